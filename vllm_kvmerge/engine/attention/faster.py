"""From how many entries on our operator takes less time than vLLM's on the CPU, measured when a worker starts."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

NEVER = 1 << 62
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
CHUNK = 32
"""Queries of a chunk: both operators take as many, or fewer, at a time."""
DECODING = 16
"""Most sequences with one query each, so that their entries do not come from the processor's caches."""
ROUNDS = 3
MARGIN = 1.05
"""How much less time ours must take: measurements differ by a few percent from start to start."""

Attend = Callable[[], None]
"""Attends once."""
Sides = Callable[[int, int], tuple[Attend, Attend] | None]
"""Ours and vLLM's, for a number of queries and a length in tokens; None: there is no room for so many."""


@dataclass(frozen=True)
class Faster:
    """Least numbers of entries from which our operator is the faster one, with one query and for chunks of many."""

    decode: int = NEVER
    chunk: int = NEVER

    def __str__(self) -> str:
        named = {"one query": self.decode, "a chunk": self.chunk}
        ours = [f"{what} over {least} entries or more" for what, least in named.items() if least < NEVER]
        return "vLLM's operator" + (f", ours for {' and '.join(ours)}" if ours else "")

    @property
    def is_ever(self) -> bool:
        return min(self.decode, self.chunk) < NEVER

    def takes(self, num_queries: int, seq_len: int) -> bool:
        """Whether it is for a row's newest ``num_queries`` tokens; it does not depend on other rows."""
        # Queries of a chunk see half of it on average.
        return seq_len >= self.decode if num_queries == 1 else seq_len - num_queries // 2 >= self.chunk


ALWAYS = Faster(0, 0)


def measure(sides: Sides) -> Faster:
    return Faster(*(_least(sides, num_queries) for num_queries in (1, CHUNK)))


def _least(sides: Sides, num_queries: int) -> int:
    """The shortest length from which on ours is faster at all that are measured."""
    least = NEVER
    for length in reversed(LENGTHS):
        both = sides(num_queries, length)
        if both is None:
            continue
        ours, stock = map(_seconds, both)
        if ours * MARGIN > stock:
            break
        least = length - num_queries // 2
    return least


def _seconds(attend: Attend) -> float:
    attend()
    taken = []
    for _ in range(ROUNDS):
        begun = perf_counter()
        attend()
        taken.append(perf_counter() - begun)
    return min(taken)
