"""vLLM's model runner V2 with compression."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner
from vllm.v1.worker.utils import KVBlockZeroer

from vllm_kvmerge.engine.attention.cuda import use_chunks
from vllm_kvmerge.engine.worker.compression import NewRows, set_batch_rows
from vllm_kvmerge.engine.worker.cuda_compression import CUDACompression


class BlockZeroer(KVBlockZeroer):
    """In place of vLLM's, which assumes a cache without metadata."""

    def __init__(self, compression: CUDACompression) -> None:
        self._compression = compression

    def zero_block_ids(self, block_ids: list[int]) -> None:
        self._compression.zero_block_ids(block_ids)


class CUDARunnerV2Mixin(GPUModelRunner):
    """Adds compression to vLLM's model runner V2.

    V2 keeps block tables on the GPU only. A compaction reads a request's row there; the row's new prefix is staged with
    the next step's writes, which follow on the same stream.
    """

    block_tables: BlockTables

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compression = CUDACompression(self.vllm_config, self.device)
        self._new_rows: list[NewRows] = []

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        use_chunks(self.compression.layers.values())
        self.compression.reserve(self.get_kv_cache_spec())

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        with self.compression.profiling():
            super().profile_run(*args, **kwargs)

    def profile_cudagraph_memory(self) -> int:
        num_bytes = super().profile_cudagraph_memory()
        self.compression.release_cache()  # which was for this alone
        return num_bytes

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self.compression.release_cache()
        super().initialize_kv_cache(*args, **kwargs)
        self.compression.use_cache(self.kv_cache_config, self.model)
        self._init_kv_zero_meta()
        group = self.compression.group
        self.compression.prepare_attention(self.attn_groups[group], self.block_tables.block_tables[group].gpu.shape[1])

    def _init_kv_zero_meta(self) -> None:
        # vLLM's worker calls it once more beside layers with a state.
        self.kv_block_zeroer = BlockZeroer(self.compression)

    def execute_model(
        self, scheduler_output: SchedulerOutput, *args: Any, dummy_run: bool = False, **kwargs: Any
    ) -> Any:
        if dummy_run:
            return super().execute_model(scheduler_output, *args, dummy_run=True, **kwargs)
        self.compression.begin(scheduler_output)
        result = super().execute_model(scheduler_output, *args, **kwargs)
        if self.execute_model_state is not None:
            # The sampler's random numbers depend on the tokens' own.
            self.compression.unshift_positions(self.execute_model_state.input_batch.positions)
            if self.execute_model_state.hidden_states is not None:
                self.compression.exchange_outputs(self.execute_model_state.hidden_states)
        else:  # nothing is sampled
            self._new_rows = self.compression.run_plans(self._blocks_of)
        return self.compression.reporter.attach_to(result)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        samples = self.execute_model_state is not None
        output = super().sample_tokens(*args, **kwargs)
        if samples:
            # Not before: the step's tokens need not wait for compactions.
            self._new_rows = self.compression.run_plans(self._blocks_of)
        return self.compression.reporter.attach_to(output)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        # All writes of a step are applied together, in no order: none may go to a request that has left or whose row is
        # written anew.
        begun = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        for request_id, group, first, blocks in self._new_rows:
            index = self.req_states.req_id_to_index.get(request_id)
            if index is not None and request_id not in begun:
                self.block_tables.block_tables[group].stage_write(index, first, blocks)
        self._new_rows = []
        with self.compression.copying(scheduler_output):
            super().update_requests(scheduler_output)

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[BatchReqState | None, int | None]:
        state, uniform_token_count = super().gather_batch_req_state(scheduler_output, dummy_run)
        if state is not None and self.compression.needs_python(self._order(state.req_ids, state)):
            # A full graph runs no Python.
            state, uniform_token_count = state._replace(decode_graph_eligible=False), None
        return state, uniform_token_count

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        set_batch_rows(
            self.attn_groups[self.compression.group],
            self.compression.rows(self._order(input_batch.req_ids, input_batch)),
        )
        prepared = super().prepare_attn(input_batch)
        self.compression.shift_positions(input_batch.positions)
        return prepared

    def prepare_dummy_attn(self, *args: Any, **kwargs: Any) -> Any:
        set_batch_rows(self.attn_groups[self.compression.group], [])
        return super().prepare_dummy_attn(*args, **kwargs)

    def _order(self, req_ids: list[str], batch: BatchReqState | InputBatch) -> Iterator[tuple[str, int, int]]:
        """The batch's requests in order, each with its numbers of tokens scheduled and computed before."""
        computed = self.req_states.num_computed_tokens_np[batch.idx_mapping_np].tolist()
        yield from zip(req_ids, batch.num_scheduled_tokens.tolist(), computed, strict=True)

    def _blocks_of(self, request_id: str) -> torch.Tensor:
        index = self.req_states.req_id_to_index[request_id]
        group = self.compression.group
        return self.block_tables.block_tables[group].gpu[index, : int(self.block_tables.num_blocks.np[group, index])]


class CompressionGPUModelRunnerV2(CUDARunnerV2Mixin, GPUModelRunner):
    """vLLM's GPU model runner V2 with compression."""
