"""Reports of what a request's KV cache held, step by step, for requests that ask."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request

USAGE_KEY = "kvmerge_usage"
"""In ``SamplingParams.extra_args`` (``vllm_xargs`` of a request body): a true value asks for the report at the end."""

STREAM = "stream"
"""The value of ``USAGE_KEY`` that asks for sizes with every output as well."""

REPORT_KEY = "kvmerge"
"""In ``kv_transfer_params`` of the answer: the report. vLLM's schedulers can tell a client nothing else about its
request; KV connectors, which the field is for, are refused together with compression."""

ERROR_KEY = "error"
"""In the report of a request that was ended because it failed: why."""

STEPS_KEY = "steps"
"""In the report of a request that asked for a stream: its newest steps, oldest first."""

NUM_RECENT_STEPS, NUM_RECENT_CHANGES = 16, 32
"""Steps that survive when vLLM merges outputs that the front end has not taken yet and keeps the newest report: the
newest ones, and the newest of those that changed the number of blocks or compressed the cache."""


@dataclass(frozen=True)
class CacheSize:
    """A running request's cache. entries: live ones, per KV head of one layer. tokens: those that they stand for.
    blocks: held, shared ones too."""

    entries: int
    tokens: int
    blocks: int


@dataclass
class CacheUsage:
    """One request's sizes after each scheduled step.

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
    _before: CacheSize = CacheSize(0, 0, 0)
    _after: CacheSize = CacheSize(0, 0, 0)

    def note_peak(self, size: CacheSize) -> None:
        """``size``: before a step's compression."""
        self._before = size
        self.peak_entries = max(self.peak_entries, size.entries)
        self.peak_blocks = max(self.peak_blocks, size.blocks)

    def count_step(self, size: CacheSize) -> None:
        """``size``: after a step's compression, from the end of the prompt on."""
        self.num_steps += 1
        self.total_entries += size.entries
        self.total_blocks += size.blocks

    def begin_step(self, size: CacheSize, compressed: bool) -> dict[str, Any] | None:
        """A step that has been scheduled, to be reported when it has been computed; None where it changes nothing.

        size: after its compression.
        """
        if not compressed and self._after == size:
            return None
        self._after = size
        step = {"start": self._now(), "tokens": size.tokens, **self._as_json(size)}
        return step | {"before": self._as_json(self._before)} if compressed else step

    def end_step(self, step: dict[str, Any]) -> None:
        last = self.recent[-1] if self.recent else {"step": 0, "bytes": 0}
        step = {"step": last["step"] + 1, "end": self._now(), **step}
        self.recent.append(step)
        if "before" in step or step["bytes"] != last["bytes"]:
            self.changes.append(step)

    def _as_json(self, size: CacheSize) -> dict[str, int]:
        return {"entries": size.entries, "bytes": size.blocks * self.bytes_per_block}

    def _now(self) -> float:
        return round(time.monotonic() - self.start, 4)

    def report(self) -> dict[str, Any]:
        """The report in terms of JSON; bytes over all layers and ranks. Means are None before the prompt's end."""
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


SizeOf = Callable[["Request"], CacheSize]


class UsageReports:
    """The ``CacheUsage`` of each request that asked for a report. A scheduler calls these methods in their order."""

    def __init__(self, bytes_per_block: int) -> None:
        self._bytes_per_block = bytes_per_block
        self._usages: dict[str, CacheUsage] = {}

    def __len__(self) -> int:
        return len(self._usages)

    def begin(self, request_id: str, asked: Any) -> None:
        """``asked``: what the request has as ``USAGE_KEY``."""
        if asked:
            self._usages[request_id] = CacheUsage(self._bytes_per_block, streams=asked == STREAM)

    def before_compressions(self, running: "list[Request]", size_of: SizeOf) -> None:
        """A step has been scheduled; its compressions follow."""
        for request, usage in self._reporting(running):
            usage.note_peak(size_of(request))

    def after_compressions(
        self, running: "list[Request]", size_of: SizeOf, compressed: set[str]
    ) -> dict[str, dict[str, Any]]:
        """The step with its compressions, of the requests that are told of each; ``computed`` takes it.

        Under asynchronous scheduling other steps are scheduled before this one has been computed.
        """
        steps = {}
        for request, usage in self._reporting(running):
            size = size_of(request)
            if size.tokens >= request.num_prompt_tokens:
                usage.count_step(size)
            if usage.streams and (step := usage.begin_step(size, request.request_id in compressed)):
                steps[request.request_id] = step
        return steps

    def computed(self, steps: dict[str, dict[str, Any]]) -> None:
        for request_id, step in steps.items():
            if usage := self._usages.get(request_id):
                usage.end_step(step)

    def end(self, request_id: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """A request's ``kv_transfer_params`` at its end, with its report if it asked for one."""
        usage = self._usages.pop(request_id, None)
        return params if usage is None else {**(params or {}), REPORT_KEY: usage.report()}

    def add_steps(self, outputs_by_client: "dict[int, EngineCoreOutputs]") -> None:
        """Adds the newest steps to the outputs of requests that run on and are told of each."""
        if not self._usages:
            return
        for outputs in outputs_by_client.values():
            for output in outputs.outputs:
                usage = self._usages.get(output.request_id)
                if usage is not None and usage.streams:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), REPORT_KEY: usage.steps_report()}

    def _reporting(self, running: "list[Request]") -> "Iterator[tuple[Request, CacheUsage]]":
        if self._usages:
            for request in running:
                if usage := self._usages.get(request.request_id):
                    yield request, usage
