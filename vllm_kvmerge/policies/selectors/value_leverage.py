"""Selector that keeps the entries whose values the others could not replace."""

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, CompressionContext, Entries
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector

RIDGE = 1e-3
"""Added to the diagonal of the values' Gram matrix, as a share of its mean."""


@register
class ValueLeverage(RankedSelector):
    """Leverage scores of values, which no linear map of them, such as the output projection, changes.

        l_i = y_i' (Y'Y + ridge)^-1 y_i

    Y are the values of a head's live entries, less their mean. What attention adds up are values: an entry whose value
    lies in directions that few others have cannot be replaced by those that stay.
    """

    name = "value_leverage"
    source = "own design, after the leverage scores of Compactor, arXiv:2507.08143"
    needs_scores = False

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        parts = list(entries.parts())
        mean = sum(_values(entries, part).sum(1, keepdim=True) for part in parts)
        mean = mean / entries.num_live.clamp(min=1)[:, None, None]
        gram = sum((centred := _values(entries, part, mean)).mT @ centred for part in parts)
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal.add_(RIDGE * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny)
        factor = torch.linalg.cholesky_ex(gram).L.mT
        scores = [
            torch.linalg.solve_triangular(factor, _values(entries, part, mean), upper=True, left=False).square_().sum(2)
            for part in parts
        ]
        return torch.cat(scores, dim=1).to(entries.scores.dtype)


def _values(entries: Entries, part: Tensor, mean: Tensor | float = 0.0) -> Tensor:
    """``[H, m, d]`` float64: values of the entries at ``part`` (``[H, m]`` int64) less ``mean``; dead ones 0."""
    is_live = entries.is_live.gather(1, part)
    # In float64, because values that differ little leave a matrix that is nearly singular.
    values = entries.values_at(part.masked_fill(~is_live, DEAD)).double() - mean
    return values.masked_fill_(~is_live.unsqueeze(2), 0.0)
