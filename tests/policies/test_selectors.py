"""Selectors against loops over heads and entries."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.examples import examples
from tests.policies.sampling import SEEDS, random_entries
from vllm_kvmerge.policies import DEAD, CompressionContext, Entries, Selector
from vllm_kvmerge.policies.selectors import HeavyHitter, Recent, SinkRecent, WindowTopK

Head = list[tuple[int, float]]
"""Position and importance of one head's live entries."""


def run(selector: Selector, entries: Entries, budget: int, num_slots: int = 0) -> list[set[int]]:
    """Positions kept per head, after checks that hold for every selector."""
    context = CompressionContext.of_layer(
        entries, budget, num_tokens=len(entries), at_prompt_end=True, num_slots=num_slots
    )
    protected = selector.protected(entries, context)
    importance = entries.scores
    kept = selector.select(entries, importance, protected, context)
    assert kept.shape == entries.positions.shape and kept.dtype == torch.bool
    assert (kept.sum(1) == budget - num_slots).all()
    assert torch.equal(kept, selector.select(entries, importance, protected, context))
    assert not (protected & ~entries.is_live).any()
    num_live_kept = (kept & entries.is_live).sum(1)
    assert torch.equal(num_live_kept, entries.is_live.sum(1).clamp(max=budget - num_slots)), "live before dead"
    return [set(row) - {DEAD} for row in entries.positions.masked_fill(~kept, DEAD).tolist()]


def heads(entries: Entries) -> list[Head]:
    rows = zip(entries.positions.tolist(), entries.scores.tolist(), strict=True)
    return [[(p, s) for p, s in zip(*row, strict=True) if p != DEAD] for row in rows]


def best(candidates: Head, count: int) -> set[int]:
    ranked = sorted(candidates, key=lambda entry: entry[1], reverse=True)
    return {position for position, _ in ranked[: max(0, count)]}


def newest(head: Head, count: int) -> set[int]:
    return set(sorted((position for position, _ in head), reverse=True)[: max(0, count)])


def heavy_hitters(head: Head, num_sinks: int, num_recent: int, budget: int) -> set[int]:
    protected = {p for p, _ in head if p < num_sinks} | newest(head, num_recent)
    others = [entry for entry in head if entry[0] not in protected]
    return protected | best(others, budget - len(protected))


def pooled_scores(head: Head, window: int, kernel: int) -> Head:
    prefix = sorted(entry for entry in head if entry[0] not in newest(head, window))
    reach = kernel // 2
    return [
        (position, max(score for _, score in prefix[max(0, i - reach) : i + reach + 1]))
        for i, (position, _) in enumerate(prefix)
    ]


@examples(40)
@given(SEEDS, st.integers(1, 3), st.integers(2, 24), st.data())
def test_recent_and_sinks(seed, num_heads, n, data):
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n)))
    budget = data.draw(st.integers(1, n))
    assert run(Recent(), entries, budget) == [newest(head, budget) for head in heads(entries)]
    num_sinks = data.draw(st.integers(0, budget - 1))
    expected = [
        heavy_hitters(head, num_sinks, budget - sum(p < num_sinks for p, _ in head), budget) for head in heads(entries)
    ]
    assert run(SinkRecent(num_sink_tokens=num_sinks), entries, budget) == expected


@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(2, 24), st.data())
def test_heavy_hitter(seed, num_heads, n, data):
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n)))
    num_sinks = data.draw(st.integers(0, n - 2))
    window = data.draw(st.none() | st.integers(0, n - 1 - num_sinks))
    share = data.draw(st.sampled_from([0.1, 0.25, 0.5, 0.9]))
    selector = HeavyHitter(num_sink_tokens=num_sinks, recent_window=window, recent_share=share)
    budget = data.draw(st.integers(selector.min_budget, n))
    num_slots = data.draw(st.integers(0, budget - selector.min_budget))
    num_kept = budget - num_slots
    num_recent = window
    if num_recent is None:  # The share is of the whole budget; sinks and one heavy hitter come first.
        num_recent = max(1, min(int(share * budget), num_kept - num_sinks - 1))
    expected = [heavy_hitters(head, num_sinks, num_recent, num_kept) for head in heads(entries)]
    assert run(selector, entries, budget, num_slots) == expected


@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(2, 32), st.data())
def test_window_topk(seed, num_heads, n, data):
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n)))
    window = data.draw(st.integers(1, n - 1))
    kernel = data.draw(st.sampled_from([1, 3, 7, 255]))
    selector = WindowTopK(window_size=window, kernel_size=kernel)
    budget = data.draw(st.integers(selector.min_budget, n))
    for kept, head in zip(run(selector, entries, budget), heads(entries), strict=True):
        recent = newest(head, window)
        assert recent <= kept
        pooled = dict(pooled_scores(head, window, kernel))
        # Neighbours of one maximum tie: which of them stays is free, their scores are not.
        expected = sorted(pooled.values(), reverse=True)[: budget - len(recent)]
        assert sorted((pooled[position] for position in kept - recent), reverse=True) == expected


def test_pooling_stops_at_the_window_and_skips_dead_entries():
    entries = random_entries(0, num_heads=1, n=20)
    entries.positions.copy_(torch.arange(20))
    entries.scores[:] = torch.arange(20.0, 0.0, -1.0)
    entries.scores[:, 16:] = 1000.0  # The window's own scores are large.
    entries.scores[:, 10] = 500.0
    dead = torch.zeros_like(entries.is_live)
    dead[:, 11:13] = True
    entries.kill(dead)
    assert run(WindowTopK(window_size=4, kernel_size=3), entries, budget=8) == [{16, 17, 18, 19, 9, 10, 13, 0}]


def test_ties_go_to_the_lower_index():
    entries = random_entries(0, num_heads=2, n=40)
    entries.scores.fill_(0.5)
    selector = HeavyHitter(num_sink_tokens=0, recent_window=0)
    context = CompressionContext.of_layer(entries, budget=20, num_tokens=40, at_prompt_end=False)
    kept = selector.select(entries, entries.scores, selector.protected(entries, context), context)
    assert torch.equal(kept, (torch.arange(40) < 20).expand(2, -1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("selector", [HeavyHitter(num_sink_tokens=1), WindowTopK(window_size=3)])
def test_scores_that_are_not_finite_keep_live_before_dead(selector, value):
    entries = random_entries(1, n=16, num_dead=6)
    entries.scores[:, ::3] = value
    run(selector, entries, budget=8)


def test_min_budget_is_one_more_than_what_is_protected():
    assert Recent().min_budget == 1
    assert SinkRecent().min_budget == 5
    assert HeavyHitter().min_budget == 6
    assert HeavyHitter(num_sink_tokens=2, recent_window=8).min_budget == 11
    assert WindowTopK().min_budget == 33


@pytest.mark.parametrize("kernel_size", [0, 2, -1, 257, 3.0])
def test_kernel_size_is_odd(kernel_size):
    with pytest.raises(ValidationError):
        WindowTopK(kernel_size=kernel_size)
