"""Draining: while the server is being stopped, new requests are refused and running ones finish.

With vLLM's ``--shutdown-timeout`` they finish only if a single API server has started every engine; several API
servers, or one with engines on other machines, cut responses off. Meanwhile vLLM answers new requests with HTTP 500 or
an empty result, and /health still reports success.
"""

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_kvmerge.engine import compat
from vllm_kvmerge.server.guard import path_of

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

RETRY_AFTER = 1
"""Seconds after which a client should retry, with another server or this one's successor."""

POLL = 0.05
"""Seconds between two checks whether all requests have been answered."""

LAST_SECONDS = 2.0
"""Time to tell those that have not been answered when there is no time left."""


class DrainingMiddleware:
    """ASGI middleware: HTTP 503 for every POST, and for /health, once the engine has been told to stop.

    What has not been answered when there is no time left is cut off before the engine ends, with an error: vLLM would
    wait for the engine's answer forever, and the server for the connection's end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["method"] == "POST" or path_of(scope) in ("/health", "/ping")):
            await self.app(scope, receive, send)
            return
        state, task = scope["app"].state, asyncio.current_task()
        assert task is not None
        answering = state.kvmerge_answering = getattr(state, "kvmerge_answering", set())
        begun: list[Headers] = []

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                begun.append(Headers(raw=message["headers"]))
            await send(message)

        # Counts, then checks for the stop; the stopping thread does the reverse: every request is refused or awaited.
        answering.add(task)
        try:
            if not getattr(state, "kvmerge_draining", False):
                await self.app(scope, receive, send_noted)
                return
        except asyncio.CancelledError:
            if not getattr(state, "kvmerge_cut_off", False):
                raise
            task.uncancel()
            await _tell(scope, receive, send, begun[0] if begun else None)
            return
        finally:
            answering.discard(task)
        await _refusal("the server is being stopped")(scope, receive, send)


def _refusal(message: str) -> JSONResponse:
    headers = {"Retry-After": str(RETRY_AFTER), "Connection": "close"}
    return JSONResponse({"error": _error(message)}, 503, headers)


def _error(message: str) -> dict[str, Any]:
    return {"message": message, "type": "ServiceUnavailableError", "code": 503}


async def _tell(scope: Scope, receive: Receive, send: Send, begun: Headers | None) -> None:
    """Ends an answer that has been cut off. begun: its headers, if they have been sent."""
    message = "the server has been stopped before this was answered"
    if begun is None:
        await _refusal(message)(scope, receive, send)
    elif begun.get("content-type", "").startswith("text/event-stream"):
        event = f"data: {json.dumps({'error': _error(message)})}\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": event.encode()})
    # Of any other answer the client sees that its end is missing.


def drain_first(engine_client: "EngineClient", state: "State") -> None:
    """Delays the stop of ``engine_client`` until all requests have been answered, or the time for that is up.

    Sets ``state.kvmerge_draining`` as soon as vLLM's launcher has been signalled, and ``state.kvmerge_cut_off`` when
    there is no time left.
    """

    def drain(timeout: float | None) -> float | None:
        state.kvmerge_draining = True
        if timeout is None or _in_event_loop():
            return timeout
        deadline = time.monotonic() + timeout
        _wait_for_answers(state, timeout)
        state.kvmerge_cut_off = True
        for task in list(_answering(state)):
            task.get_loop().call_soon_threadsafe(task.cancel)
        _wait_for_answers(state, LAST_SECONDS)
        return max(0.0, deadline - time.monotonic())

    compat.before_shutdown(engine_client, drain)


def _answering(state: "State") -> set["asyncio.Task[Any]"]:
    return getattr(state, "kvmerge_answering", set())


def _wait_for_answers(state: "State", seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _answering(state) and time.monotonic() < deadline:
        time.sleep(POLL)


def _in_event_loop() -> bool:
    """True in the thread that answers requests. The launcher stops the engine in another one; vLLM's final cleanup,
    when no request is left, runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
