"""Shares rounded to pages, and heads compressed together whose shares differ."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.sampling import newest_queries, random_entries, rope
from vllm_kvmerge.policies import SELECTORS, CompressionContext
from vllm_kvmerge.policies.shares import fitted_budgets
from vllm_kvmerge.policies.shares import paged_shares as paged_shares_of_groups
from vllm_kvmerge.request.spec import parse_compression

TOGETHER = [name for name, part in SELECTORS.items() if part.takes_shares and not part.pools_heads]


def paged_shares(shares: list[int], *room: int) -> list[int]:
    """Of one group; the others beside it make no difference."""
    groups = np.array([shares, shares[::-1], [max(shares)] * len(shares)])
    return paged_shares_of_groups(groups, *room)[0].tolist()


def num_pages(shares: list[int], size: int) -> int:
    return sum(-(-share // size) for share in shares)


@given(st.data())
def test_they_fit_and_none_loses_more_than_a_page(data):
    size, count = data.draw(st.sampled_from([1, 16, 32])), data.draw(st.integers(1, 40))
    budget = data.draw(st.integers(1, 20 * size))
    least = data.draw(st.integers(1, budget))
    marks = sorted(data.draw(st.integers(0, count * (budget - least))) for _ in range(count - 1))
    shares = [least + b - a for a, b in zip([0, *marks], [*marks, count * (budget - least)], strict=True)]
    room = -(-budget // size) * count
    most = data.draw(st.integers(max(shares), 2 * max(shares)))
    paged = paged_shares(shares, room, size, least, most)
    assert num_pages(paged, size) <= room
    assert all(least <= share <= most for share in paged)
    assert sum(paged) <= sum(shares)
    if num_pages(shares, size) <= room:
        assert paged == shares
    elif room * size - count * budget < size:
        assert sum(shares) - sum(paged) <= count + sum(max(0, b - most + size) for b in paged)
    if least < size and budget > 2 * size:
        # Pages for the least of some, the last as full as others', are taken from what others have, in proportion.
        unused = min(size - 1, -(-(room * size - sum(shares)) // count))
        fewest = -(-(least + unused) // size) * size - unused
        taken = sum(max(0, fewest - share) for share in shares)
        assert all(new > old - 2 * size - taken for new, old in zip(paged, shares, strict=True))


@pytest.mark.parametrize(
    ("shares", "num_pages", "expected"),
    [
        ([100] * 6, 6 * 7, [100] * 6),
        ([97, 33, 17, 13], 13, [97, 33, 17, 13]),
        # Of an even front each head would have three pages of 16, the last with 8 entries.
        ([97, 33, 17, 13], 12, [104, 40, 8, 8]),
    ],
)
def test_shares_in_pages(shares, num_pages, expected):
    assert paged_shares(shares, num_pages, 16, 4, 300) == expected


def test_too_few_pages_are_refused():
    with pytest.raises(ValueError, match="3 pages of 16 cannot hold 17 entries of 2 heads"):
        paged_shares([40, 40], 3, 16, 17, 40)


@pytest.mark.parametrize("selector", TOGETHER)
def test_heads_with_different_shares_together_are_as_each_alone(selector, monkeypatch):
    policy = parse_compression({"policy": "snapkv", "selector": selector}).policy
    generator = torch.Generator().manual_seed(1)
    for seed in range(5):
        entries = random_entries(seed, 6, 90, num_dead=7)
        context = CompressionContext.of_layer(
            entries, 45, 132, True, capacity=90,
            budgets=torch.randint(policy.min_budget, 91, (6,), generator=generator),
            is_packed=True,
            queries=newest_queries(torch.randn(6, 2, 32, 8, generator=generator), 132),
            output_weights=torch.randn(6, 2, 24, 8, generator=generator),
            rotation=rope(8),
        )  # fmt: skip
        together = policy.compress(entries, context)
        with monkeypatch.context() as patch:
            patch.setattr(type(policy.selector), "takes_shares", False)
            alone = policy.compress(entries, context)
        for plane, expected in zip(vars(together.update).values(), vars(alone.update).values(), strict=True):
            assert (plane is None and expected is None) or torch.equal(plane, expected)
        assert torch.equal(together.evicted, alone.evicted)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [({"threshold": 0.1, "max": 0.5}, [100, 100, 10, 10]), (50, [64, 64, 10, 10])],
    ids=["of all layers", "of each layer"],
)
def test_who_shares_pages(budget, expected):
    """Four blocks of two layers with two heads, of 16 entries each: a threshold's heads share them all."""
    policy = parse_compression(
        {"policy": "snapkv", "budget": budget, "allocator": "adaptive"}
        if budget == 50
        else {"policy": "snapkv", "budget": budget}
    ).policy
    assert fitted_budgets(policy.allocator, [100, 100, 10, 10], 2, 4, 16, 1, 200) == expected
