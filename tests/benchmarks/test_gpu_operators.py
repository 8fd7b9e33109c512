"""The benchmark of the operators on a GPU: without one it says so, or runs tiny shapes in the interpreter."""

import json
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
def test_every_operator_is_checked(tmp_path):
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


@pytest.mark.benchmarks
def test_parts_are_chosen(tmp_path):
    found, _ = run(tmp_path, "--only", "scores")
    assert [row["operator"] for row in found["rows"]] == [*["score_prompt_queries"] * 3, "score_repetition"]
    found, _ = run(tmp_path, "--only", "scores", "entries", "--minutes", "0")
    assert len(found["rows"]) == 1, "a case that was begun is finished"
    assert found["failed"] == {"time": "not complete: scores, entries"}


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
    assert done.returncode == 0 and "--interpret" in done.stdout, done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["gpu_serving.py", pytest.param("gpu_operators.py", marks=pytest.mark.benchmarks)])
def test_without_a_gpu_it_exits_with_2(tmp_path, script):
    done = subprocess.run([sys.executable, BENCHMARKS / script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "no GPU" in done.stderr and not list(tmp_path.iterdir())
