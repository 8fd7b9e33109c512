"""The rows of docs/support-matrix.md."""

import re

import pytest

from tests import preloaded
from tests.models.architectures import MODELS
from tests.models.matrix import PAGE, found_of, row

pytestmark = pytest.mark.engine

NAMES = [
    pytest.param(name, marks=pytest.mark.xdist_group(f"models {index % 3}"), id=name)
    for index, name in enumerate(MODELS)
]
"""Not all in one process."""


def told(name: str) -> str:
    """The page's row, with notes in full."""
    text = PAGE.read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    notes = dict(re.findall(r"^(\[\^\d+\]): (.*)$", text, re.MULTILINE))
    return re.sub(r"\[\^\d+\]", lambda mark: f" ({notes[mark.group()]})", line)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_says(name):
    notes: dict[str, str] = {}
    line = row(name, found_of(name, preloaded.run), notes)
    reasons = {mark: reason for reason, mark in notes.items()}
    assert re.sub(r"\[\^\d+\]", lambda mark: f" ({reasons[mark.group()]})", line) == told(name)


def test_the_page_has_all_models():
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == ["model", *MODELS]
