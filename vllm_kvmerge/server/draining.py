"""Draining: while the server is being stopped, new requests are refused and running ones finish.

With vLLM's ``--shutdown-timeout`` they finish only if a single API server has started every engine; several API
servers, or one with engines on other machines, cut responses off. Meanwhile vLLM answers new requests with HTTP 500 or
an empty result, and /health still reports success.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_kvmerge.engine import compat
from vllm_kvmerge.server.guard import path_of

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

RETRY_AFTER = 1
"""Seconds after which a client should retry, with another server or this one's successor."""

POLL = 0.05
"""Seconds between two checks whether all requests have been answered."""


class DrainingMiddleware:
    """ASGI middleware: HTTP 503 for every POST, and for /health, once the engine has been told to stop."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["method"] == "POST" or path_of(scope) in ("/health", "/ping")):
            await self.app(scope, receive, send)
            return
        state = scope["app"].state
        # Counts, then checks for the stop; the stopping thread does the reverse: every request is refused or awaited.
        state.kvmerge_answering = getattr(state, "kvmerge_answering", 0) + 1
        try:
            if not getattr(state, "kvmerge_draining", False):
                await self.app(scope, receive, send)
                return
        finally:
            state.kvmerge_answering -= 1
        error = {"message": "the server is being stopped", "type": "ServiceUnavailableError", "code": 503}
        headers = {"Retry-After": str(RETRY_AFTER), "Connection": "close"}
        await JSONResponse({"error": error}, 503, headers)(scope, receive, send)


def drain_first(engine_client: "EngineClient", state: "State") -> None:
    """Delays the stop of ``engine_client`` until all requests have been answered, or the time for that is up.

    Sets ``state.kvmerge_draining`` as soon as vLLM's launcher has been signalled.
    """

    def drain(timeout: float | None) -> float | None:
        state.kvmerge_draining = True
        if not timeout or _in_event_loop():
            return timeout
        deadline = time.monotonic() + timeout
        while getattr(state, "kvmerge_answering", 0) and time.monotonic() < deadline:
            time.sleep(POLL)
        return max(0.0, deadline - time.monotonic())

    compat.before_shutdown(engine_client, drain)


def _in_event_loop() -> bool:
    """True in the thread that answers requests. The launcher stops the engine in another one; vLLM's final cleanup,
    when no request is left, runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
