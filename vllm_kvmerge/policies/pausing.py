"""Long computations that may be left to wait, wherever in the code they are."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

PIECE_PRODUCTS = 1 << 28
"""Multiply-adds after which a computation may be left to wait: some milliseconds of one core."""

R = TypeVar("R")


class _Pausable(greenlet):
    """A computation that runs ``in_pieces``. may_wait: now."""

    may_wait = True


def in_pieces(run: Callable[[], R]) -> Generator[int, None, R]:
    """The result of ``run``, left to wait at each ``may_pause``, whose rows are yielded. What it raises is raised here.

    ``run`` goes on in the thread that asks for the next piece, on a stack of its own, with the context variables of its
    own. If it is not brought to an end, GreenletExit is raised where it waits.
    """
    running = _Pausable(run)
    try:
        while True:
            running.parent = getcurrent()
            result = running.switch()
            if running.dead:
                return result
            yield result
    finally:
        running.throw()


def may_pause(rows: int = 0) -> None:
    """A place where a computation may be left to wait. rows: of entries that it has just completed."""
    running = getcurrent()
    if isinstance(running, _Pausable) and running.may_wait:
        assert running.parent is not None
        running.parent.switch(rows)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Nothing inside is left to wait."""
    running = getcurrent()
    if not isinstance(running, _Pausable):
        yield
        return
    before, running.may_wait = running.may_wait, False
    try:
        yield
    finally:
        running.may_wait = before


def at_once(count: int, products: int) -> int:
    """How many of ``count`` parts, which take so many ``products`` each, make a piece; all if nothing may wait here."""
    most = PIECE_PRODUCTS // max(1, products) if isinstance(getcurrent(), _Pausable) else count
    return max(1, min(count, most))


Similar = tuple[Tensor, Tensor]
"""Of ``Entries.most_similar``."""


def compared_in_pieces(
    compare: Callable[[Tensor], Similar], sources: Tensor, num_targets: int, head_size: int, most: int | None = None
) -> Similar:
    """What ``compare`` finds for ``sources``, ``[H, m]``: of ``most`` at a time (None: all), or of as many as make a
    piece when each is compared with all targets, if this may be left to wait."""
    num_rows, m = sources.shape
    per_source = max(1, num_rows * num_targets)
    size = at_once(most or m, per_source * head_size)
    found = []
    for part in sources.split(size, dim=1):
        found.append(compare(part))
        may_pause()
    if len(found) == 1:
        return found[0]
    similarity, best = (torch.cat(planes, dim=1) for planes in zip(*found, strict=True))
    return similarity, best
