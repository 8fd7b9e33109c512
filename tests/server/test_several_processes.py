"""Two engines behind two API servers: the same answers and counts, and a drain, as of one engine behind one."""

import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests.documented import ROOT, blocks, commands
from tests.server.conftest import ONE_PROCESS_PER_ENGINE, Server, check_refused, random_prompt, serving, wait_until
from tests.server.test_readme import run_here
from vllm_kvmerge.request.recommended import with_policy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENGINES = ("0", "1")
ENGINE_HEADER = "X-data-parallel-rank"

FIELDS = [
    {"policy": "full"},
    {"policy": "snapkv", "budget": 96},
    {"policy": "keepkv", "budget": 96},
    {"policy": "h2o", "budget": 0.2, "interval": 16},
    {"policy": "zsmerge", "budget": 128},
    {"policy": "knorm", "budget": 96, "context_tokens": 500},
    {"policy": "pyramidkv", "budget": 96, "front": "int8", "decode": "grow"},
    {"policy": "kvzip", "budget": 1.0, "front": "int4"},
]
TOKENS = 40
JOBS = [
    {"prompt": random_prompt(900 + index, 600 + 150 * index), "max_tokens": TOKENS, "kv_compression": field}
    for index, field in enumerate(FIELDS)
]


@pytest.fixture(scope="module")
def servers() -> Iterator[Server]:
    """Both API servers, which share one address."""
    options = ("--data-parallel-size", "2", "--api-server-count", "2", "--shutdown-timeout", "120")
    with serving(*options, *ONE_PROCESS_PER_ENGINE) as ready:
        yield ready


def answer(server: Server, job: dict, engine: str | None = None) -> str:
    body, headers = {"model": "demo", "temperature": 0, "ignore_eos": True}, {ENGINE_HEADER: engine} if engine else {}
    response = server.post("/v1/completions", body | job, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_contexts_are_kept_by_one_engine_alone(servers):
    route, field = "/v1/kvmerge/contexts", {"policy": "snapkv", "budget": 64}
    answer = servers.post(route, {"model": "demo", "prompt": [2] * 500, "kv_compression": field})
    assert answer.status_code == 400 and "--data-parallel-size 1" in answer.json()["error"]["message"]
    assert httpx.get(servers.url + route).json() == {"object": "list", "data": []}
    assert httpx.get(f"{servers.url}{route}/ctx-1").status_code == 404


def run(server: Server, engine: str | None = None) -> tuple[list[str], Counter[tuple[str, str, str]]]:
    """The answers to all jobs, one after the other, and by how much each of the plugin's counters, by name, policy and
    engine, has grown meanwhile; times are no counts."""

    def counted() -> Counter[tuple[str, str, str]]:
        counts: Counter[tuple[str, str, str]] = Counter()
        for name, labels, value, *_ in server.samples():
            found = re.fullmatch(r"vllm:kvmerge_(\w+_total|compaction_seconds_count)", name)
            if found and "engine" in labels:
                counts[found[1], labels["policy"], labels["engine"]] += value
        return counts

    before = counted()
    texts = [answer(server, job, engine) for job in JOBS]
    return texts, counted() - before


def test_each_engine_answers_and_counts_as_one_alone(server, servers):
    texts, numbers = run(server)
    assert numbers["generation_tokens_total", "keepkv", "0"] == TOKENS and numbers["blocks_freed_total", "keepkv", "0"]
    for engine in ENGINES:
        found, grown = run(servers, engine)
        assert found == texts
        assert grown == {(name, policy, engine): number for (name, policy, _), number in numbers.items()}
        for gauge in ("kv_cache_usage_perc", "kvmerge_live_entries", "kvmerge_live_bytes", "kvmerge_front_bytes"):
            wait_until(lambda g=gauge, e=engine: servers.metric(f"vllm:{g}", engine=e) == 0)


def test_the_engine_that_has_answered_verifies_it(servers):
    field = {"policy": "snapkv", "budget": 2000, "verify": True}
    for engine in ENGINES:
        body = {"model": "demo", "temperature": 0, "ignore_eos": True} | JOBS[0] | {"kv_compression": field}
        response = servers.post("/v1/completions", body, headers={ENGINE_HEADER: engine})
        told = response.json()["usage"]["kv_compression"]["verified"]
        assert (told["tokens"], told["agreeing"], told["skipped"]) == (TOKENS, 1.0, None)


def test_the_documented_requests(servers):
    """Those of the page, with the second engine named."""
    (script,) = (text for text in blocks(ROOT / "docs/operations.md", "sh") if "X-data-parallel-rank" in text)
    _, ask, count = commands(script)
    known = with_policy({"budget": 512})["policy"]
    before = servers.metric("vllm:kvmerge_requests_total", policy=known, engine="1")
    answer, counts = run_here(servers, [ask + "\n", count + "\n"])
    assert json.loads(answer)["usage"]["kv_compression"]["policy"] == known
    found = re.search(rf'engine="1".*policy="{known}".*\}} (\S+)|policy="{known}".*engine="1".*\}} (\S+)', counts)
    assert found and float(found[1] or found[2]) == before + 1


def answered_by(server: Server, response: httpx.Response) -> int:
    """Which API server gives this answer: the process at the other end of a connection that is still open."""
    client_port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
    (pid,) = (
        process.pid
        for process in psutil.Process(server.process.pid).children()
        for connection in process.net_connections("tcp4")
        if connection.raddr and connection.raddr.port == client_port
    )
    return pid


def from_both(server: Server, method: str, path: str, **request: Any) -> list[httpx.Response]:
    """Answers to one request, asked again on new connections until each API server has given one."""
    responses, pids = [], set()
    with ExitStack() as stack:
        # An open connection counts as load, so that the next one goes to the other server.
        while len(pids) < 2:
            assert len(responses) < 40, "one API server answers everything"
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=120))
            responses.append(client.request(method, path, **request))
            pids.add(answered_by(server, responses[-1]))
    return responses


def test_both_api_servers_report_the_same(servers):
    for engine in ENGINES:
        answer(servers, JOBS[2], engine)
    wait_until(lambda: servers.metric("vllm:kvmerge_live_bytes") == 0)
    first, *others = (
        {line for line in response.text.splitlines() if line.startswith("vllm:kvmerge")}
        for response in from_both(servers, "GET", "/metrics")
    )
    assert all(any(f'engine="{engine}"' in line for line in first) for engine in ENGINES)
    assert all(other == first for other in others)


def test_both_refuse_by_name_and_count_it(servers):
    body = {"model": "demo", "prompt": [2, 20, 30], "kv_compression": {"policy": "snapkv", "context_tokens": 9}}
    responses = from_both(servers, "POST", "/v1/completions", json=body)
    for response in responses:
        check_refused(response, "kv_compression.context_tokens")
    assert servers.metric("vllm:kvmerge_rejected_requests_total", reason="context_too_long") == len(responses)


def test_streams_of_both_are_finished_before_the_end(servers):
    """The last test here: it stops the server while each API server streams, from both engines."""
    children = psutil.Process(servers.process.pid).children(recursive=True)
    body = {
        "model": "demo", "prompt": random_prompt(950, 400), "max_tokens": 600, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "kv_compression": {"policy": "keepkv", "budget": 128},
    }  # fmt: skip
    begun, ended = threading.Semaphore(0), []
    url = servers.url + "/v1/completions"

    def stream(engine: str) -> int:
        with httpx.stream("POST", url, json=body, headers={ENGINE_HEADER: engine}, timeout=120) as response:
            lines = filter(None, response.iter_lines())
            next(lines)
            pid = answered_by(servers, response)
            begun.release()
            ended.append([*lines])
            return pid

    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(stream, ENGINES[number % 2]) for number in range(6)]
        for _ in streams:
            assert begun.acquire(timeout=120)
        assert not ended
        servers.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(servers.url + "/health", timeout=60).status_code != 200)
        late = httpx.get(servers.url + "/health", timeout=60)
        assert len({one.result() for one in streams}) == 2
    assert (late.status_code, late.headers["retry-after"]) == (503, "1")
    for *_, usage, done in ended:
        assert done == "data: [DONE]" and json.loads(usage[6:])["usage"]["completion_tokens"] == 600
    assert servers.process.wait(120) == 0
    wait_until(lambda: not any(child.is_running() for child in children))
