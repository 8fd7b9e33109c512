"""Request ids: carried by each HTTP response and by all log lines that the API server writes on its behalf."""

import logging
import uuid
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
MAX_LENGTH = 128
"""Most characters of a client's own id; a longer one is replaced."""

REQUEST_ID: ContextVar[str | None] = ContextVar("kvmerge_request_id", default=None)
"""The id of the request being served; None outside of a request."""


class RequestIdMiddleware:
    """ASGI middleware, around all others: takes the id from the header or makes one, and passes it on in the header.

    vLLM derives its own id from the header (``cmpl-ID-0``), so the engine's log lines can be found by it too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = MutableHeaders(raw=list(scope["headers"]))
        request_id = headers.get(HEADER, "")
        if not 0 < len(request_id) <= MAX_LENGTH or not request_id.isprintable():
            request_id = uuid.uuid4().hex
            headers[HEADER] = request_id
        # Never reset: each request is a task with a context of its own, and uvicorn may log after this returns.
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self.app({**scope, "headers": headers.raw}, receive, send_with_id)


def mark_log_records() -> None:
    """Adds ``request_id``, which a JSON formatter prints, to this process's log records. Idempotent."""
    make_record = logging.getLogRecordFactory()
    if getattr(make_record, "marks_request_id", False):
        return

    def make_marked(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        request_id = REQUEST_ID.get()
        if request_id is not None:
            record.request_id = request_id
        return record

    make_marked.marks_request_id = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_marked)
