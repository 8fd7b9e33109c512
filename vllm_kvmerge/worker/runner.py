"""The model runner's side of compression: which rows of a batch are special, and running plans after a step."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_kvmerge.attention.backend import BatchRow, CompressedRow, PromptScores, WindowRow
from vllm_kvmerge.cache.plan import CompressionPlan, CompressionStep
from vllm_kvmerge.config import CompressionConfig, parse_compression
from vllm_kvmerge.kernels import Pages, ScoreUpdate
from vllm_kvmerge.metrics import count_entries, observe_compaction
from vllm_kvmerge.worker.compactor import compact


@dataclass(frozen=True)
class CompressedRequest:
    """A request whose cache has a front. update: how attention keeps its scores, if its policy goes on scoring."""

    front: int
    tail: int
    update: ScoreUpdate | None


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
        self._compressed: dict[str, CompressedRequest] = {}
        self._prompt_scores: dict[str, PromptScores] = {}
        self._step = CompressionStep()

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        (group,) = self.kv_cache_config.kv_cache_groups
        self._pages: list[Pages] = []
        for index, name in enumerate(group.layer_names):
            layer = self.compilation_config.static_forward_context[name]
            layer.kvmerge_index = index
            self._pages.append(layer.impl.pages(layer.kv_cache))

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self._step = getattr(scheduler_output, "kvmerge", CompressionStep())
        for request_id in (
            scheduler_output.finished_req_ids
            | (scheduler_output.preempted_req_ids or set())
            | scheduler_output.scheduled_cached_reqs.resumed_req_ids
        ):
            self._compressed.pop(request_id, None)
            self._prompt_scores.pop(request_id, None)
        result = super().execute_model(scheduler_output, *args, **kwargs)
        for plan in self._step.plans:
            self._run_plan(plan)
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
        compressed = self._compressed.get(request_id)
        if compressed is not None:
            return CompressedRow(compressed.front, compressed.tail, compressed.update)
        window = self._step.windows.get(request_id)
        if window is None:
            return None
        index = self.input_batch.req_id_to_index[request_id]
        seq_len = int(self.input_batch.num_computed_tokens_cpu[index]) + num_scheduled
        num_queries = min(num_scheduled, seq_len - window.start)
        if num_queries <= 0:
            return None
        scores = self._prompt_scores.get(request_id)
        if scores is None:
            pages = self._pages[0]
            scores = PromptScores.empty(len(self._pages), pages.num_kv_heads, seq_len)
            self._prompt_scores[request_id] = scores
        scores.grow(seq_len)
        return WindowRow(num_queries, score_update(parse_known(window.compression)), scores)

    def _run_plan(self, plan: CompressionPlan) -> None:
        started = time.perf_counter()
        config = parse_known(plan.compression)
        block_ids = self.requests[plan.request_id].block_ids[0]
        num_merged, num_evicted = compact(
            self._pages, plan, config, torch.tensor(block_ids), self._prompt_scores.pop(plan.request_id, None)
        )
        # vLLM keeps a request's blocks in two places: the state that rows are made from, and the row of a request that
        # is in the batch (one that had to wait for room is not).
        rows = [block_ids]
        index = self.input_batch.req_id_to_index.get(plan.request_id)
        if index is not None:
            rows.append(self.input_batch.block_table[0].block_table.np[index])
        hole = slice(len(plan.blocks), plan.num_tokens // self._pages[0].block_size)
        for row in rows:
            row[: len(plan.blocks)] = plan.blocks
            row[hole] = [0] * max(0, hole.stop - hole.start)
        update = score_update(config) if config.tracks_decode else None
        self._compressed[plan.request_id] = CompressedRequest(plan.new_front, plan.num_tokens, update)
        count_entries(config.name, num_merged, num_evicted)
        if get_tensor_model_parallel_rank() == 0:
            observe_compaction(config.name, time.perf_counter() - started)


class CompressionCPUModelRunner(CompressionRunnerMixin, CPUModelRunner):
    """vLLM's CPU model runner with compression."""
