"""Long computations that may be left to wait, wherever in the code they are."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

PIECE_PRODUCTS = 1 << 28
"""Multiply-adds after which a computation may be left to wait: some milliseconds of one core."""

R = TypeVar("R")


@dataclass(frozen=True)
class Piece:
    """Work done since the last piece: ``products`` and so on as in ``Cost``, or all that ``rows`` of entries take, if
    they have been completed."""

    rows: int = 0
    products: int = 0
    touches: int = 0
    comparisons: int = 0
    projections: int = 0


class _Pausable(greenlet):
    """A computation that runs ``in_pieces``."""


def in_pieces(run: Callable[[], R]) -> Generator[Piece, None, R]:
    """The result of ``run``, which is left to wait at each ``may_pause``. What ``run`` raises is raised here.

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


def may_pause(rows: int = 0, products: int = 0, touches: int = 0, comparisons: int = 0, projections: int = 0) -> None:
    """A place where a computation may be left to wait, after so much work; see ``Piece``."""
    running = getcurrent()
    if isinstance(running, _Pausable):
        assert running.parent is not None
        running.parent.switch(Piece(rows, products, touches, comparisons, projections))


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
        compared = part.shape[1] * per_source
        may_pause(products=compared * head_size, touches=compared)
    if len(found) == 1:
        return found[0]
    similarity, best = (torch.cat(planes, dim=1) for planes in zip(*found, strict=True))
    return similarity, best
