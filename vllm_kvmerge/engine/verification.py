"""Answers that are verified: scored with the full cache once they have ended, as the scheduler sees it.

A server asks for it when it has an answer (``Verifications.ask``), by the key that the answer's request carried.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_kvmerge.engine.grammar_masks import GrammarMasks
from vllm_kvmerge.engine.internal_requests import VerifyingRequest
from vllm_kvmerge.engine.messages import CompressionStep, TokenScores, Verify

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

VERIFY_KEY = "kvmerge_verify"
"""Key in ``SamplingParams.extra_args``: the name under which a server asks for the request's verification."""

MAX_KNOWN_TOKENS = 1 << 22
"""Tokens of the prompts that are remembered; the oldest are forgotten, whose clients have left."""


def obstacle(config: "VllmConfig", params: "SamplingParams") -> str | None:
    """Why a request's answer cannot be verified; None: it can."""
    lora, num_engines = config.lora_config, config.parallel_config.data_parallel_size
    obstacles = {
        # They compute all steps together, and one with work for itself alone would have to wake the others.
        "experts in several engines (--data-parallel-size)": num_engines > 1 and config.model_config.is_moe,
        "adapters of encoders (--enable-tower-connector-lora)": lora is not None and lora.enable_tower_connector_lora,
        "a budget of tokens for thinking": params.thinking_token_budget is not None,
    }
    return next((what for what, is_there in obstacles.items() if is_there), None)


MAX_PERIOD, LEAST_REPETITIONS = 16, 4
"""Tokens of a loop, and how often an answer has to end with them."""


def repeats(tokens: Sequence[int]) -> bool:
    """True if an answer ends in a loop."""
    last = tokens[-MAX_PERIOD * LEAST_REPETITIONS :]
    return any(
        last[-period * LEAST_REPETITIONS : -period] == last[-period * (LEAST_REPETITIONS - 1) :]
        for period in range(1, len(last) // LEAST_REPETITIONS + 1)
    )


@dataclass(eq=False)
class _Asked:
    """An answer that is being verified. prompt: its request. may_evict: as in ``VerifyingRequest``; a user waits for
    it. until: when it is given up (``time.monotonic()``). masks: of its grammar, if it has one. tokens: computed for
    it. is_computed: the last step for it has been scheduled. scores: of its tokens, by index."""

    prompt: Request
    answer: list[int]
    may_evict: bool
    until: float
    result: Future[str]
    masks: GrammarMasks | None = None
    tokens: int = 0
    is_computed: bool = False
    scores: dict[int, tuple[float, bool]] = field(default_factory=dict)

    def end(self, **said: Any) -> None:
        if not self.result.done():
            self.result.set_result(json.dumps(said))


class Verifications:
    """Has answers computed again by internal requests, while no user waits.

    hash_block_size: of the prefix cache. queue: has an internal request scheduled. end: ends requests, by id.
    free_blocks: of a request, tokens that are still to be computed, and whether free blocks suffice for them that it
    may have; those that are not in the prefix cache are then the next to be given out. grammars: of structured outputs.
    """

    def __init__(
        self,
        hash_block_size: int,
        queue: Callable[[VerifyingRequest], None],
        end: Callable[[list[str]], object],
        free_blocks: Callable[[VerifyingRequest], tuple[int, bool]],
        grammars: StructuredOutputManager,
    ) -> None:
        self._hash_block_size, self._queue, self._end, self._free_blocks = hash_block_size, queue, end, free_blocks
        self._grammars = grammars
        self._known: dict[str, tuple[Request, StructuredOutputRequest | None]] = {}
        self._known_tokens = 0
        self._held: deque[_Asked] = deque()
        self._at_work: dict[str, tuple[VerifyingRequest, _Asked]] = {}
        self._count = 0

    @property
    def is_at_work(self) -> bool:
        return bool(self._at_work)

    def running(self) -> list[VerifyingRequest]:
        """Internal requests that vLLM schedules."""
        return [internal for internal, _ in self._at_work.values() if not internal.is_finished()]

    def note(self, request: Request, key: str) -> None:
        """Notes a request whose answer a server may have verified under this name."""
        # Of a prompt's several sequences, any one will do.
        self._known_tokens += 0 if key in self._known else request.num_prompt_tokens
        # vLLM notes in its own when reasoning ends.
        self._known[key] = request, copy(request.structured_output_request)
        while self._known_tokens > MAX_KNOWN_TOKENS and len(self._known) > 1:
            self._forget(next(iter(self._known)))

    def _forget(self, key: str) -> None:
        self._known_tokens -= self._known.pop(key)[0].num_prompt_tokens

    def ask(self, text: str) -> Future[str]:
        """Has an answer verified. text: JSON of ``key``, ``answer`` (token ids), ``seconds``, after which it is given
        up, ``max_tokens``, the most to compute for it, ``may_evict``, whether blocks may be taken that only the prefix
        cache holds, and ``is_last``, if nothing more is asked for the key. Returns JSON of ``skipped``, a reason, or of
        ``log_probs`` and ``agrees`` by token, and ``tokens``, how many were computed."""
        asked, result = json.loads(text), Future[str]()
        request, constraint = self._known.get(asked["key"], (None, None))
        if request is not None and asked["is_last"]:
            self._forget(asked["key"])
        until = time.monotonic() + asked["seconds"]
        one = _Asked(request, asked["answer"], asked["may_evict"], until, result)  # type: ignore[arg-type]
        if request is None or not asked["answer"]:
            one.end(skipped="unknown")
            return result
        # Images in shared memory are gone once workers have read them.
        if request.prompt_token_ids is None or any("address" in (image.data or ()) for image in request.mm_features):
            one.end(skipped="unsupported")
            return result
        needed, _ = self._free_blocks(self._internal(one))
        if needed > asked["max_tokens"]:
            one.end(skipped="too_long", tokens=needed)
            return result
        if constraint is not None:
            one.masks = GrammarMasks(self._grammars, request, constraint, one.answer)
        self._held.append(one)
        return result

    def _internal(self, one: _Asked) -> VerifyingRequest:
        self._count += 1
        name = f"{one.prompt.request_id}/verification-{self._count}"
        return VerifyingRequest(name, one.prompt, one.answer, one.may_evict, self._hash_block_size)

    def begin_step(self, has_waiting: Callable[[], bool], has_place: bool) -> None:
        """Queues the next one if no user waits. has_waiting: whether one does. has_place: another request may run."""
        if not self._held and not self._at_work:
            return
        now = time.monotonic()
        while self._held and self._held[0].until < now:
            self._held.popleft().end(skipped="no_room")
        for internal, one in list(self._at_work.values()):
            if one.until < now:
                self._give_up(internal)
            elif internal.is_finished() and not one.is_computed:  # ended by somebody else
                self._put_back(internal)
            elif not one.is_computed and not self._free_blocks(internal)[1]:
                self._give_up(internal)
        if self._at_work:
            return
        if not self._held or not has_place or has_waiting():
            return
        for one in self._next():
            internal = self._internal(one)
            needed, has_blocks = self._free_blocks(internal)
            if has_blocks:
                self._held.remove(one)
                one.tokens = needed
                self._at_work[internal.request_id] = internal, one
                self._queue(internal)
                return

    def _next(self) -> list[_Asked]:
        """Those to begin with, the first that finds room: what a user waits for comes first."""
        awaited = next((one for one in self._held if one.may_evict), None)
        others = next((one for one in self._held if not one.may_evict), None)
        return [one for one in (awaited, others) if one is not None]

    def _give_up(self, internal: VerifyingRequest) -> None:
        _, one = self._at_work.pop(internal.request_id)
        self._end([internal.request_id])
        one.end(skipped="no_room")

    def _put_back(self, internal: VerifyingRequest) -> None:
        _, one = self._at_work.pop(internal.request_id)
        self._end([internal.request_id])
        one.scores = {}
        self._held.appendleft(one)

    def go_on(self, scheduled: Mapping[str, int], has_waiting: Callable[[], bool], step: CompressionStep) -> None:
        """Adds to ``step`` what is compared in it. has_waiting: whether users wait for a place, which then goes to
        them."""
        for internal, one in list(self._at_work.values()):
            if internal.is_finished():
                continue
            if (num_tokens := scheduled.get(internal.request_id)) is None:
                if not scheduled:  # nothing runs that could make room
                    self._give_up(internal)
                elif has_waiting():
                    self._put_back(internal)
                continue
            end = internal.num_computed_tokens
            first = max(internal.start, end - num_tokens)
            if first < end:
                assert one.prompt.sampling_params is not None
                places = first - internal.start, end - internal.start
                step.verify[internal.request_id] = Verify(
                    offset=first - (end - num_tokens),
                    first=places[0],
                    count=end - first,
                    num_prompt_tokens=internal.start + 1,
                    tokens=[*internal.prompt_token_ids, internal.answer[-1]],
                    params=one.prompt.sampling_params,
                    adapter=0 if one.prompt.lora_request is None else one.prompt.lora_request.lora_int_id,
                    masks=[] if one.masks is None else one.masks.between(*places),
                )
            if internal.is_scheduled:
                one.is_computed = True
                self._end([internal.request_id])
            elif has_waiting():
                self._put_back(internal)

    def learn(self, scores: Mapping[str, TokenScores]) -> None:
        """Takes a worker's report into account."""
        for request_id, some in scores.items():
            if (found := self._at_work.get(request_id)) is None:
                continue
            _, one = found
            for index, (log_prob, agrees) in enumerate(zip(some.log_probs, some.agrees, strict=True), some.first):
                one.scores[index] = log_prob, bool(agrees)
            if len(one.scores) == len(one.answer):
                del self._at_work[request_id]
                in_order = [one.scores[index] for index in range(len(one.answer))]
                log_probs, agree = zip(*in_order, strict=True)
                one.end(log_probs=log_probs, agrees=agree, tokens=one.tokens)
