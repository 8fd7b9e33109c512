"""Computations that are left to wait where they may be."""

import pytest
import torch

from tests.policies.sampling import random_entries
from vllm_kvmerge.policies import CompressionContext, pausing
from vllm_kvmerge.policies.pausing import in_pieces, may_pause, uninterrupted
from vllm_kvmerge.request.spec import parse_compression


def test_a_computation_goes_on_where_it_was_left():
    seen = []

    def deeper(number: int) -> int:
        seen.append(number)
        may_pause(number)
        seen.append(-number)
        return 2 * number

    pieces = in_pieces(lambda: [deeper(1), deeper(2)])
    assert next(pieces) == 1 and seen == [1]
    may_pause()  # of nothing that could wait
    assert next(pieces) == 2 and seen == [1, -1, 2]
    with pytest.raises(StopIteration) as end:
        next(pieces)
    assert end.value.value == [2, 4]


def test_a_computation_that_fails_or_is_given_up_ends_where_it_waits():
    ended = []

    def run():
        try:
            may_pause()
            raise ValueError("no")
        finally:
            ended.append(True)

    failing, given_up = in_pieces(run), in_pieces(run)
    assert next(failing) == next(given_up)
    given_up.close()
    with pytest.raises(ValueError, match="no"):
        next(failing)
    assert ended == [True, True]


def test_what_must_not_wait_does_not():
    def run() -> str:
        with uninterrupted():
            may_pause(1)
            with uninterrupted():
                may_pause(2)
            may_pause(3)
        may_pause(4)
        return "done"

    with uninterrupted():  # nor does anything outside
        assert list(in_pieces(run)) == [4]


@pytest.mark.parametrize("policy", ["keepkv", "d2o", "kvmerger", "rkv", "criticalkv"])
@pytest.mark.parametrize("at_prompt_end", [True, False])
def test_policies_come_to_the_same_in_pieces(policy, at_prompt_end, monkeypatch):
    config = parse_compression({"policy": policy, "budget": 60})
    entries = random_entries(5, num_heads=4, n=300, head_size=32)
    entries.log_votes[:, :100] = 0.5
    entries.aux += 1.0
    weights = torch.randn(4, 2, 48, 32)
    context = CompressionContext.of_layer(entries, 60, 300, at_prompt_end, scale=32**-0.5, output_weights=weights)
    expected = config.policy.compress(entries, context)
    monkeypatch.setattr(pausing, "PIECE_PRODUCTS", 1 << 14)
    pieces, found = in_pieces(lambda: config.policy.compress(entries, context, 2)), []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as end:
            result = end.value
            break
    assert sum(found) == 4 and found.count(0) >= 4
    for name, plane in vars(expected.entries).items():
        torch.testing.assert_close(getattr(result.entries, name), plane, msg=name)
