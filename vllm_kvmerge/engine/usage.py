"""What one request's KV cache held, step by step, for requests that ask."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

USAGE_KEY = "kvmerge_usage"
"""In ``SamplingParams.extra_args`` (``vllm_xargs`` of a request body): a true value asks for the report at the end."""

STREAM = "stream"
"""The value of ``USAGE_KEY`` that asks for sizes with every output as well."""

REPORT_KEY = "kvmerge"
"""In ``kv_transfer_params`` of the answer: the report. vLLM gives a scheduler no other way to tell a client something
about its request; KV connectors, whose place it is, are refused together with compression."""

ERROR_KEY = "error"
"""In the report of a request that was ended because it failed: why."""

STEPS_KEY = "steps"
"""In the report of a request that asked for a stream: its newest steps, oldest first."""

NUM_RECENT_STEPS, NUM_RECENT_CHANGES = 16, 32
"""vLLM merges outputs that the front end has not taken yet, and keeps the newest report. So many steps survive that,
and so many of those that changed the number of blocks or compressed the cache."""


@dataclass
class CacheUsage:
    """Sizes after each scheduled step. entries: live entries per KV head of one layer. blocks: held, shared ones too.

    Peaks are over all steps, the mean over those from the end of the prompt on, each taken after its compression.

    streams: whether steps are reported one by one, with times since ``start`` (``time.monotonic()``).
    """

    bytes_per_block: int
    streams: bool = False
    start: float = field(default_factory=time.monotonic)
    num_steps: int = 0
    total_entries: int = 0
    total_blocks: int = 0
    peak_entries: int = 0
    peak_blocks: int = 0
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_STEPS))
    changes: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_CHANGES))
    _before: tuple[int, int] = (0, 0)
    _after: tuple[int, int, int] = (0, 0, 0)

    def note_peak(self, entries: int, blocks: int) -> None:
        """The sizes of a step before its compression."""
        self._before = entries, blocks
        self.peak_entries = max(self.peak_entries, entries)
        self.peak_blocks = max(self.peak_blocks, blocks)

    def count_step(self, entries: int, blocks: int) -> None:
        """The sizes of a step after its compression, from the end of the prompt on."""
        self.num_steps += 1
        self.total_entries += entries
        self.total_blocks += blocks

    def begin_step(self, tokens: int, entries: int, blocks: int, compressed: bool) -> dict[str, Any] | None:
        """A step that has been scheduled, to be reported when it has been computed; None where it changes nothing.

        tokens: computed after it. entries, blocks: after its compression.
        """
        if not compressed and self._after == (tokens, entries, blocks):
            return None
        self._after = tokens, entries, blocks
        step: dict[str, Any] = {"start": self._now(), "tokens": tokens, "entries": entries}
        step["bytes"] = blocks * self.bytes_per_block
        if compressed:
            step["before"] = {"entries": self._before[0], "bytes": self._before[1] * self.bytes_per_block}
        return step

    def end_step(self, step: dict[str, Any]) -> None:
        last = self.recent[-1] if self.recent else {"step": 0, "bytes": 0}
        step = {"step": last["step"] + 1, "end": self._now(), **step}
        self.recent.append(step)
        if "before" in step or step["bytes"] != last["bytes"]:
            self.changes.append(step)

    def _now(self) -> float:
        return round(time.monotonic() - self.start, 4)

    def report(self) -> dict[str, Any]:
        """As JSON has it; bytes over all layers and ranks. Means are None for a request that never ended its prompt."""
        steps = self.num_steps
        report = {
            "mean_entries": self.total_entries / steps if steps else None,
            "mean_bytes": self.total_blocks * self.bytes_per_block / steps if steps else None,
            "peak_entries": self.peak_entries,
            "peak_bytes": self.peak_blocks * self.bytes_per_block,
        }
        return report | self.steps_report() if self.streams else report

    def steps_report(self) -> dict[str, Any]:
        """The newest steps, for a request that is still running."""
        first = self.recent[0]["step"] if self.recent else 0
        return {STEPS_KEY: [*(step for step in self.changes if step["step"] < first), *self.recent]}
