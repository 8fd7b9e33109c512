"""Scrape configuration, rules, alerts and the dashboard's queries, in a real Prometheus that scrapes a real server."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.processes import end_with_tests
from tests.server.conftest import free_port, random_prompt, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no Prometheus (apt-get install prometheus)"),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/vllm-kvmerge.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
COMPRESSING = ("keepkv", "snapkv")
SCRAPE_SECONDS = 1
POD = {"namespace": "models", "pod": "kv-0"}


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url, self.started = url, time.time()

    def get(self, path: str, **params: Any) -> Any:
        # A Prometheus that is still starting says so with 503.
        answer = httpx.get(self.url + path, params=params, timeout=30).raise_for_status().json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def series(self, query: str) -> list[tuple[dict[str, str], list[float]]]:
        """Labels of each series of the query, and its samples since the start, those that are numbers."""
        result = self.get("/api/v1/query_range", query=query, start=self.started, end=time.time(), step=SCRAPE_SECONDS)
        numbers = ([float(value) for _, value in one["values"] if value[-1].isdigit()] for one in result["result"])
        return [(one["metric"], found) for one, found in zip(result["result"], numbers, strict=True) if found]


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory) -> Iterator[Prometheus]:
    """With what the server saw in two rounds of requests: a rate takes a counter that has been there before."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = dict.fromkeys(config["global"], f"{SCRAPE_SECONDS}s")
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
    # As the Prometheus operator labels a pod's metrics.
    config["scrape_configs"][0]["static_configs"][0]["labels"] = POD
    for name in config["rule_files"]:
        # The same rules over shorter times.
        rules = (DEPLOY / "prometheus" / name).read_text()
        (folder / name).write_text(re.sub(r"\[(5|10)m\]", "[20s]", rules))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    options = f"--config.file={folder}/prometheus.yml --storage.tsdb.path={folder}/data --log.level=warn"
    command = ["prometheus", *options.split(), f"--web.listen-address=127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_tests)
    client = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: process.poll() is not None or _is_scraped(client))
        assert process.poll() is None
        fields = [{"policy": "full"}, *({"policy": policy, "refresh": {"every": 32}} for policy in COMPRESSING)]
        for seed in (101, 102):
            ask = partial(server.ask, random_prompt(seed, 1000), max_tokens=150, ignore_eos=True)
            with ThreadPoolExecutor() as pool:
                answers = list(pool.map(lambda field, ask=ask: ask(kv_compression=field), fields))
            assert {answer.status_code for answer in answers} == {200}
            assert server.ask("a", kv_compression={"policy": "nonsense"}).status_code == 400
            time.sleep(3 * SCRAPE_SECONDS)
        yield client
    finally:
        process.terminate()
        process.wait(30)


def _is_scraped(client: Prometheus) -> bool:
    try:
        return any(one["value"][1] == "1" for one in client.get("/api/v1/query", query="up")["result"])
    except httpx.HTTPError:
        return False


def filled_in(query: str) -> str:
    """A query of the dashboard as Grafana would send it, with all jobs and servers chosen."""
    filled = query.replace("$__rate_interval", "20s").replace("$job", ".*").replace("$instance", ".*")
    assert "$" not in filled
    return filled


def test_the_adapters_queries_give_what_autoscaling_asks_for(prometheus):
    """Filled in as prometheus-adapter does for the pods of a namespace; the adapter itself does not run."""
    rules = yaml.safe_load((DEPLOY / "prometheus/adapter-values.yaml").read_text())["rules"]["custom"]
    highest = {}
    for rule in rules:
        assert rule["resources"]["overrides"] == {label: {"resource": label} for label in POD}
        found = prometheus.get("/api/v1/series", **{"match[]": rule["seriesQuery"]})
        (name,) = {one["__name__"] for one in found if re.search(rule["name"]["matches"], one["__name__"])}
        query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
        query = query.replace("<<.LabelMatchers>>", 'namespace="models",pod=~"kv-0|kv-1"')
        assert "<<" not in query
        ((labels, values),) = prometheus.series(query)
        assert labels == {"pod": "kv-0"}
        highest[rule["name"]["as"]] = max(values)
    assert 0 < highest["vllm_kv_cache_usage_perc"] <= 1 and "vllm_num_requests_waiting" in highest


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}-{n}" for n, (title, _) in enumerate(QUERIES)])
def test_every_panel_shows_something(prometheus, title, query):
    found = prometheus.series(filled_in(query))
    assert found and all(min(values) >= 0 for _, values in found), query
    if "by (policy)" in query:
        by_policy = {labels["policy"]: values for labels, values in found}
        assert {*COMPRESSING} <= set(by_policy)
        if title == "Entries held per token they stand for":
            assert min(by_policy["keepkv"]) < 0.5 and min(by_policy["full"]) == 1
        if title == "Tokens generated":
            assert all(max(by_policy[policy]) > 0 for policy in ("full", *COMPRESSING))
    if title == "Requests refused because of kv_compression":
        assert "unknown_policy" in {labels["reason"] for labels, _ in found}


@pytest.mark.parametrize("variable", [v for v in DASHBOARD["templating"]["list"] if v["type"] == "query"], ids=str)
def test_variables_have_values(prometheus, variable):
    selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()
    values = prometheus.get(f"/api/v1/label/{label}/values", **{"match[]": filled_in(selector)})
    assert len(values) == 1


def test_rules_give_values_and_alerts_are_sound(prometheus):
    groups = prometheus.get("/api/v1/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        assert rule["health"] == "ok" and (rule["type"] == "alerting" or prometheus.series(rule["name"])), rule
    (alert,) = (rule for rule in rules if rule["name"] == "KVMergeServerDown")
    assert alert["state"] == "inactive"


def test_panels_can_be_drawn_without_grafana(prometheus, tmp_path):
    minutes, output = (time.time() - prometheus.started) / 60, tmp_path / "dashboard.png"
    words = sys.executable, DEPLOY / "grafana/draw.py", prometheus.url, output, minutes
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 50_000


@pytest.mark.engine
def test_promtool_agrees():
    folder = DEPLOY / "prometheus"
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "tests.yml"]):
        done = subprocess.run(["promtool", *command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_panels_have_ids_and_the_chosen_source():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for part in (*PANELS, *(target for panel in PANELS for target in panel["targets"])):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_provisioning_names_what_compose_mounts():
    compose = yaml.safe_load((DEPLOY.parent / "docker/compose.yaml").read_text())["services"]
    provisioning = DEPLOY / "grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/vllm-kvmerge.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    assert provider["options"]["path"] == mounts["../deploy/grafana/dashboards"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose
    (target,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert target["static_configs"][0]["targets"] == ["server:8000"] and "server" in compose
