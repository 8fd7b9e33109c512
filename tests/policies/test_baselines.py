"""Methods that others are compared with, against loops over heads and entries."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.policies.sampling import (
    SEEDS,
    as_worker,
    assert_same,
    assert_sound,
    attend,
    concatenate,
    in_layer,
    logits,
    newest_queries,
    probabilities,
    random_entries,
    random_query,
    rope,
    stack_rows,
)
from tests.policies.test_allocators import on_two_workers
from vllm_kvmerge.ops import ScoreMode, ScoreUpdate
from vllm_kvmerge.ops.attention import accumulate_scores
from vllm_kvmerge.policies import (
    DEAD,
    PARTS,
    PRESETS,
    CompressionContext,
    CompressionPolicy,
    Entries,
    Merger,
    Preset,
    Selector,
    noise,
    pausing,
)
from vllm_kvmerge.policies.indexing import in_place
from vllm_kvmerge.policies.mergers import AsymKVMerger, CamMerger, D2OMerger, KVMergerMerger, cam
from vllm_kvmerge.policies.noise import uniform
from vllm_kvmerge.policies.pausing import in_pieces
from vllm_kvmerge.policies.selectors import HeavyHitter, KeyDiff, KeyNorm, RandomKeep, RedundancyAware, Tova
from vllm_kvmerge.policies.trackers import SumTracker

MINE = (
    *("tova", "random", "knorm", "keydiff", "rkv", "cam", "d2o"),
    *("kvmerger", "asymkv", "pyramidkv", "pyramidinfer", "adakv"),
)


def voted(entries: Entries, seed: int) -> Entries:
    """The same, where some entries stand for several tokens."""
    generator = torch.Generator().manual_seed(seed)
    votes = torch.randint(1, 6, entries.log_votes.shape, generator=generator).to(entries.log_votes.dtype)
    return replace(entries, log_votes=torch.where(entries.is_live, votes.log(), -torch.inf))


def live(entries: Entries, head: int) -> list[int]:
    """Indices of a head's live entries, in order of position."""
    positions = entries.positions[head].tolist()
    return sorted((i for i, p in enumerate(positions) if p != DEAD), key=lambda i: positions[i])


# Selectors


def select(selector: Selector, entries: Entries, context: CompressionContext) -> list[set[int]]:
    """Positions kept per head, after checks that hold for every selector."""
    untouched = entries.clone()
    protected = selector.protected(entries, context)
    kept = selector.select(entries, entries.scores, protected, context)
    assert_same(entries, untouched)
    assert kept.dtype == torch.bool and (kept.sum(1) == context.num_kept).all()
    assert torch.equal(kept, selector.select(entries, entries.scores, protected, context))
    assert not (protected & ~kept).any() and not (protected & ~entries.is_live).any()
    num_live_kept = (kept & entries.is_live).sum(1)
    assert torch.equal(num_live_kept, entries.is_live.sum(1).clamp(max=context.num_kept)), "live before dead"
    return [set(row) - {DEAD} for row in entries.positions.masked_fill(~kept, DEAD).tolist()]


def expected_choice(
    selector: Any, entries: Entries, head: int, ranking: dict[int, float], budget: int
) -> tuple[set[int], list[float]]:
    """Positions that must stay, and the rankings of those that fill up the budget."""
    positions = [int(entries.positions[head, i]) for i in live(entries, head)]
    sinks = {p for p in positions if p < selector.num_sink_tokens}
    protected = sinks | set(positions[len(positions) - min(len(positions), selector.recent_window) :])
    others = sorted((ranking[p] for p in positions if p not in protected), reverse=True)
    return protected, others[: max(0, budget - len(protected))]


def check_choice(selector: Selector, entries: Entries, budget: int, rankings: list[dict[int, float]]) -> None:
    context = CompressionContext.of_layer(entries, budget, len(entries), at_prompt_end=True, layer=2)
    for head, kept in enumerate(select(selector, entries, context)):
        protected, values = expected_choice(selector, entries, head, rankings[head], budget)
        assert protected <= kept
        # Rankings that differ by rounding alone may be taken for one another.
        chosen = sorted((rankings[head][p] for p in kept - protected), reverse=True)
        assert chosen == pytest.approx(values, rel=1e-4, abs=1e-6)


def by_position(entries: Entries, head: int, values: Tensor) -> dict[int, float]:
    return {int(entries.positions[head, i]): float(values[head, i]) for i in live(entries, head)}


sizes = st.tuples(SEEDS, st.integers(1, 3), st.integers(3, 28), st.integers(0, 27), st.integers(0, 100))
"""Seed, heads, entries, dead entries (of which some at least are left), and where the budget lies, in percent."""


def sample(size: tuple[int, int, int, int, int], least: int) -> tuple[Entries, int]:
    seed, num_heads, n, num_dead, percent = size
    n += least
    return random_entries(seed, num_heads, n, num_dead=min(num_dead, n - 1)), least + (n - 1 - least) * percent // 100


@examples(40)
@given(sizes, st.integers(0, 3), st.integers(0, 4))
def test_key_norm_and_key_difference(size, num_sinks, window):
    least = num_sinks + window + 1
    entries, budget = sample(size, least)
    fields = {"num_sink_tokens": num_sinks, "recent_window": window}
    assert KeyNorm(**fields).min_budget == KeyDiff(**fields).min_budget == least
    check_choice(
        KeyNorm(**fields),
        entries,
        budget,
        [by_position(entries, head, -entries.keys.norm(dim=-1)) for head in range(len(entries.positions))],
    )
    rankings = []
    for head in range(len(entries.positions)):
        keys = {int(entries.positions[head, i]): entries.keys[head, i].double() for i in live(entries, head)}
        anchor = torch.stack([key / key.norm() for key in keys.values()]).mean(0)
        rankings.append({p: -float(key @ anchor / key.norm() / anchor.norm()) for p, key in keys.items()})
    check_choice(KeyDiff(**fields), entries, budget, rankings)


@examples(30)
@given(sizes, st.integers(0, 3))
def test_tova_ranks_all_heads_together(size, window):
    entries, budget = sample(size, window + 1)
    # All heads hold the same tokens in the same places, as they do wherever tova alone has chosen.
    positions = entries.positions[:1].expand_as(entries.positions)
    entries = replace(entries, positions=positions.clone(), scores=entries.scores.nan_to_num(nan=0.0))
    mean = entries.scores.mean(0, keepdim=True).expand_as(entries.scores)
    selector = Tova(recent_window=window)
    check_choice(selector, entries, budget, [by_position(entries, head, mean) for head in range(len(positions))])
    kept = select(selector, entries, CompressionContext.of_layer(entries, budget, len(entries), at_prompt_end=False))
    assert all(row == kept[0] for row in kept)


def test_tova_counts_dead_entries_as_unused():
    entries = random_entries(0, num_heads=2, n=5)
    entries.positions.copy_(torch.arange(5))
    entries.scores.copy_(torch.tensor([[3.0, 1.0, 2.0, 2.5, 0.0], [0.0, 1.0, 2.0, 2.5, 0.0]]))
    entries.positions[1, 0], entries.scores[1, 0] = DEAD, torch.nan
    context = CompressionContext.of_layer(entries, 3, 5, at_prompt_end=False)
    assert select(Tova(), entries, context) == [{2, 3, 4}, {2, 3, 4}]
    entries.scores[0, 0] = 5.0
    assert select(Tova(), entries, context) == [{0, 3, 4}, {2, 3, 4}]


def test_tova_is_the_newest_query_alone():
    preset = PRESETS["tova"]
    policy = built(preset)
    assert (policy.tracker.update_decay, policy.tracker.score_window, policy.min_budget) == (0.0, 1, 2)
    entries = random_entries(0, num_heads=2, n=6)
    seen = torch.ones(3, 6, dtype=torch.bool)
    queries = [random_query(seed, entries) for seed in range(3)]
    attention = torch.stack([probabilities(entries, query) for query in queries], dim=1).unsqueeze(1)
    update = ScoreUpdate(policy.tracker.mode, policy.tracker.update_decay)
    scores, _ = accumulate_scores(update, attention.log(), attention, seen, entries.scores, entries.aux)
    torch.testing.assert_close(scores, probabilities(entries, queries[-1]))


@pytest.mark.parametrize("selector", [RandomKeep(), Tova()], ids=lambda selector: selector.name)
def test_selection_does_not_depend_on_the_number_of_workers(selector):
    entries = random_entries(0, num_heads=4, n=50)
    entries.positions = entries.positions[:1].repeat(4, 1)

    def chosen(some: Entries, context: CompressionContext) -> Tensor:
        return selector.select(some, some.scores, selector.protected(some, context), context)

    context = CompressionContext.of_layer(entries, 20, 50, at_prompt_end=True, layer=1)
    whole = chosen(entries, context)
    for cut in (1, 2):
        if selector.pools_heads:
            halves = on_two_workers(chosen, entries, context, cut)
        else:
            heads = list(range(cut)), list(range(cut, 4))
            halves = [chosen(entries.of_rows(own), as_worker(context, own)) for own in heads]
        assert torch.equal(torch.cat(halves), whole)


@examples(30)
@given(sizes, st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_random_keeps_the_largest_draws(size, window, seed):
    entries, budget = sample(size, window + 1)
    selector = RandomKeep(seed=seed, recent_window=window)
    draws = uniform(
        seed, entries, CompressionContext.of_layer(entries, budget, len(entries), at_prompt_end=True, layer=2)
    )
    check_choice(selector, entries, budget, [by_position(entries, h, draws) for h in range(len(entries.positions))])


def test_random_numbers_are_uniform_and_independent():
    n = 20_000
    entries = random_entries(0, num_heads=3, n=n, head_size=1)
    entries.positions.copy_(torch.arange(n))
    context = CompressionContext.of_layer(entries, 10, n, at_prompt_end=True)
    draws = uniform(0, entries, context)
    assert draws.dtype == torch.float32 and draws.min() >= 0 and draws.max() < 1
    streams = [
        *draws,
        uniform(1, entries, context)[0],
        uniform(0, entries, in_layer(context, 1))[0],
        uniform(0, entries, as_worker(context, [5, 6, 7]))[0],
        draws[0].roll(1),
    ]
    for stream in streams:
        histogram = torch.histc(stream, bins=20, min=0.0, max=1.0)
        chi_squared = ((histogram - n / 20) ** 2 / (n / 20)).sum().item()
        assert chi_squared < 45  # 0.9993 quantile for 19 degrees of freedom
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlation.abs().max() < 4.5 / math.sqrt(n)
    assert torch.equal(uniform(0, entries.of_rows([2, 1]), as_worker(context, [2, 1])), draws[[2, 1]])


def test_random_numbers_are_splitmix64():
    first_outputs = {0: 0xE220A8397B1DCDAF, 1: 0x910A2DEC89025CC1}
    mixed = noise._mix(torch.tensor(list(first_outputs)))
    assert [value % (1 << 64) for value in mixed.tolist()] == list(first_outputs.values())


def test_random_stays_a_uniform_sample_of_all_tokens():
    selector = RandomKeep()
    policy = CompressionPolicy(tracker=SumTracker(), selector=selector, merger=PARTS["merger"]["drop"]())
    num_heads, total, budget = 200, 120, 30
    stream = random_entries(0, num_heads, total, head_size=1)
    stream.positions.copy_(torch.arange(total))
    entries = stream.take(torch.arange(40).expand(num_heads, -1))
    for seen in range(40, total, 10):
        entries = policy.compress(entries, CompressionContext.of_layer(entries, budget, seen, seen == 40)).entries
        entries = concatenate(entries, stream.take(torch.arange(seen, seen + 10).expand(num_heads, -1)))
    entries = policy.compress(entries, CompressionContext.of_layer(entries, budget, total, False)).entries
    share = torch.bincount(entries.positions.flatten(), minlength=total)[: total - 1] / num_heads
    expected = (budget - 1) / (total - 1)
    assert (share - expected).abs().max() < 4.5 * math.sqrt(expected * (1 - expected) / num_heads)


def rkv_ranking(selector: RedundancyAware, entries: Entries, head: int) -> dict[int, float]:
    order = live(entries, head)
    n = len(order)
    keys = entries.keys[head, order].double()
    keys = keys / keys.norm(dim=-1, keepdim=True)
    scores = entries.scores[head, order].double()
    attention = (scores / scores.sum()).tolist()
    positions = [int(entries.positions[head, i]) for i in order]
    protected = {i for i in range(n) if i >= n - selector.recent_window or positions[i] < selector.num_sink_tokens}
    attention = [0.0 if i in protected else a for i, a in enumerate(attention)]
    reach = selector.pooling_reach
    pooled = [max(attention[max(0, i - reach) : i + reach + 1]) for i in range(n)]
    counted = [[0.0 if i == j else float(keys[i] @ keys[j]) for j in range(n)] for i in range(n)]
    for i in range(n):
        similar = [j for j in range(n) if counted[i][j] > selector.redundancy_threshold]
        if similar:
            counted[i][max(similar)] = 0.0
    mean = [sum(counted[i][j] for i in range(n)) / n for j in range(n)]
    redundancy = [math.exp(m) / sum(map(math.exp, mean)) for m in mean]
    share = selector.attention_share
    return {p: share * a - (1 - share) * r for p, a, r in zip(positions, pooled, redundancy, strict=True)}


@examples(40)
@given(
    sizes,
    st.integers(0, 4),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from([0.0, 0.3, 0.5]),
    st.sampled_from([0, 1, 3]),
)
def test_redundancy_aware(size, window, share, threshold, reach):
    entries, budget = sample(size, window + 1)
    selector = RedundancyAware(
        recent_window=window, attention_share=share, redundancy_threshold=threshold, pooling_reach=reach
    )
    rankings = [rkv_ranking(selector, entries, head) for head in range(len(entries.positions))]
    check_choice(selector, entries, budget, rankings)


def test_redundancy_in_pieces(monkeypatch):
    """Whatever is compared before a pause, rankings are the same."""
    entries = random_entries(0, num_heads=2, n=40, num_dead=5)
    selector, context = RedundancyAware(), CompressionContext.of_layer(entries, 15, 40, at_prompt_end=True)
    protected = selector.protected(entries, context)
    whole, d = selector.ranking(entries, entries.scores, protected, context), entries.keys.shape[2]
    for rows in (1, 7, 40):
        monkeypatch.setattr(pausing, "PIECE_PRODUCTS", rows * 40 * d)
        pieces, count = in_pieces(lambda: selector.ranking(entries, entries.scores, protected, context)), 0
        while True:
            try:
                next(pieces)
                count += 1
            except StopIteration as end:
                assert torch.equal(end.value, whole)
                break
        assert count >= -(-39 // rows)


def test_of_keys_that_repeat_the_newest_stays():
    entries = random_entries(0, num_heads=1, n=20, head_size=32)
    entries.positions.copy_(torch.arange(20))
    entries.keys[:, 3:9] = entries.keys[:, 3:4]
    entries.scores.fill_(1.0)
    (kept,) = select(
        RedundancyAware(recent_window=1), entries, CompressionContext.of_layer(entries, 15, 20, at_prompt_end=True)
    )
    assert kept == set(range(20)) - {3, 4, 5, 6, 7}


# Mergers


def merge(
    merger: Merger, entries: Entries, budget: int, window: int = 2, at_prompt_end: bool = False, **fields: object
) -> tuple[Entries, Tensor, int]:
    """The merged entries, which were kept, and how many merged; after checks that hold for every merger."""
    untouched = entries.clone()
    context = CompressionContext.of_layer(entries, budget, len(entries), at_prompt_end, **fields)
    selector = HeavyHitter(num_sink_tokens=1, recent_window=window)
    protected = selector.protected(entries, context)
    kept = in_place(selector.select(entries, entries.scores, protected, context), budget)
    update = merger.merge(entries, kept, entries.scores, protected, context)
    result, count = update.apply(entries), update.merged.sum()
    again = merger.merge(entries, kept, entries.scores, protected, context).apply(entries)
    assert_same(entries, untouched)
    assert_same(again, result)
    assert torch.equal(result.is_live, entries.is_live.gather(1, kept))
    result.kill(~result.is_live)
    assert_sound(result, budget)
    return result, kept, int(count)


def assert_entry(
    result: Entries, head: int, slot: int, key: Tensor, value: Tensor, original: Entries, source: int
) -> None:
    """Key and value as given; votes and score those of the entry it was."""
    torch.testing.assert_close(result.keys[head, slot], key, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.values[head, slot], value, rtol=1e-4, atol=1e-5)
    assert result.log_votes[head, slot] == original.log_votes[head, source]
    assert result.scores[head, slot] == original.scores[head, source]


def nearest(entries: Entries, head: int, source: int, carriers: list[int]) -> tuple[float, int]:
    keys = entries.keys[head].double()
    cosines = [(float(keys[source] @ keys[c] / keys[source].norm() / keys[c].norm()), c) for c in carriers]
    return max(cosines)


@examples(60)
@given(sizes, st.integers(1, 9), st.sampled_from([0, 2]), st.booleans())
def test_cam(size, num_receivers, window, prior_votes):
    entries, budget = sample(size, 4)
    entries = voted(entries, size[0]) if prior_votes else entries
    context = CompressionContext.of_layer(entries, budget, len(entries), at_prompt_end=False, layer=1)
    result, kept, count = merge(CamMerger(num_receivers=num_receivers), entries, budget, window, layer=1)
    draws = uniform(cam.SEED, entries, context)
    expected = 0
    for head in range(len(kept)):
        in_order = [i for i in live(entries, head) if i in kept[head].tolist()]
        values = {c: entries.values[head, c].clone() for c in in_order}
        for e in set(live(entries, head)) - set(in_order):
            later = [c for c in in_order if entries.positions[head, c] > entries.positions[head, e]]
            receivers = later[:num_receivers]
            if not receivers:
                continue
            mean = sum(float(entries.scores[head, c]) for c in receivers) / len(receivers)
            if float(draws[head, e]) < min(1.0, float(entries.scores[head, e]) / mean):
                expected += 1
                for c in receivers:
                    values[c] += entries.values[head, e] / num_receivers
        for slot, source in enumerate(kept[head].tolist()):
            if source in values:
                assert_entry(result, head, slot, entries.keys[head, source], values[source], entries, source)
                assert result.positions[head, slot] == entries.positions[head, source]
    assert count == expected


def test_cam_merges_with_the_probability_that_it_says():
    num_heads, n = 2000, 4
    entries = random_entries(0, num_heads, n)
    entries.positions.copy_(torch.arange(n))
    entries.scores.copy_(torch.tensor([9.0, 0.6, 1.0, 1.4]))  # The sink, then one to go, whose successors' mean is 1.2.
    _, _, count = merge(CamMerger(num_receivers=2), entries, 3)
    assert abs(count / num_heads - 0.5) < 4 * math.sqrt(0.25 / num_heads)
    entries.scores[:, 1] = 0.0
    assert merge(CamMerger(num_receivers=2), entries, 3)[2] == 0


def test_cam_drops_the_prompts_evicted_entries_unless_told():
    entries = random_entries(0, num_heads=2, n=40)
    result, kept, count = merge(CamMerger(), entries, 20, at_prompt_end=True)
    assert count == 0
    assert_same(result, entries.take(kept))
    assert merge(CamMerger(merge_prompt=True), entries, 20, at_prompt_end=True)[2] > 0


@pytest.mark.parametrize("value", [0.0, 3e38, torch.inf, -torch.inf])
def test_cam_survives_extreme_scores(value):
    entries = random_entries(0, num_heads=2, n=30, num_dead=4)
    entries.scores[:, ::2] = value
    context = CompressionContext.of_layer(entries, 12, 30, at_prompt_end=False)
    kept = entries.is_live.int().argsort(dim=1, descending=True, stable=True)[:, :12]
    merger = CamMerger(num_receivers=5)
    update = merger.merge(entries, kept, entries.scores, torch.zeros_like(entries.is_live), context)
    result, count = update.apply(entries), update.merged.sum()
    assert result.values.isfinite().all() and 0 <= count <= 2 * 14


def assert_convex(result: Entries, entries: Entries, kept: Tensor) -> None:
    """Every coordinate within what the head's live entries have, and untouched entries bit for bit."""
    for name in ("keys", "values"):
        before = getattr(entries, name).masked_fill(~entries.is_live.unsqueeze(-1), torch.nan)
        low = before.nan_to_num(nan=torch.inf).amin(1, keepdim=True) - 1e-5
        high = before.nan_to_num(nan=-torch.inf).amax(1, keepdim=True) + 1e-5
        after = getattr(result, name)
        inside = (after >= low) & (after <= high)
        assert (inside | ~result.is_live.unsqueeze(-1)).all()


@examples(60)
@given(sizes, st.sampled_from([0.0, 0.7, 1.0]), st.booleans(), st.sampled_from([None, -0.4, 0.3]))
def test_d2o(size, share, prior_votes, previous):
    entries, budget = sample(size, 4)
    entries = voted(entries, size[0]) if prior_votes else entries
    if previous is not None:
        entries.aux[entries.is_live] = previous + 2.0
        entries.aux[:, ::3] = 0.0  # New tokens carry no threshold.
    result, kept, count = merge(D2OMerger(threshold_share=share), entries, budget)
    assert_convex(result, entries, kept)
    expected = 0
    for head in range(len(kept)):
        carriers = [i for i in live(entries, head) if i in kept[head].tolist()]
        evicted = [i for i in live(entries, head) if i not in carriers]
        matches = {e: nearest(entries, head, e, carriers) for e in evicted}
        known = previous is not None and any(entries.aux[head, i] > 0 for i in live(entries, head))
        threshold = previous if known else None
        if evicted:
            mean = sum(similarity for similarity, _ in matches.values()) / len(matches)
            threshold = mean if threshold is None else share * mean + (1 - share) * threshold
        joining = {c: [e for e in evicted if matches[e] >= (threshold, -1) and matches[e][1] == c] for c in carriers}
        if any(abs(similarity - threshold) < 1e-6 for similarity, _ in matches.values()) and len(evicted) > 1:
            return  # Rounding decides.
        expected += sum(map(len, joining.values()))
        for slot, source in enumerate(kept[head].tolist()):
            if source not in carriers:
                continue
            group = [source, *joining[source]]
            weights = torch.tensor([math.e, *(math.exp(matches[e][0]) for e in joining[source])])
            weights = weights / weights.sum()
            key, value = weights @ entries.keys[head, group], weights @ entries.values[head, group]
            assert_entry(result, head, slot, key, value, entries, source)
            assert result.aux[head, slot].item() == pytest.approx(0.0 if threshold is None else threshold + 2, abs=1e-5)
            assert_position(result, head, slot, entries, source, joining[source], window=2)
    assert count == expected


def assert_position(
    result: Entries, head: int, slot: int, entries: Entries, source: int, members: list[int], window: int
) -> None:
    positions = [int(entries.positions[head, i]) for i in live(entries, head)]
    own = int(entries.positions[head, source])
    fixed = own < 1 or own in positions[-window:]
    newest = max([own, *(int(entries.positions[head, e]) for e in members)])
    assert result.positions[head, slot] == (own if fixed else newest)


def test_d2o_merges_a_single_evicted_entry():
    entries = random_entries(5, num_heads=3, n=11)
    assert merge(D2OMerger(), entries, 10)[2] == 3


@examples(60)
@given(sizes, st.sampled_from([-1.0, 0.0, 0.4]), st.booleans())
@example((0, 2, 20, 3, 30), 0.0, False)
def test_kvmerger(size, threshold, prior_votes):
    entries, budget = sample(size, 4)
    entries = voted(entries, size[0]) if prior_votes else entries
    result, kept, count = merge(KVMergerMerger(merge_threshold=threshold), entries, budget)
    assert_convex(result, entries, kept)
    expected = 0
    for head in range(len(kept)):
        carriers = [i for i in live(entries, head) if i in kept[head].tolist()]
        evicted = [i for i in live(entries, head) if i not in carriers]
        matches = {e: nearest(entries, head, e, carriers) for e in evicted}
        for slot, source in enumerate(kept[head].tolist()):
            if source not in carriers:
                continue
            members = [e for e in evicted if matches[e][1] == source and matches[e][0] > threshold]
            expected += len(members)
            distances = [float((entries.keys[head, e] - entries.keys[head, source]).norm()) for e in members]
            sigma = sum(distances) / max(1, len(distances))
            weights = torch.tensor([1.0, *(math.exp(-(d**2) / (2 * sigma**2)) for d in distances)])
            weights = weights / weights.sum()
            group = [source, *members]
            key, value = weights @ entries.keys[head, group], weights @ entries.values[head, group]
            assert_entry(result, head, slot, key, value, entries, source)
            assert result.aux[head, slot] == entries.aux[head, source]
            assert_position(result, head, slot, entries, source, members, window=2)
    assert count == expected


def test_kvmerger_of_identical_keys_is_their_mean():
    entries = random_entries(0, num_heads=1, n=6)
    entries.keys[:] = entries.keys[:, :1]
    result, kept, count = merge(KVMergerMerger(), entries, 5, window=1)
    assert count == 1
    torch.testing.assert_close(result.keys, entries.keys.gather(1, kept.unsqueeze(-1).expand(-1, -1, 8)))
    (evicted,) = set(range(6)) - set(kept[0].tolist())
    means = (result.values - entries.values[0, evicted] / 2 - entries.take(kept).values / 2).abs().sum(-1)
    assert (means < 1e-5).sum() == 1


class Pairs:
    """AsymKV for one head, with lists, from the entries that may merge, in order of position."""

    def __init__(self, entries: Entries, head: int, candidates: list[int], surplus: int) -> None:
        self.runs = [
            (
                entries.keys[head, i].double(),
                entries.values[head, i].double() * math.exp(entries.log_votes[head, i]),
                math.exp(entries.log_votes[head, i]),
                float(entries.scores[head, i]),
                int(entries.positions[head, i]),
            )
            for i in candidates
        ]
        while surplus:
            surplus -= self.merge_round(surplus)

    def merge_round(self, surplus: int) -> int:
        costs = [(a[3] + b[3]) * (a[2] + b[2]) for a, b in zip(self.runs, self.runs[1:], strict=False)]
        cheap = set(sorted(range(len(costs)), key=lambda i: costs[i])[:surplus])
        takes, i = [], 0
        while i < len(costs):
            if i in cheap:
                takes.append(i)
                i += 1  # The next shares an entry with it.
            i += 1
        for i in reversed(takes):
            (key, value, votes, score, _), (key_2, value_2, votes_2, score_2, position) = self.runs[i : i + 2]
            total = votes + votes_2
            merged = ((votes * key + votes_2 * key_2) / total, value + value_2, total, score + score_2, position)
            self.runs[i : i + 2] = [merged]
        return len(takes)


@examples(60)
@given(sizes, st.booleans())
def test_asymkv(size, prior_votes):
    entries, budget = sample(size, 4)
    entries = voted(entries, size[0]) if prior_votes else entries
    selector = HeavyHitter(num_sink_tokens=1, recent_window=2)
    policy = CompressionPolicy(tracker=SumTracker(), selector=selector, merger=AsymKVMerger())
    untouched = entries.clone()
    context = CompressionContext.of_layer(entries, budget, len(entries), at_prompt_end=True)
    result = policy.compress(entries, context)
    assert_same(entries, untouched)
    assert_sound(result.entries, budget)
    num_live = entries.is_live.sum(1)
    assert (result.num_merged, result.num_evicted) == (int((num_live - budget).clamp(min=0).sum()), 0)
    for head in range(len(num_live)):
        order = live(entries, head)
        candidates = [i for i in order[: max(0, len(order) - 2)] if entries.positions[head, i] >= 1]
        expected = Pairs(entries, head, candidates, max(0, len(order) - budget)).runs
        where = {int(p): slot for slot, p in enumerate(result.entries.positions[head])}
        for i in set(order) - set(candidates):
            slot = where.pop(int(entries.positions[head, i]))
            for name in ("keys", "values", "log_votes", "scores"):
                assert torch.equal(getattr(result.entries, name)[head, slot], getattr(entries, name)[head, i])
        for key, value, votes, score, position in expected:
            slot = where.pop(position)
            close = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(result.entries.keys[head, slot].double(), key, **close)
            torch.testing.assert_close(result.entries.values[head, slot].double(), value / votes, **close)
            assert result.entries.log_votes[head, slot].item() == pytest.approx(math.log(votes), abs=1e-5)
            assert result.entries.scores[head, slot].item() == pytest.approx(score, rel=1e-5)
        assert set(where) <= {DEAD}
    # The tokens that entries stand for are all still counted.
    torch.testing.assert_close(result.entries.log_votes.exp().sum(1), entries.log_votes.exp().sum(1))


@examples(60)
@given(sizes, st.booleans(), st.integers(0, 3))
def test_asymkv_over_a_selection(size, prior_votes, window):
    entries, budget = sample(size, 5)
    entries = voted(entries, size[0]) if prior_votes else entries
    result, kept, count = merge(AsymKVMerger(merge_first=False), entries, budget, window)
    expected = 0
    for head in range(len(kept)):
        order = live(entries, head)
        where = {i: int(entries.positions[head, i]) for i in order}
        stays = [i for i in order if i in kept[head].tolist()]
        fixed = {i for i in order if where[i] < 1} | set(order[len(order) - min(len(order), window) :])
        targets = [i for i in stays if i not in fixed]
        members: dict[int, list[int]] = {i: [i] for i in stays}
        for e in set(order) - set(stays):
            if targets:
                expected += 1
                members[min(targets, key=lambda i: (abs(where[i] - where[e]), -where[i]))].append(e)  # noqa: B023
        for slot, source in enumerate(kept[head].tolist()):
            if source not in members:
                continue
            group = members[source]
            votes = entries.log_votes[head, group].exp()
            close = {"rtol": 1e-4, "atol": 1e-5}
            for name in ("keys", "values"):
                mean = votes @ getattr(entries, name)[head, group] / votes.sum()
                torch.testing.assert_close(getattr(result, name)[head, slot], mean, **close)
            torch.testing.assert_close(result.log_votes[head, slot], votes.sum().log(), **close)
            torch.testing.assert_close(result.scores[head, slot], entries.scores[head, group].sum(), **close)
            assert result.positions[head, slot] == max(where[i] for i in group)
    assert count == expected


def merged_before(entries: Entries, protected: Tensor, context: CompressionContext) -> tuple[Entries, Tensor]:
    """AsymKV's merges, and how many there were."""
    update = AsymKVMerger().before_selection(entries, entries.scores, protected, context)
    return update.apply(entries), update.merged.sum()


@examples(30)
@given(SEEDS, st.integers(2, 20), st.booleans())
def test_asymkv_loses_nothing_where_neighbours_have_one_key(seed, num_pairs, prior_votes):
    n = 2 * num_pairs + 2
    entries = random_entries(seed, num_heads=2, n=n, dtype=torch.float64)
    entries = voted(entries, seed) if prior_votes else entries
    entries.positions.copy_(torch.arange(n))
    entries.keys[:, 1:-1:2] = entries.keys[:, 2:-1:2]
    # Scores such that a pair's members are cheapest to merge with each other.
    entries.scores.fill_(1.0)
    entries.scores[:, 1:-1] = torch.arange(num_pairs).flip(0).repeat_interleave(2) * 100.0 + 1.0
    entries.log_votes[:, 2:-1:2] = entries.log_votes[:, 1:-1:2]
    query = random_query(seed, entries)
    protected = torch.zeros_like(entries.is_live)
    protected[:, [0, -1]] = True
    context = CompressionContext.of_layer(entries, n - 1, n, at_prompt_end=True)
    merged, count = merged_before(entries, protected, context)
    assert count == 2
    torch.testing.assert_close(attend(merged, query), attend(entries, query))
    assert (
        logits(merged, query)[merged.is_live].unsqueeze(0) - logits(entries, query)[merged.is_live]
    ).abs().max() < 1e-9


def test_asymkv_takes_disjoint_pairs_in_few_rounds():
    n = 600
    for scores in (torch.arange(n, 0.0, -1.0), torch.arange(1.0, n + 1), torch.ones(n)):
        entries = random_entries(0, num_heads=1, n=n)
        entries.positions.copy_(torch.arange(n))
        entries.scores.copy_(scores)
        none = torch.zeros_like(entries.is_live)
        context = CompressionContext.of_layer(entries, 60, n, at_prompt_end=True)
        merged, count = merged_before(entries, none, context)
        assert count == 540 and merged.is_live.sum() == 60
        # Cardinality counts against merging on: no entry swallows the others.
        assert merged.log_votes.exp().max() < 80


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_asymkv_ends_whatever_scores_are(value):
    entries = random_entries(0, num_heads=2, n=40, num_dead=3)
    entries.scores[:, ::3] = value
    context = CompressionContext.of_layer(entries, 8, 40, at_prompt_end=True)
    merged, count = merged_before(entries, torch.zeros_like(entries.is_live), context)
    assert count == 2 * 29 and (merged.is_live.sum(1) == 8).all()
    assert merged.keys[merged.is_live].isfinite().all()


# Presets


def built(preset: Preset) -> CompressionPolicy:
    names = {kind: getattr(preset, kind) for kind in PARTS}
    classes = {kind: PARTS[kind][name] for kind, name in names.items()}
    return CompressionPolicy(
        **{
            kind: part(**{name: value for name, value in preset.defaults.items() if name in part.model_fields})
            for kind, part in classes.items()
        }
    )


def test_presets_are_what_they_are_called():
    for name in MINE:
        policy = built(PRESETS[name])
        known = {field for part in policy.parts for field in type(part).model_fields}
        assert set(PRESETS[name].defaults) <= known
    parts = {name: tuple(part.name for part in built(PRESETS[name]).parts) for name in MINE}
    assert parts["d2o"] == ("sum", "variance", "snapkv", "d2o")
    assert parts["cam"] == ("sum", "uniform", "streaming_llm", "cam")
    assert parts["adakv"] == ("sum", "adaptive", "snapkv", "drop")
    assert parts["pyramidkv"] == ("sum", "pyramid", "snapkv", "drop")
    assert built(PRESETS["pyramidinfer"]).allocator.shape == "cosine"
    # PyramidInfer's released configuration: what 0.9 leaves in the first and the last of 32 layers.
    left = [1.0]
    for layer in range(31):
        left.append(left[-1] * (0.9 + 0.1 * (math.cos(math.pi * layer / 32) + 1) / 2))
    first, last = (0.2 + 0.8 * share for share in (left[0], left[-1]))
    assert built(PRESETS["pyramidinfer"]).allocator.ratio == pytest.approx(first / last, abs=0.005)
    # PyramidKV's beta = 20.
    assert built(PRESETS["pyramidkv"]).allocator.ratio == 2 * 20 - 1


def attend_step(policy: CompressionPolicy, entries: Entries, query: Tensor) -> Entries:
    """The entries with statistics as attention leaves them after one query."""
    tracker = policy.tracker
    if tracker.mode == ScoreMode.NONE:
        return entries
    update = ScoreUpdate(tracker.mode, tracker.update_decay)
    shape = (len(query), 1, 1, len(entries))
    visible = entries.is_live.unsqueeze(1)
    scores, aux = accumulate_scores(
        update,
        logits(entries, query).view(shape),
        probabilities(entries, query).view(shape),
        visible,
        entries.scores,
        entries.aux,
    )
    return replace(entries, scores=scores, aux=aux)


@pytest.mark.parametrize("name", PRESETS)
def test_300_decode_steps_stay_within_the_budget(name):
    policy = built(PRESETS[name])
    num_heads, prompt, steps, interval = 2, 120, 300, 16
    budget = policy.min_budget + 24
    capacity = policy.allocator.capacity(budget)
    stream = random_entries(0, num_heads, prompt + steps, head_size=4)
    stream.positions.copy_(torch.arange(prompt + steps))
    stream.scores.zero_()
    stream.aux.zero_()
    queries = torch.randn(num_heads, 1, prompt + steps, 4, generator=torch.Generator().manual_seed(1))
    entries = stream.take(torch.arange(prompt).expand(num_heads, -1))
    num_merged = 0
    for seen in range(prompt, prompt + steps + 1):
        if seen > prompt:
            entries = concatenate(entries, stream.take(torch.full((num_heads, 1), seen - 1)))
        entries = attend_step(policy, entries, queries[:, 0, seen - 1])
        assert not entries.scores.isnan().any()
        if seen > prompt and len(entries) < capacity + interval:
            continue
        before = int(entries.is_live.sum())
        window = torch.arange(max(0, seen - 32), seen)
        context = CompressionContext.of_layer(
            entries,
            budget,
            seen,
            at_prompt_end=seen == prompt,
            capacity=min(len(entries), capacity),
            layer=1,
            num_layers=3,
            scale=0.5,
            queries=newest_queries(queries[:, :, window], seen),
            rotation=rope(4),
            layer_statistics=torch.ones(1, 3),
        )
        result = policy.compress(entries, context)
        entries = result.entries
        assert_sound(entries, context.capacity)
        assert result.num_merged + result.num_evicted + int(entries.is_live.sum()) == before
        assert entries.is_live.sum() <= num_heads * budget
        assert entries.positions.max() <= seen - 1
        num_merged += result.num_merged
    assert len(entries) < capacity + interval
    assert (num_merged > 0) == (policy.merger.name != "drop")


@pytest.mark.parametrize("name", [name for name in MINE if PRESETS[name].allocator != "adaptive"])
def test_two_workers_do_what_one_does(name):
    policy = built(PRESETS[name])
    entries = random_entries(2, num_heads=4, n=90)
    entries.positions = entries.positions[:1].repeat(4, 1)
    budget = policy.min_budget + 6
    context = CompressionContext.of_layer(
        entries,
        budget,
        90,
        at_prompt_end=False,
        capacity=policy.allocator.capacity(budget),
        layer=1,
        num_layers=2,
        layer_statistics=torch.tensor([[1.0, 2.0]]),
    )
    whole = policy.compress(entries, context)
    for cut in (1, 2):
        if policy.selector.pools_heads:
            halves = on_two_workers(policy.compress, entries, context, cut)
        else:
            heads = list(range(cut)), list(range(cut, 4))
            halves = [policy.compress(entries.of_rows(own), as_worker(context, own)) for own in heads]
        assert_same(stack_rows([half.entries for half in halves]), whole.entries)
        assert sum(half.num_merged for half in halves) == whole.num_merged
