"""Results that differ are told from results that are rounded differently."""

import json
from dataclasses import asdict, replace

import pytest

from tests.gpu.compare import Generated, Tolerance, assert_all_close, assert_close, differences

TOLERANCE = Tolerance(most=0.1, mean=0.05)
EXPECTED = Generated([7, 8, 9, 7], [{7: -0.1, 3: -3.0}, {8: -0.7, 9: -0.8}, {9: -0.2, 8: -2.0}, {7: -0.5, 1: -1.5}])


def shifted(by: float, positions: range) -> Generated:
    candidates = [
        {token: value + by * (index in positions) for token, value in step.items()}
        for index, step in enumerate(EXPECTED.candidates)
    ]
    return replace(EXPECTED, candidates=candidates)


def test_rounding_is_allowed():
    assert assert_close(EXPECTED, Generated.parse(json.loads(json.dumps(asdict(EXPECTED)))), TOLERANCE, "same") == 1
    assert assert_close(shifted(0.09, range(2)), EXPECTED, TOLERANCE, "close") == 1


def test_what_follows_a_tie_is_not_compared():
    other = Generated([7, 9, 1, 2], [*EXPECTED.candidates[:2], {1: -5.0}, {2: -5.0}])
    assert assert_close(other, EXPECTED, TOLERANCE, "tied") == 0.5
    assert_all_close([other, EXPECTED], [EXPECTED] * 2, TOLERANCE, "some", least_share=0.75)
    with pytest.raises(AssertionError, match="only 50% were compared"):
        assert_all_close([other], [EXPECTED], TOLERANCE, "hardly any", least_share=0.6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (shifted(0.11, range(1, 2)), "differ by 0.11 at token 1"),
        (shifted(0.07, range(4)), "by 0.07 on average"),
        (replace(EXPECTED, tokens=[3, 8, 9, 7]), "token 0 differs, by 2.9"),
        (replace(EXPECTED, tokens=[7, 8, 5, 7]), "token 2 differs, by inf"),
        (replace(EXPECTED, tokens=[7, 8, 9]), "3 tokens, not 4"),
        (replace(EXPECTED, candidates=[{5: -0.1}] * 4), "differ by inf at token 0"),
    ],
)
def test_differences_are_found(wrong, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(wrong, EXPECTED, TOLERANCE, "wrong")


def test_all_requests_that_differ_are_told_of():
    found = [shifted(0.11, range(1, 2)), EXPECTED, shifted(0.3, range(2, 4))]
    with pytest.raises(AssertionError) as error:
        assert_all_close(found, [EXPECTED] * 3, TOLERANCE, "some")
    first, *others = str(error.value).splitlines()[:3]
    assert first == "2 of 3 requests:"
    assert (
        others[0]
        == "some, request 0: log-probabilities differ by 0.11 at token 1, 0.11 at most, 0.0275 on average of 4"
    )
    assert others[1].startswith("some, request 2: log-probabilities differ by 0.3 at token 2")
    assert differences[-2:] == [
        "some, request 1: 0, 0 on average, 4 of 4 tokens",
        "some, request 2: 0.3, 0.15 on average, 4 of 4 tokens",
    ]
