"""Who is let in, with what, and what the end looks like from outside: a real server with a key, TLS and JSON logs."""

import base64
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest

from tests.documented import ROOT, blocks, commands
from tests.server.conftest import ONE_PROCESS_PER_ENGINE, Server, serving, wait_until
from vllm_kvmerge.demo import recall
from vllm_kvmerge.request.nesting import MAX_DEPTH

pytestmark = pytest.mark.engine

OPERATIONS = ROOT / "docs/operations.md"
KEY = "open sesame"
MAX_BODY = 1 << 20
OPEN = {"/health", "/ping", "/metrics"}
WITHOUT_BODY = {"/ping", "/is_scaling_elastic_ep", "/v1/responses/{response_id}/cancel"}
"""Routes that read none."""

BODY = {
    "model": "demo", "prompt": "recall", "input": "recall", "messages": [{"role": "user", "content": "recall"}],
    "token_ids": [1, 2], "sampling_params": {"max_tokens": 1}, "max_tokens": 1,
}  # fmt: skip
"""A request to any route that generates."""

INVALID = {"policy": "nope"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this machine's own, made by the documented command."""
    folder = tmp_path_factory.mktemp("tls")
    (script,) = (text for text in blocks(OPERATIONS, "sh") if text.startswith("openssl req"))
    subprocess.run(["bash", "-c", commands(script)[0]], cwd=folder, check=True, capture_output=True)
    return folder / "certificate.pem"


@pytest.fixture(scope="module")
def guarded(certificate: Path) -> Iterator[Server]:
    default = json.dumps({"policy": "streaming_llm", "budget": 64})
    options = ("--api-key", KEY, "--max-body-bytes", str(MAX_BODY), "--enable-scale-out", "--kv-compression", default)
    options += "--ssl-keyfile", str(certificate.with_name("key.pem")), "--ssl-certfile", str(certificate)
    options += "--logging-config.formatter", "json", "--enable-log-requests", "--shutdown-timeout", "120"
    with serving(*options, *ONE_PROCESS_PER_ENGINE) as ready:
        os.environ["SSL_CERT_FILE"] = str(certificate)  # for clients here
        yield ready


@pytest.fixture(scope="module")
def client(guarded: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as one:
        yield one


@pytest.fixture(scope="module")
def routes(guarded: Server) -> set[tuple[str, str]]:
    """(method, path) of all that the server says it has."""
    found = re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", "".join(guarded.log))
    return {(method, path) for path, methods in found for method in methods.split(", ")}


@pytest.fixture(scope="module")
def parsing(routes: set[tuple[str, str]]) -> set[str]:
    """Paths that read a body."""
    paths = {path for method, path in routes if method == "POST"} - WITHOUT_BODY
    assert {"/invocations", "/v1/completions", "/tokenize", "/v1/chat/completions/batch"} <= paths
    return paths


def exchange(server: Server, request: str) -> tuple[int, str]:
    """Status and body of the answer to a request as it is written here."""
    plain = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=60)
    with ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1") as connection:
        connection.sendall(request.encode())
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, response.read().decode()


def test_every_route_asks_for_the_key(guarded: Server, client: httpx.Client, routes: set[tuple[str, str]]) -> None:
    unknown = {("GET", "/unknown"), ("POST", "/unknown"), ("GET", "//health"), ("GET", "/health/x"), ("PUT", "/v1")}
    assert len(routes) > 30
    for method, path in routes | unknown:
        path = re.sub(r"\{.*\}", "x", path)
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = httpx.request(method, guarded.url + path, headers=headers)
            assert (answer.status_code == 401) == (path not in OPEN), path
        assert client.request(method, path).status_code not in (401, 500), path
    # As vLLM does: a browser asks so before it sends a request with the key.
    assert httpx.options(guarded.url + "/invocations").status_code == 405


@pytest.mark.slow
def test_the_documented_request_over_tls(guarded: Server, certificate: Path) -> None:
    (script,) = (text for text in blocks(OPERATIONS, "sh") if text.startswith("openssl req"))
    *_, request = commands(script)
    assert request.startswith("curl --cacert")
    request = request.replace("Bearer secret", f"Bearer {KEY}").replace(":8000", f":{httpx.URL(guarded.url).port}")
    done = subprocess.run(["bash", "-c", request], cwd=certificate.parent, check=True, capture_output=True, text=True)
    assert [model["id"] for model in json.loads(done.stdout)["data"]] == ["demo"]


def test_a_websocket_asks_for_the_key(guarded: Server) -> None:
    request = (
        "GET {} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{}\r\n"
    )
    for path in ("/v1/realtime", "/anything"):
        assert exchange(guarded, request.format(path, ""))[0] == 401
        with_key = request.format(path, f"Authorization: Bearer {KEY}\r\n")
        assert exchange(guarded, with_key)[0] == 403  # there is none


def test_a_browser_opens_the_page_with_the_key_as_password(guarded: Server) -> None:
    refused = httpx.get(guarded.url + "/kvmerge/ui")
    assert refused.headers["www-authenticate"] == 'Basic realm="vllm-kvmerge"'
    for route in ("/kvmerge/ui", "/kvmerge/ui/app.js", "/kvmerge/ui/config", "/kvmerge/policies"):
        assert httpx.get(guarded.url + route, auth=("me", KEY)).status_code == 200
    basic = "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode()
    for route in ("/v1/completions", "/invocations", "/tokenize"):
        answer = httpx.post(guarded.url + route, json=BODY, headers={"Authorization": basic})
        assert answer.status_code == 401


def test_the_field_is_honoured_or_refused_on_every_route(client: httpx.Client, parsing: set[str]) -> None:
    places = [{"kv_compression": INVALID}, {"vllm_xargs": {"kv_compression": json.dumps(INVALID)}}]
    types = ["application/json", "application/json; charset=utf-16", "application/x+json", "text/plain", None]
    for path in parsing:
        for place in places:
            for content_type in types:
                headers = {} if content_type is None else {"Content-Type": content_type}
                answer = client.post(path, content=json.dumps(BODY | place), headers=headers)
                assert answer.status_code == 400, (path, content_type)
                if content_type == "application/json":
                    assert "kv_compression" in answer.json()["error"]["param"]


def test_the_path_may_be_spelled_otherwise(client: httpx.Client) -> None:
    body = BODY | {"kv_compression": INVALID}
    assert client.post("/v1/%63ompletions", json=body).json()["error"]["param"] == "kv_compression.policy"
    assert client.post("/v1/completions/", json=body).status_code == 307
    assert client.post("//v1/completions", json=body).status_code == 404


def test_json_beyond_the_limits_is_refused_on_every_route(client: httpx.Client, parsing: set[str]) -> None:
    deep = "[" * 975 + "]" * 975
    for path in parsing:
        for value in (deep, "[" * 100_000):
            answer = client.post(path, content=json.dumps(BODY)[:-1] + f', "x": {value}}}', headers=JSON)
            assert answer.status_code == 400 and f"{MAX_DEPTH} levels" in answer.json()["error"]["message"], path
        for name in ("x", "seed", "max_tokens"):
            answer = client.post(path, content=json.dumps(BODY)[:-1] + f', "{name}": {"1" * 5000}}}', headers=JSON)
            assert answer.status_code == 400, path


def test_deep_text_in_a_string_is_refused(client: httpx.Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [{"role": "user", "content": "recall"}, {"role": "assistant", "tool_calls": [call]}]
    answer = client.post("/v1/chat/completions", json={"model": "demo", "max_tokens": 1, "messages": messages})
    assert answer.status_code == 400 and "too deep" in answer.json()["error"]["message"]


def peak_memory(server: Server) -> int:
    """The API server's highest resident set, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


@pytest.mark.thin(6)
@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/completions", 413), ("/invocations", 413), ("/tokenize", 413), ("/unknown", 404), ("/ping", 200),
     ("/v1/models", 405)],
)  # fmt: skip
def test_a_huge_body_is_not_kept(guarded: Server, client: httpx.Client, path: str, status: int) -> None:
    Path(f"/proc/{guarded.process.pid}/clear_refs").write_text("5")  # the peak is what is held now
    before = peak_memory(guarded)
    answer = client.post(path, content=(b" " * (1 << 20) for _ in range(400)), headers=JSON)
    assert answer.status_code == status
    if status == 413:
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("PayloadTooLargeError", 413)
        assert str(MAX_BODY) in error["message"] and "--max-body-bytes" in error["message"]
    assert peak_memory(guarded) - before < 32 << 20
    assert client.post("/tokenize", json={"model": "demo", "prompt": "recall"}).status_code == 200


def test_a_length_over_the_limit_is_refused_before_the_body_comes(guarded: Server) -> None:
    head = f"POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n"
    assert exchange(guarded, head % "/tokenize")[0] == 413
    assert exchange(guarded, head % "/unknown")[0] == 404


@pytest.mark.parametrize(
    "header",
    ["Content-Type: text/plain", "Content-Length: 2", "Content-Encoding: gzip\r\nContent-Encoding: gzip",
     f"Authorization: Bearer {KEY}", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"],
)  # fmt: skip
def test_a_repeated_header_is_refused(guarded: Server, header: str) -> None:
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: 2\r\n{header}\r\n\r\n{{}}"
    )
    status, answer = exchange(guarded, request)
    assert status == 400
    name = header.partition(":")[0].lower()
    # Of lengths and transfer encodings uvicorn's own parser takes one alone.
    assert (
        "Invalid HTTP request"
        if name in ("content-length", "transfer-encoding")
        else f"header {name} comes more than once"
    ) in answer


def test_a_rendered_request_carries_the_field(guarded: Server, client: httpx.Client) -> None:
    field = {"policy": "snapkv", "budget": 32, "window_size": 8}
    rendered = client.post("/v1/completions/render", json=BODY | {"kv_compression": field}).json()[0]
    assert json.loads(rendered["sampling_params"]["extra_args"]["kv_compression"]) == field
    before = guarded.metric("vllm:kvmerge_requests_total", policy="snapkv")
    answer = client.post("/inference/v1/generate", json=rendered)
    assert answer.json()["usage"]["kv_compression"]["parameters"]["window_size"] == 8
    assert guarded.metric("vllm:kvmerge_requests_total", policy="snapkv") == before + 1


def test_a_default_has_no_effect_on_beam_search(client: httpx.Client) -> None:
    """Each of its steps is a request of its own, whose only token is there before its cache is compressed."""
    prompt = recall.draw_prompt(np.random.default_rng(0), 1000, 16).text
    body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def text(**extra: object) -> str:
        return client.post("/v1/completions", json=body | extra).json()["choices"][0]["text"]

    full = text(kv_compression={"policy": "full"})
    assert text() != full
    assert text(use_beam_search=True) == full  # a single beam is greedy decoding
    refused = client.post(
        "/v1/completions", json=body | {"use_beam_search": True, "kv_compression": {"policy": "full"}}
    )
    assert refused.json()["error"]["param"] == "kv_compression"


def test_without_tls_nobody_is_answered(guarded: Server) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(guarded.url.replace("https", "http") + "/health", timeout=10)


@pytest.fixture(scope="module")
def stopped(guarded: Server, client: httpx.Client) -> SimpleNamespace:
    """What clients saw of the server that was told to stop while it streamed, and its log. For the last tests here."""
    seen = SimpleNamespace(events=[])
    seen.without_key = httpx.post(guarded.url + "/v1/completions", json=BODY)
    children = psutil.Process(guarded.process.pid).children(recursive=True)
    assert children

    def come_late() -> None:
        while client.get("/health").status_code == 200:
            time.sleep(0.02)
        seen.late = {
            "health": client.get("/health").status_code,
            "metrics": client.get("/metrics").status_code,
            "post": client.post("/v1/completions", json=BODY),
        }

    body = {
        "model": "demo", "prompt": "recall", "max_tokens": 500, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "kv_compression": {"policy": "keepkv", "budget": 128},
    }  # fmt: skip
    other = threading.Thread(target=come_late)
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "drained-1"}) as answer:
        seen.header = answer.headers["x-request-id"]
        for line in answer.iter_lines():
            if line:
                seen.events.append(line.removeprefix("data: "))
            if len(seen.events) == 20 and not other.ident:
                guarded.process.send_signal(signal.SIGTERM)
                other.start()
    other.join(60)
    client.close()  # an open connection with TLS would hold the server's end up for 30 seconds
    seen.status = guarded.process.wait(180)
    wait_until(lambda: not any(child.is_running() for child in children))
    guarded.reader.join(60)
    seen.log = [json.loads(line) for line in guarded.log if line.startswith("{")]
    return seen


def test_a_stream_in_flight_is_finished(stopped: SimpleNamespace) -> None:
    *_, usage, done = stopped.events
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 500
    assert len(stopped.events) > 300
    assert stopped.status == 0
    assert not any("output_handler" in json.dumps(record) for record in stopped.log)  # nor does it look like a crash


def test_who_comes_late_is_sent_away(stopped: SimpleNamespace) -> None:
    assert (stopped.late["health"], stopped.late["metrics"]) == (503, 200)
    refusal = stopped.late["post"]
    assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")


@pytest.mark.slow
def test_who_brings_no_key_is_sent_away(stopped: SimpleNamespace) -> None:
    assert stopped.without_key.status_code == 401
    assert len(stopped.without_key.headers["x-request-id"]) == 32


def test_log_lines_carry_the_requests_id(stopped: SimpleNamespace) -> None:
    assert stopped.header == "drained-1"
    own = [line for line in stopped.log if line.get("request_id") == "drained-1"]
    assert any(line["name"] == "uvicorn.access" and '"POST /v1/completions' in line["message"] for line in own)
    assert any(line["message"].startswith("Received request cmpl-drained-1-0") for line in own)
    refused = stopped.without_key.headers["x-request-id"]
    assert [line["message"].endswith(" 401") for line in stopped.log if line.get("request_id") == refused] == [True]
    assert any("non-default args" in line["message"] for line in stopped.log)
    assert KEY not in json.dumps(stopped.log)
