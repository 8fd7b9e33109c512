"""The worker class that turns compression on in a worker process on CPU."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.support import UnsupportedConfigError, check_config
from vllm_kvmerge.engine.worker.runner import CompressionCPUModelRunner


class KVMergeWorker(CPUWorker):
    """vLLM's CPU worker with our model runner and attention backend."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        compat.install_worker(vllm_config)
        check_config(vllm_config)
        if vllm_config.use_v2_model_runner:
            raise UnsupportedConfigError("VLLM_USE_V2_MODEL_RUNNER=1 is not supported: allowed on CPU: 0")
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        # vLLM hard-codes its runner class in init_device; replacing the runner before anything is loaded costs a few
        # buffers. A class attribute for it in vLLM would make this unnecessary.
        self.model_runner = CompressionCPUModelRunner(self.vllm_config, self.device)

    def compression_rates(self) -> dict[str, float]:
        """The worker's ``policies.cost.Rates``, for API servers."""
        return self.model_runner.compression.known_rates()

    def num_kv_blocks(self) -> int:
        """``Compression.num_blocks``, for API servers."""
        return self.model_runner.compression.num_blocks

    def save_front(self, order: str) -> str | None:
        """``Compression.save_front``, for API servers."""
        return self.model_runner.compression.save_front(order)

    def load_front(self, order: str) -> str | None:
        """``Compression.load_front``, for API servers."""
        return self.model_runner.compression.load_front(order)
