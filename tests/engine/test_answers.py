"""Every policy answers what it has answered before (``tests/engine/answers.py`` says how that was noted)."""

import json

import pytest

from tests.engine.answers import ANSWERS, answers, settings
from tests.engine.conftest import Engine

pytestmark = pytest.mark.slow

EXPECTED = json.loads(ANSWERS.read_text())


@pytest.fixture(scope="module")
def found(engine: Engine) -> dict[str, list[list[int]]]:
    return answers(engine.llm)


@pytest.mark.parametrize("name", settings())
def test_tokens(found: dict[str, list[list[int]]], name: str) -> None:
    compared = 0
    for tokens, expected in zip(found[name], EXPECTED[name], strict=True):
        # An answer ends where two tokens are nearly as likely, which another processor may find earlier or later.
        length = min(len(tokens), len(expected))
        assert tokens[:length] == expected[:length]
        compared += length
    assert compared > sum(map(len, EXPECTED[name])) // 2


def test_every_setting_is_noted() -> None:
    assert list(EXPECTED) == list(settings())
