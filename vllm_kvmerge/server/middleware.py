"""The body field ``kv_compression``: checked, and put where vLLM hands it on to the engine."""

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_kvmerge.cache.usage import USAGE_KEY
from vllm_kvmerge.config import EXTRA_ARGS_KEY as FIELD
from vllm_kvmerge.config import CompressionError, parse_compression
from vllm_kvmerge.metrics import count_rejection
from vllm_kvmerge.server import usage_feed
from vllm_kvmerge.server.usage_feed import FEED, UsageFeed
from vllm_kvmerge.server.verdict import VERDICT, Verdict

CARRIERS: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("vllm_xargs",),
    "/v1/chat/completions": ("vllm_xargs",),
    "/v1/responses": ("vllm_xargs",),
    "/v1/messages": ("vllm_xargs",),
    "/invocations": ("vllm_xargs",),
    "/inference/v1/generate": ("sampling_params", "extra_args"),
}
"""Routes that take the field, and the object in their body that becomes ``SamplingParams.extra_args``."""


class CompressionFieldMiddleware:
    """ASGI middleware over vLLM's routes; requests without the field pass untouched, and so do responses, except that
    streams get what ``kvmerge_usage`` asks for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _has_json_body(scope):
            await self.app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:
            return
        try:
            rewritten = rewrite_body(_route(scope), body)
        except CompressionError as error:
            count_rejection(error.reason)
            await _refusal(error)(scope, receive, send)
            return
        if rewritten is not None:
            scope, body = _with_length(scope, len(rewritten)), rewritten
        if USAGE_KEY.encode() not in body or _route(scope) not in usage_feed.ROUTES:
            await self._pass_on(scope, body, receive, send)
            return
        feed = UsageFeed()
        token = FEED.set(feed)
        try:
            await self._pass_on(scope, body, receive, feed.wrap(send))
        finally:
            FEED.reset(token)

    async def _pass_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        if FIELD.encode() not in body:
            await self.app(scope, _replay(body, receive), send)
            return
        verdict = Verdict()
        token = VERDICT.set(verdict)
        answer = _HeldAnswer(scope, receive, send, verdict)
        try:
            await self.app(scope, _replay(body, receive), answer.send)
        except Exception:
            if not await answer.broken_off():
                raise
        finally:
            VERDICT.reset(token)


def rewrite_body(route: str, body: bytes) -> bytes | None:
    """The body to hand on instead of ``body``; None where that is ``body`` itself.

    Raises:
        CompressionError: the field cannot be honoured.
    """
    if not _may_hold_field(body):
        return None
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None  # vLLM says what is wrong with it
    if not isinstance(data, dict):
        return None
    if route not in CARRIERS:
        if FIELD in data:
            raise CompressionError(FIELD, f"not supported on {route}; allowed: {', '.join(CARRIERS)}", "wrong_route")
        return None
    return json.dumps(data).encode() if _move_field(data, CARRIERS[route]) else None


def _may_hold_field(body: bytes) -> bool:
    """Whether it pays to parse the body: JSON can spell the name in plain letters, in escapes or in UTF-16."""
    return FIELD.encode() in body or b"\\u00" in body or b"\0" in body


def _move_field(data: dict[str, Any], carrier: tuple[str, ...]) -> bool:
    """Checks the field and moves it into its carrier, as JSON text; False where nothing has to move."""
    holder = data
    for key in carrier[:-1]:
        holder = holder.get(key)  # type: ignore[assignment]
        if not isinstance(holder, dict):
            return False  # vLLM refuses the request
    carried = holder.get(carrier[-1]) or {}
    if not isinstance(carried, dict):
        return False
    field, inner = data.pop(FIELD, None), carried.get(FIELD)
    if field is None and inner is None:
        return False
    if field is not None and inner is not None:
        raise CompressionError(FIELD, f"given twice, also in {'.'.join(carrier)}; allowed: one of them", "given_twice")
    if field is not None and not isinstance(field, dict):
        raise CompressionError(FIELD, f"must be an object, got {type(field).__name__}", "wrong_type")
    value = inner if field is None else field
    parse_compression(value)
    if isinstance(value, str):
        return False
    holder[carrier[-1]] = carried | {FIELD: json.dumps(value)}
    return True


def _route(scope: Scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _has_json_body(scope: Scope) -> bool:
    content_type = dict(scope["headers"]).get(b"content-type", b"")
    return content_type.split(b";")[0].strip().lower() == b"application/json"


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None when the client has left before its end."""
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body in one piece, then what the server says (that the client has left)."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay


class _HeldAnswer:
    """Holds an answer back until the verdict is known, and sends HTTP 400 instead if it is a refusal.

    vLLM looks at a request with its prompt after it has sent a stream's status, and would report what is wrong as an
    event of the stream, or break it off.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, verdict: Verdict) -> None:
        self._scope, self._receive, self._send, self._verdict = scope, receive, send, verdict
        self._held: list[Message] = []
        self._decided = self._refused = False

    async def send(self, message: Message) -> None:
        if not self._decided:
            self._held.append(message)
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if self._verdict.checked or is_last:
                await self._decide()
        elif not self._refused:
            await self._send(message)

    async def _decide(self) -> None:
        self._decided = True
        self._refused = self._verdict.error is not None
        if self._verdict.error is not None:
            await _refusal(self._verdict.error)(self._scope, self._receive, self._send)
            return
        for message in self._held:
            await self._send(message)

    async def broken_off(self) -> bool:
        """Whether the answer ended by an exception because of the verdict; the refusal has been sent then."""
        if self._verdict.error is not None and not self._decided:
            await self._decide()
        return self._refused


def _with_length(scope: Scope, length: int) -> Scope:
    framing = (b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name not in framing]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _refusal(error: CompressionError) -> JSONResponse:
    """In the shape of the OpenAI API, as vLLM's own errors."""
    kind = "BadRequestError" if error.status == 400 else "InternalServerError"
    content = {"message": str(error), "type": kind, "param": error.param, "code": error.status}
    return JSONResponse({"error": content}, error.status)
