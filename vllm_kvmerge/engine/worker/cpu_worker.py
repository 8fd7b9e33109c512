"""The worker class that turns compression on in a worker process on CPU."""

from dataclasses import asdict
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvmerge.engine.blocks import register_spec
from vllm_kvmerge.engine.processes import end_with_parent
from vllm_kvmerge.engine.support import UnsupportedConfigError, check_config
from vllm_kvmerge.engine.validation import drop_validator
from vllm_kvmerge.engine.worker.runner import CompressionCPUModelRunner

# vLLM's CPU platform ignores a custom backend's name but honours an override of its own backend.
register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_kvmerge.engine.attention.cpu.MergeableAttentionBackend")
register_spec()


class KVMergeWorker(CPUWorker):
    """vLLM's CPU worker with our model runner and attention backend."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        check_config(vllm_config)
        if vllm_config.use_v2_model_runner:
            raise UnsupportedConfigError("VLLM_USE_V2_MODEL_RUNNER=1 is not supported: allowed on CPU: 0")
        drop_validator(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        # vLLM names its runner class inside init_device; replacing the runner before anything is loaded into it costs
        # a few buffers. A class attribute for it in vLLM would make this unnecessary.
        self.model_runner = CompressionCPUModelRunner(self.vllm_config, self.device)

    def compression_rates(self) -> dict[str, float]:
        """How fast this worker computes, ``policies.cost.Rates``; API servers ask for it."""
        rates = self.model_runner.compression.rates
        assert rates is not None, "there is no KV cache yet"
        return asdict(rates)
