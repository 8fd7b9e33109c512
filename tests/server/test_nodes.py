"""The pods of deploy/kubernetes/leaderworkerset.yaml as processes of this machine: API servers with one engine, and a
node with another and no API server."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.server.conftest import Server, free_port, random_prompt, running, serving
from tests.server.deaths import kill

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/leaderworkerset.yaml"
JOBS = [{"policy": "full"}, {"policy": "snapkv", "budget": 96}, {"policy": "keepkv", "budget": 96}]


class Nodes(NamedTuple):
    """The API server's node, which a test talks to, and the other, which has metrics only."""

    first: Server
    second: Server


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    objects = yaml.safe_load_all(MANIFEST.read_text())
    (spec,) = (one["spec"] for one in objects if one["kind"] == "LeaderWorkerSet")
    values = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "localhost"}
    rpc_port, metrics_port = free_port(), free_port()

    def options(role: str) -> list[str]:
        (container,) = spec["leaderWorkerTemplate"][f"{role}Template"]["spec"]["containers"]
        model, *words = container["args"]
        assert model == "demo"
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        # Pods have ports, and a machine, each to themselves.
        words += [f"--data-parallel-rpc-port={rpc_port}", "--host=127.0.0.1"]
        return words + ([f"--metrics-port={metrics_port}"] if role == "worker" else ["--api-server-count=2"])

    with running(*options("worker")) as node, serving(*options("leader")) as first:
        yield Nodes(first, Server(f"http://127.0.0.1:{metrics_port}", *node))


def ask(nodes: Nodes, field: dict, engine: str) -> str:
    body = {"model": "demo", "temperature": 0, "prompt": random_prompt(1, 900), "max_tokens": 30, "ignore_eos": True}
    headers = {"X-data-parallel-rank": engine}
    response = nodes.first.post("/v1/completions", body | {"kv_compression": field}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_both_nodes_answer_alike_and_count_what_is_theirs(nodes):
    texts = [[ask(nodes, field, engine) for field in JOBS] for engine in ("0", "1")]
    assert texts[0] == texts[1]
    for node, own, other in ((nodes.first, "0", "1"), (nodes.second, "1", "0")):
        assert node.metric("vllm:kvmerge_requests_total", engine=own) == len(JOBS)
        assert node.metric("vllm:kvmerge_requests_total", engine=other) == 0
        for field in JOBS:
            policy = field["policy"]
            assert node.metric("vllm:kvmerge_generation_tokens_total", engine=own, policy=policy) == 30
        assert node.metric("vllm:kvmerge_compressions_total", engine=own, policy="snapkv") == 1
        assert node.metric("vllm:kvmerge_blocks_freed_total", engine=own, policy="keepkv") > 0
        assert sum(node.metric(f"vllm:kvmerge_entries_{fate}_total", engine=own) for fate in ("merged", "evicted")) > 0


def test_one_of_several_api_servers_is_killed_while_it_answers(nodes):
    """The last test but one here."""
    kill(nodes.first, "APIServer")


def test_the_engine_of_the_second_node_is_killed(nodes):
    """The last test here."""
    kill(nodes.second, "EngineCore", is_busy=False)
