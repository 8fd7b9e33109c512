"""Long computations in tiles, so that a policy can be left after any of them and asked again.

Nothing waits inside a policy: it is asked again from the start, and tiles that it has come to before are remembered. So
what lies between tiles is computed anew, and has to depend on a policy's arguments alone.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

TILE_PRODUCTS = 1 << 29
"""Multiply-adds of a tile, about: some ten milliseconds of one core."""

R = TypeVar("R")


class _Unfinished(BaseException):
    """Raised where a tile has been completed; no ``Exception``, so that a part that catches those cannot go on."""


@dataclass
class _Computation:
    """Tiles in a row: results of those that are completed, and the computations within the next one."""

    results: list[Any] = field(default_factory=list)
    inner: "Memory" = field(default_factory=lambda: Memory())


class Memory:
    """What a computation has come to so far, tile by tile."""

    def __init__(self) -> None:
        self._computations: list[_Computation] = []
        self._next = 0

    def go_on(self, run: Callable[[], R]) -> R | None:
        """The result of ``run``, which is never None, once all its tiles are completed; None: one more is."""
        self._next = 0
        before = _memory.set(self)
        try:
            return run()
        except _Unfinished:
            return None
        finally:
            _memory.reset(before)

    @property
    def num_completed(self) -> int:
        """Tiles of the outermost computations that have been completed."""
        return sum(len(one.results) for one in self._computations)

    def computation(self) -> _Computation:
        """The next one, in the order in which ``in_tiles`` is called."""
        if self._next == len(self._computations):
            self._computations.append(_Computation())
        self._next += 1
        return self._computations[self._next - 1]


_memory: ContextVar[Memory | None] = ContextVar("kvmerge_tiles", default=None)


def in_tiles(count: int, tile: Callable[[int], R]) -> list[R]:
    """``[tile(0), tile(1), ...]``, which depend on their numbers alone and change nothing. Where a policy may be left,
    it is left after each of several."""
    if (memory := _memory.get()) is None or count == 1:
        return [tile(index) for index in range(count)]
    return _remembered(memory, count, tile)


def _remembered(memory: Memory, count: int, tile: Callable[[int], R]) -> list[R]:
    computation = memory.computation()
    results = computation.results
    if len(results) < count:
        before = _memory.set(computation.inner)
        try:
            computation.inner._next = 0
            results.append(tile(len(results)))
        finally:
            _memory.reset(before)
        computation.inner = Memory()
        raise _Unfinished
    return results


def once(run: Callable[[], R]) -> R:
    """The result of ``run``, a tile of its own."""
    memory = _memory.get()
    return run() if memory is None else _remembered(memory, 1, lambda _: run())[0]


def num_tiles(count: int, products: int, device: torch.device) -> int:
    """In how many tiles ``count`` parts are computed that take so many ``products`` each; one where nothing is left, or
    on a GPU, which is not waited for."""
    if _memory.get() is None or device.type != "cpu":
        return 1
    return max(1, min(count, -(-count * products // TILE_PRODUCTS)))


def mapped_in_tiles(function: Callable[[Tensor], R], parts: Sequence[Tensor], products: int) -> list[R]:
    """``function`` of all parts, each of which takes so many ``products``; as many parts at a time as make a tile."""
    size = -(-len(parts) // num_tiles(len(parts), products, parts[0].device))
    groups = [parts[first : first + size] for first in range(0, len(parts), size)]
    return [one for some in in_tiles(len(groups), lambda number: list(map(function, groups[number]))) for one in some]


Similar = tuple[Tensor, Tensor]
"""Of ``Entries.most_similar``."""


def compared_in_tiles(
    compare: Callable[[Tensor], Similar], sources: Tensor, num_targets: int, head_size: int, most: int | None = None
) -> Similar:
    """What ``compare`` finds for ``sources``, ``[H, m]``: of ``most`` at a time (None: all), or of as many as make a
    tile when each is compared with all targets."""
    num_rows, m = sources.shape
    count = num_tiles(m, max(1, num_rows * num_targets * head_size), sources.device)
    size = max(1, -(-m // count))
    parts = sources.split(size if most is None else min(size, most), dim=1)
    found = in_tiles(len(parts), lambda index: compare(parts[index]))
    if len(found) == 1:
        return found[0]
    similarity, best = (torch.cat(planes, dim=1) for planes in zip(*found, strict=True))
    return similarity, best
