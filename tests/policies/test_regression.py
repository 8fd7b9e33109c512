"""GRKV: value and key steps against dense float64 algebra, and what they may not do."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_same, assert_sound, newest_queries
from tests.policies.window import WINDOW, output, problem, window_loss
from vllm_kvmerge.ops.regression import OutputDerivative, conjugate_gradients
from vllm_kvmerge.policies import DEAD, CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.base import ServedModel
from vllm_kvmerge.policies.mergers import DropMerger, RegressionMerger
from vllm_kvmerge.policies.mergers.least_squares import attention
from vllm_kvmerge.policies.selectors import HeavyHitter, RecentQueries, SinkRecent, WindowTopK
from vllm_kvmerge.policies.trackers import LogEmaTracker, MeanTracker, NoTracker, SumTracker

SELECTOR = WindowTopK(window_size=WINDOW, kernel_size=3)


def policy(selector=SELECTOR, tracker=SumTracker(), **fields) -> CompressionPolicy:  # noqa: B008
    fields = {"regression_window": WINDOW, "num_fixed_sinks": 1, **fields}
    return CompressionPolicy(tracker=tracker, selector=selector, merger=RegressionMerger(**fields))


def evicting(selector=SELECTOR, tracker=SumTracker()) -> CompressionPolicy:  # noqa: B008
    return CompressionPolicy(tracker=tracker, selector=selector, merger=DropMerger())


def fixed_entries(kept: Entries, full: Entries, context: CompressionContext, share: float, num_sinks: int) -> Tensor:
    """``[H, c]`` bool, by loops: sinks, window, and those attended to most."""
    weights = attention(context.queries, full, context.scale).sum((1, 2))
    fixed = torch.zeros_like(kept.is_live)
    for head, row in enumerate(kept.positions.tolist()):
        where = {p: i for i, p in enumerate(full.positions[head].tolist()) if p != DEAD}
        for i, position in enumerate(row):
            if position < num_sinks or position >= context.queries.positions.min():
                fixed[head, i] = True
        others = [i for i, position in enumerate(row) if position != DEAD and not fixed[head, i]]
        others.sort(key=lambda i: -weights[head, where[row[i]]].item())  # noqa: B023
        fixed[head, others[: int(share * len(row))]] = True
    return fixed


@examples(30)
@given(
    SEEDS, st.integers(1, 3), st.sampled_from([1e-3, 1e-2, 1.0]), st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 9)
)
def test_value_step_solves_the_ridge_problem(seed, num_groups, ridge, share, num_dead):
    entries, context = problem(seed, num_groups=num_groups, num_dead=num_dead, dtype=torch.float64)
    fields = {"components": "v", "lambda_v": ridge, "fixed_share": share}
    result = policy(**fields).compress(entries, context).entries
    kept = evicting().compress(entries, context).entries
    fixed = fixed_entries(kept, entries, context, share, num_sinks=1)
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


def random_derivative(seed: int, free_share: float = 1.0) -> tuple[OutputDerivative, Tensor, Tensor]:
    """J of two heads, at random keys; the keys and the logits' votes."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    queries, keys, values, votes = randn(2, 6, 4), randn(2, 9, 4), randn(2, 9, 4), randn(2, 9)
    free = torch.rand(2, 9, generator=generator) < free_share
    weights = (0.5 * queries @ keys.transpose(1, 2) + votes.unsqueeze(1)).softmax(-1)
    return OutputDerivative(weights, values, queries, 0.5, free), keys, votes


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("free_share", [1.0, 0.6])
def test_derivative_and_its_adjoint(seed, free_share):
    derivative, keys, votes = random_derivative(seed, free_share)
    generator = torch.Generator().manual_seed(seed + 100)
    change = torch.randn(keys.shape, generator=generator, dtype=torch.float64)
    back = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)

    def attend(moving: Tensor) -> Tensor:
        mixed = torch.where(derivative.free.unsqueeze(-1), moving, keys)
        logits = derivative.scale * derivative.queries @ mixed.transpose(1, 2) + votes.unsqueeze(1)
        return logits.softmax(-1) @ derivative.values

    _, forward = torch.autograd.functional.jvp(attend, keys, change)
    _, adjoint = torch.autograd.functional.vjp(attend, keys, back)
    torch.testing.assert_close(derivative.forward(change), forward)
    torch.testing.assert_close(derivative.adjoint(back), adjoint)
    inner = ((derivative.forward(change) * back).sum(), (change * derivative.adjoint(back)).sum())
    torch.testing.assert_close(*inner)


def dense(derivative: OutputDerivative) -> Tensor:
    """``[H, r * d, c * d]``: J as a matrix."""
    _, c, d = derivative.values.shape
    columns = []
    for unit in torch.eye(c * d, dtype=torch.float64):
        columns.append(derivative.forward(unit.view(1, c, d).expand(2, -1, -1)).flatten(1))
    return torch.stack(columns, dim=-1)


@pytest.mark.parametrize("seed", range(5))
def test_conjugate_gradients_converge_to_the_dense_solution(seed):
    derivative, _, _ = random_derivative(seed, 0.7)
    matrix = dense(derivative)
    matrix = matrix @ matrix.transpose(1, 2) + 1e-2 * torch.eye(matrix.shape[1], dtype=torch.float64)
    right = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    right[1] *= 1e-3  # heads stop each at its own time
    expected = torch.linalg.solve(matrix, right.flatten(1)).view_as(right)

    def operator(x: Tensor) -> Tensor:
        return derivative.forward(derivative.adjoint(x)) + 1e-2 * x

    solution = conjugate_gradients(operator, right, iterations=200, tolerance=1e-12)
    torch.testing.assert_close(solution, expected, rtol=1e-8, atol=1e-10)
    rough = conjugate_gradients(operator, right, iterations=200, tolerance=1e-1)
    assert (operator(rough) - right).flatten(1).norm(dim=1).le(0.1001 * right.flatten(1).norm(dim=1)).all()
    right[0] = 0.0
    solution = conjugate_gradients(operator, right, iterations=200, tolerance=1e-12)
    assert not solution[0].any()
    torch.testing.assert_close(solution[1], expected[1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_key_step_solves_the_linearised_ridge_problem(seed):
    entries, context = problem(seed, dtype=torch.float64, size=0.3)
    fields = {"cg_iterations": 500, "cg_tolerance": 1e-12, "lambda_k": 0.05}
    for components in ("k", "kv"):
        result = policy(components=components, **fields).compress(entries, context).entries
        start = evicting().compress(entries, context).entries
        if components == "kv":  # keys are fitted to the new values
            start.values = result.values
        fixed = fixed_entries(start, entries, context, 0.1, num_sinks=1)
        weights = attention(context.queries, start, context.scale).flatten(1, 2)
        derivative = OutputDerivative(
            weights, start.values, context.queries.vectors.flatten(1, 2), context.scale, start.is_live & ~fixed
        )
        matrix = dense(derivative)
        error = (output(entries, context) - output(start, context)).flatten(1)
        # The primal form of eq. 35, with g = 0.
        normal = matrix.transpose(1, 2) @ matrix + 0.05 * torch.eye(matrix.shape[2], dtype=torch.float64)
        step = torch.linalg.solve(normal, (matrix.transpose(1, 2) @ error.unsqueeze(-1)).squeeze(-1))
        assert not torch.equal(result.keys, start.keys)
        torch.testing.assert_close(result.keys, start.keys + step.view_as(start.keys), rtol=1e-6, atol=1e-8)


def algorithm_1(entries: Entries, context: CompressionContext, ridge: float, steps: int) -> Entries:
    """GRKV's pseudocode over what the selector keeps, with dense matrices; a tenth, one sink and the window fixed."""
    start = evicting().compress(entries, context).entries
    free = start.is_live & ~fixed_entries(start, entries, context, 0.1, num_sinks=1)
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
    result = policy(guard=False, **fields).compress(entries, context).entries
    expected = algorithm_1(entries, context, 0.05, steps=2)
    torch.testing.assert_close(result.values, expected.values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.keys, expected.keys, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [4, 5, 7])
def test_the_guard_stops_steps_that_raise_the_loss(seed):
    """Queries as large as these are where the linearisation misleads the paper's algorithm."""
    entries, context = problem(seed, dtype=torch.float64, size=10.0)
    before, unguarded, guarded = (
        window_loss(entries, parts.compress(entries, context).entries, context)
        for parts in (evicting(), policy(guard=False), policy())
    )
    assert (unguarded > before).any()
    assert (guarded <= before).all() and (guarded < before).any()


def test_the_windows_own_tokens_can_be_free():
    entries, context = problem(0)
    kept = evicting().compress(entries, context).entries
    in_window = kept.positions >= 40 - WINDOW
    free = {"fixed_share": 0.0, "num_fixed_sinks": 0}
    for fix_window in (True, False):
        result = policy(fix_window=fix_window, **free).compress(entries, context).entries
        for name in ("keys", "values"):
            changed = (getattr(result, name) != getattr(kept, name)).any(-1)
            assert changed[~in_window].all()
            assert changed[in_window].any() != fix_window


@pytest.mark.parametrize(
    ("model_type", "ridge"),
    [("llama", 0.01), ("gemma2", 0.01), ("mistral", 0.1), ("mixtral", 0.1), ("qwen2", 0.1), ("qwen3_moe", 0.1)],
)
def test_the_ridge_follows_the_model(model_type, ridge):
    assert RegressionMerger.model_defaults(ServedModel(model_type)) == {"lambda_k": ridge, "lambda_v": ridge}


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
    untouched = entries.clone()
    parts = policy(components=components, lambda_k=ridge, lambda_v=ridge, steps=steps, fixed_share=share)
    result = parts.compress(entries, context)
    assert_same(entries, untouched)
    assert_sound(result.entries, budget)
    assert_same(result.entries, parts.compress(entries, context).entries)

    kept = evicting().compress(entries, context)
    before, after = (window_loss(entries, e, context) for e in (kept.entries, result.entries))
    # Losses are compared in float32, on outputs of that precision.
    size = output(entries, context).square().sum((1, 2))
    assert (after <= before * (1 + 1e-4) + 1e-8 * size).all()
    assert result.num_merged + result.num_evicted == kept.num_evicted
    fixed = fixed_entries(kept.entries, entries, context, share, num_sinks=1) | ~kept.entries.is_live
    for name, part in (("keys", "k"), ("values", "v")):
        old, new = getattr(kept.entries, name), getattr(result.entries, name)
        assert torch.equal(new[fixed], old[fixed])
        if part not in components:
            assert torch.equal(new, old)
    for name in ("log_votes", "scores", "aux", "positions"):
        assert torch.equal(getattr(result.entries, name), getattr(kept.entries, name))


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_each_component_lowers_the_loss(seed, num_groups):
    entries, context = problem(seed, num_heads=4, num_groups=num_groups)
    losses = {"": window_loss(entries, evicting().compress(entries, context).entries, context)}
    for components in ("k", "v", "kv"):
        result = policy(components=components).compress(entries, context)
        losses[components] = window_loss(entries, result.entries, context)
        assert (losses[components] < losses[""]).all()
        assert (result.num_merged, result.num_evicted) == (4 * 24, 0)
    assert (losses["kv"] < losses["v"]).all()
    several = policy(steps=3).compress(entries, context).entries
    assert (window_loss(entries, several, context) <= losses["kv"]).all()


def test_a_head_without_loss_is_left_alone():
    entries, context = problem(0, num_heads=3)
    # In head 1 attention ignores all but the window; head 2 has no more live entries than the budget.
    entries.log_votes[1, entries.positions[1] < 40 - WINDOW] = -1e4
    entries.kill(torch.stack([torch.zeros(40), torch.zeros(40), entries.positions[2] < 30]).bool())
    result = policy().compress(entries, context)
    kept = evicting().compress(entries, context).entries
    for head, changed in enumerate([True, False, False]):
        for name in ("keys", "values"):
            assert torch.equal(getattr(result.entries, name)[head], getattr(kept, name)[head]) != changed
    assert (result.num_merged, result.num_evicted) == (24, 24)


def test_queries_see_entries_up_to_their_own_position():
    entries, context = problem(1, num_heads=1, dtype=torch.float64)
    # The newest token, which only its own query sees, is alike before and after.
    index = (entries.positions[0] == 39).nonzero().item()
    weights = attention(context.queries, entries, context.scale)
    assert not weights[0, :, :-1, index].any() and weights[0, :, -1, index].all()
    result, kept = (parts.compress(entries, context).entries for parts in (policy(), evicting()))
    assert window_loss(entries, result, context) < 0.5 * window_loss(entries, kept, context)


def test_heads_can_be_handed_over_in_parts():
    entries, context = problem(2, num_heads=4)
    whole = policy().compress(entries, context).entries
    for heads in ([0], [1, 3], [2]):
        part = policy().compress(entries.of_rows(heads), context.of_rows(heads)).entries
        torch.testing.assert_close(part.values, whole.of_rows(heads).values, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(part.keys, whole.of_rows(heads).keys, rtol=1e-3, atol=1e-4)


def test_without_queries_it_evicts():
    entries, context = problem(3)
    context = replace(context, queries=None)
    result, kept = (parts.compress(entries, context) for parts in (policy(), evicting()))
    assert_same(result.entries, kept.entries)
    assert (result.num_merged, result.num_evicted) == (0, kept.num_evicted)


def test_only_the_newest_queries_count():
    entries, context = problem(4)
    older = torch.full((2, 2, 3, 8), 100.0)
    more = replace(
        context,
        queries=newest_queries(torch.cat([older, context.queries.vectors], 2), 40),
    )
    assert_same(policy().compress(entries, more).entries, policy().compress(entries, context).entries)
    fewer = replace(context, queries=context.queries.newest(1))
    assert_sound(policy().compress(entries, fewer).entries, 16)


@pytest.mark.parametrize(
    ("tracker", "selector"),
    [
        *itertools.product([SumTracker(), MeanTracker(), LogEmaTracker()], [HeavyHitter(num_sink_tokens=1), SELECTOR]),
        *itertools.product([NoTracker()], [SinkRecent(num_sink_tokens=2), RecentQueries(recent_window=3)]),
    ],
)
def test_with_other_parts_and_while_decoding(tracker, selector):
    entries, context = problem(5)
    entries.aux.fill_(1.0)
    context = replace(context, at_prompt_end=False)
    before = window_loss(entries, evicting(selector, tracker).compress(entries, context).entries, context)
    result = policy(selector, tracker).compress(entries, context).entries
    assert (window_loss(entries, result, context) < before).all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_step_that_fails_is_not_taken(broken):
    entries, context = problem(6)
    context.queries.vectors[0, 0, 0] = broken
    result, kept = (parts.compress(entries, context).entries for parts in (policy(), evicting()))
    assert torch.equal(result.keys[0], kept.keys[0]) and torch.equal(result.values[0], kept.values[0])
    assert not torch.equal(result.values[1], kept.values[1])
