"""MorphKV: what the newest queries attend to stays."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_sound, newest_queries, random_entries
from vllm_kvmerge.ops import attention as attention_module
from vllm_kvmerge.policies import DEAD, CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.policies.selectors import RecentQueries
from vllm_kvmerge.policies.trackers import NoTracker


def policy(**fields) -> CompressionPolicy:
    return CompressionPolicy(tracker=NoTracker(), selector=RecentQueries(**fields), merger=DropMerger())


def context_of(entries: Entries, budget: int, queries: torch.Tensor) -> CompressionContext:
    """``queries``: ``[H, G, w, d]``, of the newest tokens."""
    n = len(entries)
    newest = newest_queries(queries, n)
    return CompressionContext.of_layer(entries, budget, n, at_prompt_end=False, queries=newest, scale=0.3)


def kept_positions(entries: Entries) -> list[set[int]]:
    return [set(row) - {DEAD} for row in entries.positions.tolist()]


def brute_force(entries: Entries, context: CompressionContext, head: int, selector: RecentQueries) -> set[int]:
    """Algorithm 1 for one head, with loops; the distant entries pooled over their neighbours."""
    window, reach = selector.recent_window, selector.kernel_size // 2
    num_queries = selector.voting_queries or window
    fuse = {"sum": lambda a, b: a + b, "max": max}
    live = [i for i, p in enumerate(entries.positions[head].tolist()) if p != DEAD]
    position = {i: int(entries.positions[head, i]) for i in live}
    recent = set(sorted(live, key=position.get)[-window:])
    usable = [i for i in live if selector.softmax_over == "all" or i not in recent]
    fused = dict.fromkeys(live, 0.0)
    for r in range(context.queries.vectors.shape[2])[-num_queries:]:
        grouped = dict.fromkeys(live, 0.0)
        seen = [i for i in usable if position[i] <= context.queries.positions[head, r]]
        for g in range(context.queries.vectors.shape[1]):
            logits = entries.keys[head, seen] @ context.queries.vectors[head, g, r] * context.scale
            for i, p in zip(seen, (logits + entries.log_votes[head, seen]).softmax(0).tolist(), strict=True):
                grouped[i] = fuse[selector.group_fusion](grouped[i], p)
        for i in live:
            fused[i] = fuse[selector.fusion](fused[i], grouped[i])
    distant = sorted(set(live) - recent, key=position.get)
    pooled = {i: max(fused[j] for j in distant[max(0, at - reach) : at + reach + 1]) for at, i in enumerate(distant)}
    distant = sorted(sorted(distant), key=pooled.get, reverse=True)
    return {position[i] for i in recent} | {position[i] for i in distant[: max(0, context.budget - len(recent))]}


@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(1, 3), st.integers(4, 30), st.sampled_from(["sum", "max"]), st.data())
def test_is_algorithm_1(seed, num_heads, num_groups, n, fusion, data):
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    votes = torch.randn(entries.log_votes.shape, generator=generator, dtype=torch.float64)
    entries.log_votes = torch.where(entries.is_live, votes, entries.log_votes)
    window = data.draw(st.integers(1, n - 2))
    budget = data.draw(st.integers(window + 1, n - 1))
    num_queries = data.draw(st.integers(1, n))  # fewer or more than the selector reads
    queries = 2 * torch.randn(num_heads, num_groups, num_queries, 8, generator=generator, dtype=torch.float64)
    context = context_of(entries, budget, queries)
    parts = policy(
        recent_window=window,
        voting_queries=data.draw(st.none() | st.integers(1, n)),
        fusion=fusion,
        group_fusion=data.draw(st.sampled_from(["sum", "max"])),
        softmax_over=data.draw(st.sampled_from(["all", "distant"])),
        kernel_size=data.draw(st.sampled_from([1, 1, 3, 5])),
    )
    result = parts.compress(entries, context).entries
    assert_sound(result, budget)
    expected = [brute_force(entries, context, head, parts.selector) for head in range(num_heads)]
    assert kept_positions(result) == expected


@pytest.mark.parametrize("fusion", ["sum", "max"])
def test_groups_of_queries_change_nothing(monkeypatch, fusion):
    entries, parts = random_entries(3, 2, 40), policy(recent_window=12, fusion=fusion)
    context = context_of(entries, 20, torch.randn(2, 3, 12, 8, generator=torch.Generator().manual_seed(3)))
    whole = parts.compress(entries, context).entries
    monkeypatch.setattr(attention_module, "MAX_ATTENTION_BYTES", 4 * 3 * 40 * 5)  # groups of 5, 5 and 2
    assert kept_positions(parts.compress(entries, context).entries) == kept_positions(whole)


def test_without_queries_it_is_a_sliding_window():
    entries = random_entries(0, 2, 20)
    context = CompressionContext.of_layer(entries, 10, 20, at_prompt_end=True)
    result = policy(recent_window=4).compress(entries, context).entries
    assert kept_positions(result) == [set(range(10, 20))] * 2
