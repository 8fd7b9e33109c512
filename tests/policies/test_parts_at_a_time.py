"""What is read or multiplied part by part comes to what it would as a whole."""

import pytest
import torch

from tests.policies.sampling import newest_queries, random_entries, rope
from vllm_kvmerge.policies import CompressionContext, Entries, Queries
from vllm_kvmerge.policies import entries as entries_module
from vllm_kvmerge.policies.mergers import residual
from vllm_kvmerge.policies.mergers.least_squares import attention
from vllm_kvmerge.policies.mergers.regression import OutputDerivative, _Fit
from vllm_kvmerge.policies.mergers.residual import _join
from vllm_kvmerge.policies.selectors import Critical, ExpectedAttention, KeyDiff, KeyNorm


def join_one_by_one(entries: Entries, head: int, num_slots: int) -> tuple[list[int], list[float]]:
    """The slot of each member (ZSMerge algorithm 1), in float64: the first entries are slots, the others join."""
    keys = entries.keys[head].double()
    slots, weights = keys[:num_slots].clone(), entries.aux[head, :num_slots].double().clone()
    joined = []
    for key in keys[num_slots:]:
        slot = int((slots @ key).argmax())
        weights[slot] += 1
        slots[slot] += (key - slots[slot]) / weights[slot]
        joined.append(slot)
    return joined, weights.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_members", [1, 255, 256, 257, 1000])
def test_members_join_slots_one_after_the_other(num_members, dtype):
    """Whatever the number of members that are compared at a time; none of the slots nearly ties with another."""
    num_slots, num_heads = 12, 3
    entries = random_entries(num_members, num_heads, num_slots + num_members, head_size=32, dtype=dtype)
    entries.aux[:, :num_slots] = torch.arange(1.0, num_slots + 1)
    index = torch.arange(len(entries)).expand(num_heads, -1)
    slots, members = index[:, :num_slots], index[:, num_slots:]
    weights = torch.ones(num_heads, num_members, dtype=dtype)
    joined, total = _join(entries, slots, members, weights, entries.aux[:, :num_slots].clone())
    for head in range(num_heads):
        expected, expected_weights = join_one_by_one(entries, head, num_slots)
        assert joined[head].tolist() == expected
        assert total[head].tolist() == expected_weights


def test_joining_does_not_depend_on_other_heads_or_dead_members(monkeypatch):
    monkeypatch.setattr(residual, "MAX_JOINING", 8)
    entries = random_entries(3, num_heads=4, n=60)
    index = torch.arange(60).expand(4, -1)
    weights = torch.ones(4, 50)
    weights[:, 30:] = 0.0  # the last are dead, and hold NaN
    entries.keys[:, 40:] = torch.nan
    members = index[:, 10:].masked_fill(weights == 0, -1)
    joined, total = _join(entries, index[:, :10], members, weights, torch.ones(4, 10))
    alone = _join(entries.of_rows([2]), index[:1, :10], members[:1], weights[:1], torch.ones(1, 10))
    assert torch.equal(joined[2:3], alone[0]) and torch.equal(total[2:3], alone[1])
    assert (total.sum(1) == 10 + 30).all()


@pytest.mark.parametrize(
    "selector",
    [KeyNorm(), KeyDiff(), Critical(window_size=2, kernel_size=1), ExpectedAttention()],
    ids=lambda s: s.name,
)
def test_selectors_that_read_all_keys_or_values(selector, monkeypatch):
    entries = random_entries(1, num_heads=3, n=100, num_dead=5)
    weights = torch.randn(3, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    known = {"output_weights": weights, "queries": newest_queries(weights, 100), "rotation": rope(8)}
    context = CompressionContext.of_layer(entries, 40, 100, at_prompt_end=True, **known)
    masks = []
    for size in (1024, 100, 33, 7):
        monkeypatch.setattr(entries_module, "PART_ENTRIES", size)
        protected = selector.protected(entries, context)
        masks.append(selector.select(entries, entries.scores, protected, context))
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert len(list(entries.parts())) == 15


def test_comparing_in_parts(monkeypatch):
    entries = random_entries(2, num_heads=2, n=90)
    index = torch.arange(90).expand(2, -1)
    usable = torch.ones(2, 30, dtype=torch.bool)
    whole = entries.most_similar(index[:, 30:], index[:, :30], usable)
    monkeypatch.setattr(entries_module, "PART_ENTRIES", 7)
    parts = entries.most_similar(index[:, 30:], index[:, :30], usable)
    torch.testing.assert_close(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])
    assert entries.most_similar(index[:, :0], index[:, :30], usable)[0].shape == (2, 0)


def problem(num_queries: int, num_entries: int, head_size: int = 4) -> tuple[_Fit, Entries]:
    generator = torch.Generator().manual_seed(0)
    kept = random_entries(0, num_heads=2, n=num_entries, head_size=head_size, dtype=torch.float64)
    vectors = torch.randn(2, 2, num_queries, head_size, generator=generator, dtype=torch.float64)
    queries = Queries(vectors, torch.full((2, num_queries), num_entries))
    target = torch.randn(2, 2, num_queries, head_size, generator=generator, dtype=torch.float64)
    free = torch.rand(2, num_entries, generator=generator) < 0.8
    return _Fit(queries, 0.5, target, kept, free, guard=True), kept


@pytest.mark.parametrize(("num_queries", "num_entries"), [(3, 20), (20, 15), (40, 6)])
def test_value_steps_solve_the_same_problem_by_rows_or_by_entries(num_queries, num_entries):
    """Eq. 8 with the paper's system of r = G m rows, of whichever size the one that is solved was."""
    fit, kept = problem(num_queries, num_entries)
    fitted = fit.values(fit.attention(kept.keys), kept.values, 0.1)
    weights = attention(fit.queries, kept, fit.scale).flatten(1, 2)
    free = weights * fit.free.unsqueeze(1)
    system = free @ free.transpose(1, 2) + 0.1 * torch.eye(free.shape[1], dtype=free.dtype)
    residual_ = fit.target.flatten(1, 2) - weights @ kept.values
    expected = kept.values + free.transpose(1, 2) @ torch.linalg.solve(system, residual_)
    torch.testing.assert_close(fitted, expected)
    assert not torch.equal(fitted, kept.values)


@pytest.mark.parametrize("num_queries", [2, 4, 5, 40])
def test_the_derivative_after_its_adjoint(num_queries):
    """For few queries by way of their products, for many by way of the keys."""
    fit, kept = problem(num_queries, 9)
    weights = attention(fit.queries, kept, fit.scale).flatten(1, 2)
    derivative = OutputDerivative(weights, kept.values, fit.queries.vectors.flatten(1, 2), fit.scale, fit.free)
    output = torch.randn(fit.target.flatten(1, 2).shape, dtype=torch.float64)
    expected = derivative.forward(derivative.adjoint(output))
    torch.testing.assert_close(derivative.forward_adjoint(output), expected)
    assert ("_query_products" in vars(derivative)) == (2 * num_queries <= 2 * 4)
