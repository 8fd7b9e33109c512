"""Budgets per layer and head, and what the composition makes of them."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.policies.sampling import (
    SEEDS,
    as_worker,
    in_layer,
    newest_queries,
    on_two_workers,
    random_entries,
)
from vllm_kvmerge.policies import DEAD, Allocator, CompressionContext, CompressionPolicy, Entries, Heads, Selector
from vllm_kvmerge.policies.allocators import Adaptive, AllHeads, Pyramid, Variance
from vllm_kvmerge.policies.allocators.variance import split
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.policies.selectors import HeavyHitter, WindowTopK
from vllm_kvmerge.policies.trackers import LogEmaTracker, MeanTracker, NoTracker, SumTracker, attention_mass


def policy_of(allocator: Allocator, selector: Selector) -> CompressionPolicy:
    return CompressionPolicy(tracker=SumTracker(), allocator=allocator, selector=selector, merger=DropMerger())


def context_of(
    entries: Entries, allocator: Allocator, budget: int, at_prompt_end: bool = True, **fields: object
) -> CompressionContext:
    n = len(entries)
    capacity = min(n, allocator.capacity(budget))
    return CompressionContext.of_layer(entries, budget, n, at_prompt_end, capacity=capacity, **fields)


def uneven(entries: Entries) -> Entries:
    """The same with scores that make some heads' attention much more concentrated than others'."""
    power = torch.arange(1, len(entries.positions) + 1).unsqueeze(1)
    return replace(entries, scores=entries.scores**power)


def budgets_of_layers(allocator: Allocator, budget: int, num_layers: int, **fields: object) -> list[int]:
    """What a layer's two heads get, which is the same."""
    entries, budgets = random_entries(0, num_heads=2, n=4), []
    for layer in range(num_layers):
        context = CompressionContext.of_layer(entries, budget, 4, True, layer=layer, num_layers=num_layers, **fields)
        first, second = allocator.head_budgets(entries, entries.scores, context).tolist()
        assert first == second
        budgets.append(first)
    return budgets


@given(st.integers(1, 5000), st.integers(1, 100), st.floats(1.0, 100.0), st.sampled_from(["linear", "cosine"]))
def test_pyramid(budget, num_layers, ratio, shape):
    allocator = Pyramid(shape=shape, ratio=ratio)
    budgets = budgets_of_layers(allocator, budget, num_layers)
    assert sum(budgets) == num_layers * budget
    assert budgets == sorted(budgets, reverse=True)
    assert min(budgets) >= 0 and max(budgets) <= allocator.capacity(budget) <= 2 * budget
    if num_layers > 1:
        assert budgets[0] == allocator.capacity(budget)
        assert abs(budgets[0] - ratio * budgets[-1]) <= 0.5 * (1 + ratio)


def test_pyramid_shapes():
    # beta = 20 of PyramidKV: the last layer has a twentieth of the budget.
    assert budgets_of_layers(Pyramid(), 200, 5) == [390, 295, 200, 105, 10]
    # PyramidInfer's factor on the first layer's budget: 0.9 (cos(pi l / (L - 1)) + 1) / 2 + 0.1.
    first = 200 * 2 / 1.1
    expected = [round(first * (0.9 * (math.cos(math.pi * layer / 4) + 1) / 2 + 0.1)) for layer in range(5)]
    assert budgets_of_layers(Pyramid(shape="cosine", ratio=10.0), 200, 5) == expected


@examples(100)
@given(SEEDS, st.integers(1, 5), st.integers(3, 40), st.floats(0.0, 1.0), st.floats(1.0, 4.0), st.data())
def test_adaptive_against_a_loop(seed, num_heads, n, floor_share, max_share, data):
    entries = uneven(random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n - 1))))
    budget = data.draw(st.integers(1, n - 1))
    least = data.draw(st.integers(0, budget))
    allocator = Adaptive(floor_share=floor_share, max_share=max_share)
    mass = attention_mass(SumTracker(), entries)
    context = context_of(entries, allocator, budget, min_budget=least)
    budgets = allocator.head_budgets(entries, mass, context).tolist()

    floor, most = max(int(floor_share * budget), least), min(n, allocator.capacity(budget))
    expected = [floor] * num_heads
    ranked = [
        sorted((s if p != DEAD else -1.0 for s, p in zip(*head, strict=True)), reverse=True)
        for head in zip(mass.tolist(), entries.positions.tolist(), strict=True)
    ]
    for _ in range(num_heads * (budget - floor)):
        # The head whose next entry has the largest share of attention gets one more.
        head = max(
            (h for h in range(num_heads) if expected[h] < most), key=lambda h: (ranked[h][expected[h]], -expected[h])
        )
        expected[head] += 1
    assert budgets == expected
    assert sum(budgets) == num_heads * budget
    assert all(floor <= b <= allocator.capacity(budget) for b in budgets)
    # A worker splits among its own heads, so that all workers hold the same.
    own = list(range(data.draw(st.integers(1, num_heads))))
    worker = as_worker(context, own, lambda tensor: pytest.fail("asked another worker"))
    split_alone = allocator.head_budgets(entries.of_rows(own), mass[own], worker).tolist()
    assert sum(split_alone) == len(own) * budget
    assert own != list(range(num_heads)) or split_alone == budgets


@examples(50)
@given(
    SEEDS,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(3, 40),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.floats(1.0, 4.0),
    st.data(),
)
def test_a_budget_for_all_heads_of_all_layers(seed, num_layers, num_heads, n, floor_share, max_share, data):
    """Between least and most, a head has the entries above a threshold that is the same in all layers."""
    entries = random_entries(seed, num_layers * num_heads, n)
    budget = data.draw(st.integers(1, n - 1))
    least, allocator = data.draw(st.integers(0, budget)), AllHeads(floor_share=floor_share, max_share=max_share)
    mass = entries.scores.abs()
    context = context_of(entries, allocator, budget, min_budget=least, num_layers=num_layers)
    budgets = allocator.pooled_budgets(mass, context).tolist()
    least = max(least, int(floor_share * budget))
    assert sum(budgets) == num_layers * num_heads * budget
    most = min(n, allocator.capacity(budget))
    assert all(least <= one <= most for one in budgets)
    ranked = mass.sort(descending=True).values
    # No head gives up an entry of which another has a smaller one that it could do without.
    left_out = [float(row[one]) for row, one in zip(ranked, budgets, strict=True) if one < most]
    held = [float(row[one - 1]) for row, one in zip(ranked, budgets, strict=True) if one > least]
    assert not left_out or not held or max(left_out) <= min(held)


def test_attention_mass_is_a_distribution_over_live_entries():
    entries = random_entries(0, num_heads=3, n=20, num_dead=6)
    live = entries.is_live
    entries.aux = torch.where(live, torch.arange(20.0) % 3, torch.nan)
    scored = live & (entries.aux > 0)
    shares = {
        SumTracker(): entries.scores.where(live, 0.0),
        MeanTracker(): (entries.scores / entries.aux).where(scored, 0.0),
        LogEmaTracker(): LogEmaTracker().importance(entries).exp().where(scored, 0.0),
    }
    for tracker, expected in shares.items():
        torch.testing.assert_close(attention_mass(tracker, entries), expected / expected.sum(1, keepdim=True))
    entries.aux.zero_()
    entries.scores.zero_()
    for tracker in (NoTracker(), SumTracker(), MeanTracker(), LogEmaTracker()):
        assert (attention_mass(tracker, entries) == 0).all()


@examples(40)
@given(SEEDS, st.integers(1, 4), st.integers(2, 40), st.data())
def test_layer_statistic_is_the_mean_variance_of_relative_mass(seed, num_heads, n, data):
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n - 1)))
    policy = policy_of(Variance(), HeavyHitter())
    context = CompressionContext.of_layer(entries, 1, n, at_prompt_end=True)
    expected = []
    for scores, positions in zip(entries.scores.tolist(), entries.positions.tolist(), strict=True):
        mass = [s for s, p in zip(scores, positions, strict=True) if p != DEAD]
        mean = sum(mass) / len(mass)
        expected.append(sum((s / mean - 1) ** 2 for s in mass) / len(mass))
    statistic = policy.layer_statistic(entries, context)
    assert statistic.shape == (1,)
    torch.testing.assert_close(statistic.item(), sum(expected) / num_heads, rtol=1e-4, atol=1e-5)
    for cut in range(1, num_heads):
        for half in on_two_workers(policy.layer_statistic, entries, context, cut):
            assert half.item() == statistic.item()


def test_variance_is_softmax_until_it_is_cut():
    weights = [math.exp(-0.5), math.exp(-1.0), math.exp(-1.5)]

    def budgets(allocator: Variance) -> list[int]:
        return budgets_of_layers(allocator, 100, 3, layer_statistics=torch.tensor([[0.5, 1.0, 1.5]]))

    assert budgets(Variance()) == [round(300 * weight / sum(weights)) for weight in weights]
    left = [round(180 * weight / sum(weights[1:])) for weight in weights[1:]]
    assert budgets(Variance(max_share=1.2)) == [120, min(120, left[0]), 180 - min(120, left[0])]
    assert split(7, [1.0, 1.0, 1.0], 0, 3) == [3, 2, 2]
    assert split(30, [8.0, 1.0, 1.0], 5, 20) == [20, 5, 5]
    assert split(40, [6.0, 3.0, 1.0], 6, 30) == [23, 11, 6]
    assert budgets_of_layers(Variance(), 100, 1) == [100]


def test_groups_of_heads_get_their_own_context():
    seen = []

    class Spy(HeavyHitter):
        def select(
            self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
        ) -> Tensor:
            seen.append(context)
            return super().select(entries, importance, protected, context)

    entries = uneven(random_entries(0, num_heads=3, n=40))
    vectors = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 4, 8)
    weights = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 5, 8)
    context = context_of(entries, Adaptive(), 10, queries=newest_queries(vectors, 40), output_weights=weights)
    assert torch.equal(context.of_rows([0, 2]).output_weights, weights[[0, 2]])
    indices = [4, 5, 6]  # of nine heads, on three workers
    context = replace(context, heads=Heads.of([0], indices, 1, lambda tensor: torch.cat([tensor] * 3)))
    policy_of(Adaptive(), Spy()).compress(entries, context)
    assert len(seen) > 1
    for local in seen:
        own = [head - 4 for head in local.heads.indices]
        assert torch.equal(local.queries.vectors, vectors[own])
        assert torch.equal(local.output_weights, weights[own])
    assert sorted(head for local in seen for head in local.heads.indices) == indices


def test_a_share_below_what_the_selector_protects_is_raised():
    policy = policy_of(Pyramid(), WindowTopK(window_size=8))
    entries = random_entries(0, num_heads=2, n=60)
    context = context_of(entries, Pyramid(), 20, num_layers=4)
    last = in_layer(context, 3)
    assert Pyramid().head_budgets(entries, entries.scores, last).tolist() == [1, 1]
    assert policy.compress(entries, last).entries.is_live.sum(1).tolist() == [9, 9]
    # The other layers make up for it: the mean is the budget.
    layers = [policy.compress(entries, in_layer(context, layer)).entries for layer in range(4)]
    assert [result.is_live.sum(1).tolist() for result in layers] == [[31, 31], [24, 24], [16, 16], [9, 9]]
    assert all(len(result) == context.capacity == 39 for result in layers)
