"""Compressions as they are spread when they take long, whatever they take."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from vllm_kvmerge.engine import planning
from vllm_kvmerge.engine.messages import CompressPart, Kind
from vllm_kvmerge.engine.spreading import STEP_SECONDS, Pace, SpreadCompression
from vllm_kvmerge.policies import tiles

NUM_PARTS = 1000
"""More than models in tests have heads: each is a part."""


class AtOnce(Pace):
    """By which nothing is spread, whatever the machine does."""

    def is_known(self, kind: Kind) -> bool:
        return True

    def seconds(self, kind: Kind, num_entries: int) -> float:
        return 0.0

    def room(self, is_awaited: bool) -> float:
        return STEP_SECONDS


@dataclass
class Spread:
    """What has been spread. parts: policies' requests, one for each part but the last."""

    parts: list[str] = field(default_factory=list)


@contextmanager
def spread_over(num_steps: int) -> Iterator[Spread]:
    """Meanwhile every compression that other requests would wait for takes so many steps, and is left to wait within
    heads too."""
    done = Spread()

    def next_part(self: SpreadCompression, seconds: float, pace: Pace) -> CompressPart | None:
        self.until += 1.0 / num_steps
        if self.until > 1.0 - 1e-6:
            return None
        done.parts.append(self.compress.request_id)
        return CompressPart(self.compress, self.until, NUM_PARTS)

    with (
        patch.object(planning, "STEP_SECONDS", -1.0),
        patch.object(tiles, "TILE_PRODUCTS", 1 << 14),
        patch.object(SpreadCompression, "next_part", next_part),
        patch.object(SpreadCompression, "learn", lambda self, done: None),
    ):
        yield done
