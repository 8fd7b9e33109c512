"""Index arithmetic over the entries of each row; ``ops.reference`` defines what is imported here."""

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops import in_place, inverse, largest, padded_nonzero
from vllm_kvmerge.policies.entries import Entries

# fmt: off
__all__ = [
    "by_position", "complement", "in_place", "inverse", "largest", "listed", "mask_of", "newest",
    "padded_nonzero", "select", "sinks", "top", "width_on",
]
# fmt: on


def mask_of(index: Tensor, num_entries: int) -> Tensor:
    """``[H, num_entries]`` bool: true at ``index`` (``[H, m]`` int64)."""
    mask = torch.zeros(index.shape[0], num_entries, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, index, True)


def complement(index: Tensor, num_entries: int) -> Tensor:
    """``[H, num_entries - m]`` int64, ascending: all numbers but those in ``index`` (``[H, m]``, without repeats)."""
    return padded_nonzero(~mask_of(index, num_entries), num_entries - index.shape[1])


def select(plane: Tensor, index: Tensor) -> Tensor:
    """``[H, m]``: elements of ``plane`` (``[H, n]``) at ``index`` (``[H, m]`` int64); -1 where that is negative."""
    return ops.take(index, [plane], [-1])[0]


def listed(mask: Tensor, most: int) -> Tensor:
    """``padded_nonzero`` of a mask with at most ``most`` true elements per head, as wide as ``width_on`` says."""
    return padded_nonzero(mask, width_on(mask.device, most))


def width_on(device: torch.device, most: int) -> int | None:
    """Width of a list of up to ``most``: None, as wide as need be, on a CPU, and ``most`` on a GPU, which would be
    waited for."""
    return None if device.type == "cpu" else most


def by_position(entries: Entries) -> Tensor:
    """``[H, n]`` int64: the entries in order of position, dead ones first."""
    return ops.by_position(entries.positions)


def newest(entries: Entries, count: int | Tensor, num_sinks: int = 0) -> Tensor:
    """``[H, n]`` bool: the ``count`` live entries of largest position (a number, or ``[H]`` int64), and ``sinks`` of
    ``num_sinks`` tokens."""
    return ops.newest(entries.positions, count, num_sinks)


def sinks(entries: Entries, num_tokens: int) -> Tensor:
    """``[H, n]`` bool: live entries of the sequence's first ``num_tokens`` tokens."""
    return entries.is_live & (entries.positions < num_tokens)


def top(ranking: Tensor, protected: Tensor, entries: Entries, count: int | Tensor) -> Tensor:
    """``[H, n]`` bool, ``count`` per head (a number, or ``[H]`` int64): the protected entries, then the live ones of
    largest ``ranking``, then dead ones. Ties: lower index first.

    ranking: ``[H, n]`` floating point; infinite and NaN values only ever order live entries.
    """
    return ops.top(ranking, protected, entries.is_live, count)
