"""Who is asked for the key, on a small application; the page's password is in test_ui.py, real routes in
test_front_door.py."""

from argparse import Namespace
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient, WebSocketDenialResponse
from vllm.envs import disable_envs_cache

from vllm_kvmerge.server.endpoint import add_middleware

BEARER = {"Authorization": "Bearer open sesame"}


def client_of(keys: list[str] | None = None, root_path: str = "", **plugin: Any) -> TestClient:
    app = FastAPI(root_path=root_path)
    app.state.args = Namespace(api_key=keys, additional_config={"kvmerge": plugin} if plugin else None)
    add_middleware(app)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(path: str) -> str:
        return path

    @app.websocket("/socket")
    async def socket(connection: WebSocket) -> None:
        await connection.accept()
        await connection.close()

    return TestClient(app)


def test_without_a_key_nobody_is_asked() -> None:
    """Nor where vLLM's own choice of routes is asked for: the application has no guard of vLLM's here."""
    for client in (client_of(), client_of([""]), client_of(["open sesame"], api_key_routes="v1")):
        assert client.post("/invocations").status_code == 200


def test_the_environments_key_counts_where_the_option_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "open sesame")
    disable_envs_cache()  # an engine that was started in this process has made vLLM remember its environment
    assert client_of().post("/invocations").status_code == 401
    assert client_of().post("/invocations", headers=BEARER).status_code == 200
    assert client_of(["another"]).post("/invocations", headers=BEARER).status_code == 401


@pytest.mark.parametrize("prefix", ["", "/proxy"])
@pytest.mark.parametrize("path", ["/invocations", "/v1/models", "/healthy", "/metricsx", "/metrics/x", "//health", "/"])
def test_all_but_health_and_metrics_ask(prefix: str, path: str) -> None:
    client = client_of(["open sesame"], prefix)
    for headers in ({}, {"Authorization": "open sesame"}, {"Authorization": "Bearer open"}, {"X-Key": "open sesame"}):
        answer = client.post(prefix + path, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert client.post(prefix + path, headers=BEARER).status_code == 200
    for open_path in ("/health", "/ping", "/metrics", "/metrics/"):
        assert client.get(prefix + open_path).status_code == 200
    assert client.options(prefix + path).status_code == 405


def test_a_websocket_asks() -> None:
    client = client_of(["open sesame"])
    with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect("/socket"):
        pass
    assert refused.value.status_code == 401
    with client.websocket_connect("/socket", headers=BEARER):
        pass


def test_nothing_is_read_before_the_key() -> None:
    client = client_of(["open sesame"])
    headers = [("Content-Type", "a"), ("Content-Type", "b")]
    assert client.post("/invocations", headers=headers).status_code == 401
    assert client.post("/invocations", headers=[*headers, *BEARER.items()]).status_code == 400
