"""The page at ``/kvmerge/ui``: its files, and what it has to know of the server."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from starlette.responses import Response

from vllm_kvmerge import __version__
from vllm_kvmerge.demo import model_path, recall

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

DEMO_TOKENS, DEMO_FACTS = 1000, 16


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


def add_page_routes(app: FastAPI, model: str) -> None:
    """Adds the page for a server of this model (a path, or a name on the hub).

    With an API key, the page takes it as a password (see GuardMiddleware), and again in a field, for /v1.
    """
    # Read once: a request's name is looked up among these, and never becomes a path.
    files = {path.name: PageFile.read(path) for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES}
    is_demo = model == model_path()
    config = {"version": __version__, "demo": is_demo}

    @app.api_route(UI_ROUTE, methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return files[INDEX].answer(request)

    @app.get(UI_ROUTE + "/config", include_in_schema=False)
    async def page_config() -> dict[str, Any]:
        return config

    @app.get(UI_ROUTE + "/demo-prompt", include_in_schema=False)
    async def demo_prompt() -> dict[str, Any]:
        """A new prompt of the demo model's task, and the answer to its question."""
        if not is_demo:
            raise HTTPException(404)
        prompt = recall.draw_prompt(np.random.default_rng(), DEMO_TOKENS, DEMO_FACTS)
        return {"prompt": prompt.text, "answer": prompt.answer}

    @app.api_route(UI_ROUTE + "/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].answer(request)
