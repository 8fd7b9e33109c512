"""Servers that do not compress, on a small application that echoes what reaches it: the field is refused, and every
other body arrives as it came."""

import json
from argparse import Namespace
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from tests.server.conftest import check_refused, send
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.server.refusal import refuse_field

PIECES = [1, 7, 1 << 20]
"""Bytes of a body that arrive at a time."""


def app_of(additional_config: dict | None) -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(additional_config=additional_config)
    refuse_field(app)

    @app.post("/v1/completions")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    return app


def post(body: bytes, size: int, content_type: str = "application/json") -> httpx.Response:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    return send(app_of(None), "POST", "/v1/completions", content=pieces(), headers={"content-type": content_type})


@pytest.mark.parametrize("size", PIECES)
def test_other_bodies_arrive_whole(size: int) -> None:
    for body in (b'{"prompt":  "the field kv_compression"}', b'{"kv_compression": null}', b'{"kv_compression": ', b""):
        response = post(body, size)
        assert (response.status_code, response.content) == (200, body)


@pytest.mark.parametrize("size", PIECES)
def test_the_field_is_refused(size: int) -> None:
    for body in ({"kv_compression": {}}, {"vllm_xargs": {"kv_compression": "{}"}}):
        check_refused(post(json.dumps(body).encode(), size), "kv_compression", "--additional-config")
    assert post(b'{"kv_compression": {}}', size, "text/plain").status_code == 200


def test_a_server_that_is_asked_to_compress_is_not_started_so() -> None:
    with pytest.raises(UnsupportedConfigError, match="allowed: vllm-kvmerge serve MODEL"):
        app_of({"kvmerge": {}})
