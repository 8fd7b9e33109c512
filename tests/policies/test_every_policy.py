"""What holds for every policy."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.every import REQUESTS, context_for, entries_for, name_of, policy_of, small_policy
from tests.policies.sampling import (
    SEEDS,
    as_worker,
    assert_same,
    assert_sound,
    concatenate,
    on_two_workers,
    stack_rows,
)
from vllm_kvmerge.policies import PRESETS, CompressionPolicy, Entries
from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.policies.mergers import DropMerger, ResidualMerger

LEAST_SQUARES = ("regression", "attention_matching")


def num_live_after(policy: CompressionPolicy, entries: Entries, budgets: list[int]) -> list[int]:
    """Live entries that each head keeps, slots aside."""
    return [min(budget, live) for budget, live in zip(budgets, entries.is_live.sum(1).tolist(), strict=True)]


@examples(250)
@given(st.sampled_from(REQUESTS), SEEDS, st.integers(1, 4), st.integers(1, 38), st.booleans(), st.data())
def test_what_a_compression_leaves(request_, seed, num_heads, more, at_prompt_end, data):
    """Also, but for a selector that pools heads, that every head is compressed as if it were alone."""
    policy = small_policy(request_)
    n = policy.min_budget + more
    entries = entries_for(policy, seed, num_heads, n, data.draw(st.integers(0, n)))
    entries.scores = entries.scores ** torch.arange(1, num_heads + 1).unsqueeze(1)  # some heads attend to fewer
    untouched, budget = entries.clone(), data.draw(st.integers(policy.min_budget, n))
    context = context_for(policy, entries, budget, at_prompt_end=at_prompt_end)
    result = policy.compress(entries, context)
    assert_same(entries, untouched)
    assert_same(policy.compress(entries, context).entries, result.entries)
    assert_sound(result.entries, context.capacity)
    dead = ~result.entries.is_live
    assert all((getattr(result.entries, name)[dead] == 0).all() for name in ("keys", "values", "scores", "aux"))
    num_merged, num_evicted, num_live = result.num_merged, result.num_evicted, result.entries.is_live.sum(1).tolist()
    assert num_merged + num_evicted + sum(num_live) == int(entries.is_live.sum()) and min(num_merged, num_evicted) >= 0
    assert num_merged == 0 or not isinstance(policy.merger, DropMerger)
    budgets = [n] * num_heads if budget == n else policy.head_budgets(entries, context).tolist()
    kept = num_live_after(policy, entries, budgets)
    if isinstance(policy.merger, ResidualMerger):
        assert all(map(int.__le__, num_live, kept))
    else:
        assert num_live == kept
    if policy.selector.pools_heads or budget == n:
        return
    alone = policy.model_copy(update={"allocator": Uniform()})
    close = {"rtol": 1e-3, "atol": 1e-3} if policy.merger.name in LEAST_SQUARES else {"rtol": 1e-5, "atol": 1e-6}
    for head, head_budget in enumerate(budgets):
        own = replace(context.of_rows([head]), budget=head_budget)
        one = alone.compress(entries.of_rows([head]), own)
        for name, plane in vars(one.entries).items():
            torch.testing.assert_close(plane[0], getattr(result.entries, name)[head], **close, msg=name)
        num_merged, num_evicted = num_merged - one.num_merged, num_evicted - one.num_evicted
    assert (num_merged, num_evicted) == (0, 0)


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_scores_that_are_not_finite(request_, value):
    """As many live entries stay, with keys and values that are numbers."""
    policy = small_policy(request_)
    entries = entries_for(policy, 1, 2, policy.min_budget + 24, num_dead=6)
    entries.scores[:, ::3] = value
    context = context_for(policy, entries, policy.min_budget + 2)
    result = policy.compress(entries, context).finite(torch.float32).entries
    if not isinstance(policy.merger, ResidualMerger):
        kept = num_live_after(policy, entries, policy.head_budgets(entries, context).tolist())
        assert result.is_live.sum(1).tolist() == kept
    assert result.keys[result.is_live].isfinite().all() and result.values[result.is_live].isfinite().all()


@pytest.mark.parametrize("name", PRESETS)
def test_300_decode_steps_stay_within_the_budget(name):
    """Sinks stay, and so do the places of entries: what moves comes from behind."""
    policy, num_heads, prompt = policy_of({"policy": name}), 2, 120
    budget = policy.min_budget + 24
    of_layer = {"layer": 1, "num_layers": 3, "layer_statistics": torch.ones(1, 3)}
    entries = entries_for(policy, 0, num_heads, prompt)
    num_sinks, num_merged = getattr(policy.selector, "num_sink_tokens", 0), 0
    for seen in range(prompt, prompt + 300, 16):
        before = int(entries.is_live.sum())
        context = context_for(policy, entries, budget, seen, seen == prompt, **of_layer)
        result = policy.compress(entries, context)
        compressed, kept = result.entries, result.update.kept
        assert_sound(compressed, context.capacity)
        assert ((kept == torch.arange(context.capacity)) | (kept < 0) | (kept >= context.capacity)).all()
        assert result.num_merged + result.num_evicted + int(compressed.is_live.sum()) == before
        # The layers share what is known beforehand.
        most = policy.head_budgets(entries, context).sum() if name == "calibrated" else num_heads * budget
        assert compressed.is_live.sum() <= most
        assert compressed.positions.max() <= seen - 1
        assert all(set(range(num_sinks)) <= set(row) for row in compressed.positions.tolist())
        num_merged += result.num_merged
        entries = concatenate(compressed, entries_for(policy, seen, num_heads, 16, first=seen))
    assert (num_merged > 0) == (policy.merger.name != "drop")


@pytest.mark.parametrize(
    "name", [name for name, one in PRESETS.items() if one.allocator not in ("adaptive", "global", "calibrated")]
)
def test_two_workers_do_what_one_does(name):
    policy = policy_of({"policy": name})
    entries = entries_for(policy, 2, num_heads=4, n=policy.min_budget + 60)
    entries.positions = entries.positions[:1].repeat(4, 1)
    statistics = torch.tensor([[1.0, 2.0]])
    context = context_for(
        policy, entries, policy.min_budget + 6, at_prompt_end=False, layer=1, num_layers=2, layer_statistics=statistics
    )
    whole = policy.compress(entries, context)
    for cut in (1, 2):
        if policy.selector.pools_heads:
            halves = on_two_workers(policy.compress, entries, context, cut)
        else:
            heads = list(range(cut)), list(range(cut, 4))
            halves = [policy.compress(entries.of_rows(own), as_worker(context, own)) for own in heads]
        merged = stack_rows([half.entries for half in halves])
        if policy.merger.name in LEAST_SQUARES:
            assert torch.equal(merged.positions, whole.entries.positions)
        else:
            assert_same(merged, whole.entries)
        assert sum(half.num_merged for half in halves) == whole.num_merged
