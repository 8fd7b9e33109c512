"""The command line, and whole evaluations with the engine in a process of their own."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import preloaded
from tests.evaluation.runs import assert_measured, write_config
from tests.processes import end_with_tests
from vllm_kvmerge import demo
from vllm_kvmerge.cli import main
from vllm_kvmerge.evaluation.tasks.demo import DemoText

COMMAND = """
import sys
from tests import preloaded
from tests.evaluation.runs import Refused
from vllm_kvmerge.evaluation.tasks.base import register
from vllm_kvmerge.cli import main
if __name__ == "__main__":
    register(Refused)
    sys.exit(main(["eval", *sys.argv[1:]]))
"""


def fault(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["eval", *map(str, argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_faults_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "name a configuration; see vllm-kvmerge eval --help" in fault(capsys)
    assert "unrecognized arguments: --outptu" in fault(capsys, "c.yaml", "--outptu")
    assert "no-such.yaml: no such file" in fault(capsys, "no-such.yaml")
    path = write_config(tmp_path / "c.yaml", samples=0)
    assert f"{path}: samples: Input should be greater than 0" in fault(capsys, path, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_endpoint_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml")
    options = ["--endpoint", "http://127.0.0.1:1", "--output", tmp_path / "out"]
    assert "endpoint.url: http://127.0.0.1:1 cannot be reached" in fault(capsys, path, *options)
    assert "has no variable KVMERGE_NO_KEY" in fault(capsys, path, *options, "--api-key-env", "KVMERGE_NO_KEY")


def test_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'vllm-kvmerge[eval]'" in fault(capsys, write_config(tmp_path / "c.yaml"))


@pytest.mark.parametrize("argv", [["list"], ["--list"]])
def test_list(capsys, monkeypatch, argv):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["eval", *argv]) == 0
    printed = capsys.readouterr().out
    for text in ("demo_recall", "length=1024: Tokens of the prompt.", "facts=16", "exact match", "vllm_kvmerge.demo."):
        assert text in printed


def start(script: Path, *argv: object) -> subprocess.Popen:
    command = [sys.executable, str(script), *map(str, argv)]
    return preloaded.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=end_with_tests
    )


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.engine
def test_evaluation_that_is_killed_and_goes_on(tmp_path: Path) -> None:
    script, out = tmp_path / "command.py", tmp_path / "out"
    script.write_text(COMMAND)
    recall = {"task": "demo_recall", "length": 128, "facts": 4, "samples": 40}
    text = {"task": "demo_text", "length": 64, "continuation": 8, "samples": 3}
    path = write_config(
        tmp_path / "c.yaml",
        policies=["full", "snapkv"],
        budgets=[64],
        tasks=[{"task": "refused", "samples": 3}, text, recall],
        engine={"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "max_num_seqs": 2},
    )
    first = start(script, path, "--output", out)
    deadline = time.monotonic() + 400
    while len(read(out / "results.jsonl")) < 5:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0]
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = read(out / "results.jsonl")
    assert 5 <= len(before) < 86

    second = start(script, path, "--output", out)
    printed = second.communicate(timeout=500)[0]
    # What the engine refuses is named; all else is answered.
    assert second.returncode == 1, printed
    assert "failed: refused | full, sample 2: max_tokens must be at least 1, got 0" in printed
    incomplete = [line for line in printed.splitlines() if line.startswith("incomplete: ")]
    assert incomplete == [f"incomplete: refused | {cell}: 0 of 3 samples, 3 failed" for cell in ("full", "snapkv | 64")]
    results = read(out / "results.jsonl")
    assert results[: len(before)] == before
    assert len(results) == 86 == len({(result["cell"], result["sample"]) for result in results})
    cells = {cell: [r for r in results if r["cell"] == cell] for cell in {result["cell"] for result in results}}
    full = cells["demo_recall length=128 facts=4 | full"]
    small = cells["demo_recall length=128 facts=4 | snapkv | 64"]
    for group, entries, blocks in ((full, 128, 4), (small, 64, 2)):
        for result in group:
            assert_measured(result, entries, blocks)
    assert np.mean([result["score"] for result in full]) > 0.9
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32, local_files_only=True)
    losses = []
    for sample in DemoText(length=64, continuation=8).samples(3, 3, tokenizer):
        ids = torch.tensor([tokenizer.encode(sample.prompt + sample.continuation)])
        losses.append(model(ids, labels=ids.where(torch.arange(72) >= 64, -100)).loss.item())
    measured = sorted(cells["demo_text length=64 continuation=8 | full"], key=lambda result: result["sample"])
    assert [result["score"] for result in measured] == pytest.approx(losses, abs=1e-3)
    assert "lower is better" in printed and str(out / "report.html") in printed
