"""Max-pooling of scores over neighbours in the text, which keeps clusters of entries together (SnapKV section 4)."""

from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import max_pool1d

from vllm_kvmerge.policies.entries import Entries
from vllm_kvmerge.policies.indexing import by_position


def _check_odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("must be odd")
    return value


KernelSize = Annotated[int, Field(ge=1, le=255), AfterValidator(_check_odd)]
"""Neighbours, in order of position, over which an entry's score is max-pooled, itself included."""


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
