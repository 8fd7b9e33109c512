"""Results that differ are told from results that are rounded differently."""

import json
from dataclasses import asdict, replace

import pytest

from tests.gpu.compare import Generated, Tolerance, assert_all_close, assert_close

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
    # What follows a tie is not compared.
    other = Generated([7, 9, 1, 2], [*EXPECTED.candidates[:2], {1: -5.0}, {2: -5.0}])
    assert_all_close([other, EXPECTED], [EXPECTED] * 2, TOLERANCE, "some", least_share=0.75)
    with pytest.raises(AssertionError, match="only 50% were compared"):
        assert_all_close([other], [EXPECTED], TOLERANCE, "hardly any", least_share=0.6)


@pytest.mark.parametrize(
    "wrong",
    [
        shifted(0.11, range(1, 2)),
        shifted(0.07, range(4)),
        replace(EXPECTED, tokens=[3, 8, 9, 7]),
        replace(EXPECTED, tokens=[7, 8, 5, 7]),
        replace(EXPECTED, tokens=[7, 8, 9]),
        replace(EXPECTED, candidates=[{5: -0.1}] * 4),
    ],
)
def test_differences_are_found(wrong):
    with pytest.raises(AssertionError, match="1 of 2 requests:\nsome, request 0: "):
        assert_all_close([wrong, EXPECTED], [EXPECTED] * 2, TOLERANCE, "some")
