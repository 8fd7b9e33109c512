"""Who is let in, with what, and what the end looks like from outside: a real server with a key, TLS and JSON logs."""

import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.documented import ROOT, blocks, commands
from tests.server.conftest import ONE_PROCESS_PER_ENGINE, Server, check_refused, serving, wait_until
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


def test_the_field_is_honoured_or_refused_on_every_route(client: httpx.Client, parsing: set[str]) -> None:
    places = [{"kv_compression": INVALID}, {"vllm_xargs": {"kv_compression": json.dumps(INVALID)}}]
    for path, place, kind in itertools.product(parsing, places, ["application/json", "text/plain", ""]):
        headers = {"Content-Type": kind} if kind else {}
        answer = client.post(path, content=json.dumps(BODY | place), headers=headers)
        assert answer.status_code == 400, (path, kind)
        assert kind != "application/json" or "kv_compression" in answer.json()["error"]["param"]


def test_json_beyond_the_limits_is_refused_on_every_route(client: httpx.Client, parsing: set[str]) -> None:
    for path, (name, value) in itertools.product(parsing, {"x": "[" * 100_000, "seed": "1" * 5000}.items()):
        answer = client.post(path, content=json.dumps(BODY)[:-1] + f', "{name}": {value}}}', headers=JSON)
        assert answer.status_code == 400, (path, name)
        assert name != "x" or f"{MAX_DEPTH} levels" in answer.json()["error"]["message"], path


def test_deep_text_in_a_string_is_refused(client: httpx.Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [{"role": "user", "content": "recall"}, {"role": "assistant", "tool_calls": [call]}]
    answer = client.post("/v1/chat/completions", json={"model": "demo", "max_tokens": 1, "messages": messages})
    check_refused(answer, None, "too deep")


def peak_memory(server: Server) -> int:
    """The API server's highest resident set, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def test_a_huge_body_is_refused_and_not_kept(guarded: Server, client: httpx.Client) -> None:
    Path(f"/proc/{guarded.process.pid}/clear_refs").write_text("5")  # the peak is what is held now
    before = peak_memory(guarded)
    answer = client.post("/invocations", content=(b" " * (1 << 20) for _ in range(400)), headers=JSON)
    check_refused(answer, None, "--max-body-bytes", 413)
    assert peak_memory(guarded) - before < 32 << 20


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


def test_a_server_that_is_told_to_stop_finishes_its_stream(guarded: Server, client: httpx.Client) -> None:
    """The last test here: whoever comes late is sent away, and all that was logged has its request's id."""
    without_key = httpx.post(guarded.url + "/v1/completions", json=BODY)
    children = psutil.Process(guarded.process.pid).children(recursive=True)

    def come_late() -> tuple[dict[str, int], httpx.Response]:
        wait_until(lambda: client.get("/health").status_code != 200)
        late = {path: client.get(path).status_code for path in ("/health", "/ping", "/metrics")}
        return late, client.post("/v1/completions", json=BODY)

    body = {
        "model": "demo", "prompt": "recall", "max_tokens": 500, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "kv_compression": {"policy": "keepkv", "budget": 128},
    }  # fmt: skip
    with (
        ThreadPoolExecutor(1) as pool,
        client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "drained-1"}) as answer,
    ):
        lines = filter(None, answer.iter_lines())
        first = list(itertools.islice(lines, 20))
        guarded.process.send_signal(signal.SIGTERM)
        comes_late = pool.submit(come_late)
        events = [line.removeprefix("data: ") for line in [*first, *lines]]
        late, refusal = comes_late.result()
    client.close()  # an open connection with TLS would hold the server's end up for 30 seconds
    assert guarded.process.wait(180) == 0
    wait_until(lambda: not any(child.is_running() for child in children))
    guarded.reader.join(60)

    *_, usage, done = events
    assert done == "[DONE]" and len(events) > len(first)
    assert json.loads(usage)["usage"]["completion_tokens"] == 500
    assert late == {"/health": 503, "/ping": 503, "/metrics": 200}
    assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")

    log = [json.loads(line) for line in guarded.log if line.startswith("{")]
    assert not any("output_handler" in json.dumps(record) for record in log)  # nor does it look like a crash
    assert answer.headers["x-request-id"] == "drained-1"
    own = [line for line in log if line.get("request_id") == "drained-1"]
    assert any(line["name"] == "uvicorn.access" and '"POST /v1/completions' in line["message"] for line in own)
    assert any(line["message"].startswith("Received request cmpl-drained-1-0") for line in own)
    refused = without_key.headers["x-request-id"]
    assert [line["message"].endswith(" 401") for line in log if line.get("request_id") == refused] == [True]
    assert any("non-default args" in line["message"] for line in log) and KEY not in json.dumps(log)
