"""What turns stock vLLM into a server that compresses."""

from typing import Any

import pytest

from vllm_kvmerge import plugin
from vllm_kvmerge.engine.arguments import is_asked


@pytest.mark.parametrize(
    ("additional_config", "asks"),
    [
        ({"kvmerge": {}}, True),
        ({"kvmerge": {"default": None}, "other": 1}, True),
        ({"kvmerge": None}, False),
        ({"other": {}}, False),
        ({}, False),
        (None, False),
    ],
    ids=repr,
)
def test_any_object_of_ours_asks_for_compression(additional_config: Any, asks: bool) -> None:
    assert plugin._is_asked(additional_config) is is_asked(additional_config) is asks
