"""What a worker keeps of the requests that are compressed, and what it does about them in a step.

Both of vLLM's model runners hold one ``Compression`` and tell it what only they know: the batch's order, and in which
blocks a request lies.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.utils import AttentionGroup

from vllm_kvmerge.engine.arguments import plugin_config, request_limits
from vllm_kvmerge.engine.attention.rows import PLAIN, BatchRow, PromptScores, QueryRing, QueryRings, ScoreWindow
from vllm_kvmerge.engine.metrics import count_entries, observe_compaction
from vllm_kvmerge.engine.plan import CompressionPlan, CompressionReport, CompressionStep, Failure
from vllm_kvmerge.engine.worker.compactor import Compaction, Compactor, Execution
from vllm_kvmerge.engine.worker.output_weights import OutputWeights
from vllm_kvmerge.ops import NO_UPDATE, ScoreMode, ScoreUpdate, implementation, override
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies.cost import Rates, measure_rates
from vllm_kvmerge.request.parameters import CompressionConfig, parse_compression

logger = init_logger(__name__)


@dataclass
class RequestState:
    """What the worker keeps of a request that has a policy. update: how attention keeps its scores after the first
    compression, if its policy goes on scoring."""

    front: int = 0
    tail: int = 0
    update: ScoreUpdate = NO_UPDATE
    prompt_scores: PromptScores | None = None
    ring: QueryRing | None = None


def score_update(config: CompressionConfig) -> ScoreUpdate:
    tracker = config.policy.tracker
    return ScoreUpdate(ScoreMode(tracker.mode), tracker.update_decay)


def parse_known(text: str) -> CompressionConfig:
    """A configuration that the scheduler has parsed before."""
    config = parse_compression(text)
    assert config is not None
    return config


@dataclass
class EntryCounts:
    """Numbers of merged and evicted entries on their way to the metrics; a GPU is not waited for.

    engine: whose worker this is.
    """

    engine: int
    _pending: deque[tuple[list[str], Tensor, torch.cuda.Event]] = field(default_factory=deque)

    def add(self, policies: list[str], counts: Tensor) -> None:
        """``counts``: ``[plans, 3]`` int64, ``Execution.counts``."""
        if counts.is_cpu:
            self._count(policies, counts)
            return
        copied = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        copied.copy_(counts, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._pending.append((policies, copied, done))

    def flush(self) -> None:
        """Counts what has arrived."""
        while self._pending and self._pending[0][2].query():
            policies, counts, _ = self._pending.popleft()
            self._count(policies, counts)

    def _count(self, policies: list[str], counts: Tensor) -> None:
        for policy, (num_merged, num_evicted, num_overflows) in zip(policies, counts.tolist(), strict=True):
            count_entries(policy, self.engine, num_merged, num_evicted, num_overflows)


class Compression:
    """The compressed requests of one worker."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._config = vllm_config
        self._device = device
        self.states: dict[str, RequestState] = {}
        self.step = CompressionStep()
        self.rings: QueryRings | None = None
        self.rates: Rates | None = None
        self._compactor: Compactor | None = None
        self._engine = vllm_config.parallel_config.data_parallel_index
        self._counts = EntryCounts(self._engine)
        self._report = CompressionReport()

    @property
    def compactor(self) -> Compactor:
        assert self._compactor is not None, "there is no KV cache yet"
        return self._compactor

    @property
    def layers(self) -> dict[str, Attention]:
        """The model's attention layers by name."""
        return get_layers_from_vllm_config(self._config, Attention)

    def release_cache(self) -> None:
        """Lets go of a KV cache that is about to be replaced, such as the one that vLLM profiles graphs with."""
        self._compactor = None
        for layer in self.layers.values():
            layer.impl.forget_cache()  # type: ignore[attr-defined]

    def use_cache(self, kv_cache_config: KVCacheConfig, model: nn.Module) -> None:
        """The layers' caches have been allocated."""
        (group,) = kv_cache_config.kv_cache_groups
        layers: list[Any] = [self.layers[name] for name in group.layer_names]
        for index, layer in enumerate(layers):
            layer.kvmerge_index = index
        pages = [layer.impl.paged(layer.kv_cache) for layer in layers]
        override(plugin_config(self._config).operators)
        limits, self.rates = request_limits(self._config), measure_rates(self._device)
        logger.info(
            "Compressing one request may take %.0f MiB and, at %.3g products and %.3g other numbers a second, %g s",
            limits.max_bytes / 2**20,
            self.rates.products_per_second,
            self.rates.touches_per_second,
            limits.max_seconds,
        )
        logger.info("KV cache operators: %s", implementation(pages[0]))
        self._query_shape = (layers[0].impl.num_heads, layers[0].impl.head_size)
        self._compactor = Compactor(
            layers=pages,
            scale=layers[0].impl.scale,
            head_indices=self._kv_head_indices(pages[0].num_kv_heads),
            all_heads=self._all_heads,
            output_weights=OutputWeights(model, group.layer_names, pages[0].num_kv_heads, self._query_shape),
            group_size=self._query_shape[0] // pages[0].num_kv_heads,
            hidden_size=self._config.model_config.get_hidden_size(),
            max_bytes=limits.max_bytes,
            # Workers that compare heads wait for each other: one of them must not be interrupted alone.
            max_seconds=limits.max_seconds if self._config.parallel_config.tensor_parallel_size == 1 else None,
            rates=self.rates,
        )
        self._report.rates = self.rates

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Overwrites the keys and values of blocks that come from a compressed request."""
        index = sent(torch.tensor(block_ids), self._device)
        for pages in self.compactor.layers:
            pages.keys.index_fill_(0, index, 0.0)
            pages.values.index_fill_(0, index, 0.0)

    @property
    def _num_replicas(self) -> int:
        """How many workers hold the same KV head: more than one where there are more workers than heads."""
        workers = self._config.parallel_config.tensor_parallel_size
        return max(1, workers // self._config.model_config.get_total_num_kv_heads())

    def _kv_head_indices(self, num_kv_heads: int) -> list[int]:
        """Which of the model's KV heads this worker holds."""
        first = get_tensor_model_parallel_rank() // self._num_replicas * num_kv_heads
        return list(range(first, first + num_kv_heads))

    def _all_heads(self, tensor: Tensor) -> Tensor:
        """``[H, ...]`` of this worker's KV heads to that of all KV heads, each once."""
        gathered = get_tp_group().all_gather(tensor.contiguous(), dim=0)
        return gathered.unflatten(0, (-1, tensor.shape[0]))[:: self._num_replicas].flatten(0, 1)

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """A step begins: forgets the requests that are gone or start anew."""
        self._counts.flush()
        self.step = getattr(scheduler_output, "kvmerge", CompressionStep())
        for request_id in (
            scheduler_output.finished_req_ids
            | (scheduler_output.preempted_req_ids or set())
            | scheduler_output.scheduled_cached_reqs.resumed_req_ids
        ):
            state = self.states.pop(request_id, None)
            if state is not None and state.ring is not None and self.rings is not None:
                self.rings.give_back(state.ring)

    def row(self, request_id: str, num_scheduled: int, num_computed: int) -> BatchRow:
        """What attention is told of a request of which ``num_scheduled`` tokens are computed after ``num_computed``."""
        state = self.states.get(request_id)
        if state is not None and state.front > 0:
            return BatchRow(state.front, state.tail, state.update, ring=state.ring)
        num_queries = self._num_window_queries(request_id, num_scheduled, num_computed)
        if num_queries <= 0:
            return PLAIN
        seq_len = num_computed + num_scheduled
        window = self.step.windows[request_id]
        config = parse_known(window.compression)
        if state is None:
            state = self.states[request_id] = self._new_state(config, seq_len, window.query_window)
        if state.prompt_scores is None:
            return BatchRow(ring=state.ring)
        state.prompt_scores.grow(seq_len)
        return BatchRow(window=ScoreWindow(num_queries, score_update(config), state.prompt_scores), ring=state.ring)

    def rows(self, order: Iterable[tuple[str, int, int]]) -> list[BatchRow]:
        """What attention is told of each of the batch's requests; nothing where no request has a policy.

        ``order``: the requests, with tokens scheduled and computed before.
        """
        if not self.states and not self.step.windows:
            return []
        return [self.row(*request) for request in order]

    def needs_python(self, order: Iterable[tuple[str, int, int]]) -> bool:
        """Whether Python code has to see the queries of this step, so that it cannot be one captured graph."""
        return any(row.needs_python for row in self.rows(order))

    def _num_window_queries(self, request_id: str, num_scheduled: int, num_computed: int) -> int:
        """How many of a request's tokens in this step have queries that its first compression asks for."""
        window = self.step.windows.get(request_id)
        return 0 if window is None else min(num_scheduled, num_computed + num_scheduled - window.start)

    def _new_state(self, config: CompressionConfig, seq_len: int, window: int) -> RequestState:
        """Room for what the policy wants to know of the prompt's queries."""
        state, layers = RequestState(), self.compactor.layers
        if config.policy.needs_scores:
            state.prompt_scores = PromptScores.empty(len(layers), layers[0].num_kv_heads, seq_len, self._device)
        if window:
            state.ring = self.rings.take(window) if self.rings is not None else None
            if state.ring is None:
                dtype = self._config.model_config.dtype
                state.ring = QueryRing.empty(len(layers), window, *self._query_shape, dtype, self._device)
        return state

    def run_plans(self, blocks_of: Callable[[str], Tensor]) -> list[CompressionPlan]:
        """Executes this step's plans after its forward pass; ``blocks_of``: ids of a request's blocks before that.

        Returns them: the runner has to put the fronts' blocks into its rows. What failed is in the next report.
        """
        plans = self.step.plans
        if not plans:
            return plans
        started = time.perf_counter()
        configs = [parse_known(plan.compression) for plan in plans]
        states = [self.states.setdefault(plan.request_id, RequestState()) for plan in plans]
        done = self.compactor.execute(
            [
                Compaction(plan, config.policy, blocks_of(plan.request_id), state.prompt_scores, state.ring)
                for plan, config, state in zip(plans, configs, states, strict=True)
            ]
        )
        self._report_failures(plans, done)
        for plan, config, state in zip(plans, configs, states, strict=True):
            state.front, state.tail = plan.new_front, plan.num_tokens
            state.update = score_update(config) if config.tracks_decode else NO_UPDATE
            state.prompt_scores = None
        if get_tensor_model_parallel_rank() % self._num_replicas == 0:
            self._counts.add([config.name for config in configs], done.counts)
        if get_tensor_model_parallel_rank() == 0:
            # Requests are compressed together: each has its share of the time.
            seconds = (time.perf_counter() - started) / len(plans)
            for config in configs:
                observe_compaction(config.name, self._engine, seconds)
        return plans

    def _report_failures(self, plans: list[CompressionPlan], done: Execution) -> None:
        for index, error in done.failures.items():
            plan = plans[index]
            logger.error("Compression of request %s failed: %s", plan.request_id, error, exc_info=error)
            self._report.failures[plan.request_id] = Failure(str(error), error.part)
        if self._config.parallel_config.tensor_parallel_size == 1:
            return
        # Only one worker's output reaches the scheduler, and a policy may fail for the heads of another.
        group = get_tp_group()
        failed = torch.tensor([index in done.failures for index in range(len(plans))], dtype=torch.int32)
        torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX, group.cpu_group)
        for index in failed.nonzero().flatten().tolist():
            elsewhere = Failure(
                "its compression failed on another tensor-parallel worker, whose log says why", "unknown"
            )
            self._report.failures.setdefault(plans[index].request_id, elsewhere)

    def reported(self, output: Any) -> Any:
        """The model runner's output with what there is to tell the scheduler; that waits where the output is None."""
        if output is None or self._report == CompressionReport():
            return output
        report, self._report = self._report, CompressionReport()
        if isinstance(output, AsyncModelRunnerOutput):
            return _ReportingOutput(output, report)
        return _with_report(output, report)

    def front_and_hole(self, plan: CompressionPlan) -> tuple[list[int], int]:
        """What a plan leaves of its request's row: its first blocks' ids, and where the hole that follows them ends."""
        return plan.blocks, max(len(plan.blocks), plan.num_tokens // self.compactor.layers[0].block_size)


def set_batch_rows(attn_groups: list[list[AttentionGroup]], rows: list[BatchRow]) -> None:
    """Tells the metadata builders of the batch that they are about to build for; no rows: of one that is a dummy."""
    for groups in attn_groups:
        for group in groups:
            group.get_metadata_builder().rows = rows  # type: ignore[attr-defined]


def _with_report(output: ModelRunnerOutput, report: CompressionReport) -> ModelRunnerOutput:
    output = copy(output)  # vLLM shares the one of a step in which nothing was computed
    output.kvmerge = report  # type: ignore[attr-defined]
    return output


class _ReportingOutput(AsyncModelRunnerOutput):
    """An output that is still being computed, to which a report is added."""

    def __init__(self, output: AsyncModelRunnerOutput, report: CompressionReport) -> None:
        self._output, self._report = output, report

    def get_output(self) -> ModelRunnerOutput:
        return _with_report(self._output.get_output(), self._report)
