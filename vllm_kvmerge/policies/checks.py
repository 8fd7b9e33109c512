"""Checks of the results of third-party parts."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_kvmerge.policies.entries import BLANK
from vllm_kvmerge.policies.update import CacheUpdate

if TYPE_CHECKING:
    from vllm_kvmerge.policies.base import Part


def is_foreign(part: "Part") -> bool:
    """True if the part comes from another package: its results are checked, at the cost of waiting for a GPU."""
    return type(part).__module__.partition(".")[0] != __name__.partition(".")[0]


def check_tensor(what: str, tensor: object, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns ``tensor``. dtype: None stands for any floating-point type.

    Raises:
        TypeError: it is no tensor of that dtype.
        ValueError: it has another shape, or lies on another device than ``like``.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype and not (dtype is None and tensor.is_floating_point()):
        raise TypeError(f"{what} must be {dtype or 'floating-point'}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{what} must have the shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{what} must be on {like.device}, got {tensor.device}")
    return tensor


def check_count(what: str, count: object) -> int:
    """Returns ``count``. Raises TypeError if it is no integer, ValueError if it is negative."""
    if not isinstance(count, int):
        raise TypeError(f"{what} must be an integer, got {type(count).__name__}")
    if count < 0:
        raise ValueError(f"{what} must not be negative, got {count}")
    return count


def check_range(what: str, index: Tensor, low: int, end: int) -> None:
    """Raises ValueError unless all of ``index`` is in ``[low, end)``."""
    if index.numel():
        least, most = index.aminmax()
        if least < low or most >= end:
            raise ValueError(f"{what} must be from {low} to {end - 1}, got {int(least)} to {int(most)}")


def check_update(update: CacheUpdate, num_places: int, like: Tensor) -> None:
    """Checks that an update can be written. ``like``: ``[H, n]``, a statistic of the entries that it updates.

    Raises:
        TypeError, ValueError: for wrong shapes, dtypes, indices, or NaN.
    """
    (num_rows, num_entries), places = like.shape, (len(like), num_places)
    check_tensor("kept", update.kept, places, like, torch.int64)
    for name, blank in BLANK.items():
        dtype = torch.int64 if isinstance(blank, int) else like.dtype
        check_tensor(name, getattr(update, name), places, like, dtype)
    check_tensor("merged", update.merged, (num_rows,), like, torch.int64)
    width = update.changed.shape[-1] if isinstance(update.changed, Tensor) else 0
    check_tensor("changed", update.changed, (num_rows, width), like, torch.int64)
    # Negative indices stand for none, whatever the number.
    check_range("kept", update.kept.clamp(min=-1), -1, num_entries)
    check_range("changed", update.changed.clamp(min=-1), -1, num_places)
    if bool((update.log_votes.isnan() | (update.log_votes == torch.inf)).any()):
        raise ValueError("log_votes must be finite or -inf")
    changed = update.changed.masked_fill(update.changed < 0, -1).sort(dim=1).values
    if bool(((changed[:, 1:] == changed[:, :-1]) & (changed[:, 1:] >= 0)).any()):
        raise ValueError("changed must name no place twice")
    for name in ("keys", "values"):
        rows = getattr(update, name)
        if rows is None:
            continue
        size = rows.shape[-1] if isinstance(rows, Tensor) else 0
        check_tensor(name, rows, (num_rows, width, size), like, like.dtype)
        if bool((rows.isnan() & (update.changed >= 0).unsqueeze(-1)).any()):
            raise ValueError(f"{name} must be numbers, got NaN")
