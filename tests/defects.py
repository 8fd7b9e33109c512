"""Runs the test of a defect: ``python -m tests.defects 1``, with the number of its row in docs/reliability.md."""

import re
import sys
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "docs" / "reliability.md"


def cases() -> dict[int, str]:
    """Each row's test, by its number."""
    rows = re.findall(r"^\| (\d+) \|.*\| `(tests/\S+)` \|$", RECORD.read_text(), flags=re.MULTILINE)
    return {int(number): test for number, test in rows}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdigit() or int(sys.argv[1]) not in cases():
        sys.exit(f"make reliability: CASE is one of {', '.join(map(str, cases()))}")
    sys.exit(pytest.main([cases()[int(sys.argv[1])]]))
