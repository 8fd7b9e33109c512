"""The programs of docs/tutorials.md against real servers: they print what the page says."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import helm_python as helm
import httpx
import pytest
import yaml

from tests.documented import ROOT, blocks
from tests.server.conftest import Server, serving
from tests.server.test_readme import run_here

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAGE = ROOT / "docs/tutorials.md"
DOCUMENT, CHAT = "Twenty questions about one document", "A chat of ten turns"
PRESSURE, KUBERNETES = "A server default under pressure", "On Kubernetes"


def printed(section: str, server: Server, tmp_path: Path) -> tuple[list[str], list[str]]:
    """Lines that the section's program prints, and those of the page."""
    (program,), (shown,) = blocks(PAGE, "python", section), blocks(PAGE, "text", section)
    file = tmp_path / "tutorial.py"
    file.write_text(program.replace("http://127.0.0.1:8000", server.url))
    return run_here(server, [f".venv/bin/python {file}"])[0].splitlines(), shown.splitlines()


def numbers(lines: list[str], unit: str) -> list[float]:
    return [float(one) for one in re.findall(rf"([\d.]+) {unit}", "\n".join(lines))]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """As the section on pressure starts it, with as many blocks: tests have twice the bytes of its dtype."""
    (command,) = blocks(PAGE, "sh", PRESSURE)
    words = shlex.split(command.replace("\\\n", ""))[3:]
    at = words.index("--kv-cache-memory-bytes") + 1
    words[at] = str(int(words[at]) * 2)
    with serving(*words) as ready:
        yield ready


def check_memory(found: list[str], shown: list[str]) -> None:
    """These servers have float32, which takes other bytes; but in the same proportions."""
    held, said = numbers(found, "MB"), numbers(shown, "MB")
    assert held == pytest.approx([one * held[0] / said[0] for one in said], rel=0.05)


def test_a_document(server: Server, tmp_path: Path) -> None:
    found, shown = printed(DOCUMENT, server, tmp_path)
    assert [line.split()[0] for line in found] == ["plain", "keydiff", "kvzip", "snapkv", "keepkv"]
    right, said = numbers(found, "of 20 right"), numbers(shown, "of 20 right")
    assert right[:3] == said[:3] == [20, 20, 20]
    # What is close to a tie depends on the dtype, and on the processor.
    assert right[3:] == pytest.approx(said[3:], abs=2) and max(right[3:]) < 8
    check_memory(found, shown)


def test_a_chat(server: Server, tmp_path: Path) -> None:
    found, shown = printed(CHAT, server, tmp_path)
    for lines in (found, shown):
        plain, keydiff, keepkv = zip(*(re.findall("right|wrong", line) for line in lines), strict=True)
        assert plain.count("right") >= 9 and keydiff.count("right") >= 8 and keepkv.count("right") <= 4
    check_memory(found, shown)


def test_kubernetes() -> None:
    """The pod's command, from the chart and the page's values, as a process of this machine; the page's request."""
    key = "a key"
    (values,), (request,) = blocks(PAGE, "yaml", KUBERNETES), blocks(PAGE, "bash", KUBERNETES)
    with helm.Chart.load(ROOT / "deploy/helm/vllm-kvmerge") as chart:
        rendered = chart.render(yaml.safe_load(values), name="kv", namespace="default")
    objects = [yaml.safe_load(text) for name, text in rendered.items() if name.endswith(".yaml")]
    by_kind = {one["kind"]: one for one in objects if one}
    named = {f"{kind.lower()}/{one['metadata']['name']}" for kind, one in by_kind.items()}
    assert set(re.findall(r"(?:deployment|service)/\S+", "".join(blocks(PAGE, "sh", KUBERNETES)))) <= named
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value", key) for one in container["env"]}
    own = {name: value for name, value in variables.items() if name in ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE")}
    options = [word for word in container["args"] if not word.startswith("--port")]
    assert options[0] == "demo" and own["VLLM_CPU_KVCACHE_SPACE"] == "1"
    with serving(*options[1:], "--host", "127.0.0.1", **own) as server:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert httpx.get(server.url + container[probe]["httpGet"]["path"]).status_code == 200
        answer, counted = run_here(server, [f"KEY='{key}'\n" + request])[0].splitlines()
        told = json.loads(answer)
        assert told["choices"][0]["text"] == " 0 7 6 8"
        proof = told["usage"]["kv_compression"]
        assert (proof["policy"], proof["entries"]["most"], proof["tokens"]) == ("keydiff", 750, 3004)
        assert counted.startswith("vllm:kvmerge_compressions_total") and counted.endswith(" 1.0")


def test_pressure(server: Server, tmp_path: Path) -> None:
    for lines in printed(PRESSURE, server, tmp_path):
        alone, together, opted_out = numbers(lines, "compressed")
        # How many run at once, and how many are preempted, depends on how fast they arrive.
        assert alone == opted_out == 0 and together > 6
        assert numbers(lines, "preemptions")[0] == 0
        assert lines[-1] == "under pressure: True"
