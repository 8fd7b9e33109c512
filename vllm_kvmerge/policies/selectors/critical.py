"""Selector that also weighs how much an entry's value can change the layer's output."""

from typing import cast

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vllm_kvmerge import ops
from vllm_kvmerge.policies.base import CompressionContext, Entries, HeadShape
from vllm_kvmerge.policies.entries import PART_ENTRIES
from vllm_kvmerge.policies.indexing import padded_nonzero, top
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.window_topk import WindowTopK
from vllm_kvmerge.policies.tiles import in_tiles, mapped_in_tiles, num_tiles

ALIKE = 0.5
"""Share of the least score among as many as are wanted, above which others are like them."""

BOUND_AT_ONCE = 256
"""Values of a head whose products with a matrix fit in the processor's caches."""


@register
class Critical(WindowTopK):
    """SnapKV's window and max-pooled scores s, in two stages (CriticalKV algorithm 1).

    Beside the window, ``first_stage_share`` of the budget goes to the largest s, the rest to the largest
    s * ||W_O v||_1, the norm being the mean over the query heads that share the KV head. s must be a sum of
    probabilities, not a logarithm. A model whose output projection is not known is ranked by s alone.
    """

    name = "criticalkv"
    source = "CriticalKV, arXiv:2502.03805"
    needs_output_weights = True
    needs_probabilities = True

    first_stage_share: float = Field(
        0.5, ge=0.0, le=1.0, description="Share of the budget outside the window that is selected by scores alone."
    )

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        ranking = self.ranking(entries, importance, protected, context)
        if context.output_weights is None:
            return top(ranking, protected, entries, context.counts)
        num_protected = protected.sum(1)
        num_first = ((context.counts - num_protected) * self.first_stage_share).long()
        chosen = entries.is_live & top(ranking, protected, entries, num_protected + num_first)
        weights = context.output_weights
        if ranking.is_cpu:
            weighed = largest_weighed(ranking, chosen, entries, context.counts - chosen.sum(1), weights)
        else:  # which entries have to be weighed would be waited for
            norms = [ops.projected_norms(entries.values_at(part), weights) for part in entries.parts()]
            weighed = ranking * torch.cat(norms, dim=1)
        return top(weighed, chosen, entries, context.counts)

    def held(self, shape: HeadShape) -> int:
        return (shape.hidden_size + shape.head_size) * shape.head_size  # a query head's part of the projection


def largest_weighed(ranking: Tensor, chosen: Tensor, entries: Entries, counts: Tensor, weights: Tensor) -> Tensor:
    """``[H, n]``: ``ranking`` times the norms where that may be among the head's ``counts`` largest, beside those that
    are ``chosen``; elsewhere the least number there is.

    First those are weighed that could come to most, as many as are wanted, then all that could come to more than they
    do. Where scores are so much alike that this would exclude hardly any, all are weighed at once.
    """
    lowest, possible = torch.finfo(ranking.dtype).min, entries.is_live & ~chosen
    weighed = torch.full_like(ranking, lowest)

    def weigh(mask: Tensor) -> None:
        parts = padded_nonzero(mask).split(PART_ENTRIES, dim=1)
        weighed_parts = mapped_in_tiles(norms_of, parts, PART_ENTRIES * weights.shape[0] * products_of(weights))
        for part, norms in zip(parts, weighed_parts, strict=True):
            for head, some in enumerate(norms):
                index = part[head, : len(some)]
                weighed[head, index] = (ranking[head, index] * some).nan_to_num(nan=lowest, neginf=lowest)

    def norms_of(part: Tensor) -> list[Tensor]:
        """Of each head's values."""
        values, numbers = entries.values_at(part), (part >= 0).sum(1).tolist()
        return [
            norms_in_tiles(values[head, None, :count], weights[head, None])[0] for head, count in enumerate(numbers)
        ]

    bound = ranking.clamp(min=0.0).nan_to_num(nan=torch.inf)  # what is not a number may be anything
    least = least_of(bound, largest_of(bound, possible, counts))
    if 2 * (possible & (bound > ALIKE * least)).sum() > possible.sum():
        weigh(possible)
        return weighed
    bound = (bound * norm_bounds(entries, weights)).nan_to_num(nan=torch.inf)
    best = largest_of(bound, possible, counts)
    weigh(best)
    weigh(possible & ~best & (bound > least_of(weighed, best)))
    return weighed


def largest_of(numbers: Tensor, possible: Tensor, counts: Tensor) -> Tensor:
    """``[H, n]`` bool: of the ``possible`` ones those with the ``counts`` largest ``numbers``, or all if fewer."""
    return possible & ops.top(numbers, torch.zeros_like(possible), possible, counts)


def least_of(numbers: Tensor, mask: Tensor) -> Tensor:
    """``[H, 1]``: the least of ``numbers`` (``[H, n]``) where ``mask`` is true, infinity where it is nowhere."""
    return numbers.masked_fill(~mask, torch.inf).amin(1, keepdim=True)


def norm_bounds(entries: Entries, weights: Tensor) -> Tensor:
    """``[H, n]``: numbers that ``ops.projected_norms`` of the entries' values do not exceed.

    ||W v||_1 <= sqrt(hidden) ||W v||_2, and the mean over query heads of the latter is at most sqrt(v' M v), M being
    the mean of their W' W: d by d numbers instead of hidden by d.
    """
    mean, bounds = mean_products(weights), []
    for part in entries.parts():
        for values in entries.values_at(part).split(BOUND_AT_ONCE, dim=1):
            bounds.append((values @ mean).mul_(values).sum(-1).clamp_(min=0.0).sqrt_())
    return torch.cat(bounds, 1).mul_(weights.shape[2] ** 0.5)


_means = WeakTensorKeyDictionary()


def mean_products(weights: Tensor) -> Tensor:
    """``[H, d, d]``, at least float32: the mean over query heads of W' W, and a little more for what rounding takes.

    weights: ``[H, G, hidden, d]``. The result is kept as long as they are: a layer's are the same in each compression.
    """
    if weights not in _means:
        num_heads, num_groups, _, size = weights.shape
        dtype = torch.promote_types(weights.dtype, torch.float32)
        mean = weights.new_zeros(num_heads, size, size, dtype=dtype)
        for head, of_head in enumerate(weights):
            for weight in of_head:
                wide = weight.to(dtype)
                mean[head].addmm_(wide.mT, wide, alpha=1 / num_groups)
                del wide  # before the next one is made
        diagonal = mean.diagonal(dim1=1, dim2=2)
        diagonal += 1e-5 * diagonal.sum(1, keepdim=True)
        _means[weights] = mean
    return cast(Tensor, _means[weights])


def products_of(weights: Tensor) -> int:
    """Of a head's value. A tile reads all weights: four times as many products as elsewhere take as long."""
    return weights.shape[1:].numel() // 4


def norms_in_tiles(values: Tensor, weights: Tensor) -> Tensor:
    """``ops.projected_norms``, in tiles of the values."""
    count = num_tiles(values.shape[1], products_of(weights), values.device)
    parts = values.split(-(-values.shape[1] // count), dim=1) if values.shape[1] else (values,)
    return torch.cat(in_tiles(len(parts), lambda number: ops.projected_norms(parts[number], weights)), dim=1)
