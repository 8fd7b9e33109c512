"""Computations that are left after a tile, and asked again."""

import pytest
import torch

from tests.policies.sampling import random_entries
from vllm_kvmerge.policies import CompressionContext, tiles
from vllm_kvmerge.policies.tiles import Memory, in_tiles, num_tiles, once
from vllm_kvmerge.request.spec import parse_compression

CPU = torch.device("cpu")


def test_a_computation_goes_on_where_it_was_left():
    """Tiles within tiles, each computed once, whatever lies between them."""
    computed, starts = [], []

    def tile(*number: int) -> tuple[int, ...]:
        computed.append(number)
        return number

    def run() -> list:
        starts.append(None)
        outer = in_tiles(2, lambda first: in_tiles(2, lambda second: tile(first, second)))
        return [outer, once(lambda: tile(5))]

    memory, completed = Memory(), []
    while (result := memory.go_on(run)) is None:
        completed.append(memory.num_completed)
    assert result == [[[(0, 0), (0, 1)], [(1, 0), (1, 1)]], (5,)]
    assert computed == [(0, 0), (0, 1), (1, 0), (1, 1), (5,)]
    assert completed == [0, 0, 1, 1, 1, 2, 3] and len(starts) == len(completed) + 1
    computed.clear()
    assert run() == result and len(computed) == 5, "all at once where nothing is remembered"


def test_a_tile_that_fails_is_computed_again():
    failures = [ValueError("no")]

    def tile(number: int) -> int:
        if number == 1 and failures:
            raise failures.pop()
        return number

    memory = Memory()
    assert memory.go_on(lambda: in_tiles(2, tile)) is None
    with pytest.raises(ValueError, match="no"):
        memory.go_on(lambda: in_tiles(2, tile))
    assert memory.go_on(lambda: in_tiles(2, tile)) is None
    assert memory.go_on(lambda: in_tiles(2, tile)) == [0, 1]


def test_only_what_may_be_left_is_cut():
    assert num_tiles(100, tiles.TILE_PRODUCTS, CPU) == 1
    found = []
    Memory().go_on(lambda: found.append([num_tiles(100, tiles.TILE_PRODUCTS // 2, CPU), num_tiles(3, 1, CPU)]) or 1)
    assert found == [[50, 1]]


@pytest.mark.parametrize("policy", ["keepkv", "d2o", "kvmerger", "rkv", "criticalkv", "grkv", "fused"])
@pytest.mark.parametrize("at_prompt_end", [True, False])
def test_policies_come_to_the_same_in_tiles(policy, at_prompt_end, monkeypatch):
    fused = {"policy": "rkv", "selector": "fused", "of": ["value_leverage", "rkv"]}
    config = parse_compression((fused if policy == "fused" else {"policy": policy}) | {"budget": 60})
    entries = random_entries(5, num_heads=4, n=300, head_size=32)
    entries.log_votes[:, :100] = 0.5
    entries.aux += 1.0
    weights = torch.randn(4, 2, 48, 32)
    context = CompressionContext.of_layer(entries, 60, 300, at_prompt_end, scale=32**-0.5, output_weights=weights)
    expected = config.policy.compress(entries, context)
    monkeypatch.setattr(tiles, "TILE_PRODUCTS", 1 << 14)
    memory, completed = Memory(), [0]
    while (result := memory.go_on(lambda: config.policy.compress(entries, context, 2))) is None:
        completed.append(memory.num_completed)
    assert completed[-1] == 2 and completed == sorted(completed)
    assert policy == "grkv" or completed.count(0) >= 4
    for name, plane in vars(expected.entries).items():
        torch.testing.assert_close(getattr(result.entries, name), plane, msg=name)
