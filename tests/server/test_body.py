"""Bodies within limits, on a small application that says what it was given."""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from vllm_kvmerge.request.nesting import MAX_DEPTH
from vllm_kvmerge.server.endpoint import add_middleware

LIMIT = 4096


def app_of(**plugin: Any) -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(api_key=None, additional_config={"kvmerge": {"max_body_bytes": LIMIT, **plugin}})
    add_middleware(app)

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    @app.post("/form")
    async def form(request: Request) -> dict[str, Any]:
        return {name: value if isinstance(value, str) else value.size for name, value in (await request.form()).items()}

    @app.post("/none")
    async def none() -> str:
        return "unread"

    return app


def send(method: str, path: str, **request: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app_of())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **request)

    return asyncio.run(ask())


class Chunks:
    """A body whose chunks are counted as they are read."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = chunks
        self.num_read = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.num_read += 1
            yield chunk


@pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT])
def test_a_body_within_the_limit_arrives(size: int) -> None:
    body = bytes(index % 256 for index in range(size))
    assert send("POST", "/echo", content=body).content == body
    pieces = [body[start : start + 100] for start in range(0, size, 100)]
    assert send("POST", "/echo", content=Chunks(*pieces)).content == body


def test_reading_stops_where_the_limit_is_exceeded() -> None:
    body = Chunks(*[b"x" * 1000] * 1000)
    answer = send("POST", "/echo", content=body)
    assert answer.status_code == 413 and body.num_read == LIMIT // 1000 + 1
    message = f"the body exceeds {LIMIT} bytes; --max-body-bytes sets this limit"
    error = {"message": message, "type": "PayloadTooLargeError", "param": None, "code": 413}
    assert answer.json() == {"error": error}
    body = Chunks(b"x" * LIMIT, b"x")
    assert send("POST", "/echo", content=body).status_code == 413


def test_a_length_over_the_limit_is_refused_unread() -> None:
    body = Chunks(b"x")
    assert send("POST", "/echo", content=body, headers={"Content-Length": str(LIMIT + 1)}).status_code == 413
    assert body.num_read == 0


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/no", 404), ("PUT", "/echo", 405), ("POST", "/none", 200)]
)
def test_a_body_that_nobody_asks_for_is_not_read(method: str, path: str, status: int) -> None:
    body = Chunks(*[b"[" * 1000] * 1000)
    assert send(method, path, content=body, headers={"Content-Length": "1000000"}).status_code == status
    assert body.num_read == 0


def test_a_form_arrives_and_is_limited() -> None:
    sound = bytes(range(256)) * 8
    assert send("POST", "/form", files={"file": sound}, data={"a": "[" * 100}).json() == {
        "file": len(sound),
        "a": "[" * 100,
    }
    assert send("POST", "/form", files={"file": sound * 2}).status_code == 413


@pytest.mark.parametrize(
    "name", ["Authorization", "Content-Encoding", "Content-Length", "Content-Type", "Transfer-Encoding"]
)
@pytest.mark.parametrize("path", ["/echo", "/no"])
def test_a_repeated_header_is_refused(name: str, path: str) -> None:
    headers = [(name, "4"), (name.upper(), "4")]
    error = send("POST", path, headers=headers).json()["error"]
    assert error["message"] == f"the header {name.lower()} comes more than once"
    assert error["code"] == 400
    assert send("POST", "/none", headers=[("Accept", "a"), ("Accept", "b")]).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "multipart/form-data; boundary=x"])
def test_nesting_is_limited_in_every_spelling(encoding: str, content_type: str) -> None:
    def deep(num_levels: int) -> bytes:
        return (' \r\n{"a": ' + "[" * (num_levels - 1) + "]" * (num_levels - 1) + "}").encode(encoding)

    headers = {"Content-Type": content_type}
    answer = send("POST", "/echo", content=deep(MAX_DEPTH), headers=headers)
    assert json.loads(answer.content) == json.loads(deep(MAX_DEPTH))
    answer = send("POST", "/echo", content=deep(MAX_DEPTH + 1), headers=headers)
    assert answer.status_code == 400 and f"allowed: {MAX_DEPTH} levels" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("value", "is_valid"), [(1024, True), (1023, False), (0, False), ("a", False)])
def test_the_limit_is_validated(value: Any, is_valid: bool) -> None:
    if is_valid:
        app_of(max_body_bytes=value)
    else:
        with pytest.raises(ValueError, match="max_body_bytes"):
            app_of(max_body_bytes=value)
