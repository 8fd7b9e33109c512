"""A worker's reports, to the scheduler with its outputs, and to the metrics."""

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvmerge.engine.messages import (
    NO_REPORT,
    CompressionReport,
    Failure,
    FrontReport,
    HeadCounts,
    Spent,
    TokenScores,
    attach,
)
from vllm_kvmerge.engine.metrics import count_entries
from vllm_kvmerge.engine.worker.arriving import Arriving
from vllm_kvmerge.engine.worker.compaction import FEWEST, MOST
from vllm_kvmerge.engine.worker.tensor_parallel import HeadShare
from vllm_kvmerge.engine.worker.timing import Timing
from vllm_kvmerge.policies.errors import PartError

logger = init_logger(__name__)

FAILED_ELSEWHERE = Failure(
    "its compression failed on another tensor-parallel worker, whose log says why", part="unknown"
)


@dataclass(frozen=True)
class _Compressed:
    """Plans that a step has carried out. heads: that counts are of, in each plan. is_awaited: the scheduler needs them
    with the step's output."""

    request_ids: list[str]
    counts: Arriving
    heads: int
    is_awaited: bool

    @property
    def may_be_late(self) -> bool:
        return not self.is_awaited and self.counts.done is not None


class Reporter:
    """Reports to the scheduler, kept until the next output that can carry them. is_heard: outputs go to it."""

    def __init__(self) -> None:
        self.is_heard = True
        self._report = CompressionReport()
        self._timings: list[tuple[Timing, bool]] = []
        self._compressed: list[_Compressed] = []
        self._scores: list[tuple[str, int, Arriving]] = []
        self._late: list[_Compressed] = []
        """Of steps before. Compactions follow a step's tokens on the GPU, which must not wait for their numbers: these
        go with the next step's, before which they are there."""

    def add_counts(
        self, request_ids: list[str], counts: Tensor, heads: HeadShare, num_heads: int, is_awaited: bool
    ) -> None:
        """Adds ``Execution.counts`` of requests. All tensor-parallel workers call this. num_heads: of one of them, over
        all compressed layers. is_awaited: the scheduler needs them with the step's output."""
        if heads.num_workers > 1:
            by_worker = heads.gather(counts).view(-1, *counts.shape)[:: heads.num_replicas]
            num_heads *= len(by_worker)
            sums, fewest, most = by_worker[..., :FEWEST].sum(0), by_worker[..., FEWEST], by_worker[..., MOST]
            counts = torch.cat([sums, fewest.amin(0).unsqueeze(1), most.amax(0).unsqueeze(1)], 1)
        self._compressed.append(_Compressed(request_ids, Arriving.of(counts), num_heads, is_awaited))

    def add_timings(self, timings: list[Timing], is_awaited: bool) -> None:
        """Adds work that has been done, or launched on a GPU, whose time is reported once it is known. is_awaited: of
        its step."""
        self._timings += [(timing, is_awaited) for timing in timings]

    def add_failures(self, request_ids: list[str], errors: dict[int, PartError], heads: HeadShare) -> None:
        """Adds ``errors``, by index in ``request_ids``. All tensor-parallel workers call this: only one's output
        reaches the scheduler, and a policy may fail for the heads of another."""
        for index, error in errors.items():
            request_id = request_ids[index]
            logger.error("Compression of request %s failed: %s", request_id, error, exc_info=error)
            self._report.failures[request_id] = Failure(str(error), error.part, error.is_last)
        failed = heads.failed_anywhere([index in errors for index in range(len(request_ids))])
        for request_id, has_failed in zip(request_ids, failed, strict=True):
            if has_failed:
                self._report.failures.setdefault(request_id, FAILED_ELSEWHERE)

    def add_fronts(self, request_ids: list[str], fronts: dict[int, FrontReport]) -> None:
        """Adds what fronts came to, by index in ``request_ids``."""
        self._report.fronts.update({request_ids[index]: front for index, front in fronts.items()})

    def add_progress(self, request_id: str, done: float) -> None:
        """Adds how far a compression has come that is carried out in parts."""
        self._report.progress[request_id] = done

    def add_scores(self, request_id: str, first: int, scores: Tensor) -> None:
        """Adds ``score_tokens`` of an answer's tokens from place ``first`` on."""
        self._scores.append((request_id, first, Arriving.of(scores)))

    def attach_to(self, output: Any) -> Any:
        """The model runner's output with the report; without one that is heard, the report waits for the next."""
        if output is None or not self.is_heard:
            return output
        if self._timings:
            self._add_spent()
        if not self._late and not self._compressed and not self._scores and self._report == NO_REPORT:
            return output
        compressed = self._late + [one for one in self._compressed if not one.may_be_late]
        self._late, self._compressed = [one for one in self._compressed if one.may_be_late], []
        report, self._report = self._report, CompressionReport()
        scores, self._scores = self._scores, []
        if report == NO_REPORT and not compressed and not scores:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _ReportingOutput(output, report, compressed, scores)
        return _with_report(output, report, compressed, scores)

    def _add_spent(self) -> None:
        timings, self._timings = self._timings, []
        for one, is_awaited in timings:
            if (seconds := one.seconds) is None:
                self._timings.append((one, is_awaited))
                continue
            spent = self._report.spent.setdefault(one.kind, Spent())
            spent.seconds, spent.entries = spent.seconds + seconds, spent.entries + one.amount
            spent.awaited += seconds if is_awaited else 0.0


def _with_report(
    output: ModelRunnerOutput,
    report: CompressionReport,
    compressed: list[_Compressed],
    scores: list[tuple[str, int, Arriving]],
) -> ModelRunnerOutput:
    """The output, whose tokens have arrived."""
    for request_id, first, numbers in scores:
        log_probs, agrees = zip(*numbers.take(), strict=True)
        report.verified[request_id] = TokenScores(first, list(log_probs), [one > 0 for one in agrees])
    for one in compressed:
        for request_id, (merged, evicted, _, *kept) in zip(one.request_ids, one.counts.take(), strict=True):
            report.counts[request_id] = HeadCounts(one.heads, merged, evicted, *kept)
    output = copy(output)  # vLLM shares the output of steps that compute nothing
    attach(output, report)
    return output


class _ReportingOutput(AsyncModelRunnerOutput):
    """Adds a report to an output that is still being computed."""

    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        report: CompressionReport,
        compressed: list[_Compressed],
        scores: list[tuple[str, int, Arriving]],
    ) -> None:
        self._output, self._report, self._compressed, self._scores = output, report, compressed, scores

    def get_output(self) -> ModelRunnerOutput:
        return _with_report(self._output.get_output(), self._report, self._compressed, self._scores)

    def get_kv_connector_output(self) -> Any:
        return self._output.get_kv_connector_output()


@dataclass
class EntryCounts:
    """Passes numbers of merged and evicted entries to the metrics of ``engine``, without waiting for a GPU."""

    engine: int
    _pending: deque[tuple[list[str], Arriving]] = field(default_factory=deque)

    def add(self, policies: list[str], counts: Tensor) -> None:
        """Adds ``Execution.counts``, by plan."""
        self._pending.append((policies, Arriving.of(counts)))
        if counts.is_cpu:
            self.flush()

    def flush(self) -> None:
        """Counts the numbers that have arrived from the GPU."""
        while self._pending and self._pending[0][1].are_here:
            policies, counts = self._pending.popleft()
            totals: dict[str, list[int]] = {}
            for policy, numbers in zip(policies, counts.take(), strict=True):
                totals[policy] = [sum(pair) for pair in zip(totals.get(policy, [0] * 3), numbers[:3], strict=True)]
            for policy, (num_merged, num_evicted, num_overflows) in totals.items():
                count_entries(policy, self.engine, num_merged, num_evicted, num_overflows)
