"""Admission of requests: whether one can be compressed as it asks, and how, in numbers of tokens."""

from typing import Any

from vllm.v1.request import Request

from vllm_kvmerge.engine.metrics import count_request
from vllm_kvmerge.engine.schedule import RequestCompression, cdiv
from vllm_kvmerge.engine.served_model import EngineModel
from vllm_kvmerge.policies.errors import label
from vllm_kvmerge.request.limits import Limits
from vllm_kvmerge.request.spec import (
    EXTRA_ARGS_KEY,
    FULL,
    CompressionError,
    CompressionSpec,
    parse_compression,
)


class Admission:
    """Checks requests as they arrive.

    default: the ``kv_compression`` of those that have none. limits: with the pool's. engine: its index.
    """

    def __init__(self, default: Any, model: EngineModel, limits: Limits, max_model_len: int, engine: int) -> None:
        self._default, self._model, self.limits = parse_compression(default), model, limits
        self._max_model_len, self._engine = max_model_len, engine
        self.refused: dict[str, str] = {}
        """Why parts are not used again, by kind and name."""

    def config(self, request: Request, asked: Any) -> CompressionSpec | None:
        """What the request asks for, for this model; None for no compression. asked: its ``kv_compression``. Raises
        CompressionError."""
        config = self._default if asked is None else parse_compression(asked)
        if request.resumable:
            # Its prompt grows by turns, which limits do not cover, and vLLM takes tokens back between them.
            if asked is not None and config is not None:
                raise CompressionError(EXTRA_ARGS_KEY, "streamed prompts are not compressed; allowed: full", "streamed")
            config = None
        parts = [] if config is None else [label(part) for part in config.policy.parts]
        count_request(config.name if config else FULL, self._engine, parts)
        return None if config is None else config.for_model(self._model)

    def schedule(self, request: Request, config: CompressionSpec | None, free: int) -> RequestCompression | None:
        """When the request is compressed; None: never. free: blocks of the pool that no context is kept in.

        Has it end with what fits into the pool, as vLLM has it end with what the model can read. Raises
        CompressionError if it cannot be honoured, and what the policy's parts raise.
        """
        if config is None:
            self._limit_to_pool(request, None)
            return None
        # A server's front end has checked this; offline there is none.
        config.check_prompt(request.num_prompt_tokens)
        self.limits.check(config, request.num_prompt_tokens, request.max_tokens)
        for part in map(label, config.policy.parts):
            if part in self.refused:
                why = f"{part} is refused until the server is restarted: {self.refused[part]}"
                raise CompressionError(EXTRA_ARGS_KEY, f"{why}; allowed: other parts", "part_refused")
        if config.never_compresses(request.num_prompt_tokens, request.max_tokens):
            self._limit_to_pool(request, None)
            return None  # plain attention is exact and cheaper
        self._limit_to_pool(request, config)
        schedule = RequestCompression.of(config, request.num_prompt_tokens, request.max_tokens, self.limits)
        if schedule.repeats_context:
            self._check_repetition(request, schedule, free)
        return schedule

    def most_tokens(self, schedule: RequestCompression) -> int:
        """Most tokens that a request has slots for at once."""
        if schedule.chunk is not None:
            return self.limits.slots(schedule.config, schedule.num_prompt_tokens)
        # What it has generated need not fit beside its prompt when it is computed again.
        return (self.limits.pool_tokens or self._max_model_len) - self.limits.window_slots(schedule.total)

    def _limit_to_pool(self, request: Request, config: CompressionSpec | None) -> None:
        if request.pooling_params is None:
            self.limits.check_room(config, request.num_prompt_tokens)
            request.max_tokens = min(request.max_tokens, self.limits.most_generated(config, request.num_prompt_tokens))

    def _check_repetition(self, request: Request, schedule: RequestCompression, free: int) -> None:
        """Raises CompressionError if the request's context cannot be repeated, whatever else runs."""
        has_others = request.prompt_embeds is not None or request.mm_features
        schedule.config.check_tokens_alone(request.prompt_token_ids is not None and not has_others)
        num_tokens = schedule.context + schedule.config.policy.tracker.num_repeated(schedule.context)
        # The context's last block is not shared if it is not full. Both requests have windows.
        block_size = self.limits.block_size
        needed = cdiv(num_tokens, block_size) + 1 + 2 * self.limits.window_slots(num_tokens) // block_size
        if schedule.context > schedule.budget and needed > free:
            message = f"repeating {schedule.context} tokens takes {needed} blocks; allowed: up to {free}"
            raise CompressionError(EXTRA_ARGS_KEY, message, "too_long_to_repeat")
