"""Least squares with attention's derivative, on every implementation, against dense algebra in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from vllm_kvmerge.ops import reference
from vllm_kvmerge.ops.regression import OutputDerivative


@pytest.mark.parametrize(("groups", "window", "n"), [(1, 1, 1), (2, 5, 70), (4, 8, 1100)])
def test_weights_of_what_queries_see(operators, groups, window, n):
    """Dead entries hold NaN; one query sees nothing, one just one entry."""
    generator = torch.Generator().manual_seed(n)
    randn = partial(torch.randn, generator=generator)
    queries, keys, votes = randn(2, groups, window, 24), randn(2, n, 24), randn(2, n)
    positions = torch.randint(0, 40, (2, n), generator=generator)
    positions[:, 0], positions[:, 1::7] = 0, -1
    votes[positions < 0] = torch.nan
    seen = torch.arange(window).repeat(2, 1) * 9
    seen[1, -1] = -1
    attend = getattr(operators, "attention_weights", reference.attention_weights)
    weights = attend(queries, seen, keys, votes, positions, 0.3)
    logits = torch.einsum("hgqd,hnd->hgqn", queries.double() * 0.3, keys.double()) + votes.double()[:, None, None]
    hidden = (positions[:, None] < 0) | (positions[:, None] > seen[:, :, None])
    expected = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)
    assert not weights[1, :, -1].any()


@pytest.mark.parametrize(("rows", "n", "size"), [(3, 5, 16), (20, 40, 24), (6, 600, 8), (5, 20, 136)])
def test_systems_of_outputs_are_solved(operators, rows, n, size):
    """Heads come to their end each at its own time, one without an iteration; of many entries, and head sizes."""
    generator = torch.Generator().manual_seed(n)
    randn = partial(torch.randn, generator=generator)
    weights, free = randn(3, rows, n).softmax(-1), torch.rand(3, n, generator=generator) < 0.7
    values, queries, right = randn(3, n, size), randn(3, rows, size), randn(3, rows, size)
    right[1] *= 1e-3
    right[2] = 0.0
    solve = getattr(operators, "solve_outputs", reference.solve_outputs)
    derivative = OutputDerivative(weights, values, queries, size**-0.5, free)
    exactly = OutputDerivative(weights.double(), values.double(), queries.double(), size**-0.5, free)

    def error(solution: Tensor) -> Tensor:
        x = solution.double()
        left = exactly.forward(exactly.adjoint(x)) + 0.05 * x
        return (left - right).flatten(1).norm(dim=1) / right.double().flatten(1).norm(dim=1).clamp(min=1e-30)

    solution = solve(right, derivative, 0.05, 300, 1e-4)
    assert error(solution).max() < 3e-4 and not solution[2].any()
    assert (error(solve(right, derivative, 0.05, 300, 0.3))[:2] < 0.3001).all()
    # The first iteration is a step of steepest descent.
    once = solve(right, derivative, 0.05, 1, 1e-4).double()
    image = exactly.forward(exactly.adjoint(right.double())) + 0.05 * right
    sizes = [(right.double() * other).sum((1, 2), keepdim=True) for other in (right, image)]
    expected = (sizes[0] / sizes[1]).nan_to_num(0.0) * right
    torch.testing.assert_close(once, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
