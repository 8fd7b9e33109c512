"""The record of defects names tests that there are."""

import re
from pathlib import Path

from tests.defects import RECORD, cases


def test_each_row_names_a_test_that_exists():
    found = cases()
    assert list(found) == list(range(1, len(found) + 1)) and found
    for test in found.values():
        path, name = test.split("::")
        assert re.search(rf"^def {name}\(", (Path(__file__).parents[1] / path).read_text(), flags=re.MULTILINE), test
    assert len(re.findall(r"^\| \d+ \|", RECORD.read_text(), flags=re.MULTILINE)) == len(found)
