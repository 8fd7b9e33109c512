"""Selector that keeps the entries whose values the others could not replace."""

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, CompressionContext, Entries, HeadShape
from vllm_kvmerge.policies.entries import PART_ENTRIES
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector
from vllm_kvmerge.policies.tiles import mapped_in_tiles

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
        work = parts[0].numel() * entries.values_at(parts[0][:, :1]).shape[2] ** 2
        sums, grams = zip(*mapped_in_tiles(lambda part: _moments(_values(entries, part)), parts, work), strict=True)
        total, uncentred = sum(sums), sum(grams)
        mean = total / entries.num_live.clamp(min=1)[:, None, None]
        gram = uncentred - total.mT @ mean
        spread, rounding = (RIDGE * of.diagonal(dim1=1, dim2=2).mean(1) for of in (gram, 1e-9 * uncentred))
        ridge = spread.clamp(min=0.0) + rounding + torch.finfo(torch.float32).tiny
        gram.diagonal(dim1=1, dim2=2).add_(ridge.unsqueeze(1))
        factor = torch.linalg.cholesky_ex(gram).L.mT

        def scores_of(part: Tensor) -> Tensor:
            centred = _values(entries, part, mean)
            return torch.linalg.solve_triangular(factor, centred, upper=True, left=False).square_().sum(2)

        return torch.cat(mapped_in_tiles(scores_of, parts, work), dim=1).to(entries.scores.dtype)

    def held(self, shape: HeadShape) -> int:
        # Of each part, the products in float64.
        return 2 * shape.head_size**2 * (2 + shape.num_entries // PART_ENTRIES)


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of values ``[H, m, d]``, ``[H, 1, d]``, and of their products, ``[H, d, d]``."""
    return values.sum(1, keepdim=True), values.mT @ values


def _values(entries: Entries, part: Tensor, mean: Tensor | float = 0.0) -> Tensor:
    """``[H, m, d]`` float64: values of the entries at ``part`` (``[H, m]`` int64) less ``mean``; dead ones 0."""
    is_live = entries.is_live.gather(1, part)
    # In float64, because values that differ little leave a matrix that is nearly singular.
    values = entries.values_at(part.masked_fill(~is_live, DEAD)).double() - mean
    return values.masked_fill_(~is_live.unsqueeze(2), 0.0)
