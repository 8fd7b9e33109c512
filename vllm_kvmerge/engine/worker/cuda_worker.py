"""The worker class that turns compression on in a worker process with a GPU."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.support import check_config


class KVMergeCUDAWorker(Worker):
    """vLLM's GPU worker with our model runners and attention backend."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        compat.install_worker(vllm_config)
        check_config(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from vllm_kvmerge.engine.worker.cuda_runner_v2 import CompressionGPUModelRunnerV2

            return CompressionGPUModelRunnerV2(self.vllm_config, self.device)
        from vllm_kvmerge.engine.worker.cuda_runner import CompressionGPUModelRunner

        return CompressionGPUModelRunner(self.vllm_config, self.device)

    def pool_sizes(self) -> tuple[int, int, list[tuple[int, int]]]:
        """``Compression.pool_sizes``, for API servers."""
        return self.model_runner.compression.pool_sizes()

    def save_front(self, order: str) -> str | None:
        """``Compression.save_front``, for API servers."""
        return self.model_runner.compression.save_front(order)

    def load_front(self, order: str) -> str | None:
        """``Compression.load_front``, for API servers."""
        return self.model_runner.compression.load_front(order)
