"""The check that every request passes before vLLM queues it, offline requests included."""

from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from vllm_kvmerge.config import EXTRA_ARGS_KEY, parse_compression
from vllm_kvmerge.engine_args import VALIDATOR

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class CompressionValidator(LogitsProcessorV1, LogitsProcessorV2):
    """Refuses a request whose ``kv_compression`` cannot be honoured; touches no logits.

    A logits processor is where vLLM lets a plugin see a request's parameters at admission. The front end accepts only
    the interface of the model runner in use, hence the two base classes. Workers have no use for an instance and should
    call ``drop_validator`` before they build their processors.
    """

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """Raises CompressionError, which vLLM turns into its VLLMValidationError with the same message."""
        if extra := sampling_params.extra_args:
            parse_compression(extra.get(EXTRA_ARGS_KEY))

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        return False

    def apply(self, logits: "torch.Tensor", *_: Any) -> "torch.Tensor":
        return logits


def drop_validator(vllm_config: "VllmConfig") -> None:
    """Removes the validator from a worker's configuration: the front end has bound it by then.

    With any custom logits processor, vLLM's V1 runner hands every request's output tokens to the sampler at each step,
    and under asynchronous scheduling waits for the last step's tokens to do so.
    """
    model_config = vllm_config.model_config
    model_config.logits_processors = [p for p in model_config.logits_processors or () if p != VALIDATOR] or None
