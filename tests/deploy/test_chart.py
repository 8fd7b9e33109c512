"""The Helm chart, rendered by Helm's own library and validated against Kubernetes' own schemas.

What this does not cover: no cluster takes the objects, so scheduling, the probes and the metrics adapter that
autoscaling needs are untried.
"""

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import documented

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSIONS = ("1.27", "1.33")
KEY = {"apiKey": {"existingSecret": "keys"}}
TUTORIAL = "docs/tutorials.md"


@pytest.fixture(scope="module")
def folder(repository: Path) -> Path:
    return repository / "deploy/helm/vllm-kvmerge"


@pytest.fixture(scope="module")
def gpu(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "values-gpu.yaml").read_text())


@pytest.fixture(scope="module")
def render(folder: Path):
    with helm.Chart.load(folder) as chart:

        def objects(*values: dict[str, Any]) -> dict[str, dict[str, Any]]:
            """Rendered objects by kind; later values go on top of earlier ones, as with several -f."""
            merged: dict[str, Any] = {}
            for one in values:
                merged = overlay(merged, one)
            chart.validate_schema(merged)
            rendered = chart.render(merged, name="try", namespace="models")
            found = [yaml.safe_load(text) for name, text in rendered.items() if name.endswith(".yaml") and text.strip()]
            by_kind = {one["kind"]: one for one in found if one}
            assert len(by_kind) == len([one for one in found if one])
            return by_kind

        yield objects


def overlay(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {**under, **over}
    for name in under.keys() & over.keys():
        if isinstance(under[name], dict) and isinstance(over[name], dict):
            both[name] = overlay(under[name], over[name])
    return both


def container(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (one,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return one


EVERYTHING = KEY | {
    "hubToken": {"value": "hf"},
    "tls": {"existingSecret": "tls"},
    "autoscaling": {"enabled": True, "maxReplicas": 3},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"enabled": True},
    "modelCache": {"accessModes": ["ReadWriteMany"], "storageClassName": "nfs"},
    "kvCompression": {"budget": 0.25},
    "imagePullSecrets": [{"name": "registry"}],
    "runtimeClassName": "nvidia",
    "extraArgs": ["--max-num-seqs", "8"],
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
    "serviceAccount": {"annotations": {"role": "c"}},
    "nodeSelector": {"disk": "fast"},
    "affinity": {"nodeAffinity": {}},
}


OPERATORS = ("PodMonitor", "PrometheusRule")
"""Of the Prometheus operator's own schemas."""


def check_valid(objects: dict[str, dict[str, Any]], version: str = VERSIONS[-1]) -> None:
    for kind in objects.keys() - set(OPERATORS):
        kubernetes_validate.validate(objects[kind], version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [KEY, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_objects_are_valid(render, gpu, device, values, version):
    objects = render(gpu if device == "gpu" else {}, values)
    assert {"Deployment", "Service", "ServiceAccount", "PersistentVolumeClaim"} <= objects.keys()
    assert {one["metadata"]["name"] for one in objects.values()} == {"try-vllm-kvmerge"}
    check_valid(objects, version)


@pytest.mark.slow
@pytest.mark.engine
def test_resources_of_the_prometheus_operator(render, node_modules):
    """Against the schemas of the operator's resources, as an npm package carries them."""

    def fault(monitor: dict[str, Any]) -> str:
        script = (
            f"import {{{monitor['kind']} as Kind}} "
            "from '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1';"
            "import fs from 'fs'; new Kind(JSON.parse(fs.readFileSync(0, 'utf8'))).validate()"
        )
        command = ["node", "--input-type=module", "-e", script]
        done = subprocess.run(command, cwd=node_modules, input=json.dumps(monitor), capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    for values in (EVERYTHING, EVERYTHING | {"tls": {"existingSecret": ""}}):
        objects = render(values)
        assert [fault(objects[kind]) for kind in OPERATORS] == ["", ""]
    objects["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["interval"] = "often"
    assert "interval" in fault(objects["PodMonitor"])


def documented_in(repository: Path, program: str) -> list[str]:
    """Commands of ``program`` in the pages on Kubernetes."""
    pages = [repository / "docs/operations.md", repository / TUTORIAL]
    scripts = [text for page in pages for text in documented.blocks(page, "sh")]
    return [command for script in scripts for command in documented.commands(script) if command.startswith(program)]


def setting(path: str, value: str) -> dict[str, Any]:
    """Values, as ``--set`` has them."""
    name, _, rest = path.partition(".")
    return {name: setting(rest, value) if rest else yaml.safe_load(value)}


def test_documented_installations(repository, folder, render):
    """``helm install`` and ``helm upgrade`` of the pages, without a cluster."""
    commands = [*documented_in(repository, "helm install"), *documented_in(repository, "helm upgrade")]
    assert len(commands) >= 4
    for _, _, _, chart, *words in map(shlex.split, commands):
        assert repository / chart == folder
        values = []
        for option, value in zip(words[::2], words[1::2], strict=True):
            if option in ("-f", "--values"):
                file = repository / value
                text = file.read_text() if file.exists() else documented.blocks(repository / TUTORIAL, "yaml")[0]
                values.append(yaml.safe_load(text))
            else:
                assert option == "--set"
                values += [setting(*one.split("=")) for one in value.split(",")]
        check_valid(render(*values))


def test_documented_secrets(repository, render):
    """What kubectl makes of the page's command has the key where the chart looks for it."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    for command in documented_in(repository, "kubectl create secret"):
        dry = ["bash", "-c", f"{command} --dry-run=client --output=json"]
        secret = json.loads(subprocess.run(dry, check=True, capture_output=True, text=True).stdout)
        objects = render({"apiKey": {"existingSecret": secret["metadata"]["name"]}})
        (variable,) = (one for one in container(objects)["env"] if one["name"] == "VLLM_API_KEY")
        assert variable["valueFrom"]["secretKeyRef"]["key"] in secret["data"]


def test_helm_finds_nothing_wrong(folder):
    report = helm.lint(folder, KEY, strict=True)
    assert report["errors"] == [] == [message for message in report["messages"] if message["severity"] > 1]


def test_a_key_is_required(render):
    with pytest.raises(helm.HelmRenderError, match="an API key is required: set apiKey.existingSecret"):
        render({})


def test_the_key_comes_from_a_secret(render):
    for values, name in ((KEY, "keys"), ({"apiKey": {"value": "s3cret", "key": "k"}}, "try-vllm-kvmerge")):
        objects = render(values)
        (variable,) = (one for one in container(objects)["env"] if one["name"] == "VLLM_API_KEY")
        reference = variable["valueFrom"]["secretKeyRef"]
        assert reference["name"] == name
        assert ("Secret" in objects) == (name != "keys")
        assert "s3cret" not in json.dumps(objects["Deployment"])
    assert objects["Secret"]["stringData"] == {"k": "s3cret"} and reference["key"] == "k"


def test_a_new_key_starts_new_pods(render):
    templates = [render({"apiKey": {"value": key}})["Deployment"]["spec"]["template"] for key in "ab"]
    one, other = (template["metadata"]["annotations"]["checksum/secret"] for template in templates)
    assert one != other


def test_a_digest_replaces_the_tag(render):
    assert container(render(KEY))["image"] == "vllm-kvmerge:cpu"
    digest = f"sha256:{'0' * 64}"
    assert container(render(KEY, {"image": {"digest": digest}}))["image"] == f"vllm-kvmerge@{digest}"


def test_pods_may_do_little(render, gpu):
    least = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    for values in ({}, gpu):
        pod = render(values, KEY)["Deployment"]["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        (only,) = pod["containers"]
        assert only["securityContext"] == least
        writable = {mount["mountPath"] for mount in only["volumeMounts"]}
        assert writable == {"/models", "/dev/shm", "/tmp", "/home/kvmerge"}


def test_pods_outlive_their_drain(render):
    pod = render(KEY | {"shutdownTimeout": 200})["Deployment"]["spec"]["template"]["spec"]
    assert "--shutdown-timeout=200" in pod["containers"][0]["args"]
    pause = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= 200 + pause + 20


def test_serve_takes_the_arguments(render, parse):
    """The chart's arguments, as they are, through the command's own parser."""
    from vllm_kvmerge.cli.arguments import read_compression

    args = parse(container(render(EVERYTHING))["args"])
    assert (args.model_tag, args.host, args.port, args.max_num_seqs) == ("demo", "0.0.0.0", 8000, 8)
    assert (args.shutdown_timeout, args.ssl_certfile) == (60, "/tls/tls.crt")
    assert read_compression(args.kv_compression) == {"budget": 0.25}


def test_scaling_follows_the_queue_and_the_cache(render, repository):
    objects = render(EVERYTHING)
    assert "replicas" not in objects["Deployment"]["spec"]
    spec = objects["HorizontalPodAutoscaler"]["spec"]
    assert spec["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    targets = {one["pods"]["metric"]["name"]: one["pods"]["target"]["averageValue"] for one in spec["metrics"]}
    assert targets == {"vllm_num_requests_waiting": "4", "vllm_kv_cache_usage_perc": "800m"}
    offered = yaml.safe_load((repository / "deploy/prometheus/adapter-values.yaml").read_text())["rules"]["custom"]
    assert {rule["name"]["as"] for rule in offered} == targets.keys()
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 3)


@pytest.mark.parametrize("values", [{"replicas": 2}, {"autoscaling": {"enabled": True, "maxReplicas": 2}}])
def test_pods_on_several_nodes_need_a_shared_volume(render, values):
    with pytest.raises(helm.HelmRenderError, match="ReadWriteMany"):
        render(KEY, values)
    assert "Deployment" in render(KEY, values, {"modelCache": {"enabled": False}})


def test_a_volume_of_one_node_is_handed_over(render):
    for values, strategy in ((KEY, "Recreate"), (EVERYTHING, "RollingUpdate")):
        assert render(values)["Deployment"]["spec"]["strategy"]["type"] == strategy


def test_rules_are_those_of_the_repository(render, repository, tmp_path):
    spec = render(EVERYTHING)["PrometheusRule"]["spec"]
    files = [yaml.safe_load((repository / f"deploy/prometheus/{name}.yml").read_text()) for name in ("rules", "alerts")]
    assert spec["groups"] == [group for file in files for group in file["groups"]]
    if shutil.which("promtool"):
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(spec))
        subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], check=True, capture_output=True)


def test_pods_are_reached_by_who_is_named(render):
    assert "NetworkPolicy" not in render(KEY)
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
    spec = render(KEY, {"networkPolicy": {"enabled": True, "from": peers, "egress": []}})["NetworkPolicy"]["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"] and not spec["egress"]
    assert spec["ingress"] == [{"from": peers, "ports": [{"protocol": "TCP", "port": "http"}]}]


def test_pods_are_evicted_one_at_a_time(render):
    assert render(KEY)["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert "PodDisruptionBudget" not in render(KEY, {"podDisruptionBudget": {"enabled": False}})


def test_the_service_finds_the_pods(render):
    objects = render(EVERYTHING)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    kinds = ("PodMonitor", "NetworkPolicy", "PodDisruptionBudget")
    selectors = [objects[kind]["spec"].get("selector") or objects[kind]["spec"]["podSelector"] for kind in kinds]
    selectors = [selector["matchLabels"] for selector in (*selectors, objects["Deployment"]["spec"]["selector"])]
    for selector in (*selectors, objects["Service"]["spec"]["selector"]):
        assert selector.items() <= labels.items()
    ports = {port["name"] for port in container(objects)["ports"]}
    assert {objects["Service"]["spec"]["ports"][0]["targetPort"]} == ports
    assert {end["port"] for end in objects["PodMonitor"]["spec"]["podMetricsEndpoints"]} == ports


def test_the_schema_names_what_is_wrong(render):
    wrong = {
        "replica": {"replica": 2},
        "digest": {"image": {"digest": "latest"}},
        "budget": {"kvCompression": {"budget": 0}},
    }
    for name, values in wrong.items():
        with pytest.raises(helm.HelmValuesError, match=name):
            render(KEY, values)
