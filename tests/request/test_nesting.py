"""The depth of JSON text, told without descending into it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvmerge.request import nesting
from vllm_kvmerge.request.nesting import MAX_DEPTH, nests_too_deep
from vllm_kvmerge.request.spec import CompressionError, parse_compression

TRICKY = st.text('ab"\\[]{}\n\u00e9', max_size=12)
VALUES = st.recursive(
    st.none() | TRICKY, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TRICKY, inner, max_size=4)
)


def depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(VALUES, st.integers(0, 4), st.integers(1, 9), st.booleans())
def test_depth_is_that_of_the_parsed_value(value: object, limit: int, chunk: int, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "MAX_DEPTH", limit)
        patch.setattr(nesting, "CHUNK", chunk)
        assert nests_too_deep(text) == (depth(value) > limit)


@pytest.mark.parametrize("start", ["[", '{"a":', ' [ {"a" :', r'["\\",'])
def test_the_limit_itself_is_allowed(start: str) -> None:
    num_levels = start.count("[") + start.count("{")
    for num_starts in (MAX_DEPTH // num_levels, MAX_DEPTH // num_levels + 1, 1_000_000):
        assert nests_too_deep((start * num_starts).encode()) == (num_starts * num_levels > MAX_DEPTH)


@pytest.mark.parametrize("num_levels", [100, 900, 975, 100_000])
def test_a_deep_parameter_is_refused(num_levels: int) -> None:
    deep = "[" * num_levels + "]" * num_levels
    with pytest.raises(CompressionError, match=f"allowed: {MAX_DEPTH} levels"):
        parse_compression('{"policy": "keepkv", "budget": ' + deep + "}")
    value: list = []
    for _ in range(num_levels):
        value = [value]
    with pytest.raises(CompressionError):
        parse_compression({"policy": "keepkv", "budget": value})


def test_a_long_number_is_refused() -> None:
    for number in ("1" * 5000, "-" + "1" * 5000, "1e5000"):
        with pytest.raises(CompressionError):
            parse_compression('{"policy": "keepkv", "budget": ' + number + "}")
