"""The check that every request passes before vLLM queues it, offline requests included."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs import split_enc_dec_input
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from vllm_kvmerge.engine.arguments import VALIDATOR
from vllm_kvmerge.engine.metrics import count_rejection
from vllm_kvmerge.engine.verdict import VERDICT, Verdict
from vllm_kvmerge.policies.errors import PartError
from vllm_kvmerge.request.limits import Limits
from vllm_kvmerge.request.parameters import EXTRA_ARGS_KEY, CompressionConfig, CompressionError, parse_compression

if TYPE_CHECKING:
    import torch
    from vllm import PoolingParams
    from vllm.config import VllmConfig
    from vllm.inputs import EngineInput


class CompressionValidator(LogitsProcessorV1, LogitsProcessorV2):
    """Refuses a request whose ``kv_compression`` cannot be honoured; touches no logits.

    A logits processor is where vLLM lets a plugin see a request's parameters at admission. The front end accepts only
    the interface of the model runner in use, hence the two base classes. Workers have no use for an instance and should
    call ``drop_validator`` before they build their processors.
    """

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises CompressionError, which vLLM turns into its VLLMValidationError with the same message."""
        _requested(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return False

    def apply(self, logits: "torch.Tensor", *_: Any) -> "torch.Tensor":
        return logits


@dataclass(frozen=True)
class Terms:
    """What a server holds requests to. default: the compression of those that do not bring their own."""

    limits: Limits
    default: dict[str, Any] | str | None


_terms: Terms | None = None


def enforce(terms: Terms) -> None:
    """Makes the check of this process's requests refuse what the server would not do.

    Without it, as offline, the scheduler alone looks at limits, and ends a request that exceeds them with an error.
    """
    global _terms
    _terms = terms


def _requested(params: "SamplingParams | PoolingParams") -> CompressionConfig | None:
    if not isinstance(params, SamplingParams):
        return None
    default = _terms.default if _terms is not None else None
    return parse_compression((params.extra_args or {}).get(EXTRA_ARGS_KEY, default))


def _validate_request(processed_inputs: "EngineInput", params: "SamplingParams | PoolingParams") -> None:
    """The platform's own check, then ours of what depends on the prompt's length."""
    type(current_platform).validate_request(processed_inputs, params)
    verdict = VERDICT.get() or Verdict()
    verdict.checked = True
    config = _requested(params)
    if config is None:
        return
    _, prompt = split_enc_dec_input(processed_inputs)
    token_ids, embeds = prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
    num_tokens = length_from_prompt_token_ids_or_embeds(token_ids, embeds)
    try:
        config.check_context(num_tokens)
        if _terms is not None:
            assert isinstance(params, SamplingParams)
            try:
                _terms.limits.check(config, num_tokens, params.max_tokens)
            except PartError as error:
                raise CompressionError(EXTRA_ARGS_KEY, str(error), "part_failed", status=500) from error
    except CompressionError as error:
        verdict.error = error
        count_rejection(error.reason)
        raise VLLMValidationError(str(error), parameter=error.param) from None


# A logits processor sees no prompt. The platform is what vLLM asks next, and it sees prompt and parameters; handing
# logits processors the prompt as well would make this unnecessary.
current_platform.validate_request = _validate_request  # type: ignore[method-assign]


def drop_validator(vllm_config: "VllmConfig") -> None:
    """Removes the validator from a worker's configuration: the front end has bound it by then.

    With any custom logits processor, vLLM's V1 runner hands every request's output tokens to the sampler at each step,
    and under asynchronous scheduling waits for the last step's tokens to do so.
    """
    model_config = vllm_config.model_config
    model_config.logits_processors = [p for p in model_config.logits_processors or () if p != VALIDATOR] or None
