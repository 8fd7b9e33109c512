"""GRKV and attention matching: what they solve against dense float64 algebra, and what they may not do."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_same, assert_sound, concatenate, newest_queries, random_entries
from vllm_kvmerge.ops.regression import OutputDerivative
from vllm_kvmerge.policies import DEAD, CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.base import Merger
from vllm_kvmerge.policies.mergers import AttentionMatchingMerger, DropMerger, RegressionMerger
from vllm_kvmerge.policies.mergers.attention_matching import STEPS, fit_votes
from vllm_kvmerge.policies.mergers.least_squares import attention
from vllm_kvmerge.policies.selectors import WindowTopK
from vllm_kvmerge.policies.trackers import SumTracker

WINDOW = 4


def policy_of(merger: Merger) -> CompressionPolicy:
    selector = WindowTopK(window_size=WINDOW, kernel_size=3)
    return CompressionPolicy(tracker=SumTracker(), selector=selector, merger=merger)


def regression(**fields) -> CompressionPolicy:
    return policy_of(RegressionMerger(**{"regression_window": WINDOW, "num_fixed_sinks": 1, **fields}))


def matching(**fields) -> CompressionPolicy:
    return policy_of(AttentionMatchingMerger(**fields))


EVICTING = policy_of(DropMerger())


def problem(
    seed: int, num_heads: int = 2, num_groups: int = 2, n: int = 40, budget: int = 16, num_dead: int = 0, **options
) -> tuple[Entries, CompressionContext]:
    """Random entries with votes, and the queries of the newest tokens."""
    dtype = options.pop("dtype", torch.float32)
    entries = random_entries(seed, num_heads, n, num_dead=num_dead, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    votes = 0.3 * torch.randn(num_heads, n, generator=generator, dtype=dtype)
    entries.log_votes = torch.where(entries.is_live, votes, entries.log_votes)
    shape = num_heads, num_groups, options.pop("window", WINDOW), 8
    queries = newest_queries(options.pop("size", 1.0) * torch.randn(shape, generator=generator, dtype=dtype), n)
    return entries, CompressionContext.of_layer(entries, budget, n, at_prompt_end=True, scale=8**-0.5, queries=queries)


def logits_of(entries: Entries, context: CompressionContext) -> Tensor:
    """``[H, G, w, n]`` float64, with votes: of the queries over live entries up to their positions, else -inf."""
    keys = entries.keys.double().masked_fill(~entries.is_live.unsqueeze(-1), 0.0)
    logits = torch.einsum("hgwd,hnd->hgwn", context.queries.vectors.double(), keys) * context.scale
    seen = entries.is_live[:, None] & (entries.positions[:, None] <= context.queries.positions[..., None])
    return torch.where(seen[:, None], logits + entries.log_votes[:, None, None].double(), -torch.inf)


def output(entries: Entries, context: CompressionContext) -> Tensor:
    """``[H, r, d]`` float64: attention output of the queries."""
    values = entries.values.double().masked_fill(~entries.is_live.unsqueeze(-1), 0.0)
    weights = logits_of(entries, context).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hgwn,hnd->hgwd", weights, values).flatten(1, 2)


def window_loss(full: Entries, compressed: Entries, context: CompressionContext) -> Tensor:
    """``[H]``: GRKV eq. 4."""
    return (output(full, context) - output(compressed, context)).square().sum((1, 2))


# Both


@pytest.mark.parametrize("policy", [regression(), matching()], ids=lambda policy: policy.merger.name)
def test_without_queries_it_evicts(policy):
    entries, context = problem(3)
    context = replace(context, queries=None)
    result, kept = (parts.compress(entries, context) for parts in (policy, EVICTING))
    assert_same(result.entries, kept.entries)
    assert (result.num_merged, result.num_evicted) == (0, kept.num_evicted)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("policy", [regression(), matching()], ids=lambda policy: policy.merger.name)
def test_a_head_whose_queries_are_not_finite_is_left_alone(policy, broken):
    entries, context = problem(6)
    context.queries.vectors[0, 0, 0] = broken
    result, kept = (parts.compress(entries, context).entries for parts in (policy, EVICTING))
    assert_same(result.of_rows([0]), kept.of_rows([0]))
    assert not torch.equal(result.values[1], kept.values[1])


def compressed(
    policy: CompressionPolicy, entries: Entries, context: CompressionContext, untouched: tuple[str, ...]
) -> tuple[Entries, Entries]:
    """What it leaves, and what eviction does: the loss is no larger, and these planes are the same."""
    result, kept = (parts.compress(entries, context) for parts in (policy, EVICTING))
    assert_sound(result.entries, context.budget)
    assert result.num_merged + result.num_evicted == kept.num_evicted
    # Losses are compared in float32, on outputs of that precision.
    size = output(entries, context).square().sum((1, 2))
    before, after = (window_loss(entries, one.entries, context) for one in (kept, result))
    assert (after <= before * (1 + 1e-4) + 1e-8 * size).all()
    for name in untouched:
        assert torch.equal(getattr(result.entries, name), getattr(kept.entries, name))
    return result.entries, kept.entries


# GRKV


def fixed_entries(
    kept: Entries, full: Entries, context: CompressionContext, share: float, fix_window: bool = True
) -> Tensor:
    """``[H, c]`` bool, by loops: one sink, the window, and those attended to most."""
    weights = attention(context.queries, full, context.scale).sum((1, 2))
    fixed = (kept.positions < 1) | (fix_window & (kept.positions >= context.queries.positions.min()))
    for head, row in enumerate(kept.positions.tolist()):
        where = {p: i for i, p in enumerate(full.positions[head].tolist()) if p != DEAD}
        others = [i for i, position in enumerate(row) if position != DEAD and not fixed[head, i]]
        others.sort(key=lambda i: -weights[head, where[row[i]]].item())  # noqa: B023
        fixed[head, others[: int(share * len(row))]] = True
    return fixed


@examples(30)
@given(
    SEEDS,
    st.integers(1, 3),
    st.sampled_from([WINDOW, 20]),
    st.sampled_from([1e-3, 1e-2, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.integers(0, 9),
    st.booleans(),
)
def test_value_step_solves_the_ridge_problem(seed, num_groups, window, ridge, share, num_dead, fix_window):
    """For fewer rows than entries, or more."""
    entries, context = problem(seed, num_groups=num_groups, num_dead=num_dead, window=window, dtype=torch.float64)
    fields = {"fixed_share": share, "regression_window": window, "fix_window": fix_window}
    parts = regression(components="v", lambda_v=ridge, **fields)
    result, kept = (policy.compress(entries, context).entries for policy in (parts, EVICTING))
    fixed = fixed_entries(kept, entries, context, share, fix_window)
    weights = attention(context.queries, kept, context.scale).flatten(1, 2)
    for head in range(2):
        free = kept.is_live[head] & ~fixed[head]
        x, v = weights[head][:, free], kept.values[head]
        target = output(entries, context)[head] - weights[head][:, ~free] @ v[~free]
        # The primal form (eq. 7), in as many unknowns as there are free entries.
        normal = x.T @ x + ridge * torch.eye(int(free.sum()), dtype=torch.float64)
        expected = v.clone()
        expected[free] = torch.linalg.solve(normal, x.T @ target + ridge * v[free])
        torch.testing.assert_close(result.values[head], expected, rtol=1e-8, atol=1e-10)
    assert torch.equal(result.keys, kept.keys)


@pytest.mark.parametrize("num_rows", [4, 12])
def test_derivative_and_its_adjoint(num_rows):
    """One after the other: for few rows by way of their products, for many by way of the keys."""
    generator = torch.Generator().manual_seed(num_rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    queries, keys, values, votes = randn(2, num_rows, 4), randn(2, 9, 4), randn(2, 9, 4), randn(2, 1, 9)
    free = torch.rand(2, 9, generator=generator) < 0.6

    def weights(moving: Tensor) -> Tensor:
        return (0.5 * queries @ torch.where(free.unsqueeze(-1), moving, keys).transpose(1, 2) + votes).softmax(-1)

    derivative = OutputDerivative(weights(keys), values, queries, 0.5, free)
    change, back = randn(2, 9, 4), randn(2, num_rows, 4)
    _, forward = torch.autograd.functional.jvp(lambda moving: weights(moving) @ values, keys, change)
    _, adjoint = torch.autograd.functional.vjp(lambda moving: weights(moving) @ values, keys, back)
    found = derivative.forward(change), derivative.adjoint(back), derivative.forward_adjoint(back)
    torch.testing.assert_close(found, (forward, adjoint, derivative.forward(adjoint)))


def dense(derivative: OutputDerivative) -> Tensor:
    """``[H, r * d, c * d]``: J as a matrix."""
    _, c, d = derivative.values.shape
    units = torch.eye(c * d, dtype=torch.float64).view(-1, 1, c, d)
    return torch.stack([derivative.forward(unit.expand(2, -1, -1)).flatten(1) for unit in units], dim=-1)


def algorithm_1(entries: Entries, context: CompressionContext, ridge: float, steps: int) -> Entries:
    """GRKV's pseudocode over what the selector keeps, with dense matrices; a tenth, one sink and the window fixed."""
    start = EVICTING.compress(entries, context).entries
    free = start.is_live & ~fixed_entries(start, entries, context, 0.1)
    target, queries = output(entries, context), context.queries.vectors.flatten(1, 2)
    keys, values = start.keys, start.values
    for _ in range(steps):
        weights = attention(context.queries, replace(start, keys=keys), context.scale).flatten(1, 2)
        carried = weights * free.unsqueeze(1)
        gram = carried @ carried.transpose(1, 2) + ridge * torch.eye(queries.shape[1], dtype=torch.float64)
        values = start.values + carried.transpose(1, 2) @ torch.linalg.solve(gram, target - weights @ start.values)
        matrix = dense(OutputDerivative(weights, values, queries, context.scale, free))
        moved = (matrix @ (keys - start.keys).flatten(1).unsqueeze(-1)).squeeze(-1)
        gram = matrix @ matrix.transpose(1, 2) + ridge * torch.eye(matrix.shape[1], dtype=torch.float64)
        alpha = torch.linalg.solve(gram, (target - weights @ values).flatten(1) + moved)
        keys = start.keys + (matrix.transpose(1, 2) @ alpha.unsqueeze(-1)).view_as(start.keys)
    return replace(start, keys=keys, values=values)


@pytest.mark.parametrize("seed", range(4))
def test_without_its_guard_it_is_the_papers_algorithm(seed):
    entries, context = problem(seed, dtype=torch.float64, size=4.0)
    fields = {"lambda_k": 0.05, "lambda_v": 0.05, "steps": 2, "cg_iterations": 1000, "cg_tolerance": 1e-12}
    result = regression(guard=False, **fields).compress(entries, context).entries
    expected = algorithm_1(entries, context, 0.05, steps=2)
    torch.testing.assert_close(result.values, expected.values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.keys, expected.keys, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [4, 5, 7])
def test_the_guard_stops_steps_that_raise_the_loss(seed):
    """Queries as large as these are where the linearisation misleads the paper's algorithm."""
    entries, context = problem(seed, dtype=torch.float64, size=10.0)
    before, unguarded, guarded = (
        window_loss(entries, parts.compress(entries, context).entries, context)
        for parts in (EVICTING, regression(guard=False), regression())
    )
    assert (unguarded > before).any()
    assert (guarded <= before).all() and (guarded < before).any()


@examples(60)
@given(
    SEEDS,
    st.sampled_from(["k", "v", "kv"]),
    st.integers(1, 3),
    st.sampled_from([0.1, 1.0, 5.0, 30.0]),
    st.sampled_from([0.0, 1e-4, 1e-2, 1.0]),
    st.integers(1, 3),
    st.data(),
)
def test_window_loss_never_rises_and_fixed_entries_stay(seed, components, num_groups, size, ridge, steps, data):
    n = data.draw(st.integers(12, 60))
    num_dead = data.draw(st.integers(0, n))
    budget = data.draw(st.integers(WINDOW + 1, n - 1))
    share = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    entries, context = problem(seed, 3, num_groups, n, budget, num_dead, size=size)
    parts = regression(components=components, lambda_k=ridge, lambda_v=ridge, steps=steps, fixed_share=share)
    result, kept = compressed(parts, entries, context, ("log_votes", "scores", "aux", "positions"))
    fixed = fixed_entries(kept, entries, context, share) | ~kept.is_live
    for name, part in (("keys", "k"), ("values", "v")):
        old, new = getattr(kept, name), getattr(result, name)
        assert torch.equal(new[fixed], old[fixed])
        assert part in components or torch.equal(new, old)


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_each_component_lowers_the_loss(seed, num_groups):
    entries, context = problem(seed, num_heads=4, num_groups=num_groups)
    policies = [EVICTING, regression(components="v"), regression(), regression(components="k"), regression(steps=3)]
    without, values, both, keys, several = (
        window_loss(entries, parts.compress(entries, context).entries, context) for parts in policies
    )
    assert (keys < without).all() and (values < without).all()
    assert (both < values).all() and (several <= both).all()


def test_only_the_newest_queries_count():
    entries, context = problem(4)
    older = torch.full((2, 2, 3, 8), 100.0)
    more = replace(context, queries=newest_queries(torch.cat([older, context.queries.vectors], 2), 40))
    assert_same(regression().compress(entries, more).entries, regression().compress(entries, context).entries)


# Attention matching


def bounded_optimum(quadratic: Tensor, linear: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """x between ``least`` and ``most`` that minimises x'Qx / 2 - l'x, by far more accelerated steps than are needed."""
    x = ahead = torch.ones_like(linear)
    rate = 1 / torch.linalg.matrix_norm(quadratic, 2)
    for step in range(3000):
        x, before = (ahead - rate * (quadratic @ ahead - linear)).clamp(least, most), x
        ahead = x + step / (step + 3) * (x - before)
    return x


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
        best[free[head]] = bounded_optimum(quadratic, moving.T @ rest + ridges[head].double(), *bounds)
        within = 1e-3 if ridge == 1e-4 else 1e-4
        assert -1e-6 * values[0] <= values[-1] - objective(head, best) <= within * values[0]
        assert values[-1] < 0.95 * values[0]


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize(("ridge", "num_dead"), [(1e-3, 0), (1.0, 5)])
def test_values_solve_the_ridge_problem_beside_the_new_votes(num_groups, ridge, num_dead):
    entries, context = problem(0, num_groups=num_groups, num_dead=num_dead, window=12, dtype=torch.float64)
    result = matching(values_ridge=ridge).compress(entries, context)
    kept = EVICTING.compress(entries, context).entries
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
    before, after = (logits_of(entries, context).logsumexp(-1) for entries in (full, compressed))
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
    parts = matching(votes_ridge=ridge, values_ridge=ridge)
    result, kept = compressed(parts, entries, context, ("keys", "scores", "aux", "positions"))
    before, after = (lost_mass(entries, one, context) for one in (kept, result))
    assert (after <= before * (1 + 1e-4) + 1e-6).all()
    votes = result.log_votes[result.is_live]
    assert votes.abs().max() <= 3.0 + 1e-5 if len(votes) else num_dead == n


def test_votes_stay_bounded_however_often_it_is_compressed():
    entries, context = problem(3, num_groups=1, n=40, window=8)
    for step in range(12):
        kept = matching(votes_ridge=1e-3).compress(entries, context).entries
        assert kept.log_votes[kept.is_live].abs().max() <= 3.0 + 1e-4
        new = random_entries(step, n=24)
        new.positions = new.positions + 40 + 24 * step
        entries = concatenate(kept, new)
        queries = replace(context.queries, positions=context.queries.positions + 24)
        context = replace(context, queries=queries, num_tokens=context.num_tokens + 24, at_prompt_end=False)
    assert kept.log_votes.max() > 1.0
