"""The worker class that turns compression on in a worker process on CPU."""

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.arguments import request_limits
from vllm_kvmerge.engine.support import UnsupportedConfigError, check_config
from vllm_kvmerge.engine.worker.runner import CompressionCPUModelRunner

logger = init_logger(__name__)


class KVMergeWorker(CPUWorker):
    """vLLM's CPU worker with our model runner and attention backend."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        compat.install_worker(vllm_config)
        compat.forget_worker_memory()
        check_config(vllm_config)
        if vllm_config.use_v2_model_runner:
            raise UnsupportedConfigError("VLLM_USE_V2_MODEL_RUNNER=1 is not supported: allowed on CPU: 0")
        if vllm_config.speculative_config is not None:
            compat.sample_beside_drafts()
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        # vLLM hard-codes its runner class in init_device; replacing the runner before anything is loaded costs a few
        # buffers. A class attribute for it in vLLM would make this unnecessary.
        self.model_runner = CompressionCPUModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        available, kept = super().determine_available_memory(), request_limits(self.vllm_config).kept_bytes
        if self.cache_config.kv_cache_memory_bytes is not None:
            logger.info("Prompt scores and newest queries may take %.0f MiB beside the KV cache", kept / 2**20)
            return available
        if kept >= available:
            raise ValueError(
                f"{available / 2**20:.0f} MiB are left for the KV cache; requests' prompt scores and newest queries "
                f"may take {kept / 2**20:.0f}; allowed: more by --gpu-memory-utilization, or less by "
                "--max-compaction-bytes or --max-num-seqs"
            )
        logger.info("The KV cache leaves %.0f MiB for prompt scores and newest queries", kept / 2**20)
        return available - kept

    def pool_sizes(self) -> tuple[int, int, list[tuple[int, int]]]:
        """``Compression.pool_sizes``, for API servers."""
        return self.model_runner.compression.pool_sizes()

    def save_front(self, order: str) -> str | None:
        """``Compression.save_front``, for API servers."""
        return self.model_runner.compression.save_front(order)

    def load_front(self, order: str) -> str | None:
        """``Compression.load_front``, for API servers."""
        return self.model_runner.compression.load_front(order)
