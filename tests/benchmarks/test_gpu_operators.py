"""The benchmark of the operators on a GPU: without one it says so, or runs tiny shapes in the interpreter."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import end_with_tests

pytestmark = pytest.mark.engine

pytest.importorskip("triton", reason="Triton is not installed")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_operators.py"
PARTS = {"decode", "coded", "skewed", "compaction", "merges", "prefill", "peers", "scores", "entries", "float32"}


def run(tmp_path, *options):
    """What it wrote to its output file, and to the terminal."""
    output = tmp_path / "gpu.json"
    command = [sys.executable, SCRIPT, "--interpret", "--output", output, *options]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=end_with_tests)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(output.read_text()), done.stdout


@pytest.mark.benchmarks
def test_every_operator_is_checked_and_every_aim_is_judged(tmp_path):
    found, printed = run(tmp_path)
    rows = found["rows"]
    assert {row["part"] for row in rows} == PARTS and not found["failed"]
    kernels = {"paged_attention", "score_prompt_queries", "score_repetition", "fused_attention", "join_slots"}
    kernels |= {"gather_metadata", "gather_rows", "write_metadata", "write_rows", "write_tokens", "move_entries"}
    kernels |= {"write_codes"}
    assert {row["operator"] for row in rows} == kernels | {"merge_entries", "most_similar", "prefill", "compaction"}
    # What is timed, but is compositions of operators that are checked, has nothing to be compared with.
    assert all(row["errors"] or row["operator"] == "compaction" for row in rows)
    limits = {"bfloat16": 1e-2, "float32": 1e-5}
    assert all(max(row["errors"].values(), default=0.0) <= limits[row["dtype"]] for row in rows)
    assert all(row["seconds"] > 0 and row["operator"] in printed for row in rows)
    peers = {row["implementation"] for row in rows if row["part"] == "peers"}
    assert peers == {"SDPA", "Flex, pages of 16", "Flex, pages of 128"}
    assert found["absent"] and all(f"without {name}" in printed for name in found["absent"])
    judged = {aim["text"]: aim["reached"] for aim in found["aims"]}
    assert all(text in printed for text in judged)
    unknown = {text for text, reached in judged.items() if reached is None}
    # Too small a cache, and no CUDA operators.
    assert len(unknown) == 3 and sum("CUDA" in text for text in unknown) == 2
    assert judged["errors in bfloat16 are at most 1e-02"] and judged["errors in float32 are at most 1e-05"]


@pytest.mark.benchmarks
def test_parts_are_chosen_and_added_to_an_earlier_file(tmp_path):
    earlier = tmp_path / "earlier.json"
    row = {"part": "decode", "operator": "x", "implementation": "triton", "case": "y", "dtype": "float32"}
    earlier.write_text(json.dumps({"rows": [row | {"seconds": 1.0}]}))
    found, _ = run(tmp_path, "--only", "scores", "--resume", earlier)
    assert [row["operator"] for row in found["rows"]] == ["x", *["score_prompt_queries"] * 3, "score_repetition"]
    found, _ = run(tmp_path, "--only", "scores", "entries", "--minutes", "0")
    assert len(found["rows"]) == 1, "a case that was begun is finished"
    assert found["failed"] == {"time": "not complete: scores, entries"}


@pytest.mark.benchmarks
def test_tuning_tries_settings_and_keeps_what_is_right(tmp_path):
    tried, printed = run(tmp_path, "--tune", "write", "--rules", tmp_path / "rules")
    assert "write, G 1" in printed and len(tried) >= 3
    assert {one["kernel"] for one in tried} == {"write"} and all(one["log_seconds"] is not None for one in tried)
    assert len({one["settings"]["block_n"] for one in tried}) == 2
    # Whether one is faster in the interpreter is chance.
    assert all(path.name == "tuning.json" for path in tmp_path.glob("rules/*"))


@pytest.mark.benchmarks
def test_it_needs_no_more_packages_than_it_says(tmp_path):
    """On machines with GPUs there may be torch and Triton, but neither vLLM nor what comes with it."""
    packages = "vllm", "fastapi", "transformers", "tokenizers", "rich", "tvm_ffi", "safetensors", "matplotlib"
    script = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({packages}))
sys.path.insert(0, {str(BENCHMARKS)!r})
sys.argv = ["gpu_operators.py", "--help"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "--tune" in done.stdout, done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["gpu_serving.py", pytest.param("gpu_operators.py", marks=pytest.mark.benchmarks)])
def test_without_a_gpu_it_exits_with_2(tmp_path, script):
    done = subprocess.run([sys.executable, BENCHMARKS / script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "no GPU" in done.stderr and not list(tmp_path.iterdir())


@pytest.fixture
def load(monkeypatch):
    """Imports one of the benchmark's modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


SHAPES = [(1, 1, 1), (3, 50, 1), (2, 256, 1), (2, 150, 40), (1, 300, 300), (2, 129, 129), (1, 260, 132)]


def row_of(load, part="decode", implementation="triton", seconds=1.0, front=512, mode="sum", **changes):
    shape = {"rows": 64, "entries": 4096, "groups": 4, "queries": 1, "front": front, "mode": mode}
    row = load("gpu_bench").Row(
        part, "paged_attention", implementation, f"64 x 4096, front {front}, {mode}", "bfloat16", seconds
    )
    row.shape, row.errors = shape | {"live_bytes": 1 << 30}, {"output": 1e-3}
    for name, value in changes.items():
        setattr(row, name, value)
    return row


def judged(load, rows):
    return {aim.text: aim.reached for aim in load("gpu_aims").aims(rows)}


def the(found, *words):
    (reached,) = (value for text, value in found.items() if all(word in text for word in words))
    return reached


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("85%", {"share": 0.84}),
        ("90%", {"share": 0.89}),
        ("score update takes", {"update": 1.09}),
        ("with votes is at least as fast as FlexAttention over pages: decoding", {"flex": 0.99}),
        ("decoding in CUDA", {"flash": 0.9}),
        ("bfloat16", {"error": 2e-2}),
        ("bfloat16", {"error": math.nan}),
    ],
)
def test_aims_are_judged_by_the_worst_case(load, words, changes):
    def found(share=0.95, update=1.05, flex=1.2, flash=1.0, error=1e-3):
        rows = [
            row_of(load, mode="none", implementation="cuda"),
            row_of(load, seconds=update, share=share, implementation="cuda"),
            row_of(load, "peers", "Flex, pages of 16", 2.0, 4096, "none"),
            row_of(load, "peers", "Flex, pages of 128", flex, 4096, "none"),
            row_of(load, "peers", "SDPA flash", flash, 0, "none", errors={"output": error}),
        ]
        return the(judged(load, rows), words)

    assert found() is True and found(**changes) is False


def test_the_search_takes_the_fastest_that_is_right(load):
    """Four warps are fastest but wrong, tiles of 64 do not run; the rest costs what is said below."""
    tune, tuning = load("gpu_tune"), load("vllm_kvmerge.ops.triton.tuning")
    first = {"warps": 1, "stages": 1, "block_n": 16, "block_m": 16, "least": 128, "programs": 1}

    def measure():
        now = tuning.settings("decode", "Some GPU")
        if now.block_n == 64:
            raise RuntimeError("out of resource: shared memory\nand more")
        seconds = {1: 4.0, 2: 2.0, 4: 0.1}[now.warps] * {16: 1.0, 32: 0.5, 128: 0.999 * 0.5}[now.block_n]
        errors = {"output": 1.0 if now.warps == 4 else 0.0}
        return [row_of(load, seconds=seconds, errors=errors), row_of(load, seconds=seconds)]

    values = {"warps": [1, 2, 4], "block_n": [16, 32, 48, 64, 128]}
    conditions = {"kernel": "decode", "device": "Some GPU"}
    tried = tune.search("decode", 4, conditions, first, values, measure, math.inf)
    assert tried[0].settings == first and tried[-1].settings == first | {"warps": 2, "block_n": 32}
    assert tried[-1].log_seconds == pytest.approx(math.log(1.0))
    reasons = {one.reason for one in tried}
    assert "RuntimeError: out of resource: shared memory" in reasons and "splits would not be whole tiles" in reasons
    assert any(reason.startswith("wrong: ") for reason in reasons)
    assert tune.search("decode", 4, conditions, first, values, measure, -math.inf)[-1].settings == first, "no time"


def test_the_faster_implementation_is_chosen_where_it_is_right(load, tmp_path):
    tune, choice = load("gpu_tune"), load("vllm_kvmerge.ops.choice")

    def rows(error=0.0):
        return [
            row_of(load, implementation=name, seconds=seconds, mode=mode, errors={"output": found})
            for name, seconds, found in (("triton", 1.0, 0.0), ("cuda", 0.5, error))
            for mode in ("none", "sum")
        ]

    (rule,) = tune.chosen(rows(), "Some GPU", 128)
    assert (rule["operator"], rule["implementation"]) == ("paged_attention", "cuda")
    assert rule["measured"].startswith("50% of triton's time in 2 cases")
    assert tune.chosen(rows(error=0.5), "Some GPU", 128) == []
    assert tune.chosen([row for row in rows() if row.implementation == "triton"], "Some GPU", 128) == []
    path = tune.write_rules(tmp_path, choice.RULES, [rule], ("operator", "device", "head_sizes"))
    assert json.loads(path.read_text()) == [*json.loads(choice.RULES.read_text()), rule]
