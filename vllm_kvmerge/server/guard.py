"""The API key, required on every route but health and metrics."""

import base64
import binascii
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

OPEN_ROUTES = ("/health", "/ping", "/metrics")
"""Routes of probes and scrapers."""


def path_of(scope: Scope) -> str:
    """The request's path without a proxy's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class GuardMiddleware(AuthenticationMiddleware):
    """ASGI middleware: vLLM's guard, for all paths, unknown ones included. HTTP 401 without a key.

    vLLM's own guard goes by the path's prefix: it covers /v1 and a few others, and leaves open /invocations, which
    generates text. A browser that opens a page cannot send ``Authorization: Bearer``: a GET of ``page_routes`` and of
    the paths below them may bring the key as the password of HTTP Basic, with any user name.
    """

    def __init__(self, app: ASGIApp, tokens: list[str], page_routes: tuple[str, ...]) -> None:
        super().__init__(app, tokens)
        self.page_routes = page_routes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            return self.app(scope, receive, send)
        path = path_of(scope)
        headers = Headers(scope=scope)
        if path.rstrip("/") in OPEN_ROUTES or self.verify_token(headers):
            return self.app(scope, receive, send)
        is_page = scope.get("method") in ("GET", "HEAD") and any(
            path == route or path.startswith(route + "/") for route in self.page_routes
        )
        if is_page and self.verify_password(headers):
            return self.app(scope, receive, send)
        challenge = 'Basic realm="vllm-kvmerge"' if is_page else "Bearer"
        refusal = JSONResponse({"error": "Unauthorized"}, 401, {"WWW-Authenticate": challenge})
        return refusal(scope, receive, send)

    def verify_password(self, headers: Headers) -> bool:
        """True if the headers contain a key as the password of HTTP Basic."""
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            _, _, password = base64.b64decode(credentials, validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return False
        return self.verify_token(Headers(raw=[(b"authorization", b"Bearer " + password)]))
