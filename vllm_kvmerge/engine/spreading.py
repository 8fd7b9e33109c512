"""Compressions that are spread over steps, so that no other request's token waits long for one."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvmerge.engine.messages import Compress, CompressPart, Keep, Kind, MoveWindow, Spent
from vllm_kvmerge.engine.schedule import Segments

STEP_SECONDS = 0.035
"""Bound on the time of a step's compressions, in seconds, as far as workers' pace tells, unless a single one exceeds it
that nobody waits for. Tokens are to wait 50 ms at most; the rest is for what the pace, and the parts that work comes
in, are off."""

LEAST_SECONDS = STEP_SECONDS / 2
"""Of these, what a compression that is spread gets in any case."""

SHARE = 0.3
"""Of the engine's time, what compressions get while other requests run."""

GUESS = 1e-9
"""Seconds for two entries of a KV head, before a kind of compressions has been timed: as if all were compared."""

MAX_KINDS = 256
"""Kinds of compressions whose pace is remembered."""

MOST_PARTS = 64
"""Parts of a compression whose pace is not known."""


class Pace:
    """How fast workers compress, by what they report, and how much of the engine's time they have compressed for.

    It decides how much work a step asks for, and so when a request goes on, never what comes of it. num_heads: KV heads
    of all layers. clock: in seconds.
    """

    def __init__(self, num_heads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._guess, self._clock = GUESS * num_heads, clock
        self._of_entry: dict[Kind, float] = {}
        self._credit, self._since = STEP_SECONDS, clock()
        """Seconds that compressions may take while others wait: what they take too much now, they get less later."""

    def is_known(self, kind: Kind) -> bool:
        return kind in self._of_entry

    def seconds(self, kind: Kind, num_entries: int) -> float:
        """Of a compression of so many entries per KV head; a guess where the kind's pace is not known."""
        return num_entries * self._of_entry.get(kind, num_entries * self._guess)

    def room(self, is_awaited: bool) -> float:
        """Seconds that a step has for compressions. is_awaited: other requests wait for their next tokens."""
        now = self._clock()
        self._credit = min(STEP_SECONDS, self._credit + SHARE * (now - self._since))
        self._since = now
        return STEP_SECONDS if self._credit > 0.0 or not is_awaited else 0.0

    def learn(self, spent: Mapping[Kind, Spent]) -> None:
        """Takes a worker's report into account."""
        for kind, one in spent.items():
            self._credit -= one.awaited
            if one.entries > 0.0:
                pace = one.seconds / one.entries
                earlier = self._of_entry.pop(kind, pace)
                self._of_entry[kind] = (earlier + pace) / 2  # at the end, as the latest
        while len(self._of_entry) > MAX_KINDS:
            del self._of_entry[next(iter(self._of_entry))]


@dataclass
class SpreadCompression:
    """A compression under way, whose request computes nothing until its last part.

    front, moves: messages that go with the last part. before: the request's segments until then. num_freed: blocks that
    the pool gains. may_shrink: what heads hold depends on data. superseded: blocks that a shared front takes the place
    of. until: share of it that has been asked for. done: that has been reported as done. in_flight: parts that have not
    been reported.
    """

    compress: Compress
    front: Keep | None
    moves: list[MoveWindow]
    before: Segments
    num_freed: int
    kind: Kind
    num_entries: int
    may_shrink: bool = False
    superseded: list[KVCacheBlock] = field(default_factory=list)
    until: float = 0.0
    done: float = 0.0
    in_flight: int = 0

    def next_part(self, seconds: float, pace: Pace) -> CompressPart | None:
        """What so many seconds suffice for; None: for all the rest."""
        share, num_parts = 1 / MOST_PARTS, MOST_PARTS
        if pace.is_known(self.kind):
            total = max(pace.seconds(self.kind, self.num_entries), LEAST_SECONDS)
            # With half a step's work in one part, a step does not take much more than its share.
            share, num_parts = seconds / total, math.ceil(total / LEAST_SECONDS)
        self.until = max(self.until, self.done + share * (1 + self.in_flight))
        if self.until >= 1.0:
            return None
        self.in_flight += 1
        return CompressPart(self.compress, self.until, num_parts, seconds)

    def learn(self, done: float) -> None:
        """Notes how far workers have come."""
        self.done, self.in_flight = done, max(0, self.in_flight - 1)
