"""The programs of docs/tutorials.md against real servers of SmolLM2: they print what the page says, but for answers
that depend on the processor's arithmetic."""

import json
import re
import shlex
from pathlib import Path

import helm_python as helm
import httpx
import pytest
import yaml

from tests.documented import ROOT, blocks
from tests.server.conftest import Server, serving
from tests.server.test_readme import readme_server, run_here  # noqa: F401, a fixture
from vllm_kvmerge.demo import pretrained

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAGE = ROOT / "docs/tutorials.md"
DOCUMENT, FLOOR = "Many questions about one document", "A floor for your own documents"
CHAT, PRESSURE, KUBERNETES = "A chat of ten turns", "A server default under pressure", "On Kubernetes"


def printed(section: str, server: Server, tmp_path: Path) -> tuple[str, str]:
    """What the section's program prints, and what the page shows."""
    (program,), (shown,) = blocks(PAGE, "python", section), blocks(PAGE, "text", section)
    file = tmp_path / "tutorial.py"
    file.write_text(program.replace("http://127.0.0.1:8000", server.url))
    return run_here(server, [f".venv/bin/python {file}"])[0], shown


def numbers(text: str, unit: str) -> list[float]:
    return [float(one) for one in re.findall(rf"([\d.]+) {unit}", text)]


def test_a_document(readme_server: Server, tmp_path: Path) -> None:  # noqa: F811
    for text in printed(DOCUMENT, readme_server, tmp_path):
        assert re.findall(r"^\w+", text, re.MULTILINE) == ["full", "kvzip", "keydiff", "snapkv"]
        full, kvzip, *others = numbers(text, "of 6 right")
        assert full == 6 and kvzip >= 4 and max(others) <= 1
        held, *compressed = numbers(text, "MB")
        assert compressed == pytest.approx([0.26 * held] * 3, rel=0.06)


def test_a_floor(readme_server: Server, tmp_path: Path) -> None:  # noqa: F811
    for text in printed(FLOOR, readme_server, tmp_path):
        entries = [int(one) for one in re.findall(r", (\d+) of 2240 entries", text)]
        assert entries == sorted(entries) and len(entries) == 2 and entries[0] < 2240
        assert len(re.findall(r"^    \d+%: '", text, re.MULTILINE)) == 4
        assert re.findall(r"^(\S+) +0.5: \d+% agree", text, re.MULTILINE) == ["expected_attention", "kvzip"]


def test_a_chat(readme_server: Server, tmp_path: Path) -> None:  # noqa: F811
    """Compressed caches stay within their budgets. The page leaves out some turns."""
    found, shown = (re.findall("^turn.*", text, re.MULTILINE) for text in printed(CHAT, readme_server, tmp_path))
    full, *compressed = zip(*(re.findall("right|wrong", line) for line in found), strict=True)
    assert len(full) == 10 and full.count("right") >= 9 and all(side.count("right") >= 6 for side in compressed)
    for lines in found, shown:
        held = [numbers(line, "MB") for line in lines]
        assert held == sorted(held, key=lambda line: line[0])
        whole, larger, smaller = map(max, zip(*held, strict=True))
        assert larger < 0.55 * whole and smaller < 0.55 * larger


def test_pressure(tmp_path: Path) -> None:
    """On a server as the section starts it, with as many blocks: tests have twice the bytes of its dtype."""
    (command,) = blocks(PAGE, "sh", PRESSURE)
    model, *words = shlex.split(command.replace("\\\n", ""))[2:]
    at = words.index("--kv-cache-memory-bytes") + 1
    words[at] = str(int(words[at]) * 2)
    with serving(*words, command=("-m", "vllm_kvmerge.cli", "serve", model)) as server:
        for text in printed(PRESSURE, server, tmp_path):
            alone, together, opted_out = numbers(text, "compressed")
            # How many run at once, and how many are preempted, depends on how fast they arrive.
            assert alone == opted_out == 0 and together >= 2
            assert numbers(text, "preemptions")[0] == 0


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
    model, *options = [word for word in container["args"] if not word.startswith("--port")]
    assert model == pretrained.SOURCES["smollm2"].hub and own["VLLM_CPU_KVCACHE_SPACE"] == "1"
    command, room = ("-m", "vllm_kvmerge.cli", "serve", pretrained.folder("smollm2")), "1G"
    options += ["--kv-cache-memory-bytes", room, "--host", "127.0.0.1"]
    with serving(*options, command=command, **own) as server:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert httpx.get(server.url + container[probe]["httpGet"]["path"]).status_code == 200
        answer, counted = run_here(server, [f"KEY='{key}'\n" + request])[0].splitlines()
        told = json.loads(answer)
        assert "6352" in told["choices"][0]["message"]["content"]
        proof = told["usage"]["kv_compression"]
        assert (proof["policy"], proof["entries"]["mean"], proof["compressions"]) == ("kvzip", 560, 1)
        assert counted.startswith("vllm:kvmerge_compressions_total") and counted.endswith(" 1.0")
