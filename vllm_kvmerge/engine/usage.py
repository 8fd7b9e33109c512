"""Reports of the size of a request's KV cache, step by step, for requests that ask for them."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_kvmerge.request.parameters import EXTRA_ARGS_KEY, FULL, CompressionConfig

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request

USAGE_KEY = "kvmerge_usage"
"""Key in ``SamplingParams.extra_args`` (``vllm_xargs`` of a body): a true value asks for a report at the end."""

STREAM = "stream"
"""Value of ``USAGE_KEY`` that asks for sizes with every output as well."""

REPORT_KEY = "kvmerge"
"""Key of the report in the response's ``kv_transfer_params``, the only field in which vLLM's schedulers can tell a
client about its request. It is meant for KV connectors, whose keys stay beside it."""

ERROR_KEY = "error"
"""Key in the report of a request that failed: the reason."""

STATUS_KEY = "status"
"""Key beside it: the HTTP status, if the client is at fault."""

STEPS_KEY = "steps"
"""Key in the report of a request that asked for a stream: its newest steps, oldest first."""

NUM_RECENT_STEPS, NUM_RECENT_CHANGES = 16, 32
"""Numbers of steps in a report, of the newest ones and of the newest that changed the number of blocks or compressed
the cache: vLLM merges outputs that the front end has not taken yet, and keeps the newest report."""


@dataclass(frozen=True)
class CacheSize:
    """Size of a running request's cache. entries: live ones, per KV head of one layer. tokens: represented by them.
    blocks: held, including shared ones. external_bytes: of the complete cache outside the pool, over all ranks."""

    entries: int
    tokens: int
    blocks: int
    external_bytes: int = 0


@dataclass
class CacheUsage:
    """One request's cache sizes after each scheduled step.

    Peaks are over all steps, means over the steps from the end of the prompt on, after their compression. streams:
    whether steps are reported one by one, with times since ``start`` (``time.monotonic()``). may_stop: the front end
    may end the request, by a stop string, so every output has the report. config: what the request asks for, for the
    engine's model; None: no compression.
    """

    bytes_per_block: int
    config: CompressionConfig | None = None
    streams: bool = False
    may_stop: bool = False
    start: float = field(default_factory=time.monotonic)
    num_steps: int = 0
    total_entries: int = 0
    total_blocks: int = 0
    peak_entries: int = 0
    peak_blocks: int = 0
    peak_external_bytes: int = 0
    num_compressions: int = 0
    num_refreshes: int = 0
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_STEPS))
    changes: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_CHANGES))
    _before: CacheSize = CacheSize(0, 0, 0)
    _after: CacheSize = CacheSize(0, 0, 0)

    def note_peak(self, size: CacheSize) -> None:
        """Takes the ``size`` before a step's compression."""
        self._before = size
        self.peak_entries = max(self.peak_entries, size.entries)
        self.peak_blocks = max(self.peak_blocks, size.blocks)

    def count_step(self, size: CacheSize) -> None:
        """Takes the ``size`` after a step's compression, from the end of the prompt on."""
        self.num_steps += 1
        self.total_entries += size.entries
        self.total_blocks += size.blocks

    def count_change(self, size: CacheSize, is_refresh: bool) -> None:
        """Takes the ``size`` after a compression."""
        self.peak_external_bytes = max(self.peak_external_bytes, size.external_bytes)
        self.num_compressions += 1
        self.num_refreshes += is_refresh

    def begin_step(self, size: CacheSize, compressed: bool, is_refresh: bool = False) -> dict[str, Any] | None:
        """A scheduled step, to be reported when it has been computed; None if it changes nothing. size: after its
        compression."""
        if not compressed and self._after == size:
            return None
        self._after = size
        step = {"start": self._now(), "tokens": size.tokens, **self._as_json(size)}
        if is_refresh:
            step["refresh"] = True
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
        """The report as a JSON object; bytes over all layers and ranks. Means are None before the prompt's end."""
        steps = self.num_steps
        report = {
            "mean_entries": self.total_entries / steps if steps else None,
            "mean_bytes": self.total_blocks * self.bytes_per_block / steps if steps else None,
            "peak_entries": self.peak_entries,
            "peak_bytes": self.peak_blocks * self.bytes_per_block,
            "compressions": self.num_compressions,
            EXTRA_ARGS_KEY: {"policy": FULL} if self.config is None else self.config.parameters,
        }
        if self.peak_external_bytes:
            report |= {"refreshes": self.num_refreshes, "external_bytes": self.peak_external_bytes}
        return report | self.steps_report() if self.streams else report

    def steps_report(self) -> dict[str, Any]:
        """The newest steps, for a request that is still running."""
        first = self.recent[0]["step"] if self.recent else 0
        return {STEPS_KEY: [*(step for step in self.changes if step["step"] < first), *self.recent]}


SizeOf = Callable[["Request"], CacheSize]

T = TypeVar("T")


def outputs_with(
    outputs_by_client: "dict[int, EngineCoreOutputs]", kept: Mapping[str, T]
) -> "Iterator[tuple[EngineCoreOutput, T]]":
    """A step's outputs of the requests in ``kept``, each with what is kept of it."""
    if kept:
        for outputs in outputs_by_client.values():
            for output in outputs.outputs:
                if (found := kept.get(output.request_id)) is not None:
                    yield output, found


class UsageReports:
    """The ``CacheUsage`` of each request that asked for a report; the scheduler calls the methods in this order."""

    def __init__(self, bytes_per_block: int) -> None:
        self._bytes_per_block = bytes_per_block
        self._usages: dict[str, CacheUsage] = {}

    def __len__(self) -> int:
        return len(self._usages)

    def begin(self, request: "Request", asked: Any, config: CompressionConfig | None) -> None:
        """Starts a request's report if it asked for one. asked: its value of ``USAGE_KEY``."""
        if asked:
            may_stop = request.sampling_params is not None and bool(request.sampling_params.stop)
            usage = CacheUsage(self._bytes_per_block, config, streams=asked == STREAM, may_stop=may_stop)
            self._usages[request.request_id] = usage

    def before_compressions(self, running: "list[Request]", size_of: SizeOf) -> None:
        """Notes the sizes of a scheduled step, before its compressions."""
        for request, usage in self._reporting(running):
            usage.note_peak(size_of(request))

    def after_compressions(
        self, running: "list[Request]", size_of: SizeOf, compressed: dict[str, bool]
    ) -> dict[str, dict[str, Any]]:
        """The step of each request with a stream, for ``computed``: under asynchronous scheduling, other steps are
        scheduled before this one has been computed. compressed: requests, and whether theirs is a refresh."""
        steps = {}
        for request, usage in self._reporting(running):
            size = size_of(request)
            if size.tokens >= request.num_prompt_tokens:
                usage.count_step(size)
            is_compressed, is_refresh = request.request_id in compressed, compressed.get(request.request_id, False)
            if is_compressed:
                usage.count_change(size, is_refresh)
            if usage.streams and (step := usage.begin_step(size, is_compressed, is_refresh)):
                steps[request.request_id] = step
        return steps

    def computed(self, steps: dict[str, dict[str, Any]]) -> None:
        for request_id, step in steps.items():
            if usage := self._usages.get(request_id):
                usage.end_step(step)

    def end(self, request_id: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` of a request that ends, with its report if it asked for one."""
        usage = self._usages.pop(request_id, None)
        return params if usage is None else {**(params or {}), REPORT_KEY: usage.report()}

    def add_steps(self, outputs_by_client: "dict[int, EngineCoreOutputs]") -> None:
        """Adds the newest steps to the outputs of running requests with a stream, reports to those that may stop."""
        for output, usage in outputs_with(outputs_by_client, self._usages):
            if usage.streams or usage.may_stop:
                report = usage.report() if usage.may_stop else usage.steps_report()
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), REPORT_KEY: report}

    def _reporting(self, running: "list[Request]") -> "Iterator[tuple[Request, CacheUsage]]":
        if self._usages:
            for request in running:
                if usage := self._usages.get(request.request_id):
                    yield request, usage
