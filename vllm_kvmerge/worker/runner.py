"""The model runner's side of compression: which rows of a batch are special, and running plans after a step."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_kvmerge.attention.backend import PLAIN, BatchRow, PromptScores, QueryRing, ScoreWindow
from vllm_kvmerge.cache.plan import CompressionPlan, CompressionStep
from vllm_kvmerge.config import CompressionConfig, parse_compression
from vllm_kvmerge.kernels import ScoreUpdate, implementation, override
from vllm_kvmerge.metrics import count_entries, observe_compaction
from vllm_kvmerge.worker.compactor import Compaction, Compactor
from vllm_kvmerge.worker.output_weights import OutputWeights

logger = init_logger(__name__)


@dataclass
class RequestState:
    """What the worker keeps of a request that has a policy. update: how attention keeps its scores after the first
    compression, if its policy goes on scoring."""

    front: int = 0
    tail: int = 0
    update: ScoreUpdate | None = None
    prompt_scores: PromptScores | None = None
    ring: QueryRing | None = None


def score_update(config: CompressionConfig) -> ScoreUpdate:
    tracker = config.policy.tracker
    return ScoreUpdate(tracker.mode, tracker.update_decay)


def parse_known(text: str) -> CompressionConfig:
    """A configuration that the scheduler has parsed before."""
    config = parse_compression(text)
    assert config is not None
    return config


class CompressionRunnerMixin(CPUModelRunner):
    """Adds compression to vLLM's model runner V1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._states: dict[str, RequestState] = {}
        self._step = CompressionStep()

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        (group,) = self.kv_cache_config.kv_cache_groups
        layers = [self.compilation_config.static_forward_context[name] for name in group.layer_names]
        for index, layer in enumerate(layers):
            layer.kvmerge_index = index
        pages = [layer.impl.pages(layer.kv_cache) for layer in layers]
        override(self.vllm_config.additional_config.get("kvmerge", {}).get("operators") or {})
        logger.info("KV cache operators: %s", implementation(pages[0]))
        self._query_shape = (layers[0].impl.num_heads, layers[0].impl.head_size)
        self._compactor = Compactor(
            layers=pages,
            scale=layers[0].impl.scale,
            head_indices=self._kv_head_indices(pages[0].num_kv_heads),
            all_heads=self._all_heads,
            output_weights=OutputWeights(self.model, group.layer_names, pages[0].num_kv_heads, self._query_shape),
        )

    @property
    def _num_replicas(self) -> int:
        """How many workers hold the same KV head: more than one where there are more workers than heads."""
        return max(1, self.parallel_config.tensor_parallel_size // self.model_config.get_total_num_kv_heads())

    def _kv_head_indices(self, num_kv_heads: int) -> list[int]:
        """Which of the model's KV heads this worker holds."""
        first = get_tensor_model_parallel_rank() // self._num_replicas * num_kv_heads
        return list(range(first, first + num_kv_heads))

    def _all_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[H, ...]`` of this worker's KV heads to that of all KV heads, each once."""
        gathered = get_tp_group().all_gather(tensor.contiguous(), dim=0)
        return gathered.unflatten(0, (-1, tensor.shape[0]))[:: self._num_replicas].flatten(0, 1)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self._step = getattr(scheduler_output, "kvmerge", CompressionStep())
        for request_id in (
            scheduler_output.finished_req_ids
            | (scheduler_output.preempted_req_ids or set())
            | scheduler_output.scheduled_cached_reqs.resumed_req_ids
        ):
            self._states.pop(request_id, None)
        result = super().execute_model(scheduler_output, *args, **kwargs)
        if self._step.plans:
            self._run_plans(self._step.plans)
        return result

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = kwargs.get("num_scheduled_tokens")
        rows: list[BatchRow] = []
        if scheduled is not None:  # None in dummy runs
            rows = [self._row(request_id, scheduled[request_id]) for request_id in self.input_batch.req_ids]
        for groups in self.attn_groups:
            for group in groups:
                group.get_metadata_builder().rows = rows  # type: ignore[attr-defined]
        return super()._build_attention_metadata(*args, **kwargs)

    def _row(self, request_id: str, num_scheduled: int) -> BatchRow:
        state = self._states.get(request_id)
        if state is not None and state.front > 0:
            return BatchRow(state.front, state.tail, state.update, ring=state.ring)
        window = self._step.windows.get(request_id)
        if window is None:
            return PLAIN
        index = self.input_batch.req_id_to_index[request_id]
        seq_len = int(self.input_batch.num_computed_tokens_cpu[index]) + num_scheduled
        num_queries = min(num_scheduled, seq_len - window.start)
        if num_queries <= 0:
            return PLAIN
        config = parse_known(window.compression)
        if state is None:
            state = self._states[request_id] = self._new_state(config, seq_len)
        if state.prompt_scores is None:
            return BatchRow(ring=state.ring)
        state.prompt_scores.grow(seq_len)
        return BatchRow(window=ScoreWindow(num_queries, score_update(config), state.prompt_scores), ring=state.ring)

    def _new_state(self, config: CompressionConfig, seq_len: int) -> RequestState:
        """Room for what the policy wants to know of the prompt's queries."""
        state, layers = RequestState(), self._compactor.layers
        if config.policy.needs_scores:
            state.prompt_scores = PromptScores.empty(len(layers), layers[0].num_kv_heads, seq_len)
        if config.policy.query_window:
            state.ring = QueryRing(len(layers), config.policy.query_window, *self._query_shape, self.dtype)
        return state

    def _run_plans(self, plans: list[CompressionPlan]) -> None:
        started = time.perf_counter()
        configs = [parse_known(plan.compression) for plan in plans]
        states = [self._states.setdefault(plan.request_id, RequestState()) for plan in plans]
        counts = self._compactor.run(
            [
                Compaction(
                    plan,
                    config.policy,
                    torch.tensor(self.requests[plan.request_id].block_ids[0]),
                    state.prompt_scores,
                    state.ring,
                )
                for plan, config, state in zip(plans, configs, states, strict=True)
            ]
        )
        for plan, config, state, (num_merged, num_evicted) in zip(plans, configs, states, counts, strict=True):
            self._move_to_front(plan)
            state.front, state.tail = plan.new_front, plan.num_tokens
            state.update = score_update(config) if config.tracks_decode else None
            state.prompt_scores = None
            count_entries(config.name, num_merged, num_evicted)
        if get_tensor_model_parallel_rank() == 0:
            # Requests are compressed together: each has its share of the time.
            seconds = (time.perf_counter() - started) / len(plans)
            for config in configs:
                observe_compaction(config.name, seconds)

    def _move_to_front(self, plan: CompressionPlan) -> None:
        """The request's row of blocks as the plan leaves it."""
        # vLLM keeps a request's blocks in two places: the state that rows are made from, and the row of a request that
        # is in the batch (one that had to wait for room is not).
        block_ids = self.requests[plan.request_id].block_ids[0]
        rows = [block_ids]
        index = self.input_batch.req_id_to_index.get(plan.request_id)
        if index is not None:
            rows.append(self.input_batch.block_table[0].block_table.np[index])
        hole = slice(len(plan.blocks), plan.num_tokens // self._compactor.layers[0].block_size)
        for row in rows:
            row[: len(plan.blocks)] = plan.blocks
            row[hole] = [0] * max(0, hole.stop - hole.start)


class CompressionCPUModelRunner(CompressionRunnerMixin, CPUModelRunner):
    """vLLM's CPU model runner with compression."""

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        # After a chunk that is not a prompt's last, vLLM discards what it sampled and winds the generator of a request
        # with a seed back, which CPU generators cannot do: the worker would die. Such rows sample without theirs. A
        # runner that skips discarded rows, or restores the generator's state, would make this unnecessary.
        generators, discarded = self.input_batch.generators, self.discard_request_mask.np
        kept = {row: generators.pop(row) for row in list(generators) if discarded[row]}
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(kept)
