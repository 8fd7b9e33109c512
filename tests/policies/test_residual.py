"""ZSMerge: prompt averaging, slots and theorem 3.1."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_sound, probabilities, random_entries, random_query
from vllm_kvmerge.policies import DEAD, CompressionContext, CompressionPolicy
from vllm_kvmerge.policies.mergers import ResidualMerger
from vllm_kvmerge.policies.selectors import HeavyHitter
from vllm_kvmerge.policies.trackers import SumTracker


def policy(recent: int | None = None, **merger: object) -> CompressionPolicy:
    return CompressionPolicy(
        tracker=SumTracker(decay=0.98),
        selector=HeavyHitter(num_sink_tokens=0, recent_window=recent, recent_share=0.25),
        merger=ResidualMerger(**merger),
    )


@examples(80)
@given(SEEDS, st.integers(1, 3), st.integers(8, 40), st.floats(0.0, 1.0), st.data())
def test_prompt_end_averages_runs(seed, num_heads, n, alpha, data):
    num_dead = data.draw(st.integers(0, n))
    entries = random_entries(seed, num_heads, n, num_dead=num_dead, dtype=torch.float64)
    budget = data.draw(st.integers(4, n - 1))
    share = data.draw(st.sampled_from([0.125, 0.5, 0.9]))
    context = CompressionContext.of_layer(entries, budget, n, at_prompt_end=True)
    result = policy(alpha=alpha, residual_share=share).compress(entries, context)
    assert_sound(result.entries, budget)
    assert result.num_evicted == 0

    num_slots = min(max(1, round(share * budget)), budget - 2)
    num_kept = budget - num_slots
    for head in range(num_heads):
        live = entries.is_live[head].nonzero().flatten().tolist()
        live.sort(key=lambda i: entries.positions[head, i].item())
        num_recent = max(1, min(int(0.25 * budget), num_kept - 1))
        older = sorted(live[:-num_recent], key=lambda i: -entries.scores[head, i].item())
        rest = sorted(older[num_kept - len(live[-num_recent:]) :], key=lambda i: entries.positions[head, i].item())
        count = min(num_slots, len(rest))  # runs begin at i * len / count
        runs = [[e for rank, e in enumerate(rest) if rank * count // len(rest) == i] for i in range(count)]
        assert {len(run) for run in runs} <= {len(rest) // max(1, len(runs)), len(rest) // max(1, len(runs)) + 1}
        where = {int(p): slot for slot, p in enumerate(result.entries.positions[head])}
        for run in runs:
            slot = where[int(entries.positions[head, run[-1]])]
            torch.testing.assert_close(result.entries.keys[head, slot], entries.keys[head, run].mean(0))
            torch.testing.assert_close(result.entries.values[head, slot], entries.values[head, run].mean(0))
            torch.testing.assert_close(result.entries.scores[head, slot], entries.scores[head, run].sum())
            assert result.entries.aux[head, slot] == len(run)
            assert math.isclose(result.entries.log_votes[head, slot], alpha * math.log(len(run)), abs_tol=1e-12)
        assert (result.entries.aux[head] >= 1).sum() == len(runs)
        assert result.entries.is_live[head].sum() == min(num_kept, len(live)) + len(runs)


def test_what_leaves_founds_slots_first():
    """Algorithm 1: three entries found the slots, in order of position, the fourth joins that of largest product."""
    entries = random_entries(0, num_heads=2, n=13, dtype=torch.float64)
    parts = policy(recent=3, residual_share=0.25)  # B_p = 3, B_c = 6, B_r = 3
    result = parts.compress(entries, CompressionContext.of_layer(entries, 12, 13, at_prompt_end=False)).entries
    for head in range(2):
        old = entries.positions[head].argsort()[:-3]
        leaving = old[entries.scores[head, old].argsort()[:4]]
        *founders, last = leaving[entries.positions[head, leaving].argsort()].tolist()
        keys = [entries.keys[head, founder] for founder in founders]
        joined = max(range(3), key=lambda i: float(keys[i] @ entries.keys[head, last]))
        keys[joined] = (keys[joined] + entries.keys[head, last]) / 2
        is_slot = result.aux[head] >= 1
        assert sorted(result.aux[head, is_slot].tolist()) == [1, 1, 2]
        for i, key in enumerate(keys):
            slot = (result.keys[head] - key).abs().sum(1).argmin()
            torch.testing.assert_close(result.keys[head, slot], key)
            assert is_slot[slot] and result.aux[head, slot] == 1 + (i == joined)


@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(8, 60), st.floats(0.0, 1.0), st.booleans(), st.data())
def test_theorem_3_1_uncompressed_entries_gain_attention(seed, num_heads, n, alpha, at_prompt_end, data):
    full = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n // 2)), dtype=torch.float64)
    context = CompressionContext.of_layer(full, data.draw(st.integers(4, n - 1)), n, at_prompt_end)
    compressed = policy(alpha=alpha).compress(full, context).entries
    query = random_query(seed, full, size=data.draw(st.sampled_from([0.1, 1.0, 10.0])))
    before, after = probabilities(full, query), probabilities(compressed, query)
    for head in range(num_heads):
        where = {position: i for i, position in enumerate(full.positions[head].tolist()) if position != DEAD}
        for i in (compressed.is_live & (compressed.aux == 0))[head].nonzero().flatten().tolist():
            original = before[head, where[int(compressed.positions[head, i])]]
            assert after[head, i] >= original * (1 - 1e-9)


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_slots_in_excess_join_with_their_weight(weight):
    """However large their scores are."""
    entries = random_entries(0, num_heads=2, n=20, dtype=torch.float64)
    entries.aux[:, :6] = weight
    entries.log_votes[:, :6] = 0.6 * math.log(weight)
    entries.scores[:, :6] += 10.0
    context = CompressionContext.of_layer(entries, 10, 20, at_prompt_end=False)
    result = policy(recent=2, residual_share=0.2).compress(entries, context)
    assert_sound(result.entries, 10)
    assert (result.entries.aux >= 1).sum(1).tolist() == [2, 2]
    assert result.entries.aux.clamp(min=1).sum(1).tolist() == [14 + 6 * weight] * 2
