"""The benchmark of stated costs runs; whether they hold is tested in tests/policies/test_cost.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.benchmarks]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compaction_cost.py"


def test_stated_and_measured(tmp_path):
    output = tmp_path / "cost.json"
    options = ["--policies", "h2o", "grkv", "--entries", "200", "--share", "0.3", "--repeats", "1", "--output", output]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(output.read_text())["rows"]
    assert [(row["parameters"]["policy"], row["num_entries"]) for row in rows] == [
        ("h2o", 200),
        ("h2o", 76),
        ("grkv", 200),
    ]
    assert all(0 < row["bytes"] <= row["stated_bytes"] and row["stated_seconds"] > 0 for row in rows)
    assert "grkv, prompt, 200" in done.stdout
