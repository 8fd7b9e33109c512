"""Budgets per layer and head, and what the composition makes of them."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from tests.examples import examples
from tests.policies.sampling import (
    SEEDS,
    as_worker,
    assert_same,
    assert_sound,
    in_layer,
    newest_queries,
    random_entries,
    stack_rows,
)
from vllm_kvmerge.ops import ScoreMode
from vllm_kvmerge.policies import (
    DEAD,
    Allocator,
    CompressionContext,
    CompressionPolicy,
    Entries,
    Merger,
    Selector,
    Tracker,
)
from vllm_kvmerge.policies.allocators import Adaptive, AllHeads, Pyramid, Uniform, Variance
from vllm_kvmerge.policies.allocators.variance import split
from vllm_kvmerge.policies.errors import PartError
from vllm_kvmerge.policies.mergers import AsymKVMerger, CamMerger, D2OMerger, DropMerger, ResidualMerger, ZipMerger
from vllm_kvmerge.policies.selectors import HeavyHitter, RandomKeep, Recent, Tova, WindowTopK
from vllm_kvmerge.policies.trackers import LogEmaTracker, MeanTracker, NoTracker, SumTracker, attention_mass


def policy_of(
    allocator: Allocator,
    selector: Selector | None = None,
    merger: Merger | None = None,
    tracker: Tracker | None = None,
) -> CompressionPolicy:
    return CompressionPolicy(
        tracker=tracker or SumTracker(),
        allocator=allocator,
        selector=selector or HeavyHitter(num_sink_tokens=1, recent_window=1),
        merger=merger or DropMerger(),
    )


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


def on_two_workers(
    compute: Callable[[Entries, CompressionContext], object], entries: Entries, context: CompressionContext, cut: int
) -> list[object]:
    """What ``compute`` gives for heads ``[0, cut)`` and for the others, as two tensor-parallel workers would run it."""
    heads = (range(cut), range(cut, len(entries.positions)))
    sent: list[Tensor] = []

    class Sent(BaseException):
        pass

    def send(tensor: Tensor) -> Tensor:
        sent.append(tensor)
        raise Sent

    for own in heads:
        with pytest.raises(Sent):
            compute(entries.of_rows(list(own)), as_worker(context, list(own), send))
    results = []
    for worker, own in enumerate(heads):

        def gather(tensor: Tensor, worker: int = worker) -> Tensor:
            torch.testing.assert_close(tensor, sent[worker], rtol=0, atol=0)
            return torch.cat(sent)

        results.append(compute(entries.of_rows(list(own)), as_worker(context, list(own), gather)))
    return results


@given(st.integers(1, 5000), st.integers(1, 100), st.floats(1.0, 100.0), st.sampled_from(["linear", "cosine"]))
def test_pyramid(budget, num_layers, ratio, shape):
    allocator = Pyramid(shape=shape, ratio=ratio)
    entries = random_entries(0, num_heads=2, n=4)
    budgets = []
    for layer in range(num_layers):
        context = CompressionContext.of_layer(
            entries, budget, 4, at_prompt_end=True, layer=layer, num_layers=num_layers
        )
        first, second = allocator.head_budgets(entries, entries.scores, context)
        assert first == second
        budgets.append(first)
    assert sum(budgets) == num_layers * budget
    assert budgets == sorted(budgets, reverse=True)
    assert min(budgets) >= 0 and max(budgets) <= allocator.capacity(budget) <= 2 * budget
    if num_layers > 1:
        assert budgets[0] == allocator.capacity(budget)
        assert abs(budgets[0] - ratio * budgets[-1]) <= 0.5 * (1 + ratio)


def test_pyramid_shapes():
    entries = random_entries(0, num_heads=1, n=4)

    def budgets(allocator: Pyramid) -> list[int]:
        contexts = [CompressionContext.of_layer(entries, 200, 4, True, layer=layer, num_layers=5) for layer in range(5)]
        return [allocator.head_budgets(entries, entries.scores, context)[0] for context in contexts]

    # beta = 20 of PyramidKV: the last layer has a twentieth of the budget.
    assert budgets(Pyramid()) == [390, 295, 200, 105, 10]
    # PyramidInfer's factor on the first layer's budget: 0.9 (cos(pi l / (L - 1)) + 1) / 2 + 0.1.
    first = 200 * 2 / 1.1
    expected = [round(first * (0.9 * (math.cos(math.pi * layer / 4) + 1) / 2 + 0.1)) for layer in range(5)]
    assert budgets(Pyramid(shape="cosine", ratio=10.0)) == expected
    assert budgets(Pyramid(ratio=1.0)) == [200] * 5


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
@given(SEEDS, st.integers(1, 4), st.integers(1, 3), st.integers(3, 40), st.floats(1.0, 4.0), st.data())
def test_a_budget_for_all_heads_of_all_layers(seed, num_layers, num_heads, n, max_share, data):
    """Between least and most, a head has the entries above a threshold that is the same in all layers."""
    entries = random_entries(seed, num_layers * num_heads, n)
    budget = data.draw(st.integers(1, n - 1))
    least, allocator = data.draw(st.integers(0, budget)), AllHeads(max_share=max_share)
    mass = entries.scores.abs()
    context = context_of(entries, allocator, budget, min_budget=least, num_layers=num_layers)
    budgets = allocator.pooled_budgets(mass, context).tolist()
    assert sum(budgets) == num_layers * num_heads * budget
    most = min(n, allocator.capacity(budget))
    assert all(least <= one <= most for one in budgets)
    ranked = mass.sort(descending=True).values
    # No head gives up an entry of which another has a smaller one that it could do without.
    left_out = [float(row[one]) for row, one in zip(ranked, budgets, strict=True) if one < most]
    held = [float(row[one - 1]) for row, one in zip(ranked, budgets, strict=True) if one > least]
    assert not left_out or not held or max(left_out) <= min(held)


def test_adaptive_gives_equal_heads_equal_budgets():
    entries = random_entries(0, num_heads=4, n=30)
    context = context_of(entries, Adaptive(), 10)
    for scores in (torch.ones(4, 30), torch.zeros(4, 30), entries.scores[:1].repeat(4, 1)):
        mass = attention_mass(SumTracker(), replace(entries, scores=scores))
        assert Adaptive().head_budgets(entries, mass, context).tolist() == [10] * 4
    # Scaling a head's scores, as a head that attends more to its newest entries does to the others, changes nothing.
    mass = attention_mass(SumTracker(), entries)
    scaled = replace(entries, scores=entries.scores * torch.tensor([[1.0], [10.0], [0.1], [3.0]]))
    torch.testing.assert_close(attention_mass(SumTracker(), scaled), mass)


def test_adaptive_gives_nothing_to_dead_entries_while_there_are_live_ones():
    entries = random_entries(0, num_heads=2, n=12)
    entries.positions[0, 3:] = DEAD
    entries.scores[1, 1:] = 0.0
    mass = attention_mass(SumTracker(), entries)
    assert Adaptive(floor_share=0.0).head_budgets(entries, mass, context_of(entries, Adaptive(), 6)).tolist() == [3, 9]


def test_attention_mass_is_a_distribution_over_live_entries():
    entries = random_entries(0, num_heads=3, n=20, num_dead=6)
    live = entries.is_live
    entries.aux = torch.where(live, torch.arange(20.0) % 3, torch.nan)
    for tracker in (SumTracker(), MeanTracker(), LogEmaTracker()):
        mass = attention_mass(tracker, entries)
        assert (mass[~live] == 0).all() and (mass >= 0).all()
        torch.testing.assert_close(mass.sum(1), torch.ones(3))
        if tracker.mode != ScoreMode.SUM:
            assert (mass[live & (entries.aux == 0)] == 0).all()
    importance = LogEmaTracker().importance(entries)
    scored = live & (entries.aux > 0)
    expected = torch.where(scored, importance.double().exp(), 0.0)
    expected = (expected / expected.sum(1, keepdim=True)).float()
    torch.testing.assert_close(attention_mass(LogEmaTracker(), entries), expected)

    entries.aux.zero_()
    entries.scores.zero_()
    for tracker in (NoTracker(), SumTracker(), MeanTracker(), LogEmaTracker()):
        assert (attention_mass(tracker, entries) == 0).all()


@examples(40)
@given(SEEDS, st.integers(1, 4), st.integers(2, 40), st.data())
def test_layer_statistic_is_the_mean_variance_of_relative_mass(seed, num_heads, n, data):
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n - 1)))
    policy = policy_of(Variance())
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


@examples(100)
@given(
    st.lists(st.floats(0.0, 1e4, allow_subnormal=False), min_size=1, max_size=40),
    st.integers(1, 2000),
    st.floats(1.0, 4.0),
    st.floats(0.0, 1.0),
)
def test_variance_budgets(variances, budget, max_share, least_share):
    least = int(least_share * budget)
    allocator = Variance(max_share=max_share)
    entries = random_entries(0, num_heads=2, n=4)
    statistics = torch.tensor(variances)
    budgets = []
    for layer in range(len(variances)):
        context = CompressionContext.of_layer(
            entries,
            budget,
            4,
            True,
            min_budget=least,
            layer=layer,
            num_layers=len(variances),
            layer_statistics=statistics[None],
        )
        first, second = allocator.head_budgets(entries, entries.scores, context)
        assert first == second
        budgets.append(first)
    assert sum(budgets) == budget * len(variances)
    assert all(least <= b <= allocator.capacity(budget) for b in budgets)
    for (v, b), (w, c) in itertools.combinations(zip(statistics.tolist(), budgets, strict=True), 2):
        assert (v <= w or b <= c + 1) and (w <= v or c <= b + 1)


def test_variance_is_softmax_until_it_is_cut():
    statistics = torch.tensor([0.5, 1.0, 1.5])
    weights = [math.exp(-0.5), math.exp(-1.0), math.exp(-1.5)]
    entries = random_entries(0, num_heads=1, n=4)

    def budgets(allocator: Variance) -> list[int]:
        context = CompressionContext.of_layer(entries, 100, 4, True, num_layers=3, layer_statistics=statistics[None])
        layers = [in_layer(context, layer) for layer in range(3)]
        return [allocator.head_budgets(entries, entries.scores, layer)[0] for layer in layers]

    assert budgets(Variance()) == [round(300 * weight / sum(weights)) for weight in weights]
    left = [round(180 * weight / sum(weights[1:])) for weight in weights[1:]]
    assert budgets(Variance(max_share=1.2)) == [120, min(120, left[0]), 180 - min(120, left[0])]
    assert budgets(Variance(max_share=1.0)) == [100, 100, 100]
    assert split(7, [1.0, 1.0, 1.0], 0, 3) == [3, 2, 2]
    assert split(30, [8.0, 1.0, 1.0], 5, 20) == [20, 5, 5]
    assert split(40, [6.0, 3.0, 1.0], 6, 30) == [23, 11, 6]
    alone = CompressionContext.of_layer(entries, 100, 4, at_prompt_end=True)
    assert Variance().head_budgets(entries, entries.scores, alone) == [100]


def test_what_does_not_go_together():
    with pytest.raises(ValidationError, match="selector 'tova' ranks all heads together, allocator 'adaptive'"):
        policy_of(Adaptive(), Tova())
    for allocator in (Pyramid(), Variance(), Uniform()):
        assert policy_of(allocator, Tova()).allocator is allocator
    entries = random_entries(0)
    with pytest.raises(PartError, match="allocator 'uniform' has no layer statistic"):
        policy_of(Uniform()).layer_statistic(entries, CompressionContext.of_layer(entries, 4, 16, True))


ALLOCATORS = (Uniform(), Adaptive(), Adaptive(floor_share=0.0, max_share=3.0), Pyramid(ratio=5.0), Variance())
PARTS = (
    (HeavyHitter(num_sink_tokens=1, recent_window=1), DropMerger(), SumTracker()),
    (WindowTopK(window_size=2, kernel_size=3), D2OMerger(), SumTracker()),
    (HeavyHitter(num_sink_tokens=0), CamMerger(num_receivers=3, merge_prompt=True), SumTracker()),
    (HeavyHitter(num_sink_tokens=1, recent_window=1), AsymKVMerger(), SumTracker()),
    (HeavyHitter(num_sink_tokens=1, recent_window=1), ResidualMerger(), SumTracker()),
    (HeavyHitter(num_sink_tokens=1, recent_window=1), ZipMerger(merge_threshold=0.3), LogEmaTracker()),
    (RandomKeep(), DropMerger(), NoTracker()),
    (Recent(), DropMerger(), NoTracker()),
)
POLICIES = [policy_of(allocator, *parts) for allocator in ALLOCATORS for parts in PARTS]


@examples(150)
@given(st.sampled_from(POLICIES), SEEDS, st.integers(1, 4), st.integers(1, 30), st.integers(0, 3), st.data())
def test_every_head_is_compressed_as_if_it_were_alone(policy, seed, num_heads, more, layer, data):
    n = policy.min_budget + more
    num_dead = data.draw(st.integers(0, n))
    entries = uneven(random_entries(seed, num_heads, n, num_dead=num_dead))
    if policy.tracker.mode == ScoreMode.LOG_EMA:
        entries.aux.fill_(2.0)
    untouched = entries.clone()
    budget = data.draw(st.integers(policy.min_budget, n - 1))
    statistics = torch.tensor([3.0, 1.0, 0.5, 2.0])
    fields = {"layer": layer, "num_layers": 4, "layer_statistics": statistics[None]}
    context = context_of(entries, policy.allocator, budget, at_prompt_end=False, **fields)
    result = policy.compress(entries, context)
    assert_same(entries, untouched)
    assert_sound(result.entries, context.capacity)

    mass = attention_mass(policy.tracker, entries)
    budgets = policy.allocator.head_budgets(entries, mass, replace(context, min_budget=policy.min_budget))
    budgets = [min(int(b), context.capacity) for b in budgets]
    num_live = result.entries.is_live.sum(1).tolist()
    assert all(live <= b <= context.capacity for live, b in zip(num_live, budgets, strict=True))
    if not isinstance(policy.merger, ResidualMerger):
        assert num_live == [min(b, n - num_dead) for b in budgets]
    assert result.num_merged + result.num_evicted + sum(num_live) == num_heads * (n - num_dead)
    dead = ~result.entries.is_live
    for name in ("keys", "values", "scores", "aux"):
        assert (getattr(result.entries, name)[dead] == 0).all()

    alone = policy.model_copy(update={"allocator": Uniform()})
    merged = evicted = 0
    for head, head_budget in enumerate(budgets):
        own = replace(as_worker(context, [head]), budget=head_budget)
        one = alone.compress(entries.of_rows([head]), own)
        for name in ("positions", "log_votes", "scores", "aux"):
            assert torch.equal(getattr(one.entries, name)[0], getattr(result.entries, name)[head]), name
        torch.testing.assert_close(one.entries.keys[0], result.entries.keys[head])
        torch.testing.assert_close(one.entries.values[0], result.entries.values[head])
        merged, evicted = merged + one.num_merged, evicted + one.num_evicted
    assert (merged, evicted) == (result.num_merged, result.num_evicted)


@pytest.mark.parametrize("parts", PARTS[:4], ids=lambda parts: parts[1].name)
def test_two_workers_do_what_one_does(parts):
    allocator = Variance()
    policy = policy_of(allocator, *parts)
    entries = uneven(random_entries(3, num_heads=4, n=60, num_dead=5))
    context = context_of(entries, allocator, 16, False, layer_statistics=torch.tensor([[1.0, 2.0]]), num_layers=2)
    whole = policy.compress(entries, context).entries
    halves = [policy.compress(entries.of_rows(own), as_worker(context, own)).entries for own in ([0], [1, 2, 3])]
    assert_same(stack_rows(halves), whole)


def test_adaptive_leaves_each_head_what_its_selector_protects():
    entries, allocator = uneven(random_entries(0, num_heads=4, n=60)), Adaptive(floor_share=0.2)
    context, mass = context_of(entries, allocator, 16, min_budget=12), attention_mass(SumTracker(), entries)
    budgets = allocator.head_budgets(entries, mass, context).tolist()
    assert min(budgets) == 12 and sum(budgets) == 4 * 16


def test_groups_of_heads_get_their_own_context():
    seen = []

    class Spy(Recent):
        def select(
            self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
        ) -> Tensor:
            seen.append(context)
            return super().select(entries, importance, protected, context)

    entries = uneven(random_entries(0, num_heads=3, n=40))
    vectors = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 4, 8)
    weights = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 5, 8)
    policy = policy_of(Adaptive(), Spy())
    context = context_of(entries, Adaptive(), 10, queries=newest_queries(vectors, 40), output_weights=weights)
    assert torch.equal(context.of_rows([0, 2]).output_weights, weights[[0, 2]])
    for indices, num_workers in (([0, 1, 2], 1), ([4, 5, 6], 3)):
        seen.clear()
        policy.compress(entries, as_worker(context, indices, lambda tensor: torch.cat([tensor] * num_workers)))  # noqa: B023
        assert len(seen) > 1
        for local in seen:
            own = [head - indices[0] for head in local.heads.indices]
            assert torch.equal(local.queries.vectors, vectors[own])
            assert torch.equal(local.output_weights, weights[own])
        assert sorted(head for local in seen for head in local.heads.indices) == indices


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=repr)
def test_room_for_less_than_the_capacity(allocator):
    """A prompt between the budget and the capacity: the cache has room for all of it, budgets still hold."""
    policy = policy_of(allocator)
    entries = uneven(random_entries(1, num_heads=3, n=22))
    context = context_of(entries, allocator, 20, layer_statistics=torch.tensor([[1.0, 5.0]]), num_layers=2)
    result = policy.compress(entries, context).entries
    assert_sound(result, min(22, allocator.capacity(20)))
    assert result.is_live.any(1).all()
    same = policy.compress(entries, replace(context, budget=22, capacity=22))
    assert_same(same.entries, entries)


def test_a_share_below_what_the_selector_protects_is_raised():
    policy = policy_of(Pyramid(), WindowTopK(window_size=8))
    entries = random_entries(0, num_heads=2, n=60)
    context = context_of(entries, Pyramid(), 20, num_layers=4)
    last = in_layer(context, 3)
    assert Pyramid().head_budgets(entries, entries.scores, last) == [1, 1]
    assert policy.compress(entries, last).entries.is_live.sum(1).tolist() == [9, 9]
    # The other layers make up for it: the mean is the budget.
    layers = [policy.compress(entries, in_layer(context, layer)).entries for layer in range(4)]
    assert [result.is_live.sum(1).tolist() for result in layers] == [[31, 31], [24, 24], [16, 16], [9, 9]]
    assert all(len(result) == context.capacity == 39 for result in layers)


def test_skipped_layers_keep_everything():
    """MorphKV appendix A.6."""
    allocator = Uniform(skip_layers=2)
    assert (allocator.capacity(20), Uniform().capacity(20)) == (None, 20)
    policy = policy_of(allocator, WindowTopK(window_size=8))
    entries = random_entries(0, num_heads=2, n=60)
    context = CompressionContext.of_layer(entries, 20, 60, at_prompt_end=True, capacity=60, num_layers=3)
    layers = [policy.compress(entries, in_layer(context, layer)).entries for layer in range(3)]
    assert [result.is_live.sum(1).tolist() for result in layers] == [[60, 60], [60, 60], [20, 20]]
    for result in layers[:2]:
        assert_same(result, entries)
