"""The body field: moved, refused, or left alone; on a small application that echoes what reaches it."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from tests.server.conftest import check_refused, send
from vllm_kvmerge.engine.validation import VERDICT, Verdict
from vllm_kvmerge.request.spec import CompressionError
from vllm_kvmerge.server import middleware
from vllm_kvmerge.server.body import BodyMiddleware, Refusal, answer_refusal
from vllm_kvmerge.server.middleware import CARRIERS, CompressionFieldMiddleware
from vllm_kvmerge.server.outputs import Answer

VALID = {"policy": "streaming_llm", "budget": 64}
XARGS_ROUTES = [route for route, carrier in CARRIERS.items() if carrier == ("vllm_xargs",)]
JSON = {"content-type": "application/json"}
SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


@pytest.fixture
def rejections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reasons: list[str] = []
    monkeypatch.setattr(middleware, "count_rejection", reasons.append)
    return reasons


def echo_app() -> FastAPI:
    """Answers a POST with the body that it got."""
    app = FastAPI()

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    for path in (*CARRIERS, "/{path:path}"):
        app.add_api_route(path, echo, methods=["GET", "POST"])
    app.add_middleware(CompressionFieldMiddleware)
    app.add_middleware(BodyMiddleware, max_bytes=1 << 24)
    app.add_exception_handler(Refusal, answer_refusal)
    return app


def post(route: str, *, app: Any = None, **request: Any) -> httpx.Response:
    return send(app or echo_app(), "POST", route, **request)


@pytest.mark.parametrize("route", XARGS_ROUTES)
def test_field_moves_into_vllm_xargs(route: str) -> None:
    body = {"model": "m", "prompt": "héllo 😀", "kv_compression": VALID, "vllm_xargs": {"other": 1}}
    received = post(route, json=body).json()
    assert json.loads(received["vllm_xargs"].pop("kv_compression")) == VALID
    assert received == {"model": "m", "prompt": "héllo 😀", "vllm_xargs": {"other": 1}}


def test_field_moves_into_sampling_params_of_the_token_route() -> None:
    body = {"sampling_params": {"max_tokens": 1}, "kv_compression": VALID}
    received = post("/inference/v1/generate", json=body).json()
    assert json.loads(received["sampling_params"].pop("extra_args")["kv_compression"]) == VALID
    assert received == {"sampling_params": {"max_tokens": 1}}


INVALID = '{"kv_compression": {"policy": "nope"}}'
TEXT = json.dumps(VALID)
REFUSED: list[tuple[str, str, Any]] = [
    ("kv_compression", "wrong_type", {"kv_compression": TEXT}),
    ("kv_compression.contextmessages", "unknown_field", {"kv_compression": {"contextmessages": 1}}),
    ("kv_compression.policy", "unknown_policy", {"vllm_xargs": {"kv_compression": '{"policy": "nope"}'}}),
    ("kv_compression", "given_twice", {"kv_compression": VALID, "vllm_xargs": {"kv_compression": TEXT}}),
    # A second object does not hide the field.
    ("kv_compression", "given_twice", b'{"kv_compression": {"policy": "nope"}, "kv_compression": null}'),
    ("kv_compression", "given_twice", b'{"vllm_xargs": {"kv_compression": {}, "kv_compression": null}}'),
    ("vllm_xargs", "given_twice", b'{"vllm_xargs": {"kv_compression": {"policy": "full"}}, "vllm_xargs": {}}'),
    # Names that are nearly right.
    ("kv_compresion", "unknown_field", {"kv_compresion": {}}),
    ("kvCompression", "unknown_field", {"kvCompression": None}),
    ("KV-Compression", "unknown_field", {"KV-Compression": 1}),
    ("kv_compress", "unknown_field", {"kv_compress": {}, "kv_compression": {"policy": "full"}}),
    ("vllm_xargs.kv_compressions", "unknown_field", {"vllm_xargs": {"kv_compressions": "{}"}}),
    # Other spellings of the name.
    ("kv_compression.policy", "unknown_policy", INVALID.replace("_", "\\u005f", 1).encode()),
    ("kv_compression.policy", "unknown_policy", b'{"vllm_xargs": {"kv_compress\\u0069on": {"policy": "nope"}}}'),
    *(
        ("kv_compression.policy", "unknown_policy", INVALID.encode(encoding))
        for encoding in ("utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le")
    ),
]


@pytest.mark.parametrize(("param", "reason", "body"), REFUSED)
def test_what_is_not_the_field_as_it_should_be_is_refused_and_counted(
    param: str, reason: str, body: Any, rejections: list[str]
) -> None:
    """A body is JSON whatever its header says."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    for headers in (JSON, {"content-type": "text/plain"}, {"content-type": "application/x+json"}, {}):
        assert check_refused(post("/v1/completions", content=content, headers=headers), param).startswith(param)
    assert rejections == [reason] * 4


def test_what_stands_in_vllm_xargs_becomes_canonical_text() -> None:
    canonical = json.dumps(VALID, sort_keys=True)
    for given in (VALID, json.dumps(VALID, indent=1), canonical):
        body = json.dumps({"vllm_xargs": {"kv_compression": given}}, indent=3)
        received = post("/v1/completions", content=body, headers=JSON)
        assert received.json()["vllm_xargs"]["kv_compression"] == canonical
        assert (received.text == body) == (given is canonical)


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
    assert send(echo_app(), "GET", "/v1/completions", content=INVALID, headers=JSON).text == INVALID
    assert rejections == []


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/systemone"])
def test_field_on_other_routes_is_refused(route: str, rejections: list[str]) -> None:
    check_refused(post(route, json={"kv_compression": VALID}), "kv_compression", "/v1/chat/completions")
    assert post(route, json={"vllm_xargs": {"kv_compression": json.dumps(VALID)}}).status_code == 400
    assert rejections == ["wrong_route"] * 2
    assert post(route, json={"input": "kv_compression"}).status_code == 200


@pytest.mark.parametrize("holder", ["sampling_params", "extra_args", "extra_body"])
def test_the_field_in_an_object_that_is_not_read_is_refused(holder: str, rejections: list[str]) -> None:
    check_refused(post("/v1/completions", json={holder: {"kv_compression": VALID}}), f"{holder}.kv_compression")
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
def test_beam_search_with_the_field_is_refused(holder: str | None, beam: Any, rejections: list[str]) -> None:
    field: dict[str, Any] = {"kv_compression": VALID}
    body = {"use_beam_search": beam, **(field if holder is None else {holder: field})}
    routes = "/v1/completions", "/v1/chat/completions", "/invocations"
    for route in routes:
        check_refused(post(route, json=body), "kv_compression", "beam search does not support it")
        assert post(route, json=body | {"use_beam_search": False}).status_code == 200
        assert post(route, json={"use_beam_search": True, "prompt": "kv_compression"}).status_code == 200
    assert rejections == ["beam_search"] * len(routes)


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


def drive(app: Any, incoming: list[dict[str, Any]], sent: list[dict[str, Any]]) -> None:
    """Calls the application with these messages; ``sent`` grows by its answer's as they leave."""

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(BodyMiddleware(CompressionFieldMiddleware(app), max_bytes=1 << 24)(SCOPE, receive, send))


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

    sent: list[dict[str, Any]] = []
    request = {"type": "http.request", "body": json.dumps({"kv_compression": VALID | {"context_tokens": 9}}).encode()}
    if begun:
        with pytest.raises(ValueError, match="broken off"):
            drive(app, [request], sent)
        assert [message.get("body") for message in sent] == [None, b"0", b"1"]
    else:
        drive(app, [request], sent)
        assert sent[0]["status"] == 400 and b"9 are more" in sent[1]["body"] and len(sent) == 2


def test_client_that_leaves_before_the_end_of_its_body_reaches_nobody() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(await receive())

    sent: list[dict[str, Any]] = []
    with pytest.raises(Refusal, match="left before the end"):
        drive(app, [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}], sent)
    assert sent == []


def test_reports_of_the_newest_stored_responses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MOST_STORED", 2)
    one = CompressionFieldMiddleware(echo_app())
    for name in "abc":
        one.store(name, Answer())
    assert list(one._stored) == ["b", "c"]
