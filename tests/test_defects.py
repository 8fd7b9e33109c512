"""The record of defects names tests that there are, in the fast layer."""

import ast
from pathlib import Path

import pytest

from tests.defects import RECORD, cases


def is_slow(*marks: ast.expr) -> bool:
    return any("pytest.mark.slow" in ast.unparse(mark) for mark in marks)


@pytest.mark.parametrize("case", cases())
def test_each_row_names_a_test_of_the_fast_layer(case):
    path, name = cases()[case].split("::")
    module = ast.parse((Path(__file__).parents[1] / path).read_text())
    (found,) = (one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == name)
    assert not is_slow(*found.decorator_list)
    assert not is_slow(*(one for one in module.body if isinstance(one, ast.Assign)))


def test_rows_are_numbered():
    rows = [line for line in RECORD.read_text().splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert list(cases()) == list(range(1, len(rows) + 1))
