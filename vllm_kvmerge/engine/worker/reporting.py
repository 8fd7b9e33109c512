"""A worker's reports, to the scheduler with its outputs, and to the metrics."""

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvmerge.engine.metrics import count_entries
from vllm_kvmerge.engine.plan import CompressionPlan, CompressionReport, Failure, FrontReport, Progress, attach
from vllm_kvmerge.engine.worker.tensor_parallel import HeadShare
from vllm_kvmerge.policies.cost import Rates
from vllm_kvmerge.policies.errors import PartError

logger = init_logger(__name__)

FAILED_ELSEWHERE = Failure(
    "its compression failed on another tensor-parallel worker, whose log says why", part="unknown"
)


class Reporter:
    """Reports to the scheduler, kept until the next output that can carry them."""

    def __init__(self) -> None:
        self._report = CompressionReport()

    def add_rates(self, rates: Rates) -> None:
        self._report.rates = rates

    def add_failures(self, plans: list[CompressionPlan], errors: dict[int, PartError], heads: HeadShare) -> None:
        """Adds ``errors``, by index in ``plans``. All tensor-parallel workers call this: only one's output reaches the
        scheduler, and a policy may fail for the heads of another."""
        for index, error in errors.items():
            request_id = plans[index].request_id
            logger.error("Compression of request %s failed: %s", request_id, error, exc_info=error)
            self._report.failures[request_id] = Failure(str(error), error.part)
        failed = heads.failed_anywhere([index in errors for index in range(len(plans))])
        for plan, has_failed in zip(plans, failed, strict=True):
            if has_failed:
                self._report.failures.setdefault(plan.request_id, FAILED_ELSEWHERE)

    def add_fronts(self, plans: list[CompressionPlan], fronts: dict[int, FrontReport]) -> None:
        """Adds what fronts came to, by index in ``plans``."""
        self._report.fronts.update({plans[index].request_id: front for index, front in fronts.items()})

    def add_progress(self, request_id: str, progress: Progress) -> None:
        """Adds how far a plan has come that is carried out in parts."""
        self._report.progress[request_id] = progress

    def attach_to(self, output: Any) -> Any:
        """The model runner's output with the report; without an output, the report waits for the next one."""
        if output is None or self._report == CompressionReport():
            return output
        report, self._report = self._report, CompressionReport()
        if isinstance(output, AsyncModelRunnerOutput):
            return _ReportingOutput(output, report)
        return _with_report(output, report)


def _with_report(output: ModelRunnerOutput, report: CompressionReport) -> ModelRunnerOutput:
    output = copy(output)  # vLLM shares the output of steps that compute nothing
    attach(output, report)
    return output


class _ReportingOutput(AsyncModelRunnerOutput):
    """Adds a report to an output that is still being computed."""

    def __init__(self, output: AsyncModelRunnerOutput, report: CompressionReport) -> None:
        self._output, self._report = output, report

    def get_output(self) -> ModelRunnerOutput:
        return _with_report(self._output.get_output(), self._report)

    def get_kv_connector_output(self) -> Any:
        return self._output.get_kv_connector_output()


@dataclass
class EntryCounts:
    """Passes numbers of merged and evicted entries to the metrics of ``engine``, without waiting for a GPU."""

    engine: int
    _pending: deque[tuple[list[str], Tensor, torch.cuda.Event]] = field(default_factory=deque)

    def add(self, policies: list[str], counts: Tensor) -> None:
        """Adds ``Execution.counts``, ``[plans, 3]`` int64."""
        if counts.is_cpu:
            self._count(policies, counts)
            return
        copied = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        copied.copy_(counts, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._pending.append((policies, copied, done))

    def flush(self) -> None:
        """Counts the numbers that have arrived from the GPU."""
        while self._pending and self._pending[0][2].query():
            policies, counts, _ = self._pending.popleft()
            self._count(policies, counts)

    def _count(self, policies: list[str], counts: Tensor) -> None:
        for policy, (num_merged, num_evicted, num_overflows) in zip(policies, counts.tolist(), strict=True):
            count_entries(policy, self.engine, num_merged, num_evicted, num_overflows)
