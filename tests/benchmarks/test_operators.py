"""The benchmark of the native operators runs, and what it measures is right."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import end_with_tests
from vllm_kvmerge import ops
from vllm_kvmerge.ops import cpu, reference

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "operators.py"
TOLERANCE = 1e-2


@pytest.mark.benchmarks
@pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="the native operators are not built")
def test_native_operators_are_measured(tmp_path):
    """Those that take time beside the others."""
    output = tmp_path / "operators.json"
    subprocess.run([sys.executable, SCRIPT, "--quick", "--output", output], check=True, preexec_fn=end_with_tests)
    rows = json.loads(output.read_text())["rows"]
    operators = {name for name in vars(ops) if inspect.isfunction(getattr(reference, name, None))}
    measured = {row["operator"] for row in rows}
    assert measured <= {name for name in operators if hasattr(cpu, name)}
    assert {"paged_attention", "attention_scores", "move_entries"} & measured and len(measured) >= 8
    for row in rows:
        assert row["floor"]["least"] > 0 and all(side["least"] > 0 for side in row["seconds"].values()), row
        assert "native" in row["errors"] and max(row["errors"].values()) < TOLERANCE, row
    assert output.with_suffix(".svg").stat().st_size > 0
