"""Some rows of docs/support-matrix.md, others every day."""

import datetime
import os
import re

import pytest

from tests import preloaded
from tests.models.architectures import MODELS
from tests.models.matrix import PAGE, found_of, row

pytestmark = pytest.mark.engine

NUM_ROWS = 2


def todays() -> list[str]:
    """Those that are due, or as ``MODELS`` in the environment says, separated by semicolons."""
    if asked := os.environ.get("MODELS"):
        return asked.split(";")
    names, day = list(MODELS), datetime.date.today().toordinal()
    return [names[(NUM_ROWS * day + index) % len(names)] for index in range(NUM_ROWS)]


def told(name: str) -> str:
    """The page's row, with notes in full."""
    text = PAGE.read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    notes = dict(re.findall(r"^(\[\^\d+\]): (.*)$", text, re.MULTILINE))
    return re.sub(r"\[\^\d+\]", lambda mark: f" ({notes[mark.group()]})", line)


@pytest.mark.parametrize("name", todays())
def test_what_the_page_says(name):
    notes: dict[str, str] = {}
    line = row(name, found_of(name, preloaded.run), notes)
    reasons = {mark: reason for reason, mark in notes.items()}
    assert re.sub(r"\[\^\d+\]", lambda mark: f" ({reasons[mark.group()]})", line) == told(name)


def test_the_page_has_all_models():
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == ["model", *MODELS]
