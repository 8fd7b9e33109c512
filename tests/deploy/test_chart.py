"""The Helm chart, rendered by Helm's own library and validated against Kubernetes' own schemas.

What this does not cover: no cluster takes the objects, so scheduling, the probes and the metrics adapter that
autoscaling needs are untried. An API server checks them where one is there (tests/deploy/api_server.py).
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
TUTORIAL = "docs/tutorials/kubernetes.md"


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


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [KEY, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_objects_are_valid(render, gpu, device, values, version):
    objects = render(gpu if device == "gpu" else {}, values)
    assert {"Deployment", "Service", "ServiceAccount", "PersistentVolumeClaim"} <= objects.keys()
    for kind, one in objects.items():
        assert one["metadata"]["name"] == "try-vllm-kvmerge"
        if kind not in OPERATORS:  # of the Prometheus operator's own schemas
            kubernetes_validate.validate(one, version, strict=True)


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
        monitor = render(values)["PodMonitor"]
        assert fault(monitor) == ""
    monitor["spec"]["podMetricsEndpoints"][0]["interval"] = "often"
    assert "interval" in fault(monitor)
    rule = render(EVERYTHING)["PrometheusRule"]
    assert fault(rule) == ""
    rule["spec"]["groups"][0]["rules"][0]["expr"] = []
    assert "expr" in fault(rule)


def test_the_validator_sees_mistakes(render):
    objects = render(KEY)
    container(objects)["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects["Deployment"], VERSIONS[-1], strict=True)


@pytest.mark.engine
@pytest.mark.parametrize("values", [KEY, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_an_api_server_takes_the_objects(api_server, render, gpu, device, values):
    values = {name: value for name, value in values.items() if name != "runtimeClassName"}  # a cluster has its own
    objects = render(gpu if device == "gpu" else {}, values, {"modelCache": {"accessModes": ["ReadWriteMany"]}})
    template = objects["Deployment"]["spec"]["template"]
    metadata = template["metadata"] | {"name": "pod"}
    spec = template["spec"] | {"serviceAccountName": "default"}
    objects["Pod"] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    for kind in objects.keys() - set(OPERATORS):
        status, answer = api_server.create(objects[kind])
        assert status == 201, answer
        assert answer["metadata"]["uid"]


@pytest.mark.engine
def test_the_api_server_refuses_mistakes(api_server, render):
    deployment = render(KEY)["Deployment"]
    container({"Deployment": deployment})["volumeMount"] = []
    status, answer = api_server.create(deployment)
    assert status == 400 and 'unknown field "spec.template.spec.containers[0].volumeMount"' in answer["message"]
    deployment = render(KEY)["Deployment"]
    deployment["spec"]["selector"]["matchLabels"] = {"app": "another"}
    status, answer = api_server.create(deployment)
    assert status == 422 and "selector" in answer["message"]
    template = render(KEY)["Deployment"]["spec"]["template"]
    spec = template["spec"] | {"serviceAccountName": "default", "hostNetwork": True}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    status, answer = api_server.create(pod)
    assert status == 403 and "restricted" in answer["message"]


def documented_in(repository: Path, program: str) -> list[str]:
    """Commands of ``program`` in the pages on Kubernetes."""
    pages = [repository / "docs/operations.md", repository / TUTORIAL]
    scripts = [text for page in pages for text in documented.blocks(page, "sh")]
    return [command for script in scripts for command in documented.commands(script) if command.startswith(program)]


def test_documented_installations(repository, folder, render):
    """``helm install`` and ``helm upgrade`` of the pages, without a cluster."""
    commands = [
        shlex.split(command) for name in ("install", "upgrade") for command in documented_in(repository, f"helm {name}")
    ]
    assert len(commands) >= 4
    for _, _, _, chart, *words in commands:
        assert repository / chart == folder
        values: dict[str, Any] = {}
        for option, value in zip(words[::2], words[1::2], strict=True):
            if option in ("-f", "--values"):
                file = repository / value
                text = file.read_text() if file.exists() else documented.blocks(repository / TUTORIAL, "yaml")[0]
                values = overlay(values, yaml.safe_load(text))
            else:
                assert option == "--set"
                for setting in value.split(","):
                    path, _, leaf = setting.partition("=")
                    for name in reversed(path.split(".")):
                        leaf = {name: yaml.safe_load(leaf) if isinstance(leaf, str) else leaf}
                    values = overlay(values, leaf)
        objects = render(values)
        for kind, one in objects.items():
            if kind not in OPERATORS:
                kubernetes_validate.validate(one, VERSIONS[-1], strict=True)


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
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


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
    def checksum(key: str) -> str:
        template = render({"apiKey": {"value": key}})["Deployment"]["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/secret"]

    assert checksum("a") != checksum("b")


def test_a_digest_replaces_the_tag(render):
    assert container(render(KEY))["image"] == "vllm-kvmerge:cpu"
    digest = f"sha256:{'0' * 64}"
    image = {"repository": "registry.example/vllm-kvmerge", "digest": digest}
    assert container(render(KEY, {"image": image}))["image"] == f"registry.example/vllm-kvmerge@{digest}"


def test_pods_may_do_little(render, gpu):
    for values in ({}, gpu):
        pod = render(values, KEY)["Deployment"]["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        (only,) = pod["containers"]
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
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
    assert render(KEY)["Deployment"]["spec"]["strategy"]["type"] == "Recreate"
    assert render(EVERYTHING)["Deployment"]["spec"]["strategy"]["type"] == "RollingUpdate"


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
    share = {"podDisruptionBudget": {"maxUnavailable": "25%"}}
    assert render(KEY, share)["PodDisruptionBudget"]["spec"]["maxUnavailable"] == "25%"
    assert "PodDisruptionBudget" not in render(KEY, {"podDisruptionBudget": {"enabled": False}})


def test_the_service_finds_the_pods(render):
    objects = render(EVERYTHING)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = (
        objects["Service"]["spec"]["selector"],
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["PodMonitor"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    )
    for selector in selectors:
        assert selector.items() <= labels.items()
    ports = {port["name"] for port in container(objects)["ports"]}
    assert {objects["Service"]["spec"]["ports"][0]["targetPort"]} == ports
    assert {end["port"] for end in objects["PodMonitor"]["spec"]["podMetricsEndpoints"]} == ports


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": "2"}, "replicas"),
        ({"model": ""}, "model"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"kvCompression": {"budget": 0}}, "budget"),
        ({"service": {"port": 0}}, "service"),
        ({"modelCache": {"accessModes": ["ReadWriteAlways"]}}, "accessModes"),
        ({"podMonitor": {"interval": "often"}}, "interval"),
        ({"podDisruptionBudget": {"maxUnavailable": "many"}}, "maxUnavailable"),
        ({"networkPolicy": {"from": [{}]}}, "from"),
        ({"autoscaling": {"kvUsagePercent": 0.8}}, "kvUsagePercent"),
    ],
)
def test_the_schema_names_what_is_wrong(render, values, said):
    with pytest.raises(helm.HelmValuesError, match=said):
        render(KEY, values)


def test_every_value_is_in_the_schema(folder, gpu):
    known = json.loads((folder / "values.schema.json").read_text())["properties"]
    values = yaml.safe_load((folder / "values.yaml").read_text())
    assert set(values) == set(known) - {"global"}
    assert set(gpu) <= set(known)
