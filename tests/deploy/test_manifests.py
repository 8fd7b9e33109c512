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


VALUES = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.example"}
"""Variables that the controller puts into the pods' environment."""


@pytest.fixture(scope="module")
def templates(objects) -> dict[str, dict[str, Any]]:
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return {role: group[f"{role}Template"] for role in ("leader", "worker")}


def pod(template: dict[str, Any]) -> dict[str, Any]:
    metadata = template["metadata"] | {"name": "one"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def test_pods_are_valid(objects, templates):
    for one in (objects["Service"], *map(pod, templates.values())):
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
    parsed = {}
    for role, template in templates.items():
        words = template["spec"]["containers"][0]["args"]
        for name, value in VALUES.items():
            words = [word.replace(f"$({name})", value) for word in words]
        assert not any("$(" in word for word in words)
        parsed[role] = parse(words)
    shared = ("data_parallel_size", "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port")
    for name in (*shared, "max_model_len", "shutdown_timeout"):
        assert getattr(parsed["leader"], name) == getattr(parsed["worker"], name), name
    assert parsed["leader"].data_parallel_size == 2
    assert (parsed["leader"].headless, parsed["worker"].headless) == (False, True)
    assert parsed["worker"].data_parallel_start_rank == 1
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
