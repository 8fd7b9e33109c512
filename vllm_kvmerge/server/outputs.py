"""The engine's outputs on their way to HTTP responses: errors of requests that it ended, and reports for streams that
ask with ``kvmerge_usage``."""

import json
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GenerationError

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.usage import ERROR_KEY, REPORT_KEY, STEPS_KEY
from vllm_kvmerge.request.parameters import EXTRA_ARGS_KEY

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
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


FEED: ContextVar[UsageFeed | None] = ContextVar("kvmerge_usage_feed", default=None)
"""The feed of the HTTP request being served; None if it does not ask for one."""


def follow_outputs(engine_client: "EngineClient", has_default: bool) -> None:
    """Puts the error of a failed compression into the response, instead of "Internal server error", and feeds streams.

    has_default: whether requests without the field are compressed too.
    """

    def follow(outputs: compat.Outputs, params: "SamplingParams") -> compat.Outputs:
        feed = FEED.get()
        if feed is not None:
            feed.num_sequences += params.n
        elif not has_default and EXTRA_ARGS_KEY not in (params.extra_args or {}):
            return outputs
        return _followed(outputs, feed)

    compat.watch_outputs(engine_client, follow)


async def _followed(outputs: compat.Outputs, feed: UsageFeed | None) -> compat.Outputs:
    async with aclosing(outputs):
        async for output in outputs:
            report = (output.kv_transfer_params or {}).get(REPORT_KEY) or {}
            if ERROR_KEY in report:
                raise GenerationError(f"{EXTRA_ARGS_KEY}: {report[ERROR_KEY]}")
            if feed is not None and report:
                feed.note(report)
            yield output
