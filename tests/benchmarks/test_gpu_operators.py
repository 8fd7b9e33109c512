"""The benchmark of the operators on a card: without one it says so, or runs tiny shapes in the interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_operators.py"
OPERATORS = {
    "paged_attention",
    "column_scores",
    "gather_metadata",
    "gather_rows",
    "write_metadata",
    "write_rows",
    "move_entries",
    "merge_entries",
    "most_similar",
    "fused_attention",
    "join_slots",
    "write_tokens",
}


def test_every_triton_operator_is_checked(tmp_path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, SCRIPT, "--interpret", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(output.read_text())["rows"]
    assert {row["operator"] for row in rows} == OPERATORS
    assert all(row["errors"] and max(row["errors"].values()) < 1e-2 for row in rows)
    assert all(row["operator"] in done.stdout for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_exits_with_2(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "no card" in done.stderr and not list(tmp_path.iterdir())
