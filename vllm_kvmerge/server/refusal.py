"""Servers that do not compress refuse the field, which vLLM would ignore."""

import json

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_kvmerge.engine.arguments import is_asked
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY as FIELD
from vllm_kvmerge.request.spec import CompressionError
from vllm_kvmerge.server.body import BODILESS_METHODS, as_refusal, holders

HOW_TO = "start it by vllm-kvmerge serve MODEL, or vllm serve MODEL --additional-config '{\"kvmerge\": {}}'"


def refuse_field(app: FastAPI) -> None:
    """Adds ``FieldRefusal``. Raises UnsupportedConfigError if the engine compresses."""
    if is_asked(app.state.args.additional_config):
        raise UnsupportedConfigError(
            "additional_config.kvmerge is not supported by this command; allowed: vllm-kvmerge serve MODEL, "
            "vllm serve MODEL, or python -m vllm.entrypoints.openai.api_server --model MODEL"
        )
    app.add_middleware(FieldRefusal)


class FieldRefusal:
    """ASGI middleware over a server that does not compress: HTTP 400 for bodies with the field. All else passes as it
    comes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        is_json = headers.get(b"content-type", b"").startswith(b"application/json")
        if scope["type"] != "http" or scope["method"] in BODILESS_METHODS or not is_json:
            await self.app(scope, receive, send)
            return
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
        if _asks(b"".join(message.get("body", b"") for message in messages)):
            error = CompressionError(FIELD, f"not read by this server; {HOW_TO}", "not_enabled")
            await as_refusal(error).response()(scope, receive, send)
            return

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, receive_again, send)


def _asks(body: bytes) -> bool:
    if FIELD.encode() not in body:
        return False
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return False  # vLLM reports the error
    return isinstance(data, dict) and any(holder.get(FIELD) is not None for _, holder in holders(data))
