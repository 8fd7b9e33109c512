"""Durations of compactions, measured without waiting for a GPU."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvmerge.engine.messages import Kind

Moment = Any
"""Seconds of a clock, or a GPU's event."""


def moment(device: torch.device) -> Moment:
    """Now, or when the device has done what has been launched so far."""
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class Timing:
    """Work of one kind. amount: entries per KV head, or the part of them that it comes to."""

    kind: Kind
    amount: float
    started: Moment
    ended: Moment

    @property
    def seconds(self) -> float | None:
        """None: a GPU has not come so far."""
        if isinstance(self.started, float):
            return self.ended - self.started
        return self.started.elapsed_time(self.ended) / 1000 if self.ended.query() else None
