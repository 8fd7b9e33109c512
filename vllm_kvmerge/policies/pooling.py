"""Pooling of scores over neighbours in the text, which keeps clusters of entries together: the largest (SnapKV section
4), or the mean of a chunk (ChunkKV algorithm 1)."""

from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from vllm_kvmerge import ops
from vllm_kvmerge.policies.base import MAX_TOKENS
from vllm_kvmerge.policies.entries import Entries
from vllm_kvmerge.policies.indexing import by_position


def _check_odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("must be odd")
    return value


KernelSize = Annotated[int, Field(ge=1, le=255), AfterValidator(_check_odd)]
"""Neighbours, in order of position, over which an entry's score is max-pooled, itself included."""


ChunkLength = Annotated[
    int, Field(ge=1, le=255, description="Neighbours, by position, that are ranked together, by their mean; 1: none.")
]


def max_pooled(ranking: Tensor, protected: Tensor, entries: Entries, kernel_size: int) -> Tensor:
    """``[H, n]``: each entry's largest ``ranking`` (``[H, n]`` floating point) over its neighbourhood, itself included.

    Neighbours are the live entries that are not ``protected`` (``[H, n]`` bool), in order of position.
    """
    # Dead entries sort before all others, so the live ones are contiguous.
    order = by_position(entries)
    pooled_from = entries.is_live & ~protected
    ordered = ranking.masked_fill(~pooled_from, -torch.inf).gather(1, order)
    pooled = max_pool1d(ordered, kernel_size, stride=1, padding=kernel_size // 2)
    return torch.empty_like(pooled).scatter_(1, order, pooled)


def chunk_means(ranking: Tensor, protected: Tensor, entries: Entries, chunk_length: int) -> Tensor:
    """``[H, n]``: the mean ``ranking`` (``[H, n]`` floating point) of each entry's chunk: ``chunk_length`` live entries
    that follow one another by position, counted from the first. ``protected`` (``[H, n]`` bool) and dead entries take
    no part in a mean; what they get may be anything.
    """
    if chunk_length == 1:
        return ranking
    order = ops.by_position(entries.positions.masked_fill(~entries.is_live, MAX_TOKENS))
    counted = entries.is_live & ~protected
    missing = -order.shape[1] % chunk_length

    def sums(numbers: Tensor) -> Tensor:
        ordered = numbers.masked_fill(~counted, 0.0).gather(1, order)
        return pad(ordered, (0, missing)).unflatten(1, (-1, chunk_length)).sum(2, keepdim=True)

    means = sums(ranking) / sums(torch.ones_like(ranking)).clamp_(min=1.0)
    of_entries = means.expand(-1, -1, chunk_length).flatten(1)[:, : order.shape[1]]
    return torch.empty_like(ranking).scatter_(1, order, of_entries)
