"""The body field: moved, refused, or left alone; on a small application that echoes what reaches it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from vllm_kvmerge.engine.validation import VERDICT, Verdict
from vllm_kvmerge.request.parameters import CompressionError
from vllm_kvmerge.server import middleware
from vllm_kvmerge.server.body import BodyMiddleware, Refusal, answer_refusal
from vllm_kvmerge.server.middleware import CARRIERS, CompressionFieldMiddleware
from vllm_kvmerge.server.outputs import Answer

VALID = {"policy": "streaming_llm", "budget": 64}
XARGS_ROUTES = [route for route, carrier in CARRIERS.items() if carrier == ("vllm_xargs",)]
JSON = {"content-type": "application/json"}


@pytest.fixture
def rejections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reasons: list[str] = []
    monkeypatch.setattr(middleware, "count_rejection", reasons.append)
    return reasons


def echo_app() -> FastAPI:
    """Answers a POST with the body that it got."""
    app = FastAPI()

    @app.post("/stream")
    async def stream(request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            for number in range(3):
                yield f"data: {number}\n\n".encode()

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    for path in (*CARRIERS, "/{path:path}"):
        app.add_api_route(path, echo, methods=["GET", "POST"])
    app.add_middleware(CompressionFieldMiddleware)
    app.add_middleware(BodyMiddleware, max_bytes=1 << 24)
    app.add_exception_handler(Refusal, answer_refusal)
    return app


def wrapped(app: Any) -> Any:
    """An application without routes behind the same middlewares."""
    return BodyMiddleware(CompressionFieldMiddleware(app), max_bytes=1 << 24)


def post(route: str, *, app: FastAPI | None = None, **request: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app or echo_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(route, **request)

    return asyncio.run(send())


@pytest.mark.parametrize("route", XARGS_ROUTES)
def test_field_moves_into_vllm_xargs(route: str) -> None:
    body = {"model": "m", "prompt": "héllo 😀", "kv_compression": VALID, "vllm_xargs": {"other": 1}}
    response = post(route, json=body)
    received = response.json()
    assert json.loads(received["vllm_xargs"].pop("kv_compression")) == VALID
    assert received == {"model": "m", "prompt": "héllo 😀", "vllm_xargs": {"other": 1}}


def test_field_moves_into_sampling_params_of_the_token_route() -> None:
    response = post("/inference/v1/generate", json={"sampling_params": {"max_tokens": 1}, "kv_compression": VALID})
    received = response.json()
    assert json.loads(received["sampling_params"]["extra_args"]["kv_compression"]) == VALID
    assert received["sampling_params"]["max_tokens"] == 1 and "kv_compression" not in received


@pytest.mark.parametrize(
    ("field", "param", "reason"),
    [
        ("keepkv", "kv_compression", "wrong_type"),
        (json.dumps(VALID), "kv_compression", "wrong_type"),
        ([VALID], "kv_compression", "wrong_type"),
        (True, "kv_compression", "wrong_type"),
        ({}, "kv_compression.policy", "unknown_policy"),
        ({"contextmessages": 1}, "kv_compression.contextmessages", "unknown_field"),
        ({"policy": "keepvk"}, "kv_compression.policy", "unknown_policy"),
        ({"policy": "streaming_llm", "budget": 0}, "kv_compression.budget", "invalid_value"),
        ({"policy": "streaming_llm", "bugdet": 64}, "kv_compression.bugdet", "unknown_field"),
    ],
)
def test_invalid_field_is_refused_and_counted(field: Any, param: str, reason: str, rejections: list[str]) -> None:
    response = post("/v1/completions", json={"prompt": "x", "kv_compression": field})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param)
    assert error["message"].startswith(param)
    assert rejections == [reason]


@pytest.mark.parametrize("inner", [VALID, json.dumps(VALID)])
def test_both_places_are_refused(inner: Any, rejections: list[str]) -> None:
    body = {"kv_compression": VALID, "vllm_xargs": {"kv_compression": inner}}
    response = post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "kv_compression"
    assert rejections == ["given_twice"]


def test_vllm_xargs_alone_is_checked_and_passes_unchanged(rejections: list[str]) -> None:
    body = json.dumps({"vllm_xargs": {"kv_compression": json.dumps(VALID)}}, indent=3)
    assert post("/v1/completions", content=body, headers=JSON).text == body
    response = post("/v1/completions", json={"vllm_xargs": {"kv_compression": '{"policy": "nope"}'}})
    assert response.status_code == 400
    assert rejections == ["unknown_policy"]


def test_object_in_vllm_xargs_becomes_text() -> None:
    received = post("/v1/completions", json={"vllm_xargs": {"kv_compression": VALID}}).json()
    assert json.loads(received["vllm_xargs"]["kv_compression"]) == VALID


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":  "no field",\n "n": 1}',
        b'{"prompt": "the words kv_compression in a text"}',
        b'{"prompt": "x", "kv_compression": null}',
        b'{"prompt": "x", "kv_transfer_params": {}, "kv_compression_ratio": 2, "n": {"kv_compresion": 1}}',
        b'{"kv_compression": broken',
        b'["kv_compression"]',
        b'"kv_compression"',
        b'{"kv_compression": {"policy": "full"}, "vllm_xargs": "not an object"}',
        b"",
        b"\xff\xfe kv_compression",
    ],
    ids=range(10),
)
def test_everything_else_is_byte_identical(body: bytes, rejections: list[str]) -> None:
    response = post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 200 and response.content == body
    assert rejections == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kv_compresion": {}}, "kv_compresion"),
        ({"kvCompression": None}, "kvCompression"),
        ({"KV-Compression": 1}, "KV-Compression"),
        ({"kv_compress": {}, "kv_compression": {"policy": "full"}}, "kv_compress"),
        ({"vllm_xargs": {"kv_compressions": "{}"}}, "vllm_xargs.kv_compressions"),
    ],
)
def test_names_that_are_nearly_right_are_refused(body: dict[str, Any], param: str, rejections: list[str]) -> None:
    response = post("/v1/completions", json={"prompt": "x", **body})
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert "allowed: kv_compression" in response.json()["error"]["message"]
    assert rejections == ["unknown_field"]


def test_a_body_is_json_whatever_its_header_says() -> None:
    body = b'{"kv_compression": 1}'
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/x+json"}, {}):
        assert post("/v1/completions", content=body, headers=headers).status_code == 400


def test_other_methods_pass() -> None:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(echo_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request("GET", "/v1/completions", content=b'{"kv_compression": 1}', headers=JSON)

    assert asyncio.run(get()).content == b'{"kv_compression": 1}'


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/systemone"])
def test_field_on_other_routes_is_refused(route: str, rejections: list[str]) -> None:
    response = post(route, json={"kv_compression": VALID})
    assert response.status_code == 400
    assert "/v1/chat/completions" in response.json()["error"]["message"]
    assert post(route, json={"vllm_xargs": {"kv_compression": json.dumps(VALID)}}).status_code == 400
    assert rejections == ["wrong_route"] * 2
    assert post(route, json={"input": "kv_compression"}).status_code == 200


INVALID = '{"kv_compression": {"policy": "nope"}}'


@pytest.mark.parametrize(
    "body",
    [
        INVALID.replace("_", "\\u005f", 1).encode(),
        INVALID.replace("k", "\\u006B", 1).encode(),
        *(INVALID.encode(encoding) for encoding in ("utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le")),
        b" \r\n\t" + INVALID.encode(),
        b'{"vllm_xargs": {"kv_compress\\u0069on": {"policy": "nope"}}}',
    ],
)
def test_other_spellings_of_the_name_are_seen(body: bytes, rejections: list[str]) -> None:
    assert post("/v1/completions", content=body, headers=JSON).status_code == 400
    assert rejections == ["unknown_policy"]


@pytest.mark.parametrize(
    "body",
    [
        '{"kv_compression": {"policy": "nope"}, "kv_compression": null}',
        '{"vllm_xargs": {"kv_compression": {"policy": "full"}, "kv_compression": null}}',
        '{"vllm_xargs": {"kv_compression": {"policy": "full"}}, "vllm_xargs": {}}',
    ],
)
def test_a_second_object_does_not_hide_the_field(body: str, rejections: list[str]) -> None:
    assert post("/v1/completions", content=body, headers=JSON).status_code == 400
    assert rejections == ["given_twice"]


@pytest.mark.parametrize("holder", ["sampling_params", "extra_args", "extra_body"])
def test_the_field_in_an_object_that_is_not_read_is_refused(holder: str, rejections: list[str]) -> None:
    response = post("/v1/completions", json={holder: {"kv_compression": VALID}})
    assert response.json()["error"]["param"] == f"{holder}.kv_compression"
    assert post("/v1/completions", json={"metadata": {"kv_compression": VALID}}).status_code == 200
    assert rejections == ["wrong_place"]


def test_the_field_in_a_form_is_refused(rejections: list[str]) -> None:
    for form in ({"files": {"file": b"sound"}}, {}):
        response = post("/v1/audio/transcriptions", data={"kv_compression": json.dumps(VALID)}, **form)
        assert response.status_code == 400
        assert post("/v1/audio/transcriptions", data={"prompt": "kv_compression"}, **form).status_code == 200
    assert rejections == ["wrong_place"] * 2


@pytest.mark.parametrize("beam", [True, 1, "true"])
@pytest.mark.parametrize("holder", ["vllm_xargs", None])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/invocations"])
def test_beam_search_with_the_field_is_refused(
    route: str, holder: str | None, beam: Any, rejections: list[str]
) -> None:
    field: dict[str, Any] = {"kv_compression": VALID}
    body = {"use_beam_search": beam, **(field if holder is None else {holder: field})}
    error = post(route, json=body).json()["error"]
    assert error["param"] == "kv_compression" and "beam search does not support it" in error["message"]
    assert rejections == ["beam_search"]
    assert post(route, json=body | {"use_beam_search": False}).status_code == 200
    assert post(route, json={"use_beam_search": True, "prompt": "kv_compression"}).status_code == 200


def test_chunked_body_is_joined() -> None:
    text = json.dumps({"prompt": "x" * 1000, "kv_compression": VALID}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(text), 7):
            yield text[start : start + 7]

    response = post("/v1/completions", content=chunks(), headers=JSON)
    assert json.loads(response.json()["vllm_xargs"]["kv_compression"]) == VALID


def test_big_body() -> None:
    prompt = "ab" * 4_000_000
    received = post("/v1/completions", json={"prompt": prompt, "kv_compression": VALID}).json()
    assert received["prompt"] == prompt


def test_root_path_is_not_part_of_the_route() -> None:
    app = echo_app()
    app.root_path = "/proxy"
    for path in ("/proxy/v1/completions", "/v1/completions", "/v1/%63ompletions"):
        assert "vllm_xargs" in post(path, app=app, json={"kv_compression": VALID}).json()


@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize"])
def test_a_servers_default_may_be_refused_late_too(route: str) -> None:
    seen: list[Verdict | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        seen.append(VERDICT.get())
        await Response("ours")(scope, receive, send)

    inner = CompressionFieldMiddleware(app, has_default=True)
    assert post(route, app=BodyMiddleware(inner, max_bytes=1 << 20), json={"prompt": "x"}).text == "ours"
    assert (seen == [None]) == (route == "/tokenize")


def test_response_is_not_buffered() -> None:
    """Each piece of the answer leaves before the next one is asked for, and the client's leaving is seen."""
    sent: list[bytes] = []
    seen_by_app: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen_by_app.append((await receive())["type"])
        verdict = VERDICT.get()
        assert verdict is not None
        verdict.checked = True
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
            assert len(sent) == number + 1
        seen_by_app.append((await receive())["type"])

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    body = json.dumps({"kv_compression": VALID, "stream": True}).encode()
    incoming: list[dict[str, Any]] = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json; charset=utf-8")],
    }
    asyncio.run(wrapped(app)(scope, receive, send))
    assert sent == [b"0", b"1", b"2"]
    assert seen_by_app == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("events", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("field", [{"kv_compression": VALID}, {}], ids=["with the field", "without"])
def test_a_refusal_that_comes_late_is_answered_as_any_other(
    field: dict[str, Any], refused: bool, stream: bool, events: int
) -> None:
    """vLLM looks at the prompt's length when it has sent a stream's status, and on some routes its first events."""
    error = CompressionError("kv_compression.context_tokens", "9 tokens are more", "context_too_long")
    seen: list[Verdict | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        verdict = VERDICT.get()
        seen.append(verdict)

        def check() -> None:
            if verdict is not None:
                verdict.checked, verdict.error = True, error if refused else None

        async def chunks() -> AsyncIterator[str]:
            for number in range(events):
                yield f"data: {number}\n\n"
            check()
            yield "data: the rest\n\n"
            yield "data: [DONE]\n\n"

        if stream:
            await StreamingResponse(chunks(), media_type="text/event-stream")(scope, receive, send)
        else:
            check()
            await Response("vLLM's own", 400 if refused else 200)(scope, receive, send)

    body = {"prompt": "x", "stream": stream, **field}
    response = post("/v1/completions", app=wrapped(app), json=body)
    assert VERDICT.get() is None and (seen == [None]) == (not field)
    if field and refused:
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": str(error), "type": "BadRequestError", "param": error.param, "code": 400
        }  # fmt: skip
    elif stream:
        start = "".join(f"data: {number}\n\n" for number in range(events))
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text == start + "data: the rest\n\ndata: [DONE]\n\n"
    else:
        assert (response.status_code, response.text) == (400 if refused else 200, "vLLM's own")


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_that_is_broken_off(begun: bool) -> None:
    """A refusal takes its place unless it has begun: the verdict on one of several prompts may come later."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        verdict = VERDICT.get()
        assert verdict is not None
        verdict.checked = begun
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"0", "more_body": True})
        verdict.checked, verdict.error = True, CompressionError("kv_compression.context_tokens", "9 are more", "x")
        if begun:
            await send({"type": "http.response.body", "body": b"1", "more_body": True})
        raise ValueError("broken off")

    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    body = json.dumps({"kv_compression": VALID | {"context_tokens": 9}}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    call = wrapped(app)(scope, receive, send)
    if begun:
        with pytest.raises(ValueError, match="broken off"):
            asyncio.run(call)
        assert [message.get("body") for message in sent] == [None, b"0", b"1"]
    else:
        asyncio.run(call)
        assert sent[0]["status"] == 400 and b"9 are more" in sent[1]["body"] and len(sent) == 2


def test_an_answer_without_a_verdict_is_not_kept() -> None:
    """What vLLM refuses for a reason of its own never comes to be checked."""
    body = {"prompt": "x", "kv_compression": VALID | {"context_tokens": 9}}
    received = post("/v1/completions", json=body).json()
    assert json.loads(received["vllm_xargs"]["kv_compression"])["context_tokens"] == 9
    assert post("/stream", json={"prompt": "context_tokens"}).text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_client_that_leaves_before_the_end_of_its_body_reaches_nobody() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(await receive())

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError("answered")

    incoming: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
    }
    with pytest.raises(Refusal, match="left before the end"):
        asyncio.run(wrapped(app)(scope, receive, send))


def test_reports_of_the_newest_stored_responses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MOST_STORED", 2)
    one = CompressionFieldMiddleware(echo_app())
    for name in ("resp_1", "resp_2", "resp_3"):
        one._store(name, Answer())
    assert list(one._stored) == ["resp_2", "resp_3"]


def test_streaming_answer_passes() -> None:
    assert post("/stream", json={"prompt": "x"}).text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
