"""Failures of a policy's parts: which part it was, and limits on the time that it may take."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm_kvmerge.policies.base import Part
    from vllm_kvmerge.policies.outcome import CacheUpdate

KINDS = ("tracker", "allocator", "selector", "merger")
STATISTICS = ("log_votes", "scores", "aux")


class PartError(RuntimeError):
    """A part of a policy raised, returned something that cannot be used, or took too long.

    part: its kind and registered name, such as ``merger:zip``.
    """

    def __init__(self, part: str, message: str) -> None:
        super().__init__(f"{part.replace(':', ' ')}: {message}")
        self.part = part


class PartTimeout(PartError):
    """A part took longer than it may."""


class OutOfTime(BaseException):
    """Raised inside a part whose time is over; no ``Exception``, so that a part which catches those cannot go on."""


def label(part: "Part") -> str:
    """The part's kind and registered name."""
    kinds = (base.__name__.lower() for base in type(part).__mro__)
    return f"{next((kind for kind in kinds if kind in KINDS), 'part')}:{part.name}"


def is_foreign(part: "Part") -> bool:
    """Whether the part comes from another package: what it returns is checked, for which a GPU is waited for."""
    return type(part).__module__.partition(".")[0] != __name__.partition(".")[0]


class blamed_on:  # noqa: N801
    """Context manager that turns whatever is raised inside into a ``PartError`` that names the part."""

    def __init__(self, part: "Part") -> None:
        self._part = part

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OutOfTime):
            raise PartTimeout(label(self._part), str(error)) from None
        if isinstance(error, Exception) and not isinstance(error, PartError):
            raise PartError(label(self._part), describe(error)) from error


def as_part_error(error: BaseException) -> PartError:
    """The error as one of a part; what no part is to blame for is the composition's."""
    if isinstance(error, PartError):
        return error
    kind = PartTimeout if isinstance(error, OutOfTime) else PartError
    return kind("policy:composition", describe(error))


def describe(error: BaseException) -> str:
    """The exception's type and message, in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].removesuffix(": ")


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises ``OutOfTime`` inside once ``seconds`` have passed; None: never.

    A signal does it, so Python code and system calls are interrupted, an operator in C++ only when it returns, and
    nothing in threads other than the process's main one. What runs inside must not change anything that outlives it.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    late = OutOfTime("took longer than it may (--max-compaction-seconds)")
    if seconds <= 0.0:
        raise late
    is_over = False

    def end(number: int, frame: FrameType | None) -> None:
        if not is_over:
            raise late

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, end)
    # Again and again: Python swallows what is raised in a destructor.
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:  # somebody else's alarm goes on
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, remaining - (time.monotonic() - started)))


def check_tensor(what: str, tensor: object, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` itself. dtype: None stands for any floating-point type.

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
    """The count itself. Raises TypeError or ValueError if it is no integer, or negative."""
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


def check_outcome(outcome: "CacheUpdate", num_places: int, like: Tensor) -> None:
    """Finds an outcome that cannot be written. ``like``: ``[H, n]``, a statistic of the entries that it is of.

    Raises:
        TypeError, ValueError: for its shapes, dtypes, indices, or what is not a number.
    """
    (heads, num_entries), places = like.shape, (len(like), num_places)
    planes = ("kept", torch.int64), ("positions", torch.int64), *((name, like.dtype) for name in STATISTICS)
    for name, dtype in planes:
        check_tensor(name, getattr(outcome, name), places, like, dtype)
    check_tensor("merged", outcome.merged, (heads,), like, torch.int64)
    width = outcome.changed.shape[-1] if isinstance(outcome.changed, Tensor) else 0
    check_tensor("changed", outcome.changed, (heads, width), like, torch.int64)
    for name in ("keys", "values"):
        rows = getattr(outcome, name)
        if rows is not None:
            size = rows.shape[-1] if isinstance(rows, Tensor) else 0
            check_tensor(name, rows, (heads, width, size), like, like.dtype)
    # What leaves no entry is negative, whatever the number.
    check_range("kept", outcome.kept.clamp(min=-1), -1, num_entries)
    check_range("changed", outcome.changed.clamp(min=-1), -1, num_places)
    if bool((outcome.log_votes.isnan() | (outcome.log_votes == torch.inf)).any()):
        raise ValueError("log_votes must be finite or -inf")
    changed = outcome.changed.masked_fill(outcome.changed < 0, -1).sort(dim=1).values
    if bool(((changed[:, 1:] == changed[:, :-1]) & (changed[:, 1:] >= 0)).any()):
        raise ValueError("changed must name no place twice")
    exists = (outcome.changed >= 0).unsqueeze(-1)
    for name in ("keys", "values"):
        rows = getattr(outcome, name)
        if rows is not None and bool((rows.isnan() & exists).any()):
            raise ValueError(f"{name} must be numbers, got NaN")
