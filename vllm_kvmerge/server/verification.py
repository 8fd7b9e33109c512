"""Verification of an answer once it has ended: its tokens are scored with the full cache, by the engine."""

import asyncio
import json
import uuid
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind

from vllm_kvmerge.engine.arguments import PluginConfig
from vllm_kvmerge.engine.metrics import count_verified
from vllm_kvmerge.engine.verification import VERIFY_KEY, obstacle
from vllm_kvmerge.request.proof import Verified
from vllm_kvmerge.request.spec import FULL, CompressionSpec, compression

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams


@dataclass
class _Sequence:
    """Tokens of one sequence, and their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class Verifier:
    """Has the answers of an engine's requests verified."""

    def __init__(self, engine_client: "EngineClient", config: PluginConfig) -> None:
        self._engine_client, self._config = engine_client, config

    def begin(self, params: "SamplingParams", request_id: str, spec: CompressionSpec | None) -> "Verification | None":
        """Follows the outputs of a request that is about to be sent to the engine, with these parameters; None: it is
        not verified."""
        is_asked = spec is not None and spec.is_verified
        if not is_asked and not self._is_chosen(request_id):
            return None
        config = self._engine_client.vllm_config
        has_log_probs = config.model_config.logprobs_mode == "raw_logprobs"
        return Verification(self, params, spec, is_asked, obstacle(config, params) is None, has_log_probs)

    def _is_chosen(self, request_id: str) -> bool:
        """By the request's id, so that neither its policy nor its company has a say."""
        share = self._config.verify_share
        return share > 0.0 and zlib.crc32(request_id.encode()) < share * 2**32

    async def ask(self, key: str, answer: list[int], may_evict: bool, is_last: bool) -> dict[str, Any]:
        seconds = self._config.verify_seconds
        most = self._config.verify_max_tokens
        asked = {"key": key, "answer": answer, "seconds": seconds, "max_tokens": most}
        asked |= {"may_evict": may_evict, "is_last": is_last}
        # Of several engines, the one that has served the request knows its key.
        call = self._engine_client.engine_core.call_utility_all_async("kvmerge_verify", json.dumps(asked))  # type: ignore[attr-defined]
        try:
            found: list[dict[str, Any]] = [*map(json.loads, await asyncio.wait_for(call, seconds))]
        except TimeoutError:
            return {"skipped": "no_room"}
        return next((one for one in found if one.get("skipped") != "unknown"), found[0])


class Verification:
    """One request's. Its tokens' log-probabilities are asked for, and taken out of the outputs if only this asks.

    is_asked: its answer waits for it. is_able: the engine can do it. has_log_probs: they are those of the model.
    """

    def __init__(
        self,
        verifier: Verifier,
        params: "SamplingParams",
        spec: CompressionSpec | None,
        is_asked: bool,
        is_able: bool,
        has_log_probs: bool,
    ) -> None:
        self._verifier, self._params, self._spec = verifier, params, spec
        self.is_asked, self._is_able = is_asked, is_able
        self._has_log_probs = has_log_probs and is_able
        self._sequences: dict[int, _Sequence] = {}
        self._key = uuid.uuid4().hex
        if is_able:
            params.extra_args = (params.extra_args or {}) | {VERIFY_KEY: self._key}
        self._takes_out = self._has_log_probs and params.logprobs is None
        if self._takes_out:
            params.logprobs = 0

    def take(self, output: "RequestOutput") -> None:
        for one in output.outputs:
            sequence = self._sequences.setdefault(one.index, _Sequence())
            if self._params.output_kind != RequestOutputKind.DELTA:
                sequence.tokens, sequence.log_probs = [], []
            sequence.tokens += one.token_ids
            if self._has_log_probs and one.logprobs:
                sequence.log_probs += [
                    chosen[token].logprob for token, chosen in zip(one.token_ids, one.logprobs, strict=True)
                ]
            if self._takes_out:
                one.logprobs = one.cumulative_logprob = None

    async def end(self) -> Verified:
        """The result, once the engine has it, and whether the answer must be made again."""
        *others, last = self._sequences.values()
        parts = [await self._verified(one, is_last=False) for one in others]
        verified = Verified.of_all([*parts, await self._verified(last, is_last=True)])
        floor = None if self._spec is None else self._spec.min_agreement
        if floor is not None and verified.agreeing is not None and verified.agreeing < floor:
            verified = verified.model_copy(update={"fallback": True})
        name, budget = (FULL, 1.0) if self._spec is None else (self._spec.name, self._spec.budget)
        count_verified(name, budget, verified)
        return verified

    def plain_params(self) -> "SamplingParams":
        """The request's parameters without compression."""
        params = self._params.clone()
        extra = {name: value for name, value in (params.extra_args or {}).items() if name != VERIFY_KEY}
        params.extra_args = extra | compression(FULL)
        if self._takes_out:
            params.logprobs = None
        return params

    async def _verified(self, sequence: _Sequence, is_last: bool) -> Verified:
        found: dict[str, Any] = {"skipped": "unsupported"}
        if self._is_able:
            # Whoever asks for it may have what any request of theirs might; a share takes nothing from anybody.
            found = await self._verifier.ask(self._key, sequence.tokens, self.is_asked, is_last)
        return Verified.of(found, sequence.log_probs, self._params.temperature > 0.0)
