"""Work that is done in units, between which it can be left to wait."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Work that is done without a break.

    run: does it; returns the units that come next, before all others, if it has any. share: of all work, what has been
    done after it and those.
    """

    run: "Callable[[], Iterable[Unit] | None]"
    share: float = 0.0


class Work:
    """Units, one after the other. total: of their shares.

    ``may_stop``: what takes longer than it should may be left, because workers need not come equally far.
    """

    def __init__(self, total: float = 1.0) -> None:
        self.may_stop = False
        self._total, self._done = total, 0.0
        self._units = deque[Unit]()
        self._seconds = 0.0
        self._since: float | None = None

    def add(self, units: Iterable[Unit]) -> None:
        self._units.extend(units)

    @property
    def progress(self) -> float:
        """Share of the work that has been done."""
        return self._done / self._total

    @property
    def seconds(self) -> float:
        """Time spent so far."""
        return self._seconds if self._since is None else self._seconds + time.monotonic() - self._since

    def advance(self, until: float, max_seconds: float = math.inf) -> None:
        """Goes on up to this share of the work, by one unit at least unless it has been done; 1: to the end. What would
        take more than ``max_seconds`` is left, where it may be."""
        self._since, started = time.monotonic(), self._seconds
        last, last_seconds = 0.0, 0.0
        while self._units and (until >= 1.0 or self.progress + last < until):
            if self.may_stop and self.seconds + last_seconds > started + max_seconds:
                break
            progress, seconds = self.progress, self.seconds
            self._run(self._units.popleft())
            last, last_seconds = self.progress - progress, self.seconds - seconds
        self._seconds, self._since = self.seconds, None

    def _run(self, unit: Unit) -> None:
        followers = list(unit.run() or ())
        self._units.extendleft(reversed(followers))
        self._done += unit.share - sum(one.share for one in followers)
