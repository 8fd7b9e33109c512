"""Reports of a request's cache find their way into its streamed answer, and into no other."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from vllm.exceptions import GenerationError

from vllm_kvmerge.engine.validation import VERDICT
from vllm_kvmerge.server.middleware import CompressionFieldMiddleware
from vllm_kvmerge.server.outputs import FEED, UsageFeed, follow_outputs

EVENTS = [b'data: {"text": "a"}\n\n', b": keep-alive\n\n", b'data: {"text": "b"}\n\n', b"data: [DONE]\n\n"]


def steps(*numbers: int) -> list[dict[str, int]]:
    return [{"step": number, "bytes": 100 * number} for number in numbers]


class Output:
    def __init__(self, report: dict[str, Any] | None) -> None:
        self.finished = False
        self.kv_transfer_params = None if report is None else {"kvmerge": report}


class Params:
    def __init__(self, n: int, extra_args: dict[str, Any] | None = None) -> None:
        self.n = n
        self.extra_args = extra_args
        self.structured_outputs = None


class Client:
    """An engine client whose outputs are given."""

    def __init__(self, reports: list[dict[str, Any] | None]) -> None:
        self.reports = reports
        self.closed = 0

    async def generate(self, prompt: Any, sampling_params: Params, request_id: str) -> AsyncGenerator[Output, None]:
        try:
            for report in self.reports:
                yield Output(report)
        finally:
            self.closed += 1


REPORTS = [{"steps": steps(1, 2)}, {"steps": steps(1, 2, 3)}]


def answer(route: str, body: Any, n: int = 1, num_prompts: int = 1, reports: Any = REPORTS) -> httpx.Response:
    """That of an application that sends one event after each of the engine's outputs."""
    client = Client(reports)
    follow_outputs(client, has_default=False)  # type: ignore[arg-type]
    app = FastAPI()

    @app.post(route)
    async def handle(request: Request) -> Any:
        data = await request.json()
        if verdict := VERDICT.get():
            verdict.checked = True  # as vLLM has by the time that it generates
        outputs = [client.generate("p", sampling_params=Params(n), request_id=str(i)) for i in range(num_prompts)]

        async def stream() -> AsyncIterator[bytes]:
            for output in outputs:
                async for _ in output:
                    yield EVENTS[0]
            for event in EVENTS[1:]:
                yield event

        return StreamingResponse(stream(), media_type="text/event-stream") if data.get("stream") else JSONResponse(data)

    app.add_middleware(CompressionFieldMiddleware)

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post(route, json=body)

    return asyncio.run(post())


ASKS = {"stream": True, "vllm_xargs": {"kvmerge_usage": "stream"}}
ROUTES = ["/v1/completions", "/v1/chat/completions"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("field", [{}, {"kv_compression": {"policy": "h2o"}}])
def test_each_step_comes_once(route, field):
    text = answer(route, ASKS | field).text
    assert text.count("\n\n") == 5
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert [chunk["text"] for chunk in chunks] == ["a", "a", "b"]
    assert [chunk.get("kv_transfer_params") for chunk in chunks] == [
        {"kvmerge": {"steps": steps(1, 2)}},
        {"kvmerge": {"steps": steps(3)}},
        None,
    ]
    assert text.endswith("data: [DONE]\n\n")


def test_streams_that_do_not_ask_are_untouched():
    text = answer(ROUTES[0], {"stream": True}).content
    assert text == EVENTS[0] * 2 + b"".join(EVENTS[1:])


def test_answers_of_several_sequences_are_untouched():
    plain = b"".join(EVENTS[1:])
    assert answer(ROUTES[0], ASKS, n=2).content == EVENTS[0] * 2 + plain
    assert answer(ROUTES[0], ASKS, num_prompts=2).content == EVENTS[0] * 4 + plain


def test_other_routes_and_whole_answers_are_untouched():
    assert answer("/v1/responses", ASKS).content == EVENTS[0] * 2 + b"".join(EVENTS[1:])
    assert answer(ROUTES[0], ASKS | {"stream": False}).json() == ASKS | {"stream": False}


def test_the_report_at_the_end_joins_the_last_steps():
    feed = UsageFeed()
    feed.num_sequences = 1
    feed.note({"steps": steps(4, 5)})
    feed.note({"mean_bytes": 7.5, "steps": steps(5, 6)})
    event = feed.add_to(b'data: {"text": ""}\n\n')
    assert json.loads(event.removeprefix(b"data: "))["kv_transfer_params"]["kvmerge"] == {
        "mean_bytes": 7.5,
        "steps": steps(4, 5, 6),
    }
    assert feed.add_to(EVENTS[0]) == EVENTS[0]


@pytest.mark.parametrize("own", ["null", '{"kvmerge": {"mean_bytes": 1}}'])
def test_an_event_that_has_the_field_has_it_once(own: str):
    feed = UsageFeed()
    feed.num_sequences = 1
    feed.note({"mean_bytes": 7.5})
    event = feed.add_to(b'data: {"kv_transfer_params": %s, "text": "\xc3\xa4"}\n\n' % own.encode())
    assert event.count(b"kv_transfer_params") == 1
    chunk = json.loads(event.removeprefix(b"data: "))
    assert chunk == {"text": "\u00e4", "kv_transfer_params": {"kvmerge": {"mean_bytes": 7.5}}}


def test_an_event_of_another_form_waits_for_the_next():
    feed = UsageFeed()
    feed.num_sequences = 1
    feed.note({"peak_bytes": 1})
    for event in (b"", b": keep-alive\n\n", b"data: [DONE]\n\n", b'event: x\ndata: {"a": 1}\n\n', EVENTS[0] * 2):
        assert feed.add_to(event) == event
    assert b"peak_bytes" in feed.add_to(EVENTS[0])


def generated(client: Client, params: Params, has_default: bool = False) -> AsyncGenerator[Output, None]:
    follow_outputs(client, has_default)  # type: ignore[arg-type]
    return client.generate(None, params, "")


@pytest.mark.parametrize("feed", [None, UsageFeed()], ids=["no feed", "feed"])
def test_a_client_that_leaves_ends_the_request(feed):
    client = Client(REPORTS)

    async def leave() -> None:
        FEED.set(feed)
        outputs = generated(client, Params(1, {"kv_compression": "{}"}))
        await anext(outputs)
        assert client.closed == 0
        await outputs.aclose()

    asyncio.run(leave())
    assert client.closed == 1


@pytest.mark.parametrize(
    ("extra", "has_default", "is_told"),
    [({"kv_compression": "{}"}, False, True), (None, True, True), (None, False, False)],
)
def test_a_request_that_the_engine_ended_fails_with_its_reason(extra, has_default, is_told):
    """Requests that cannot be compressed are not looked at."""
    client = Client([{"error": "merger zip: it broke"}])
    outputs = generated(client, Params(1, extra), has_default)
    if is_told:
        with pytest.raises(GenerationError, match="kv_compression: merger zip: it broke"):
            asyncio.run(_consume(outputs))
    else:
        asyncio.run(_consume(outputs))
    assert client.closed == 1


async def _consume(outputs: Any) -> None:
    async for _ in outputs:
        pass
