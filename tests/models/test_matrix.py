"""The rows of docs/support-matrix.md."""

import re

import pytest

from tests.models.architectures import MODELS
from tests.models.matrix import PAGE, found_of, row

pytestmark = pytest.mark.engine

NAMES = [
    pytest.param(name, marks=pytest.mark.xdist_group(f"models {index % 3}"), id=name)
    for index, name in enumerate(MODELS)
]
"""Not all in one process."""


def in_full(line: str, reasons: dict[str, str]) -> str:
    """A row with its notes."""
    return re.sub(r"\[\^\d+\]", lambda mark: f" ({reasons[mark.group()]})", line)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_says(name):
    text, notes = PAGE.read_text(), {}
    (told,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
    reasons = dict(re.findall(r"^(\[\^\d+\]): (.*)$", text, re.MULTILINE))
    found = row(name, found_of(name), notes)
    assert in_full(found, {mark: reason for reason, mark in notes.items()}) == in_full(told, reasons)


def test_the_page_has_all_models():
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == ["model", *MODELS]
