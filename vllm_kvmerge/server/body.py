"""Request bodies: read whole when the application asks for them, and refused if they exceed a limit."""

import json
import re
from collections.abc import Iterator
from typing import Any

from fastapi import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_kvmerge.request.nesting import MAX_DEPTH, nests_too_deep
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY as FIELD
from vllm_kvmerge.request.spec import CompressionError

SINGLE_HEADERS = (b"authorization", b"content-encoding", b"content-length", b"content-type", b"transfer-encoding")
"""Headers that may occur once: of two, one parser would take the first and another the last."""

BODILESS_METHODS = ("GET", "HEAD", "OPTIONS")
JSON_START = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*[\[{]")

ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    500: "InternalServerError",
    507: "InsufficientStorageError",
}


PLACES = (
    (),
    ("vllm_xargs",),
    ("sampling_params", "extra_args"),
    ("sampling_params",),
    ("extra_args",),
    ("extra_body",),
)
"""Objects of a body, the body itself included, in which a client may have put the field."""


class Refusal(HTTPException):
    """The response, in the OpenAI API's format, to a request that is refused.

    Raised while the application reads the body, or by a route: ``answer_refusal`` is its handler.
    """

    def __init__(self, status_code: int, message: str, param: str | None = None) -> None:
        super().__init__(status_code, message)
        self.param = param

    @classmethod
    def of(cls, status: int, content: bytes) -> "Refusal":
        """That of a request of the server's own, which got this answer."""
        try:
            error = json.loads(content)["error"]
            return cls(status if status in ERROR_TYPES else 500, error["message"], error.get("param"))
        except (ValueError, KeyError, TypeError):
            return cls(500, content[:200].decode(errors="replace"))

    def response(self) -> JSONResponse:
        kind = ERROR_TYPES[self.status_code]
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.status_code}
        return JSONResponse({"error": error}, self.status_code)


def as_refusal(error: CompressionError) -> Refusal:
    return Refusal(error.status, str(error), error.param)


def holders(data: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The objects of ``PLACES`` that the body has."""
    for place in PLACES:
        holder: Any = data
        for key in place:
            holder = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            yield place, holder


def fields_of(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The objects of a body that hold the field, and the field, if it is an object or the text of one."""
    for _, holder in holders(data):
        field = holder.get(FIELD)
        if isinstance(field, str):
            try:
                field = json.loads(field)
            except ValueError:
                continue
        if isinstance(field, dict):
            yield holder, field


async def answer_refusal(_: Request, refusal: Exception) -> JSONResponse:
    assert isinstance(refusal, Refusal)
    return refusal.response()


async def answer_recursion(_: Request, error: Exception) -> JSONResponse:
    """Responds to a body with JSON inside a string, such as a tool call's arguments, that vLLM failed to parse."""
    return Refusal(400, f"text in the body nests too deep: {error}").response()


class BodyMiddleware:
    """ASGI middleware: refuses repeated headers, bodies of more than ``max_bytes``, and JSON that nests too deep.

    Nothing is read before the application asks, so an unknown path or method costs nothing. The application then gets
    the whole body as one message, JSON in UTF-8. Responses pass unchanged.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        names = [name for name, _ in scope["headers"]]
        repeated = next((name.decode() for name in SINGLE_HEADERS if names.count(name) > 1), None)
        if repeated is not None:
            await Refusal(400, f"the header {repeated} comes more than once").response()(scope, receive, send)
        elif scope["method"] in BODILESS_METHODS:
            await self.app(scope, receive, send)
        else:
            await self.app(scope, _WholeBody(scope, receive, self.max_bytes).receive, send)


class _WholeBody:
    """A ``receive`` that returns the body in one piece."""

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int) -> None:
        self._scope, self._receive, self._max_bytes = scope, receive, max_bytes
        self._is_read = False

    async def receive(self) -> Message:
        """Returns the body, then the server's own messages (that the client has disconnected)."""
        if self._is_read:
            return await self._receive()
        self._is_read = True
        body = _as_utf8(await self._read())
        if nests_too_deep(body) and JSON_START.match(body):
            raise Refusal(400, f"the body nests objects and arrays too deep; allowed: {MAX_DEPTH} levels")
        return {"type": "http.request", "body": body, "more_body": False}

    async def _read(self) -> bytes:
        self._check_size(int(dict(self._scope["headers"]).get(b"content-length", b"0")))
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the client left before the end of the body")
            body += message.get("body", b"")
            self._check_size(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise Refusal(413, f"the body exceeds {self._max_bytes} bytes; --max-body-bytes sets this limit")


def _as_utf8(body: bytes) -> bytes:
    """The body in UTF-8 if it is JSON in UTF-16 or UTF-32, which vLLM reads too."""
    encoding = json.detect_encoding(body)
    if encoding.startswith("utf-8"):
        return body
    try:
        text = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body  # vLLM reports the error
    return text if JSON_START.match(text) else body
