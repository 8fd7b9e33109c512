"""Brings what a request's cache holds into its streamed answer, for requests that ask with ``kvmerge_usage``."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Send

from vllm_kvmerge.engine.usage import REPORT_KEY, STEPS_KEY

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

ROUTES = ("/v1/completions", "/v1/chat/completions")
"""Routes whose streams are events of one JSON object each, to which OpenAI clients let a server add fields."""

EVENT_START, EVENT_END = b"data: {", b"}\n\n"


class UsageFeed:
    """The reports of one HTTP request's cache on their way from vLLM's outputs to the events of the stream.

    An answer of several sequences (``n``, a list of prompts) gets none: its events could not say whose they are.
    """

    def __init__(self) -> None:
        self._num_sequences = 0
        self._last_step = 0
        self._report: dict[str, Any] | None = None

    def follow(self, outputs: "AsyncGenerator[RequestOutput]", num_sequences: int) -> "AsyncGenerator[RequestOutput]":
        """The same outputs, whose reports are noted as they pass."""
        self._num_sequences += num_sequences
        return self._noted(outputs)

    async def _noted(self, outputs: "AsyncGenerator[RequestOutput]") -> "AsyncGenerator[RequestOutput]":
        async with aclosing(outputs):
            async for output in outputs:
                if output.kv_transfer_params and REPORT_KEY in output.kv_transfer_params:
                    self.note(output.kv_transfer_params[REPORT_KEY])
                yield output

    def note(self, report: dict[str, Any]) -> None:
        """Keeps a report, and of its steps those that are new."""
        earlier = self._report or {}
        self._report = {**earlier, **report}
        if STEPS_KEY in report:
            new = [step for step in report[STEPS_KEY] if step["step"] > self._last_step]
            self._report[STEPS_KEY] = [*earlier.get(STEPS_KEY, []), *new]
            self._last_step = new[-1]["step"] if new else self._last_step

    def add_to(self, event: bytes) -> bytes:
        """The event with what there is to report since the last one."""
        if self._report is None or self._num_sequences != 1:
            return event
        if not (event.startswith(EVENT_START) and event.endswith(EVENT_END)) or event.count(b"\n") != 2:
            return event
        report, self._report = self._report, None
        field = json.dumps({"kv_transfer_params": {REPORT_KEY: report}}).encode()
        return event.removesuffix(EVENT_END) + b", " + field[1:-1] + EVENT_END

    def wrap(self, send: Send) -> Send:
        """A ``send`` that adds reports to the events of a stream."""

        async def send_with_reports(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": self.add_to(bytes(message.get("body", b"")))}
            await send(message)

        return send_with_reports


FEED: ContextVar[UsageFeed | None] = ContextVar("kvmerge_usage_feed", default=None)
"""That of the HTTP request being served; None for one that does not ask."""


def feed_from(engine_client: "EngineClient") -> None:
    """Makes the feed of the request being served see the engine's outputs.

    Replaces ``generate`` of this one object. Needed until vLLM's streams carry ``kv_transfer_params``, as its other
    answers do.
    """
    generate = engine_client.generate

    def generate_and_feed(
        prompt: Any, sampling_params: "SamplingParams", *args: Any, **kwargs: Any
    ) -> "AsyncGenerator[RequestOutput]":
        outputs = generate(prompt, sampling_params, *args, **kwargs)
        feed = FEED.get()
        return outputs if feed is None else feed.follow(outputs, sampling_params.n)

    engine_client.generate = generate_and_feed  # type: ignore[method-assign]
