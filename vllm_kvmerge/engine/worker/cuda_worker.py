"""The worker class that turns compression on in a worker process with a GPU."""

from dataclasses import asdict
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvmerge.engine.blocks import register_spec
from vllm_kvmerge.engine.processes import end_with_parent
from vllm_kvmerge.engine.support import check_config
from vllm_kvmerge.engine.validation import drop_validator

register_backend(AttentionBackendEnum.CUSTOM, "vllm_kvmerge.engine.attention.cuda.CUDAAttentionBackend")
register_spec()


class KVMergeCUDAWorker(Worker):
    """vLLM's GPU worker with our model runners and attention backend."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        check_config(vllm_config)
        drop_validator(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from vllm_kvmerge.engine.worker.cuda_runner_v2 import CompressionGPUModelRunnerV2

            return CompressionGPUModelRunnerV2(self.vllm_config, self.device)
        from vllm_kvmerge.engine.worker.cuda_runner import CompressionGPUModelRunner

        return CompressionGPUModelRunner(self.vllm_config, self.device)

    def compression_rates(self) -> dict[str, float]:
        """How fast this worker computes, ``policies.cost.Rates``; API servers ask for it."""
        rates = self.model_runner.compression.rates
        assert rates is not None, "there is no KV cache yet"
        return asdict(rates)
