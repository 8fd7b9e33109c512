"""Refuses new requests while the server is being stopped and those that run are finished.

vLLM's ``--shutdown-timeout`` lets them finish; what comes in meanwhile it answers with HTTP 500 or an empty result, and
/health goes on saying that all is well.
"""

from functools import wraps
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

RETRY_AFTER = 1
"""Seconds after which a client should ask again: another server, or this one's successor."""


class DrainingMiddleware:
    """ASGI middleware: HTTP 503 to every POST, and to /health, once the engine has been told to stop."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_draining(scope) and _needs_engine(scope):
            error = {"message": "the server is being stopped", "type": "ServiceUnavailableError", "code": 503}
            headers = {"Retry-After": str(RETRY_AFTER), "Connection": "close"}
            await JSONResponse({"error": error}, 503, headers)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _is_draining(scope: Scope) -> bool:
    return getattr(scope["app"].state, "kvmerge_draining", False)


def _needs_engine(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope["method"] == "POST" or path in ("/health", "/ping")


def note_shutdown(engine_client: "EngineClient", state: "State") -> None:
    """Sets ``state.kvmerge_draining`` as soon as vLLM's launcher has been signalled and stops ``engine_client``.

    The launcher keeps to itself that it was signalled; an event or a hook of its own would make this unnecessary.
    """
    shut_down = engine_client.shutdown

    @wraps(shut_down)
    def shutdown(*args: Any, **kwargs: Any) -> None:
        state.kvmerge_draining = True
        shut_down(*args, **kwargs)

    engine_client.shutdown = shutdown  # type: ignore[method-assign]
