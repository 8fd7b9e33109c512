"""Attention matching: votes against an exact active-set method, values against dense algebra, what neither may do."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_same, assert_sound, concatenate, newest_queries, random_entries
from tests.policies.window import output, problem, window_loss
from vllm_kvmerge.ops import attention as ops_attention
from vllm_kvmerge.policies import CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.allocators import Adaptive, Uniform
from vllm_kvmerge.policies.mergers import AttentionMatchingMerger, DropMerger
from vllm_kvmerge.policies.mergers.attention_matching import STEPS, fit_votes
from vllm_kvmerge.policies.mergers.least_squares import attention
from vllm_kvmerge.policies.selectors import HeavyHitter, RecentQueries, SinkRecent, WindowTopK
from vllm_kvmerge.policies.trackers import LogEmaTracker, MeanTracker, NoTracker, SumTracker

SELECTOR = WindowTopK(window_size=4, kernel_size=3)


def policy(selector=SELECTOR, tracker=SumTracker(), allocator=Uniform(), **fields) -> CompressionPolicy:  # noqa: B008
    merger = AttentionMatchingMerger(**fields)
    return CompressionPolicy(tracker=tracker, selector=selector, merger=merger, allocator=allocator)


def evicting(selector=SELECTOR, tracker=SumTracker(), allocator=Uniform()) -> CompressionPolicy:  # noqa: B008
    return CompressionPolicy(tracker=tracker, selector=selector, merger=DropMerger(), allocator=allocator)


def active_set(quadratic: Tensor, linear: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """x between ``least`` and ``most`` that minimises x'Qx / 2 - l'x, from 1: the primal active-set method, exact."""
    x, held = torch.ones_like(linear), torch.zeros_like(linear, dtype=torch.bool)
    while True:
        gradient = quadratic @ x - linear
        step = torch.zeros_like(x)
        step[~held] = torch.linalg.solve(quadratic[~held][:, ~held], -gradient[~held])
        room = torch.where(step > 0, (most - x) / step, torch.where(step < 0, (least - x) / step, torch.inf))
        length, first = room.min(0)
        if length < 1:
            x = x + length * step
            x[first] = most[first] if step[first] > 0 else least[first]
            held[first] = True
            continue
        x = x + step
        gradient = quadratic @ x - linear
        wrong = torch.where(x <= least, -gradient, gradient).masked_fill(~held, -torch.inf)
        worst, index = wrong.max(0)
        if worst <= 1e-12:
            return x
        held[index] = False


@pytest.mark.parametrize("ridge", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize(("r", "c", "n", "size"), [(16, 40, 100, 1.0), (64, 25, 200, 2.0), (8, 60, 400, 4.0)])
def test_votes_come_near_the_optimum_and_no_step_raises_the_objective(r, c, n, size, ridge):
    generator = torch.Generator().manual_seed(r)
    mass = (size * torch.randn(2, r, n, generator=generator)).softmax(-1)[:, :, :c]
    free = torch.rand(2, c, generator=generator) < 0.9
    ridges = ridge * mass.square().sum((1, 2), keepdim=True).squeeze(2) / c
    least, most = torch.full((2, c), 0.05), torch.full((2, c), 20.0)

    def objective(head: int, votes: Tensor) -> float:
        misfit = (mass[head].double() @ votes - 1).square().sum()
        return (misfit + ridges[head].double() * (votes - 1).square().sum()).item()

    votes = [fit_votes(mass, free, ridges, least, most, steps) for steps in range(STEPS + 1)]
    assert all(((one >= least) & (one <= most) & (free | (one == 1.0))).all() for one in votes)
    for head in range(2):
        values = [objective(head, one[head].double()) for one in votes]
        assert all(later <= earlier + 1e-6 * values[0] for earlier, later in zip(values, values[1:], strict=False))
        moving = mass[head][:, free[head]].double()
        rest = 1 - mass[head][:, ~free[head]].double().sum(1)
        quadratic = moving.T @ moving + ridges[head].double() * torch.eye(moving.shape[1], dtype=torch.float64)
        bounds = (bound[head][free[head]].double() for bound in (least, most))
        best = torch.ones(c, dtype=torch.float64)
        best[free[head]] = active_set(quadratic, moving.T @ rest + ridges[head].double(), *bounds)
        within = 1e-3 if ridge == 1e-4 else 1e-4
        assert -1e-6 * values[0] <= values[-1] - objective(head, best) <= within * values[0]
        assert values[-1] < 0.95 * values[0]


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize(("ridge", "num_dead"), [(1e-3, 0), (1.0, 5)])
def test_values_solve_the_ridge_problem_beside_the_new_votes(num_groups, ridge, num_dead):
    entries, context = problem(0, num_groups=num_groups, num_dead=num_dead, window=12, dtype=torch.float64)
    result = policy(values_ridge=ridge).compress(entries, context)
    kept = evicting().compress(entries, context).entries
    assert (result.num_merged, result.num_evicted) == (2 * (24 - num_dead), 0)
    assert torch.equal(result.entries.keys, kept.keys)
    weights = attention(context.queries, result.entries, context.scale).flatten(1, 2)
    for head in range(2):
        x, v = weights[head], kept.values[head]
        normal = x.T @ x
        normal += ridge * normal.diagonal().mean() * torch.eye(len(normal), dtype=torch.float64)
        change = torch.linalg.solve(normal, x.T @ (output(entries, context)[head] - x @ v))
        torch.testing.assert_close(result.entries.values[head], v + change, rtol=1e-7, atol=1e-9)


def lost_mass(full: Entries, compressed: Entries, context: CompressionContext) -> Tensor:
    """``[H]``: squared error of the mass of live entries, relative to the full cache's, over queries that see some."""

    def log_mass(entries: Entries) -> Tensor:
        keys = entries.keys.double().masked_fill(~entries.is_live.unsqueeze(-1), 0.0)
        logits = torch.einsum("hgwd,hnd->hgwn", context.queries.vectors.double(), keys) * context.scale
        seen = entries.is_live[:, None] & (entries.positions[:, None] <= context.queries.positions[..., None])
        logits = torch.where(seen[:, None], logits + entries.log_votes[:, None, None].double(), -torch.inf)
        return logits.logsumexp(-1)

    before, after = log_mass(full), log_mass(compressed)
    return torch.where(before > -torch.inf, (after - before).exp() - 1, 0.0).square().sum((1, 2))


@examples(40)
@given(
    SEEDS,
    st.sampled_from([1, 4]),
    st.sampled_from([0.1, 1.0, 5.0, 30.0]),
    st.sampled_from([1e-6, 0.1, 1.0, 100.0]),
    st.data(),
)
def test_the_window_never_loses_by_it(seed, num_groups, size, ridge, data):
    n = data.draw(st.integers(12, 60))
    num_dead, window = data.draw(st.integers(0, n)), data.draw(st.integers(1, 12))
    budget = data.draw(st.integers(5, n - 1))
    entries, context = problem(seed, 3, num_groups, n, budget, num_dead, size=size, window=window)
    untouched = entries.clone()
    parts = policy(votes_ridge=ridge, values_ridge=ridge)
    result, kept = (one.compress(entries, context) for one in (parts, evicting()))
    assert_same(entries, untouched)
    assert_sound(result.entries, budget)
    assert_same(result.entries, parts.compress(entries, context).entries)
    assert result.num_merged + result.num_evicted == kept.num_evicted
    size = output(entries, context).square().sum((1, 2))
    before, after = (window_loss(entries, one.entries, context) for one in (kept, result))
    assert (after <= before * (1 + 1e-4) + 1e-8 * size).all()
    before, after = (lost_mass(entries, one.entries, context) for one in (kept, result))
    assert (after <= before * (1 + 1e-4) + 1e-6).all()
    for name in ("keys", "scores", "aux", "positions"):
        assert torch.equal(getattr(result.entries, name), getattr(kept.entries, name))
    votes = result.entries.log_votes[result.entries.is_live]
    assert votes.abs().max() <= 3.0 + 1e-5 if len(votes) else num_dead == n


@pytest.mark.parametrize("num_groups", [1, 4])
def test_copies_of_what_stays_are_lossless_for_any_query(num_groups):
    """As many votes as there are copies, found from queries alone: in head 0 three of each, in head 1 one to three.

    Dropping the copies in head 0 costs nothing but mass.
    """
    kept = random_entries(1, 2, 12, dtype=torch.float64)
    entries = concatenate(concatenate(kept, kept), kept)
    entries.positions = torch.arange(36).expand(2, -1).clone()
    entries.kill(
        (torch.arange(36) < 24) & (torch.arange(36) % 12 % 3 > torch.arange(36) // 12) & (torch.arange(2) == 1)[:, None]
    )
    copies = entries.is_live.view(2, 3, 12).sum(1)
    generator = torch.Generator().manual_seed(0)
    queries = 2 * torch.randn(2, num_groups, 80, 8, generator=generator, dtype=torch.float64)
    positions = torch.full((2, 80), 36)
    context = CompressionContext.of_layer(entries, 12, 36, at_prompt_end=True, scale=8**-0.5)
    context = replace(context, queries=replace(newest_queries(queries, 36), positions=positions))
    parts = policy(SinkRecent(num_sink_tokens=0), NoTracker(), matching_window=80, votes_ridge=1e-6, values_ridge=1e-6)
    result = parts.compress(entries, context).entries
    order = result.positions.argsort(1)
    torch.testing.assert_close(result.log_votes.gather(1, order).exp(), copies.double(), rtol=1e-3, atol=1e-3)
    other = torch.randn(2, num_groups, 50, 8, generator=generator, dtype=torch.float64)
    context = replace(context, queries=replace(newest_queries(other, 36), positions=positions[:, :50]))
    torch.testing.assert_close(output(result, context), output(entries, context), rtol=1e-3, atol=1e-4)


def test_votes_of_earlier_compressions_count():
    """An entry that leaves with two votes counts as two that leave with one each."""
    entries, context = problem(2, dtype=torch.float64)
    entries.log_votes.zero_()
    leaves = (entries.positions == 0).nonzero()[:, 1]
    heads = torch.arange(2)
    selector, tracker = SinkRecent(num_sink_tokens=0), NoTracker()
    twin = entries.take(leaves.unsqueeze(1))
    # The newest tokens stay, so that both are gone; attention does not read positions but to see what is later.
    twin.positions = torch.full_like(twin.positions, -2)
    doubled = concatenate(twin, entries)
    doubled.positions = doubled.positions.clamp(min=-2) + 2
    shifted = replace(context.queries, positions=context.queries.positions + 2)
    expected = policy(selector, tracker).compress(doubled, replace(context, queries=shifted, num_tokens=42)).entries
    entries.log_votes[heads, leaves] = torch.full((2,), 2.0, dtype=torch.float64).log()
    result = policy(selector, tracker).compress(entries, context).entries
    orders = [one.positions.argsort(1) for one in (result, expected)]
    for name in ("log_votes", "values"):
        one, other = (
            getattr(entries.take(order), name) for entries, order in zip((result, expected), orders, strict=True)
        )
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_votes_stay_bounded_however_often_it_is_compressed():
    entries, context = problem(3, num_groups=1, n=40, window=8)
    for step in range(12):
        kept = policy(votes_ridge=1e-3).compress(entries, context).entries
        assert kept.log_votes[kept.is_live].abs().max() <= 3.0 + 1e-4
        new = random_entries(step, n=24)
        new.positions = new.positions + 40 + 24 * step
        entries = concatenate(kept, new)
        queries = replace(context.queries, positions=context.queries.positions + 24)
        context = replace(context, queries=queries, num_tokens=context.num_tokens + 24, at_prompt_end=False)
    assert kept.log_votes.max() > 1.0


def test_entries_that_no_query_looks_at_stay_as_they_are():
    entries, context = problem(4, window=8)
    unseen = entries.positions < 12
    entries.log_votes[unseen] = -60.0
    entries.scores[unseen] = 100.0
    result, kept = (one.compress(entries, context).entries for one in (policy(), evicting()))
    still = kept.log_votes == -60.0
    assert still.sum() > 16
    assert torch.equal(result.log_votes[still], kept.log_votes[still])
    torch.testing.assert_close(result.values[still], kept.values[still], rtol=1e-6, atol=1e-6)
    assert not torch.equal(result.values[~still], kept.values[~still])


@pytest.mark.parametrize(
    ("tracker", "selector"),
    [
        (SumTracker(), HeavyHitter(num_sink_tokens=1)),
        (MeanTracker(), SELECTOR),
        (LogEmaTracker(), HeavyHitter(num_sink_tokens=1)),
        (NoTracker(), RecentQueries(recent_window=3)),
    ],
)
def test_with_other_parts_and_budgets_that_differ(tracker, selector):
    entries, context = problem(5, num_heads=4)
    entries.aux.fill_(1.0)
    losses = [
        window_loss(entries, parts(selector, tracker).compress(entries, context).entries, context)
        for parts in (evicting, policy)
    ]
    assert (losses[1] < 0.8 * losses[0]).all()
    if tracker.mode == "sum":
        context = replace(context, capacity=Adaptive().capacity(16))
        shares = evicting(selector, tracker, Adaptive()).head_budgets(entries, context)
        assert len(set(shares)) > 1
        whole = policy(selector, tracker, Adaptive()).compress(entries, context).entries
        for head, share in enumerate(shares):
            alone = replace(context.of_rows([head]), budget=share, capacity=context.capacity)
            expected = policy(selector, tracker).compress(entries.of_rows([head]), alone).entries
            torch.testing.assert_close(whole.of_rows([head]).values, expected.values, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(whole.of_rows([head]).log_votes, expected.log_votes, rtol=1e-4, atol=1e-5)


def test_long_contexts_are_read_in_parts(monkeypatch):
    entries, context = problem(8, num_heads=3, num_groups=4, window=10)
    whole = policy().compress(entries, context).entries
    monkeypatch.setattr(ops_attention, "MAX_ATTENTION_BYTES", 3 * 4 * 40 * 4)
    monkeypatch.setattr(ops_attention, "PART_BYTES", 1)
    parts = policy().compress(entries, context).entries
    assert torch.equal(parts.values, whole.values) and torch.equal(parts.log_votes, whole.log_votes)


def test_without_queries_it_evicts():
    entries, context = problem(6)
    context = replace(context, queries=None)
    result, kept = (parts.compress(entries, context) for parts in (policy(), evicting()))
    assert_same(result.entries, kept.entries)
    assert (result.num_merged, result.num_evicted) == (0, kept.num_evicted)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_head_whose_queries_are_not_finite_is_left_alone(broken):
    entries, context = problem(7)
    context.queries.vectors[0, 0, 0] = broken
    result, kept = (parts.compress(entries, context) for parts in (policy(), evicting()))
    assert_same(result.entries.of_rows([0]), kept.entries.of_rows([0]))
    assert not torch.equal(result.entries.log_votes[1], kept.entries.log_votes[1])
    assert (result.num_merged, result.num_evicted) == (24, 24)
