"""The multi-node manifest and the Ray example, as far as they go without a cluster: schemas, parsers, names."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate")


@pytest.fixture(scope="module")
def objects(repository) -> dict[str, dict[str, Any]]:
    text = (repository / "deploy/kubernetes/leaderworkerset.yaml").read_text()
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def templates(objects) -> dict[str, dict[str, Any]]:
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return {role: group[f"{role}Template"] for role in ("leader", "worker")}


def test_pods_are_valid(objects, templates):
    pods = [{"apiVersion": "v1", "kind": "Pod", **one, "metadata": {"name": "one"}} for one in templates.values()]
    for one in (objects["Service"], *pods):
        kubernetes_validate.validate(one, "1.33", strict=True)
    leader, worker = (templates[role]["metadata"]["labels"] for role in ("leader", "worker"))
    selector = objects["Service"]["spec"]["selector"]
    assert selector.items() <= leader.items() and not selector.items() <= worker.items()


def test_all_pods_have_probes(templates):
    paths = {"leader": "/health", "worker": "/metrics"}
    for role, path in paths.items():
        (container,) = templates[role]["spec"]["containers"]
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": path, "port": "http"}


def test_serve_takes_the_arguments(templates, parse):
    """tests/server/test_nodes.py starts both."""
    parsed = {}
    for role, template in templates.items():
        words = template["spec"]["containers"][0]["args"]
        # Variables that the controller puts into the pods' environment.
        for name, value in (("GROUP_SIZE", "2"), ("WORKER_INDEX", "1"), ("LEADER_ADDRESS", "leader.example")):
            words = [word.replace(f"$(LWS_{name})", value) for word in words]
        assert not any("$(" in word for word in words)
        parsed[role] = parse(words)
    assert [(one.data_parallel_size, one.headless) for one in parsed.values()] == [(2, False), (2, True)]
    for role, port in (("leader", "port"), ("worker", "metrics_port")):
        (container,) = templates[role]["spec"]["containers"]
        assert {"name": "http", "containerPort": getattr(parsed[role], port)} in container["ports"]
        assert parsed[role].host == "0.0.0.0"


def test_ray_example_gives_vllm_arguments_it_knows(repository, monkeypatch):
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_kvmerge.engine.arguments import SCHEDULER_CLS, WORKER_CLS

    ray = ModuleType("ray.serve.llm")
    ray.LLMConfig, ray.build_openai_app = SimpleNamespace, lambda args: args
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.serve.llm", ray)
    monkeypatch.syspath_prepend(str(repository))
    example = importlib.import_module("deploy.ray.serve_llm")
    (config,) = example.app["llm_configs"]
    assert config.engine_kwargs["worker_cls"] == WORKER_CLS and config.engine_kwargs["scheduler_cls"] == SCHEDULER_CLS
    assert AsyncEngineArgs(model="m", **config.engine_kwargs).additional_config["kvmerge"]["default"]["budget"]
