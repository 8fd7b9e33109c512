"""CriticalKV: two stages, the second of which weighs values by the output projection."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_sound, random_entries
from vllm_kvmerge import ops
from vllm_kvmerge.policies import DEAD, CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.policies.selectors import Critical, WindowTopK, critical
from vllm_kvmerge.policies.trackers import SumTracker


def policy(selector) -> CompressionPolicy:
    return CompressionPolicy(tracker=SumTracker(), selector=selector, merger=DropMerger())


def random_weights(seed: int, num_heads: int, num_groups: int = 2, hidden: int = 12, head_size: int = 8):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_heads, num_groups, hidden, head_size)
    # Projections of very different size, so that the second stage has something to say.
    return torch.randn(shape, generator=generator, dtype=torch.float64) * torch.rand(shape, generator=generator) ** 3


def brute_force(entries: Entries, weights: torch.Tensor, head: int, budget: int, selector: Critical) -> set[int]:
    """Both stages for one head, with loops; pooling is over one entry."""
    live = [i for i, p in enumerate(entries.positions[head].tolist()) if p != DEAD]
    live.sort(key=lambda i: entries.positions[head, i].item())
    window, others = live[-selector.window_size :], live[: -selector.window_size]
    room = max(0, budget - len(window))
    score = {i: entries.scores[head, i].item() for i in others}
    critical_score = {}
    for i in others:
        norms = [(weight @ entries.values[head, i]).abs().sum().item() for weight in weights[head]]
        critical_score[i] = score[i] * sum(norms) / len(norms)
    stage_1 = sorted(others, key=score.get, reverse=True)[: int(room * selector.first_stage_share)]
    rest = [i for i in others if i not in stage_1]
    stage_2 = sorted(rest, key=critical_score.get, reverse=True)[: room - len(stage_1)]
    return {entries.positions[head, i].item() for i in window + stage_1 + stage_2}


@examples(60)
@given(
    SEEDS, st.integers(1, 3), st.integers(1, 3), st.integers(3, 30), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.data()
)
def test_two_stages(seed, num_heads, num_groups, n, share, data):
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n)), dtype=torch.float64)
    window = data.draw(st.integers(1, n - 2))
    budget = data.draw(st.integers(window + 1, n - 1))
    weights = random_weights(seed, num_heads, num_groups)
    selector = Critical(window_size=window, kernel_size=1, first_stage_share=share)
    context = CompressionContext.of_layer(entries, budget, n, at_prompt_end=True, output_weights=weights)
    result = policy(selector).compress(entries, context).entries
    assert_sound(result, budget)
    kept = [set(row) - {DEAD} for row in result.positions.tolist()]
    assert kept == [brute_force(entries, weights, head, budget, selector) for head in range(num_heads)]


def test_without_weights_it_is_snapkv():
    entries = random_entries(0, 3, 60, num_dead=5)
    context = CompressionContext.of_layer(entries, 25, 60, at_prompt_end=True)
    ours, snapkv = (
        policy(selector).compress(entries, context).entries.positions.sort().values
        for selector in (Critical(window_size=8), WindowTopK(window_size=8))
    )
    assert torch.equal(ours, snapkv)


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_entries_left_unweighed_are_none_of_the_largest(spread):
    """Scores that are alike, so that all are weighed, and scores that are not, of models' dtypes."""
    heads, n, head_size, budget = 2, 500, 32, 120
    generator = torch.Generator().manual_seed(int(10 * spread))
    weights = random_weights(1, heads, 3, 64, head_size).to(torch.bfloat16)
    entries = random_entries(1, heads, n, num_dead=7, head_size=head_size)
    entries.scores = ((0.01 + spread) * torch.randn(heads, n, generator=generator)).exp()
    selector = Critical(window_size=8, kernel_size=1)
    context = CompressionContext.of_layer(entries, budget, n, at_prompt_end=True, output_weights=weights)
    result = policy(selector).compress(entries, context).entries
    exact = replace(entries, values=entries.values.double())
    expected = [brute_force(exact, weights.double(), head, budget, selector) for head in range(heads)]
    assert [set(row) for row in result.positions.tolist()] == expected


@examples(40)
@given(SEEDS, st.sampled_from(["normal", "one column", "one row", "alike"]))
def test_bounds_hold(seed, kind):
    entries, weights = random_entries(seed, 2, 40, head_size=8), random_weights(seed, 2).float()
    if kind == "one column":
        weights[..., 1:] = 0.0
    elif kind == "one row":
        weights[:, :, 1:] = 0.0
    elif kind == "alike":  # the bound is as close as it can be
        weights[:], entries.values[:] = 0.3, 0.7
    bounds, norms = critical.norm_bounds(entries, weights), ops.projected_norms(entries.values, weights)
    assert (bounds >= norms).all()
    if kind == "alike":
        assert (bounds < 1.001 * norms).all()


def test_products_of_weights_are_kept_while_these_are():
    weights = random_weights(1, 2)
    assert critical.mean_products(weights) is critical.mean_products(weights)
    assert critical.mean_products(weights.clone()) is not critical.mean_products(weights)
    before = len(critical._means)
    del weights
    assert len(critical._means) < before
