"""kvpress beside this package: what both sides are given keeps as many entries, and where both compute the same,
answers are the same. The comparison needs an environment with kvpress, which ``KVMERGE_KVPRESS`` names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import end_with_tests
from vllm_kvmerge.evaluation.config import EvalConfig
from vllm_kvmerge.evaluation.runner import Prompt
from vllm_kvmerge.evaluation.tasks.base import Sample
from vllm_kvmerge.request.parameters import parse_compression

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

from kvpress_scores import METHODS, WINDOW, Job, compare, criticalkv_press, dropped  # noqa: E402


@pytest.fixture
def entry():
    config = {"policies": ["full"], "tasks": [{"task": "demo_recall", "length": 64, "facts": 2}]}
    return EvalConfig.model_validate(config).tasks[0]


def job(entry, method, budget, tokens=100, context_tokens=None, reference="1 2"):
    prompt = Prompt(Sample("", "q", [reference], 3), list(range(tokens)), [], context_tokens)
    return Job(entry, prompt, method, budget)


@pytest.mark.parametrize("tokens", [97, 128, 1024, 4095])
def test_ratios_are_cut_to_the_number_of_entries(tokens):
    for kept in range(1, tokens):
        assert int(tokens * (1 - dropped(kept, tokens))) == kept
    for kept in range(WINDOW + 2, tokens, 7):
        press = criticalkv_press(kept, tokens, 1)
        first = int((1 - press["inner"]["compression_ratio"]) * tokens * press["first_stage_ratio"])
        assert first == WINDOW + (kept - WINDOW) // 2


@pytest.mark.parametrize("method", METHODS)
def test_what_both_sides_are_asked(entry, method):
    budget = None if method == "full" else 0.2
    asked = job(entry, method, budget, tokens=503)
    config, theirs = parse_compression(asked.ours().compression), asked.theirs()
    assert theirs["compressed"] == 503 and theirs["prompt"] == list(range(503))
    if method == "full":
        assert config is None and theirs["press"] is None
        return
    assert config.budget == asked.kept == 102  # 100.6 entries, in whole pairs
    assert config.decode == ("bounded" if method == "cam" else "grow")
    agnostic = job(entry, method, budget, tokens=503, context_tokens=400)
    assert agnostic.kept == agnostic.ours().compression["budget"] == 80
    assert agnostic.ours().compression["context_tokens"] == agnostic.theirs()["compressed"] == 400


def test_scores_are_compared_prompt_by_prompt(entry):
    jobs = [job(entry, "h2o", 0.1) for _ in range(4)]
    (row,) = compare(jobs, ["1 2", "1 2", "1 2", "3"], ["1 2", " 1 2", "1 3", "4"])
    assert (row.ours.mean, row.kvpress.mean, row.difference.mean) == (0.75, 0.5, 0.25)
    assert row.difference.low == 0 and row.agrees and row.same == 0.5
    (row,) = compare(jobs, ["1 2"] * 4, ["1"] * 4)
    assert not row.agrees and row.difference.low == row.difference.high == 1


def test_methods_that_are_the_same_give_the_same_answers(tmp_path):
    python = os.environ.get("KVMERGE_KVPRESS")
    if python is None:
        pytest.skip("KVMERGE_KVPRESS does not name the python of an environment with kvpress")
    script, path = FOLDER / "kvpress_scores.py", tmp_path / "k.json"
    methods = ["full", "streaming_llm", "tova", "h2o", "snapkv", "pyramidkv", "criticalkv"]
    sizes = [
        "--tasks",
        "demo_recall",
        "--length",
        "256",
        "--budgets",
        "0.3",
        "--samples",
        "4",
        "--seed",
        "5",
        "--processes",
        "2",
    ]
    command = [sys.executable, str(script), "--kvpress", python, "--methods", *methods, *sizes, "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, preexec_fn=end_with_tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads(path.read_text())
    assert result["arguments"]["kvpress"]["kvpress"]
    assert [(row["question"], row["method"]) for row in result["rows"]] == [
        (question, method) for question in ("aware", "agnostic") for method in methods
    ]
    assert all(row["same"] == 1 and row["agrees"] for row in result["rows"])
    full, *compressed = (row["ours"]["mean"] for row in result["rows"])
    assert full > min(compressed)  # something was lost, on both sides alike
