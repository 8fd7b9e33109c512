"""MorphKV: what the newest queries attend to stays."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_sound, concatenate, newest_queries, random_entries
from vllm_kvmerge.ops import attention as attention_module
from vllm_kvmerge.policies import DEAD, CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.policies.selectors import RecentQueries
from vllm_kvmerge.policies.trackers import NoTracker


def policy(**fields) -> CompressionPolicy:
    return CompressionPolicy(tracker=NoTracker(), selector=RecentQueries(**fields), merger=DropMerger())


def with_queries(context: CompressionContext, queries: torch.Tensor, scale: float = 0.3) -> CompressionContext:
    """``queries``: ``[H, G, w, d]``, of the newest tokens."""
    return replace(context, queries=newest_queries(queries, context.num_tokens), scale=scale)


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
    context = with_queries(CompressionContext.of_layer(entries, budget, n, at_prompt_end=False), queries)
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


@pytest.mark.parametrize(("window", "voting"), [(4, 10), (8, 3)])
def test_distant_entries_are_those_before_the_window_however_many_queries_vote(window, voting):
    entries = random_entries(0, 2, 24, dtype=torch.float64)
    queries = 2 * torch.randn(2, 2, 12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    context = with_queries(CompressionContext.of_layer(entries, 14, 24, at_prompt_end=False), queries)
    parts = policy(recent_window=window, voting_queries=voting, softmax_over="distant")
    expected = [brute_force(entries, context, head, parts.selector) for head in range(2)]
    assert kept_positions(parts.compress(entries, context).entries) == expected


def test_groups_of_queries_change_nothing(monkeypatch):
    entries = random_entries(3, 2, 40)
    queries = torch.randn(2, 3, 12, 8, generator=torch.Generator().manual_seed(3))
    context = with_queries(CompressionContext.of_layer(entries, 20, 40, at_prompt_end=True), queries)
    whole = [policy(recent_window=12, fusion=f).compress(entries, context).entries for f in ("sum", "max")]
    monkeypatch.setattr(attention_module, "MAX_ATTENTION_BYTES", 4 * 3 * 40 * 5)  # groups of 5, 5 and 2
    groups = [policy(recent_window=12, fusion=f).compress(entries, context).entries for f in ("sum", "max")]
    assert [kept_positions(e) for e in groups] == [kept_positions(e) for e in whole]


def profile_example(profiles: list[list[float]]) -> tuple[Entries, torch.Tensor]:
    """One head whose queries of the last tokens attend to all tokens as given: row r to entry k with probability r, k.

    Keys are unit vectors, so that a query is its logits.
    """
    table = torch.tensor(profiles)
    n = table.shape[1]
    entries = random_entries(0, 1, n, head_size=n)
    entries.positions = torch.arange(n).unsqueeze(0)
    entries.keys = torch.eye(n).unsqueeze(0)
    return entries, table.clamp(min=1e-9).log()[None, None]


def test_walk_through_example():
    # Section 3.2, timestep T0: "weather" and "The" both attend to "today's" (0.3) and hardly to "me" (0.05).
    words = ["me", "today's", "weather", "The"]
    entries, queries = profile_example([[0.05, 0.3, 0.65, 0.0], [0.05, 0.3, 0.2, 0.45]])
    context = with_queries(CompressionContext.of_layer(entries, 3, 4, at_prompt_end=False), queries, scale=1.0)
    for fusion in ("sum", "max"):
        kept = policy(recent_window=2, fusion=fusion).compress(entries, context).entries
        assert {words[p] for p in kept.positions[0].tolist()} == {"today's", "weather", "The"}


@pytest.mark.parametrize(("fusion", "stays"), [("sum", 0), ("max", 1)])
def test_sum_prefers_what_is_always_attended_to_and_max_what_one_query_needs(fusion, stays):
    # Section 3.1.3: entry 0 gets 0.3 from both, entry 1 gets 0.5 from one.
    entries, queries = profile_example([[0.3, 0.0, 0.7, 0.0], [0.3, 0.5, 0.1, 0.1]])
    context = with_queries(CompressionContext.of_layer(entries, 3, 4, at_prompt_end=False), queries, scale=1.0)
    kept = policy(recent_window=2, fusion=fusion).compress(entries, context).entries
    assert set(kept.positions[0].tolist()) == {stays, 2, 3}


def test_a_query_does_not_see_newer_entries():
    # Both queries would give entry 3 everything; the older one cannot, and decides between 0 and 1.
    entries, queries = profile_example([[0.2, 0.1, 0.0, 1e9], [0.0, 0.0, 0.0, 1e9]])
    context = with_queries(CompressionContext.of_layer(entries, 3, 4, at_prompt_end=False), queries, scale=1.0)
    kept = policy(recent_window=2).compress(entries, context).entries
    assert set(kept.positions[0].tolist()) == {0, 2, 3}


def test_query_heads_are_summed_before_fusing():
    entries, first = profile_example([[0.0, 0.5, 0.5, 0.0], [0.3, 0.0, 0.0, 0.7]])
    _, second = profile_example([[0.0, 0.0, 1.0, 0.0], [0.3, 0.0, 0.0, 0.7]])
    queries = torch.cat([first, second], dim=1)
    context = with_queries(CompressionContext.of_layer(entries, 3, 4, at_prompt_end=False), queries, scale=1.0)
    kept = policy(recent_window=2, fusion="max").compress(entries, context).entries
    assert set(kept.positions[0].tolist()) == {0, 2, 3}  # 0.3 + 0.3 > 0.5 + 0


def test_size_is_constant_over_300_steps():
    num_heads, num_groups, head_size, budget, window = 2, 2, 8, 24, 6
    parts = policy(recent_window=window)
    generator = torch.Generator().manual_seed(0)
    entries = random_entries(1, num_heads, 60, head_size)
    entries.positions = torch.arange(60).expand(num_heads, -1).clone()
    history = torch.randn(num_heads, num_groups, 360, head_size, generator=generator)
    for seen in range(60, 360):
        if seen > 60:
            token = random_entries(seen, num_heads, 1, head_size)
            token.positions.fill_(seen - 1)
            entries = concatenate(entries, token)
        context = with_queries(
            CompressionContext.of_layer(entries, budget, seen, seen == 60), history[:, :, seen - window : seen]
        )
        entries = parts.compress(entries, context).entries
        assert_sound(entries, budget)
        assert all(set(range(seen - window, seen)) <= row for row in kept_positions(entries))


def test_without_queries_it_is_a_sliding_window():
    entries = random_entries(0, 2, 20)
    result = (
        policy(recent_window=4)
        .compress(entries, CompressionContext.of_layer(entries, 10, 20, at_prompt_end=True))
        .entries
    )
    assert kept_positions(result) == [set(range(10, 20))] * 2


def test_what_it_asks_for():
    assert policy().query_window == 32 and policy(recent_window=200).query_window == 200
    assert policy(voting_queries=31).query_window == 31
    assert policy().min_budget == 33
    assert not policy().needs_scores
    with pytest.raises(ValueError, match="kernel_size\n.*must be odd"):
        policy(kernel_size=4)
