"""Draining: new requests are refused while the server is being stopped, and those that run are finished.

vLLM's ``--shutdown-timeout`` lets them finish where the one API server has started every engine; several API servers,
and one whose engines run on other machines, break their answers off. What comes in meanwhile vLLM answers with HTTP 500
or an empty result, and /health goes on saying that all is well.
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
"""Seconds after which a client should ask again: another server, or this one's successor."""

POLL = 0.05
"""Seconds between two looks at whether all requests have been answered."""


class DrainingMiddleware:
    """ASGI middleware: HTTP 503 to every POST, and to /health, once the engine has been told to stop."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _needs_engine(scope):
            await self.app(scope, receive, send)
            return
        state = scope["app"].state
        # Counted before the look at whether the server stops, and the other way round in the thread that stops it: a
        # request is refused, or waited for.
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


def _needs_engine(scope: Scope) -> bool:
    return scope["method"] == "POST" or path_of(scope) in ("/health", "/ping")


def drain_first(engine_client: "EngineClient", state: "State") -> None:
    """Lets ``engine_client`` be stopped only when all requests have been answered, or the time for it is over.

    Sets ``state.kvmerge_draining`` as soon as vLLM's launcher has been signalled.
    """

    def drain(timeout: float | None) -> float | None:
        state.kvmerge_draining = True
        return _wait_for_answers(state, timeout) if timeout and not _in_event_loop() else timeout

    compat.before_shutdown(engine_client, drain)


def _wait_for_answers(state: "State", timeout: float) -> float:
    """Waits until no request is being answered, at most ``timeout`` seconds; returns what is left of them."""
    deadline = time.monotonic() + timeout
    while getattr(state, "kvmerge_answering", 0) and time.monotonic() < deadline:
        time.sleep(POLL)
    return max(0.0, deadline - time.monotonic())


def _in_event_loop() -> bool:
    """Whether this is the thread that answers requests. The launcher stops the engine in another one; the cleanup at
    vLLM's end, when there is nothing to wait for any more, happens in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
