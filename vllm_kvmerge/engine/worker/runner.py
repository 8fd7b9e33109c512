"""vLLM's model runner V1 with compression, and the one for CPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_kvmerge.engine.arguments import plugin_config
from vllm_kvmerge.engine.attention.cpu import MergeableAttentionBuilder, attends_plain
from vllm_kvmerge.engine.blocks import with_equal_blocks
from vllm_kvmerge.engine.worker.compression import Compression, NewRows, set_batch_rows

logger = init_logger(__name__)


class CompressionRunnerMixin(GPUModelRunner):
    """Adds compression to vLLM's model runner V1."""

    compression_class: type[Compression] = Compression

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compression = self.compression_class(self.vllm_config, self.device)
        self._scheduled: dict[str, int] = {}
        self._new_rows: list[NewRows] = []

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return with_equal_blocks(super().get_kv_cache_spec())

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self.compression.release_cache()
        super().initialize_kv_cache(*args, **kwargs)
        self.compression.use_cache(self.kv_cache_config, self.model)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.compression.begin(scheduler_output)
        self._scheduled = scheduler_output.num_scheduled_tokens
        result = super().execute_model(scheduler_output, *args, **kwargs)
        if self.execute_model_state is None:  # nothing is sampled
            self._new_rows = self.compression.run_plans(self._blocks_of)
        return self.compression.reporter.attach_to(result)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        # A part of the buffer that full graphs read; vLLM fills it anew in each step.
        self.compression.shift_positions(kwargs["positions"])
        output = super()._model_forward(*args, **kwargs)
        self.compression.exchange_outputs(output)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        samples = self.execute_model_state is not None
        output = super().sample_tokens(*args, **kwargs)
        if samples:
            # Not before: the step's tokens need not wait for compactions.
            self._new_rows = self.compression.run_plans(self._blocks_of)
        return self.compression.reporter.attach_to(output)

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        # vLLM's own assumes a cache without metadata.
        self.compression.zero_block_ids(block_ids)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        # Not earlier: only here has vLLM waited for the GPU, which may still be copying the last step's rows.
        for request_id, group, first, blocks in self._new_rows:
            # vLLM keeps a request's blocks in its state and, unless it had to wait for room, in a row of the batch.
            places = slice(first, first + len(blocks))
            self.requests[request_id].block_ids[group][places] = blocks
            index = self.input_batch.req_id_to_index.get(request_id)
            if index is not None:
                self.input_batch.block_table[group].block_table.np[index, places] = blocks
        self._new_rows = []
        with self.compression.copying(scheduler_output):
            return super()._update_states(scheduler_output)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        is_dummy = kwargs.get("num_scheduled_tokens") is None
        rows = [] if is_dummy else self.compression.rows(self._order())
        set_batch_rows(self.attn_groups[self.compression.group], rows)
        return super()._build_attention_metadata(*args, **kwargs)

    def _order(self) -> Iterator[tuple[str, int, int]]:
        """The batch's requests in order, each with its numbers of tokens scheduled and computed before."""
        computed = self.input_batch.num_computed_tokens_cpu
        for index, request_id in enumerate(self.input_batch.req_ids):
            yield request_id, self._scheduled[request_id], int(computed[index])

    def _blocks_of(self, request_id: str) -> torch.Tensor:
        # As in V2's block tables: kernels are compiled for each type.
        ids = self.requests[request_id].block_ids[self.compression.group]
        return torch.from_numpy(np.fromiter(ids, np.int32, len(ids)))


class CompressionCPUModelRunner(CompressionRunnerMixin, CPUModelRunner):
    """vLLM's CPU model runner with compression."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        choice = plugin_config(self.vllm_config).plain_attention
        for group in self.attn_groups[self.compression.group]:
            builder = group.get_metadata_builder()
            if isinstance(builder, MergeableAttentionBuilder):
                is_ours = choice == "ours" or choice == "auto" and attends_plain(self.compression.compactor.layers[0])
                builder.attends_plain = is_ours
                logger.info("Attention of plain requests: %s", "ours" if is_ours else "vLLM's operator")

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        # vLLM verifies drafts even in a step without any, where it fails if a request has a top_k.
        has_drafts = spec_decode_metadata is not None and any(spec_decode_metadata.num_draft_tokens)
        return super()._sample(logits, spec_decode_metadata if has_drafts else None)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        # After a chunk that is not a prompt's last, vLLM discards the sampled token and rewinds the generator of a
        # request with a seed, which CPU generators cannot do: the worker would die. Such rows sample without theirs. A
        # runner that skips discarded rows, or restores the generator's state, would make this unnecessary.
        generators, discarded = self.input_batch.generators, self.discard_request_mask.np
        kept = {row: generators.pop(row) for row in list(generators) if discarded[row]}
        try:
            output = super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(kept)
        if self.compression.holds_queries:
            # Of a token and its drafts, as many are right as tokens follow.
            numbers = map(len, output.sampled_token_ids)
            self.compression.count_verified(dict(zip(output.req_ids, numbers, strict=True)))
        return output
