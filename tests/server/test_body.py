"""Bodies within limits, on a small application that says what it was given."""

import json
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from tests.server.conftest import check_refused, send
from vllm_kvmerge.request.nesting import MAX_DEPTH
from vllm_kvmerge.server.endpoint import add_middleware

LIMIT = 4096


def ask(method: str, path: str, **request: Any) -> httpx.Response:
    app = FastAPI()
    app.state.args = Namespace(api_key=None, additional_config={"kvmerge": {"max_body_bytes": LIMIT}})
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

    return send(app, method, path, **request)


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
    assert ask("POST", "/echo", content=body).content == body
    pieces = [body[start : start + 100] for start in range(0, size, 100)]
    assert ask("POST", "/echo", content=Chunks(*pieces)).content == body


def test_reading_stops_where_the_limit_is_exceeded() -> None:
    body = Chunks(*[b"x" * 1000] * 1000)
    answer = ask("POST", "/echo", content=body)
    assert body.num_read == LIMIT // 1000 + 1
    check_refused(answer, None, f"the body exceeds {LIMIT} bytes; --max-body-bytes sets this limit", 413)
    assert ask("POST", "/echo", content=Chunks(b"x" * LIMIT, b"x")).status_code == 413
    body = Chunks(b"x")  # whose header says more
    assert ask("POST", "/echo", content=body, headers={"Content-Length": str(LIMIT + 1)}).status_code == 413
    assert body.num_read == 0


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/no", 404), ("PUT", "/echo", 405), ("POST", "/none", 200)]
)
def test_a_body_that_nobody_asks_for_is_not_read(method: str, path: str, status: int) -> None:
    body = Chunks(*[b"[" * 1000] * 1000)
    assert ask(method, path, content=body, headers={"Content-Length": "1000000"}).status_code == status
    assert body.num_read == 0


def test_a_form_arrives_and_is_limited() -> None:
    sound = bytes(range(256)) * 8
    whole = ask("POST", "/form", files={"file": sound}, data={"a": "[" * 100}).json()
    assert whole == {"file": len(sound), "a": "[" * 100}
    assert ask("POST", "/form", files={"file": sound * 2}).status_code == 413


@pytest.mark.parametrize("path", ["/echo", "/no"])
def test_a_repeated_header_is_refused(path: str) -> None:
    for name in ("Authorization", "Content-Encoding", "Content-Length", "Content-Type", "Transfer-Encoding"):
        answer = ask("POST", path, headers=[(name, "4"), (name.upper(), "4")])
        check_refused(answer, None, f"the header {name.lower()} comes more than once")
    assert ask("POST", "/none", headers=[("Accept", "a"), ("Accept", "b")]).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "multipart/form-data; boundary=x"])
def test_nesting_is_limited_in_every_spelling(encoding: str, content_type: str) -> None:
    def deep(num_levels: int) -> bytes:
        return (' \r\n{"a": ' + "[" * (num_levels - 1) + "]" * (num_levels - 1) + "}").encode(encoding)

    headers = {"Content-Type": content_type}
    answer = ask("POST", "/echo", content=deep(MAX_DEPTH), headers=headers)
    assert json.loads(answer.content) == json.loads(deep(MAX_DEPTH))
    answer = ask("POST", "/echo", content=deep(MAX_DEPTH + 1), headers=headers)
    check_refused(answer, None, f"allowed: {MAX_DEPTH} levels")
