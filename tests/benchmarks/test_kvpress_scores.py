"""kvpress beside this package: what both sides are given keeps as many entries, and where both compute the same,
answers are the same. The comparison needs an environment with kvpress, which ``KVMERGE_KVPRESS`` names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.processes import end_with_tests
from vllm_kvmerge.evaluation.config import EvalConfig
from vllm_kvmerge.evaluation.runner import Prompt
from vllm_kvmerge.evaluation.tasks.base import Sample
from vllm_kvmerge.request.spec import parse_compression

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

from kvpress_scores import METHODS, WINDOW, Job, Side, compare, criticalkv_press, dropped, kept_alike  # noqa: E402


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
    budget = 0.2 if METHODS[method].takes_budget else None
    asked = job(entry, method, budget, tokens=503)
    config, theirs = parse_compression(asked.ours().compression), asked.theirs()
    assert theirs["compressed"] == 503 and theirs["prompt"] == list(range(503))
    if method == "full":
        assert config is None and theirs["press"] is None
        return
    assert config.decode == ("bounded" if method == "cam" else "grow")
    agnostic = job(entry, method, budget, tokens=503, context_tokens=400)
    if budget is not None:
        assert config.budget == asked.kept == 102  # 100.6 entries, in whole pairs
        assert agnostic.kept == agnostic.ours().compression["budget"] == 80
    assert agnostic.ours().compression["context_tokens"] == agnostic.theirs()["compressed"] == 400


@pytest.mark.parametrize("tokens", [97, 1024])
def test_kvzip_keeps_as_many_entries_of_a_layer_or_of_all(tokens):
    for kept in range(2, tokens, 2):
        ratio = METHODS["kvzip"].theirs(kept, tokens)["compression_ratio"]
        for heads in (2, 8, 256):  # of a layer, or of all
            assert heads * tokens - int(heads * tokens * ratio) == heads * kept


def sides(texts, kept=None):
    return [Side(text, np.ones((1, 100), bool) if kept is None else kept) for text in texts]


def test_scores_are_compared_prompt_by_prompt(entry):
    jobs = [job(entry, "h2o", 0.1) for _ in range(4)]
    half = np.arange(100)[None] < 50
    (row,) = compare(jobs, sides(["1 2", "1 2", "1 2", "3"]), sides(["1 2", " 1 2", "1 3", "4"], half))
    assert (row.ours.mean, row.kvpress.mean, row.difference.mean) == (0.75, 0.5, 0.25)
    assert row.difference.low == 0 and row.agrees and row.same == 0.5
    assert (row.kept, row.order) == (0.5, 1.0)
    (row,) = compare(jobs, sides(["1 2"] * 4), sides(["1"] * 4))
    assert not row.agrees and row.difference.low == row.difference.high == 1


def test_what_both_sides_keep():
    one = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)
    other = np.array([[1, 1, 0, 0], [0, 1, 1, 0]], bool)
    # Two entries of four; of the first head's two, and none of the second's one.
    assert kept_alike(one, other) == kept_alike(other, one) == (0.5, 2 / 3)
    assert kept_alike(np.ones((1, 4), bool), one) == (0.5, 1.0)  # without a compression, all of every head


def test_methods_that_are_the_same_give_the_same_answers(tmp_path):
    python = os.environ.get("KVMERGE_KVPRESS")
    if python is None:
        pytest.skip("KVMERGE_KVPRESS does not name the python of an environment with kvpress")
    script, path = FOLDER / "kvpress_scores.py", tmp_path / "k.json"
    methods = ["full", "streaming_llm", "tova", "h2o", "snapkv", "pyramidkv", "criticalkv"]
    own_budgets = ["kvzip", "kvzip, by layer", "kvzip+", "kvzap, threshold"]
    tasks = [{"task": "demo_recall", "length": 256, "question_agnostic": agnostic} for agnostic in (False, True)]
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model": "demo", "policies": ["full"], "tasks": tasks, "samples": 4, "seed": 5}))
    sizes = ["--config", str(config), "--budgets=0.3", "--processes=2"]
    asked = ["--kvpress", python, "--methods", *methods, *own_budgets, *sizes, "--output", str(path)]
    command = [sys.executable, str(script), *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, preexec_fn=end_with_tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads(path.read_text())
    assert result["arguments"]["kvpress"]["kvpress"]
    assert [(row["question"], row["method"]) for row in result["rows"]] == [
        (question, method) for question in ("aware", "agnostic") for method in methods + own_budgets
    ]
    equal = [row for row in result["rows"] if row["method"] in methods]
    assert all(row["same"] == row["kept"] == 1 and row["agrees"] for row in equal)
    assert all(row["order"] == 1 for row in result["rows"])
    full, *compressed = (row["ours"]["mean"] for row in equal)
    assert full > min(compressed)  # something was lost, on both sides alike
