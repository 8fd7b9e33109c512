"""The pods of deploy/kubernetes/leaderworkerset.yaml as processes of this machine: API servers with one engine, and a
node with another and no API server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from tests.server.conftest import Server, free_port, running, serving, wait_until
from tests.server.deaths import ask_for_long, kill

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/leaderworkerset.yaml"
ENGINES = ("0", "1")
JOBS = [
    {"policy": "full"},
    {"policy": "snapkv", "budget": 96},
    {"policy": "keepkv", "budget": 96},
]


@dataclass
class Nodes:
    """The API server's node, which a test talks to, and the other, which has metrics only."""

    first: Server
    second: Server

    def metric(self, name: str, **labels: str) -> float:
        return self.first.metric(name, **labels) + self.second.metric(name, **labels)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    templates = next(one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "LeaderWorkerSet")[
        "spec"
    ]["leaderWorkerTemplate"]
    values = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "localhost"}
    rpc_port, metrics_port = free_port(), free_port()

    def options(role: str) -> list[str]:
        (container,) = templates[f"{role}Template"]["spec"]["containers"]
        model, *words = container["args"]
        assert model == "demo"
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        # Pods have ports, and a machine, each to themselves.
        words += [f"--data-parallel-rpc-port={rpc_port}", "--host=127.0.0.1"]
        return words + ([f"--metrics-port={metrics_port}"] if role == "worker" else ["--api-server-count=2"])

    with running(*options("worker")) as node, serving(*options("leader")) as first:
        yield Nodes(first, Server(f"http://127.0.0.1:{metrics_port}", *node))


def ask(nodes: Nodes, field: dict, seed: int, **headers: str) -> str:
    prompt = [2, *np.random.default_rng(seed).integers(19, 780, 899).tolist()]
    body = {
        "model": "demo", "temperature": 0, "prompt": prompt, "max_tokens": 30, "ignore_eos": True,
        "kv_compression": field,
    }  # fmt: skip
    response = httpx.post(nodes.first.url + "/v1/completions", json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_both_nodes_answer_alike_and_count_what_is_theirs(nodes):
    texts = [[ask(nodes, field, 1, **{"X-data-parallel-rank": engine}) for field in JOBS] for engine in ENGINES]
    assert texts[0] == texts[1]
    for node, own, other in ((nodes.first, "0", "1"), (nodes.second, "1", "0")):
        assert node.metric("vllm:kvmerge_requests_total", engine=own) == len(JOBS)
        assert node.metric("vllm:kvmerge_requests_total", engine=other) == 0
        for field in JOBS:
            policy = field["policy"]
            assert node.metric("vllm:kvmerge_generation_tokens_total", engine=own, policy=policy) == 30
        assert node.metric("vllm:kvmerge_compressions_total", engine=own, policy="snapkv") == 1
        assert node.metric("vllm:kvmerge_blocks_freed_total", engine=own, policy="keepkv") > 0
        gone = sum(node.metric(f"vllm:kvmerge_entries_{fate}_total", engine=own) for fate in ("merged", "evicted"))
        assert gone > 0


def test_the_balancer_reaches_both_and_sums_are_right(nodes):
    before = [nodes.metric("vllm:kvmerge_requests_total", engine=engine) for engine in ENGINES]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: ask(nodes, JOBS[seed % 3], seed), range(12)))
    received = [nodes.metric("vllm:kvmerge_requests_total", engine=engine) for engine in ENGINES]
    received = [now - earlier for now, earlier in zip(received, before, strict=True)]
    assert sum(received) == 12 and min(received) >= 2
    for engine in ENGINES:
        wait_until(lambda e=engine: nodes.metric("vllm:kvmerge_live_bytes", engine=e) == 0)
        wait_until(lambda e=engine: nodes.first.metric("vllm:kv_cache_usage_perc", engine=e) == 0)


def test_one_of_several_api_servers_is_killed_while_it_answers(nodes):
    """The last test but one here."""
    asker = ask_for_long(nodes.first)
    kill(nodes.first, "APIServer")
    asker.check_told()


def test_the_engine_of_the_second_node_is_killed(nodes):
    """The last test here."""
    kill(nodes.second, "EngineCore")
