"""Index arithmetic over the entries of each head."""

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import Entries


def mask_of(index: Tensor, num_entries: int) -> Tensor:
    """``[H, num_entries]`` bool: true at ``index`` (``[H, m]`` int64)."""
    mask = torch.zeros(index.shape[0], num_entries, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, index, True)


def complement(index: Tensor, num_entries: int) -> Tensor:
    """``[H, num_entries - m]`` int64, ascending: what ``index`` (``[H, m]``, without repeats) leaves out."""
    return (~mask_of(index, num_entries)).nonzero()[:, 1].view(index.shape[0], -1)


def first(mask: Tensor, order: Tensor, count: Tensor | int) -> Tensor:
    """``[H, n]`` bool: of the entries in ``mask``, those among the first ``count`` of ``order`` (``[H, n]`` int64)."""
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return mask & (rank < count)


def newest(entries: Entries, count: int) -> Tensor:
    """``[H, n]`` bool: the ``count`` live entries of largest position."""
    return first(entries.is_live, entries.positions.argsort(dim=1, descending=True, stable=True), count)


def sinks(entries: Entries, num_tokens: int) -> Tensor:
    """``[H, n]`` bool: live entries of the sequence's first ``num_tokens`` tokens."""
    return entries.is_live & (entries.positions < num_tokens)


def top(ranking: Tensor, protected: Tensor, entries: Entries, count: int) -> Tensor:
    """``[H, count]`` int64: the protected entries, then the live ones of largest ``ranking``, then dead ones.

    ranking: ``[H, n]`` floating point; infinite and NaN values only ever order live entries. Ties: lower index first.
    """
    limits = torch.finfo(ranking.dtype)
    ranking = ranking.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    ranking = ranking.masked_fill(protected, torch.inf).masked_fill(~entries.is_live, -torch.inf)
    return ranking.argsort(dim=1, descending=True, stable=True)[:, :count]
