"""Ranges of a prompt's tokens that no policy may evict or merge."""

from collections.abc import Iterable

import torch
from torch import Tensor

TokenRanges = tuple[tuple[int, int], ...]
"""First token of each range, and the one after its last; ascending, and apart from each other."""


def disjoint(ranges: Iterable[tuple[int, int]]) -> TokenRanges:
    """The same tokens in ranges that neither overlap nor touch."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def count_below(ranges: TokenRanges, num_tokens: int) -> int:
    """Number of tokens in ``ranges`` among the first ``num_tokens``."""
    return sum(max(0, min(end, num_tokens) - start) for start, end in ranges)


def within(ranges: TokenRanges, positions: Tensor) -> Tensor:
    """Bool of the same shape: true for ``positions`` (int64) in one of the ranges."""
    inside = torch.zeros_like(positions, dtype=torch.bool)
    for start, end in ranges:
        inside |= (positions >= start) & (positions < end)
    return inside
