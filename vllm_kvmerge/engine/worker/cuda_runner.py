"""vLLM's model runner V1 with compression on a GPU."""

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_kvmerge.engine.attention.cuda import use_chunks
from vllm_kvmerge.engine.worker.cuda_compression import CUDACompression
from vllm_kvmerge.engine.worker.runner import CompressionRunnerMixin


class CUDARunnerMixin(CompressionRunnerMixin, GPUModelRunner):
    """Adds compression to vLLM's model runner V1 where attention is ``CUDAAttentionBackend``."""

    compression_class = CUDACompression
    compression: CUDACompression

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
        super().initialize_kv_cache(*args, **kwargs)
        group = self.compression.group
        width = self.input_batch.block_table[group].block_table.gpu.shape[1]
        self.compression.prepare_attention(self.attn_groups[group], width)

    def _init_kv_zero_meta(self) -> None:
        """Does nothing: ``_zero_block_ids`` is ours, and vLLM's worker asks for this one beside layers with a state."""

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        # A full graph runs no Python. Dummy runs pass the argument themselves.
        if kwargs.get("force_uniform_decode") is None and self.compression.needs_python(self._order()):
            kwargs["force_uniform_decode"] = False
        return super()._determine_batch_execution_and_padding(*args, **kwargs)


class CompressionGPUModelRunner(CUDARunnerMixin, GPUModelRunner):
    """vLLM's GPU model runner V1 with compression."""
