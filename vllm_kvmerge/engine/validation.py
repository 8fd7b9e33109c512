"""The check that every request passes before vLLM queues it, offline requests included."""

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.inputs import split_enc_dec_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.arguments import plugin_config, request_limits
from vllm_kvmerge.engine.contexts import CONTEXT_KEY
from vllm_kvmerge.engine.metrics import count_rejection
from vllm_kvmerge.engine.served_model import EngineModel
from vllm_kvmerge.engine.verification import obstacle
from vllm_kvmerge.policies.errors import PartError
from vllm_kvmerge.request.limits import Limits
from vllm_kvmerge.request.spec import (
    EXTRA_ARGS_KEY,
    KEPT_CONTEXT,
    CompressionError,
    CompressionSpec,
    parse_compression,
    refuse_first,
    text_of,
    unlocated,
)

if TYPE_CHECKING:
    import torch
    from vllm import PoolingParams
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient
    from vllm.inputs import EngineInput


@dataclass
class Verdict:
    """The result of a request's check. checked: whether a prompt of it has been checked. error: why it is refused."""

    checked: bool = False
    error: CompressionError | None = None


VERDICT: ContextVar[Verdict | None] = ContextVar("kvmerge_verdict", default=None)
"""The verdict on the HTTP request being served; None outside of a request, and where nothing waits for it."""


class Prefix(NamedTuple):
    """Tokens that a prompt must begin with for messages in it to be where they were located, or for a context to be its
    beginning.

    field: the one that names the messages or the context.
    """

    field: str
    tokens: list[int]

    def check(self, token_ids: list[int] | None) -> None:
        """Raises CompressionError if a prompt begins otherwise."""
        if token_ids is not None and list(token_ids[: len(self.tokens)]) == self.tokens:
            return
        if self.field == KEPT_CONTEXT:
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.{KEPT_CONTEXT}",
                "the prompt does not begin with the context's tokens: it is truncated, or the chat template renders "
                "the context's messages otherwise when others follow; allowed: context_tokens",
                "unknown_context",
            )
        raise unlocated(
            self.field,
            "the prompt does not begin as its messages do when they are rendered alone, so that they cannot be located",
        )


PREFIX: ContextVar[Prefix | None] = ContextVar("kvmerge_prefix", default=None)
"""The prefix of the HTTP request being served; None where no messages were located."""

KEEPS_CONTEXT: ContextVar[bool] = ContextVar("kvmerge_keeps_context", default=False)
"""True while a server makes the request that creates a context: others must not bring ``CONTEXT_KEY``."""


_limits: Limits | None = None
"""Limits of a server's requests."""

_model: EngineModel | None = None
"""A server's model."""

_vllm_config: "VllmConfig | None" = None
"""A server's; None offline."""

_default: CompressionSpec | None = None
"""Compression of a server's requests that do not bring their own."""


async def enforce_limits(engine_client: "EngineClient") -> None:
    """Makes the check refuse requests that exceed the engine's limits.

    Without it, as offline, only the scheduler checks limits, and ends a request that exceeds them with an error.
    """
    global _limits, _model, _vllm_config, _default
    config = _vllm_config = engine_client.vllm_config
    limits, pools = request_limits(config), await engine_client.collective_rpc("pool_sizes")
    _model = EngineModel(config.model_config, limits.is_calibrated)
    num_blocks, block_size, windows = min(pools)
    _limits = replace(
        limits,
        block_size=block_size,
        pool_tokens=(num_blocks - 1) * block_size,
        window_blocks=tuple((most, size) for most, size in windows),
    )
    _default = parse_compression(plugin_config(config).default)


class CompressionValidator(LogitsProcessorV1, LogitsProcessorV2):
    """Refuses a request whose ``kv_compression`` is invalid; changes no logits.

    A logits processor is where vLLM shows a plugin a request's parameters at admission. The front end accepts only the
    interface of the model runner in use, hence the two base classes. Workers drop it (``compat.drop_validator``).
    """

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Puts canonical text in the place of ``kv_compression``, which scheduler and workers look up.

        Raises CompressionError, which vLLM turns into a VLLMValidationError with the same message.
        """
        compat.install_front_end(check_prompt)  # offline, nothing of ours is called earlier
        extra = sampling_params.extra_args or {}
        if (asked := extra.get(EXTRA_ARGS_KEY)) is not None and (text := text_of(parse_compression(asked))) != asked:
            sampling_params.extra_args = extra | {EXTRA_ARGS_KEY: text}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return False

    def apply(self, logits: "torch.Tensor", *_: Any) -> "torch.Tensor":
        return logits


def check_prompt(processed_inputs: "EngineInput", params: "SamplingParams | PoolingParams") -> None:
    """Checks what depends on the prompt's length, after ``validate_params``.

    Raises VLLMValidationError if the request is refused, and notes it in the verdict that the server waits for.
    """
    verdict = VERDICT.get() or Verdict()
    verdict.checked = True
    if not isinstance(params, SamplingParams):
        return
    try:
        _check_key(params)
        extra = params.extra_args or {}
        config = parse_compression(extra[EXTRA_ARGS_KEY]) if EXTRA_ARGS_KEY in extra else _default
        _, prompt = split_enc_dec_input(processed_inputs)
        token_ids, embeds = prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
        num_tokens = length_from_prompt_token_ids_or_embeds(token_ids, embeds)
        if config is not None:
            _check_config(config, token_ids, num_tokens, params)
        is_tokens, max_tokens = prompt["type"] == "token", params.max_tokens or 1
        if config is not None and not is_tokens and not config.never_compresses(num_tokens, max_tokens):
            config.check_tokens_alone(is_tokens)
        if _limits is not None:
            is_plain = config is None or config.never_compresses(num_tokens, max_tokens)
            _limits.check_room(None if is_plain else config, num_tokens)
    except CompressionError as error:
        verdict.error = error
        count_rejection(error.reason)
        raise VLLMValidationError(str(error), parameter=error.param) from None


def _check_key(params: SamplingParams) -> None:
    """Refuses a client's request that would create a context beside the server's route for that."""
    if _limits is not None and CONTEXT_KEY in (params.extra_args or {}) and not KEEPS_CONTEXT.get():
        message = "is the server's own; allowed: POST /v1/kvmerge/contexts"
        raise CompressionError(CONTEXT_KEY, message, "wrong_place")


def _check_config(
    config: CompressionSpec, token_ids: list[int] | None, num_tokens: int, params: SamplingParams
) -> None:
    if (prefix := PREFIX.get()) is not None:
        prefix.check(token_ids)
    config.check_prompt(num_tokens)
    if config.is_verified:
        _check_verified(config, params)
    if _limits is not None and _model is not None:
        try:
            _limits.check(config.for_model(_model), num_tokens, params.max_tokens)
        except PartError as error:
            raise CompressionError(EXTRA_ARGS_KEY, str(error), "part_failed", status=500) from error


def _check_verified(config: CompressionSpec, params: SamplingParams) -> None:
    """Refuses what cannot be verified, or has no floor."""
    field, value, reason = "verify", "false", "not_verifiable"
    if config.min_agreement is not None:
        field, value = "min_agreement", "null"
    why = "an engine without a server" if _vllm_config is None else obstacle(_vllm_config, params)
    is_stream = params.output_kind != RequestOutputKind.FINAL_ONLY
    has_floor, is_sampled = config.min_agreement is not None, params.temperature > 0.0
    refuse_first(
        [
            (why, field, reason, f"not supported with {why}", value),
            (has_floor and is_stream, field, reason, "a stream cannot be taken back", "null, or no stream"),
            (has_floor and is_sampled, field, reason, "sampled answers have none", "null, or temperature 0"),
        ]
    )
