"""What is tried first on a machine with a GPU: limits, failures, and as much as there is without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import end_with_tests

pytestmark = pytest.mark.engine

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "gpu_first.py"
HANGS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
ANSWERS = """
import json, sys
print(json.dumps("ready"))
for line in sys.stdin:
    print(json.dumps({"answers": [[sum(json.loads(line)["prompts"][0])] * 48]}))
"""


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def first(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import gpu_first

    return gpu_first


def test_a_step_that_fails_or_hangs_stops_no_other(first, monkeypatch, tmp_path, capsys):
    def step(name: str, code: str, **more) -> object:
        return first.Step(name, [sys.executable, "-c", code], seconds=2.0, **more)

    request = {"prompts": [[1, 2]]}
    every = [
        step("fails", "raise ValueError('in here')"),
        step("hangs", HANGS),
        step("stock", ANSWERS, requests=[request]),
        step("plugin", ANSWERS, requests=[request, {"prompts": [[3]]}]),
        step("never", ""),
    ]
    monkeypatch.setattr(first, "steps", lambda on_gpu, folder: every)
    output = tmp_path / "new" / "first.json"
    names = [one.name for one in every[:-1]]
    assert first.main(["--output", str(output), "--only", *names]) == 1
    assert first.main(["--output", str(output), "--only", "never", "--minutes", "0"]) == 1
    found = json.loads(output.read_text())["steps"]
    assert [found[name]["status"] for name in names] == ["exit 1", "over 2 s", "ok", "ok"]
    assert found["hangs"]["seconds"] < 10 and is_gone(int(found["hangs"]["out"]))
    assert found["plugin"]["answers"] == [[3] * 48, [3] * 48]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*names, "never"]
    assert lines[0].endswith("ValueError: in here") and "48 of 48 tokens as stock" in lines[3]


@pytest.mark.benchmarks
def test_engines_without_a_gpu(tmp_path):
    """V2 is refused there, which stops nothing; neither is there a GPU to name."""
    output, names = tmp_path / "first.json", ["gpu", "v2-eager", "stock", "v1-eager", "short-tests"]
    command = [sys.executable, SCRIPT, "--device", "cpu", "--output", output, "--only", *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    some = {"capture_output": True, "text": True, "timeout": 280, "preexec_fn": end_with_tests, "env": environment}
    done = subprocess.run(command, **some)
    found = json.loads(output.read_text())["steps"]
    statuses = [found[name]["status"] for name in names]
    assert statuses == ["exit 1", "exit 1", "ok", "ok", "ok"], done.stdout + done.stderr
    assert "Model Runner V2" in found["v2-eager"]["err"]
    assert found["v1-eager"]["said"].startswith("2 of 2 answered; plain:")
    assert "skipped" in found["short-tests"]["said"]
