"""The page at ``/kvmerge/ui``: its files, and example prompts for it."""

import hashlib
from collections.abc import Callable
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
    "Cache-Control": "no-cache",  # revalidated each time, with 304 if unchanged
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile:
    """A file of the page, in memory."""

    def __init__(self, path: Path) -> None:
        self.content, self.content_type = path.read_bytes(), CONTENT_TYPES[path.suffix]
        self.etag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "ETag": self.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "Content-Type": self.content_type})


def add_page_routes(app: FastAPI, draw_example: Callable[[], dict[str, Any]], is_demo: bool) -> None:
    """Adds the page. draw_example: returns an example prompt and its answer, which the page can insert. is_demo: the
    model knows no language.

    An API key is asked for as the page's password (see GuardMiddleware), and again in a field, for /v1.
    """
    # Read once: the name in a request is only looked up here, and never becomes a path.
    files = {path.name: PageFile(path) for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES}
    config = {"version": __version__, "demo": is_demo}

    @app.api_route(UI_ROUTE, methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return files[INDEX].answer(request)

    @app.get(UI_ROUTE + "/config", include_in_schema=False)
    async def page_config() -> dict[str, Any]:
        return config

    @app.get(UI_ROUTE + "/example", include_in_schema=False)
    async def example() -> dict[str, Any]:
        """A new prompt and the answer to its question."""
        return draw_example()

    @app.api_route(UI_ROUTE + "/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].answer(request)
