"""The engine's outputs as HTTP responses: errors of requests that it ended, what compression did for
those that it answers, and reports for streams that ask with ``kvmerge_usage``."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import Message
from vllm.exceptions import GenerationError, VLLMValidationError

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.arguments import PluginConfig
from vllm_kvmerge.engine.saved_contexts import SavedContexts
from vllm_kvmerge.engine.usage import ERROR_KEY, REPORT_KEY, STATUS_KEY, STEPS_KEY
from vllm_kvmerge.request.proof import PROOFS_KEY, Chosen, CompressionProof, Verified
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, parse_compression
from vllm_kvmerge.server.verification import Verification, Verifier

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

FEED_ROUTES = ("/v1/completions", "/v1/chat/completions")
"""Routes whose streams have one JSON object per event, in which OpenAI clients accept additional fields."""

EVENT_PREFIX, EVENT_END = b"data: ", b"\n\n"


class UsageFeed:
    """Reports of one HTTP request's cache, passed from vLLM's outputs to the events of the stream.

    Responses with several sequences (``n``, a list of prompts) get none: their events could not say whose they are.
    """

    def __init__(self) -> None:
        self.num_sequences = 0
        self._last_step = 0
        self._report: dict[str, Any] | None = None

    def note(self, report: dict[str, Any]) -> None:
        """Keeps a report, with those of its steps that are new."""
        earlier = self._report or {}
        self._report = {**earlier, **report}
        if STEPS_KEY in report:
            new = [step for step in report[STEPS_KEY] if step["step"] > self._last_step]
            self._report[STEPS_KEY] = [*earlier.get(STEPS_KEY, []), *new]
            self._last_step = new[-1]["step"] if new else self._last_step

    def add_to(self, event: bytes) -> bytes:
        """The event, with the report since the previous event added."""
        if self._report is None or self.num_sequences != 1:
            return event
        if not (event.startswith(EVENT_PREFIX + b"{") and event.endswith(b"}" + EVENT_END)) or event.count(b"\n") != 2:
            return event
        report, self._report = self._report, None
        # Some vLLM releases have the field in events, null in all but the last.
        chunk = json.loads(event.removeprefix(EVENT_PREFIX)) | {"kv_transfer_params": {REPORT_KEY: report}}
        return EVENT_PREFIX + json.dumps(chunk).encode() + EVENT_END


class Answer:
    """One HTTP response, in whose ``usage`` is put what compression did for its sequences: a JSON object's, or that of
    the events of a stream that have one once all sequences have ended."""

    def __init__(self, other: "Answer | None" = None) -> None:
        self._sources: list[_Source] = [] if other is None else other._sources
        self.verified: list[Verified] = [] if other is None else other.verified
        self.chosen: Chosen | None = None if other is None else other.chosen
        self._start: Message | None = None

    def again(self) -> "Answer":
        """Another response with what is, or will be, known of the same sequences: one that is read back."""
        return Answer(self)

    def begin(self) -> "_Source":
        """Starts one of the engine's requests: there are several for a list of prompts."""
        self._sources.append(_Source())
        return self._sources[-1]

    def messages(self, message: Message) -> list[Message]:
        """The messages to send now instead of this one of the application."""
        if message["type"] == "http.response.start":
            content_type = dict(message["headers"]).get(b"content-type", b"")
            if message["status"] != 200 or not content_type.startswith(b"application/json"):
                return [message]
            self._start = message
            return []
        if message["type"] != "http.response.body":
            return [message]
        body = bytes(message.get("body", b""))
        if self._start is None:
            return [{**message, "body": b"\n".join(map(self._line, body.split(b"\n")))}]
        start, self._start = self._start, None
        if message.get("more_body", False):
            return [start, message]
        body = self._object(body)
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        return [{**start, "headers": headers}, {**message, "body": body}]

    def _object(self, body: bytes) -> bytes:
        proof = self._proof()
        if proof is None:
            return body
        data = json.loads(body)
        data["usage"] = (data.get("usage") or {}) | {EXTRA_ARGS_KEY: proof}
        return _compact(data)

    def _line(self, line: bytes) -> bytes:
        """A line of a stream of events."""
        if not line.startswith(EVENT_PREFIX + b"{") or b'"usage":' not in line or (proof := self._proof()) is None:
            return line
        data = json.loads(line.removeprefix(EVENT_PREFIX))
        usages = [one.get("usage") for one in (data, data.get("response")) if isinstance(one, dict)]
        if data.get("choices") or not any(isinstance(usage, dict) for usage in usages):
            return line
        for usage in usages:
            if isinstance(usage, dict):
                usage[EXTRA_ARGS_KEY] = proof
        return EVENT_PREFIX + _compact(data)

    def _proof(self) -> dict[str, Any] | None:
        """None while a sequence is going on, or if nothing was compressed by this server."""
        proofs = [CompressionProof.model_validate(proof) for source in self._sources for proof in source.proofs]
        if not proofs or not all(source.has_ended for source in self._sources):
            return None
        proof = CompressionProof.of_all(proofs)
        if self.verified:
            proof = proof.model_copy(update={"verified": Verified.of_all(self.verified)})
        return proof.model_copy(update={"chosen": self.chosen}).model_dump()


def _compact(data: Any) -> bytes:
    """JSON as vLLM's servers write it."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


class _Source:
    """One of the engine's requests. proofs: of its sequences."""

    def __init__(self) -> None:
        self.proofs: list[dict[str, Any]] = []
        self.has_ended = False

    def take(self, output: "RequestOutput") -> None:
        """Takes the output's proofs out of it."""
        self.has_ended = output.finished
        params = output.kv_transfer_params
        if params is not None and PROOFS_KEY in params:
            self.proofs = params[PROOFS_KEY]
            output.kv_transfer_params = {key: params[key] for key in params if key != PROOFS_KEY} or None


FEED: ContextVar[UsageFeed | None] = ContextVar("kvmerge_usage_feed", default=None)
"""The feed of the HTTP request being served; None if it does not ask for one."""

ANSWER: ContextVar[Answer | None] = ContextVar("kvmerge_answer", default=None)
"""The response to the HTTP request being served; None if it says nothing of compression."""


def follow_outputs(engine_client: "EngineClient", config: PluginConfig, contexts: SavedContexts) -> None:
    """Puts the error of a failed compression, or of a grammar that the tokenizer cannot spell, into the response,
    instead of "Internal server error", feeds streams, has answers verified, and contexts loaded that are saved."""
    default, verifier = parse_compression(config.default), Verifier(engine_client, config)

    def follow(
        outputs: compat.Outputs,
        prompt: Any,
        params: "SamplingParams",
        request_id: str,
        again: Callable[["SamplingParams"], compat.Outputs],
    ) -> compat.Outputs:
        feed, field = FEED.get(), (params.extra_args or {}).get(EXTRA_ARGS_KEY)
        spec = default if field is None else parse_compression(field)
        verification = verifier.begin(params, request_id, spec)
        if feed is not None:
            feed.num_sequences += params.n
        elif default is field is verification is params.structured_outputs is None:
            return outputs
        answer = ANSWER.get() or Answer()  # whose proofs nobody reads
        followed = _followed(outputs, feed, answer.begin(), lambda: contexts.load_front(prompt, params))
        return followed if verification is None else _verified(followed, verification, answer, again)

    compat.watch_outputs(engine_client, follow)


async def _followed(
    outputs: compat.Outputs, feed: UsageFeed | None, source: _Source, first: Callable[[], Awaitable[None]]
) -> compat.Outputs:
    """The outputs of a request that is sent when ``first`` has been awaited."""
    await first()
    async with aclosing(outputs):
        async for output in outputs:
            report = (output.kv_transfer_params or {}).get(REPORT_KEY) or {}
            if STATUS_KEY in report:
                param, _, _ = report[ERROR_KEY].partition(": ")
                is_ours = param.startswith(EXTRA_ARGS_KEY)
                raise VLLMValidationError(report[ERROR_KEY], parameter=param if is_ours else None)
            if ERROR_KEY in report:
                raise GenerationError(f"{EXTRA_ARGS_KEY}: {report[ERROR_KEY]}")
            if feed is not None and report:
                feed.note(report)
            source.take(output)
            yield output


async def _verified(
    outputs: compat.Outputs,
    verification: Verification,
    answer: Answer,
    again: Callable[["SamplingParams"], compat.Outputs],
) -> compat.Outputs:
    """The outputs, of which the last one waits for its verification where the request asks for that."""
    async with aclosing(outputs):
        async for output in outputs:
            verification.take(output)
            if output.finished and verification.is_asked:
                verified = await verification.end()
                answer.verified.append(verified)
                if verified.fallback:
                    async for last in again(verification.plain_params()):
                        output = last
                    output.kv_transfer_params = None
            yield output
    if not verification.is_asked:
        task = asyncio.create_task(verification.end())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[Verified]] = set()
"""Verifications of answers that have been sent: the event loop alone would forget them."""
