"""The page at ``/kvmerge/ui``: its files, and example prompts for it."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from starlette.responses import Response

from vllm_kvmerge import __version__

UI_ROUTE = "/kvmerge/ui"
FOLDER = Path(__file__).parent / "ui"
INDEX = "index.html"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "Cache-Control": "no-cache",  # asked again each time, answered with 304 as long as nothing has changed
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    content_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "PageFile":
        content = path.read_bytes()
        return cls(content, CONTENT_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "ETag": self.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "Content-Type": self.content_type})


def add_page_routes(app: FastAPI, draw_example: Callable[[], dict[str, Any]] | None) -> None:
    """Adds the page; with ``draw_example``, which returns a prompt and the answer to it, it can insert those.

    With an API key, the page takes it as a password (see GuardMiddleware), and again in a field, for /v1.
    """
    # Read once: a request's name is looked up among these, and never becomes a path.
    files = {path.name: PageFile.read(path) for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES}
    config = {"version": __version__, "demo": draw_example is not None}

    @app.api_route(UI_ROUTE, methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return files[INDEX].answer(request)

    @app.get(UI_ROUTE + "/config", include_in_schema=False)
    async def page_config() -> dict[str, Any]:
        return config

    @app.get(UI_ROUTE + "/demo-prompt", include_in_schema=False)
    async def demo_prompt() -> dict[str, Any]:
        """A new prompt, and the answer to its question."""
        if draw_example is None:
            raise HTTPException(404)
        return draw_example()

    @app.api_route(UI_ROUTE + "/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].answer(request)
