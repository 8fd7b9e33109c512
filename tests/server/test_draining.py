"""The drain: what a server answers between the signal to stop and its end.

The first tests drive the middleware alone, the last ones a real server of their own, which they stop.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.processes import end_with_tests
from tests.server.conftest import free_port
from vllm_kvmerge.server.draining import DrainingMiddleware, drain_first


def answers(client) -> dict[str, int]:
    codes = {path: client.get(path).status_code for path in ("/health", "/ping", "/metrics")}
    return codes | {"post": client.post("/v1/completions").status_code}


def app_with(answer) -> Starlette:
    routes = [Route(path, lambda _: PlainTextResponse("ok")) for path in ("/health", "/ping", "/metrics")]
    routes.append(Route("/v1/completions", answer, methods=["POST"]))
    return Starlette(routes=routes, middleware=[Middleware(DrainingMiddleware)])


def test_new_requests_are_refused_once_the_engine_stops():
    app = app_with(lambda _: PlainTextResponse("ok"))
    client = TestClient(app)
    calls = []
    engine = SimpleNamespace(shutdown=lambda timeout: calls.append((timeout, answers(client))))
    drain_first(engine, app.state)
    assert set(answers(client).values()) == {200}
    engine.shutdown(timeout=30)
    draining = {"/health": 503, "/ping": 503, "/metrics": 200, "post": 503}
    assert calls == [(pytest.approx(30, abs=5), draining)]  # from before the engine is told
    refusal = client.post("/v1/completions")
    assert refusal.headers["retry-after"] == "1"
    assert refusal.json()["error"]["code"] == 503


def test_the_engine_stops_when_all_have_been_answered():
    """Both parts of it: with an answer under way, and with one that takes longer than there is time."""
    begun, go_on = threading.Event(), threading.Event()

    def answer(_):
        begun.set()
        assert go_on.wait(60)
        return PlainTextResponse("whole")

    for timeout, waits in ((60, True), (0.1, False), (0, False)):
        app, stopped, answered = app_with(answer), [], []
        begun.clear(), go_on.clear()
        engine = SimpleNamespace(shutdown=lambda timeout, seen=stopped: seen.append(timeout))
        drain_first(engine, app.state)
        poster = threading.Thread(
            target=lambda app=app, seen=answered: seen.append(TestClient(app).post("/v1/completions").text)
        )
        poster.start()
        assert begun.wait(60)
        stopper = threading.Thread(target=lambda engine=engine, timeout=timeout: engine.shutdown(timeout=timeout))
        stopper.start()
        if waits:
            while not getattr(app.state, "kvmerge_draining", False):
                time.sleep(0.01)
            assert stopped == [] and stopper.is_alive()
            go_on.set()
        stopper.join(60)
        assert len(stopped) == 1 and (stopped[0] > 0) == waits
        go_on.set()
        poster.join(60)
        assert answered == ["whole"]


def test_the_thread_that_answers_does_not_wait_for_itself():
    app, stopped = app_with(None), []
    app.state.kvmerge_answering = 1
    engine = SimpleNamespace(shutdown=lambda timeout: stopped.append(timeout))
    drain_first(engine, app.state)

    async def stop() -> None:
        engine.shutdown(timeout=600)

    asyncio.run(stop())
    assert stopped == [600]


KEY = "a key of the test's own"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def stopped(certificate, tmp_path_factory):
    """A server with a key, TLS and JSON logs, stopped while it streams: what its clients saw, and its log."""
    import ssl

    port, log = free_port(), tmp_path_factory.mktemp("log") / "server.log"
    command = [
        sys.executable, "-m", "vllm_kvmerge.cli", "serve", "demo", "--port", str(port), "--dtype", "float32",
        "--max-model-len", "4096", "--enforce-eager", "--kv-cache-memory-bytes", str(20 << 20),
        "--api-key", KEY, "--ssl-keyfile", str(certificate / "key.pem"),
        "--ssl-certfile", str(certificate / "certificate.pem"),
        "--logging-config.formatter", "json", "--enable-log-requests", "--shutdown-timeout", "120",
    ]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=end_with_tests)
    context = ssl.create_default_context(cafile=str(certificate / "certificate.pem"))
    client = httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=60)
    try:
        deadline = time.monotonic() + 400
        while "ready on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield stop_in_a_stream(process, client, port, log)
    finally:
        if process.poll() is None:
            process.kill()


def stop_in_a_stream(process, client, port, log):
    seen = SimpleNamespace(late={})
    seen.without_key = client.post("/v1/completions", json={"model": "demo", "prompt": "recall"})
    client.headers["Authorization"] = f"Bearer {KEY}"
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=10)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)

    def come_late():
        while client.get("/health").status_code == 200:
            time.sleep(0.02)
        seen.late = {
            "health": client.get("/health").status_code,
            "metrics": client.get("/metrics").status_code,
            "post": client.post("/v1/completions", json={"model": "demo", "prompt": "recall", "max_tokens": 4}),
        }

    body = {
        "model": "demo", "prompt": "recall", "max_tokens": 1500, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "kv_compression": {"policy": "keepkv", "budget": 128},
    }  # fmt: skip
    other = threading.Thread(target=come_late)
    events = []
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "drained-1"}) as answer:
        seen.header = answer.headers["x-request-id"]
        for line in answer.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if len(events) == 20 and not other.ident:
                process.send_signal(signal.SIGTERM)
                other.start()
    other.join(60)
    seen.events = events
    seen.status = process.wait(180)
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in children.stdout.split()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    seen.log = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return seen


@pytest.mark.engine
def test_a_stream_in_flight_is_finished(stopped):
    *_, usage, done = stopped.events
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 1500
    assert len(stopped.events) > 1000
    assert stopped.status == 0


@pytest.mark.engine
def test_who_comes_late_is_sent_away(stopped):
    assert (stopped.late["health"], stopped.late["metrics"]) == (503, 200)
    refusal = stopped.late["post"]
    assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")


@pytest.mark.engine
def test_who_brings_no_key_is_sent_away(stopped):
    assert stopped.without_key.status_code == 401
    assert len(stopped.without_key.headers["x-request-id"]) == 32


@pytest.mark.engine
def test_log_lines_carry_the_requests_id(stopped):
    assert stopped.header == "drained-1"
    own = [line for line in stopped.log if line.get("request_id") == "drained-1"]
    assert any(line["name"] == "uvicorn.access" and '"POST /v1/completions' in line["message"] for line in own)
    assert any(line["message"].startswith("Received request cmpl-drained-1-0") for line in own)
    refused = stopped.without_key.headers["x-request-id"]
    assert [line["message"].endswith(" 401") for line in stopped.log if line.get("request_id") == refused] == [True]
    assert any("non-default args" in line["message"] for line in stopped.log)
    assert KEY not in json.dumps(stopped.log)
