"""CaM, D2O, KVMerger and AsymKV against loops over heads and entries."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.policies.every import policy_of
from tests.policies.sampling import SEEDS, assert_same, assert_sound, for_parts, live, nearest, random_entries
from vllm_kvmerge.policies import DEAD, PRESETS, CompressionContext, Entries, Merger
from vllm_kvmerge.policies.indexing import in_place
from vllm_kvmerge.policies.mergers import AsymKVMerger, CamMerger, D2OMerger, KVMergerMerger, cam
from vllm_kvmerge.policies.noise import uniform
from vllm_kvmerge.policies.selectors import HeavyHitter

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@st.composite
def samples(draw: st.DrawFn) -> tuple[Entries, int]:
    """Entries, some of which may stand for several tokens and some be dead, and a budget."""
    seed, num_heads, n = draw(SEEDS), draw(st.integers(1, 3)), draw(st.integers(7, 33))
    entries = random_entries(seed, num_heads, n, num_dead=draw(st.integers(0, n - 5)))
    if draw(st.booleans()):
        votes = torch.randint(1, 6, (num_heads, n), generator=torch.Generator().manual_seed(seed)).float()
        entries.log_votes = torch.where(entries.is_live, votes.log(), -torch.inf)
    return entries, draw(st.integers(4, n - 1))


def merge(
    merger: Merger, entries: Entries, budget: int, window: int = 2, at_prompt_end: bool = False, **fields: object
) -> tuple[Entries, Tensor, int]:
    """The merged entries, which were kept, and how many merged."""
    context = for_parts(CompressionContext.of_layer(entries, budget, len(entries), at_prompt_end, **fields))
    selector = HeavyHitter(num_sink_tokens=1, recent_window=window)
    protected = selector.protected(entries, context)
    kept = in_place(selector.select(entries, entries.scores, protected, context), budget)
    update = merger.merge(entries, kept, entries.scores, protected, context)
    result = update.apply(entries)
    assert torch.equal(result.is_live, entries.is_live.gather(1, kept))
    result.kill(~result.is_live)
    assert_sound(result, budget)
    return result, kept, int(update.merged.sum())


def assert_entry(
    result: Entries, head: int, slot: int, key: Tensor, value: Tensor, entries: Entries, source: int
) -> None:
    """Key and value as given; votes and score those of the entry it was."""
    torch.testing.assert_close(result.keys[head, slot], key, **CLOSE)
    torch.testing.assert_close(result.values[head, slot], value, **CLOSE)
    assert result.log_votes[head, slot] == entries.log_votes[head, source]
    assert result.scores[head, slot] == entries.scores[head, source]


def assert_merged(
    result: Entries,
    kept: Tensor,
    entries: Entries,
    head: int,
    joining: dict[int, list[int]],
    weights: list[list[float]],
) -> None:
    """Of what joins each entry that stays, and the weights of these groups: keys and values are means, the position is
    that of the newest in it, unless the entry is a sink or one of the two newest."""
    newest = [int(entries.positions[head, i]) for i in live(entries, head)[-2:]]
    for (source, members), shares in zip(joining.items(), weights, strict=True):
        slot, group, share = kept[head].tolist().index(source), [source, *members], torch.tensor(shares)
        key, value = (share @ plane[head, group] / share.sum() for plane in (entries.keys, entries.values))
        assert_entry(result, head, slot, key, value, entries, source)
        own = int(entries.positions[head, source])
        is_fixed = own < 1 or own in newest
        assert result.positions[head, slot] == (own if is_fixed else max(entries.positions[head, group]))


@examples(60)
@given(samples(), st.integers(1, 9), st.sampled_from([0, 2]))
def test_cam(sample, num_receivers, window):
    entries, budget = sample
    context = CompressionContext.of_layer(entries, budget, len(entries), at_prompt_end=False, layer=1)
    result, kept, count = merge(CamMerger(num_receivers=num_receivers), entries, budget, window, layer=1)
    draws, expected = uniform(cam.SEED, entries, context), 0
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


def test_cam_drops_the_prompts_evicted_entries_unless_told():
    entries = random_entries(0, num_heads=2, n=40)
    result, kept, count = merge(CamMerger(), entries, 20, at_prompt_end=True)
    assert count == 0
    assert_same(result, entries.take(kept))
    assert merge(CamMerger(merge_prompt=True), entries, 20, at_prompt_end=True)[2] > 0


@examples(60)
@given(samples(), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([None, -0.4, 0.3]))
@example((random_entries(5, num_heads=3, n=11), 10), 0.7, None)
def test_d2o(sample, share, previous):
    """previous: the threshold that entries carry; of one entry that leaves its own similarity is the threshold."""
    entries, budget = sample
    if previous is not None:
        entries.aux[entries.is_live] = previous + 2.0
        entries.aux[:, ::3] = 0.0  # New tokens carry no threshold.
    result, kept, count = merge(D2OMerger(threshold_share=share), entries, budget)
    expected = 0
    for head in range(len(kept)):
        carriers = [i for i in live(entries, head) if i in kept[head].tolist()]
        matches = nearest(entries, head, set(live(entries, head)) - set(carriers), carriers)
        threshold = previous if any(entries.aux[head, i] > 0 for i in live(entries, head)) else None
        if matches:
            mean = sum(similarity for similarity, _ in matches.values()) / len(matches)
            threshold = mean if threshold is None else share * mean + (1 - share) * threshold
        if len(matches) > 1 and any(abs(similarity - threshold) < 1e-6 for similarity, _ in matches.values()):
            return  # Rounding decides.
        joining = {c: [e for e in matches if matches[e] >= (threshold, -1) and matches[e][1] == c] for c in carriers}
        expected += sum(map(len, joining.values()))
        weights = [[math.e, *(math.exp(matches[e][0]) for e in members)] for members in joining.values()]
        assert_merged(result, kept, entries, head, joining, weights)
        aux = torch.tensor(0.0 if threshold is None else threshold + 2).expand(int(result.is_live[head].sum()))
        torch.testing.assert_close(result.aux[head, result.is_live[head]], aux, rtol=0, atol=1e-5)
    assert count == expected


@examples(60)
@given(samples(), st.sampled_from([-1.0, 0.0, 0.4]))
@example((random_entries(0, 2, 24, num_dead=3), 10), 0.0)
def test_kvmerger(sample, threshold):
    entries, budget = sample
    result, kept, count = merge(KVMergerMerger(merge_threshold=threshold), entries, budget)
    expected = 0
    for head in range(len(kept)):
        carriers = [i for i in live(entries, head) if i in kept[head].tolist()]
        matches = nearest(entries, head, set(live(entries, head)) - set(carriers), carriers)
        joining = {c: [e for e in matches if matches[e][1] == c and matches[e][0] > threshold] for c in carriers}
        expected += sum(map(len, joining.values()))
        weights = []
        for carrier, members in joining.items():
            distances = [float((entries.keys[head, e] - entries.keys[head, carrier]).norm()) for e in members]
            sigma = sum(distances) / max(1, len(distances))
            weights.append([1.0, *(math.exp(-(d**2) / (2 * sigma**2)) for d in distances)])
        assert_merged(result, kept, entries, head, joining, weights)
    assert torch.equal(result.aux, entries.aux.gather(1, kept).where(result.is_live, 0.0))
    assert count == expected


def test_kvmerger_of_identical_keys_is_their_mean():
    entries = random_entries(0, num_heads=1, n=6)
    entries.keys[:] = entries.keys[:, :1]
    result, kept, count = merge(KVMergerMerger(), entries, 5, window=1)
    (evicted,) = set(range(6)) - set(kept[0].tolist())
    means = (entries.values[0, evicted] + entries.take(kept).values[0]) / 2
    assert count == 1 and (result.values[0] - means).abs().sum(1).le(1e-5).sum() == 1


Run = tuple[Tensor, Tensor, float, float, int]
"""What neighbours became: key, sum of values, votes, score, newest position."""


def merged_runs(runs: list[Run], surplus: int) -> list[Run]:
    """AsymKV for one head, with lists, in order of position: so many fewer."""
    while surplus:
        costs = [(a[3] + b[3]) * (a[2] + b[2]) for a, b in pairwise(runs)]
        cheap = set(sorted(range(len(costs)), key=lambda i: costs[i])[:surplus])  # noqa: B023
        takes: list[int] = []
        for i in sorted(cheap):
            if not takes or i > takes[-1] + 1:  # the next shares an entry with it
                takes.append(i)
        for i in reversed(takes):
            (key, value, votes, score, _), (key_2, value_2, votes_2, score_2, position) = runs[i : i + 2]
            total = votes + votes_2
            merged = ((votes * key + votes_2 * key_2) / total, value + value_2, total, score + score_2, position)
            runs = [*runs[:i], merged, *runs[i + 2 :]]
        surplus -= len(takes)
    return runs


@examples(60)
@given(samples())
def test_asymkv(sample):
    entries, budget = sample
    policy = policy_of({"policy": "asymkv", "num_sink_tokens": 1, "recent_window": 2})
    result = policy.compress(entries, CompressionContext.of_layer(entries, budget, len(entries), at_prompt_end=True))
    num_live = entries.is_live.sum(1)
    assert (result.num_merged, result.num_evicted) == (int((num_live - budget).clamp(min=0).sum()), 0)
    for head in range(len(num_live)):
        order = live(entries, head)
        candidates = [i for i in order[: max(0, len(order) - 2)] if entries.positions[head, i] >= 1]
        votes, positions = entries.log_votes[head].exp().tolist(), entries.positions[head].tolist()
        keys, values = entries.keys[head].double(), entries.values[head].double()
        scores = entries.scores[head].tolist()
        runs = [(keys[i], votes[i] * values[i], votes[i], scores[i], positions[i]) for i in candidates]
        expected = merged_runs(runs, max(0, len(order) - budget))
        where = {int(p): slot for slot, p in enumerate(result.entries.positions[head])}
        for i in set(order) - set(candidates):
            slot = where.pop(int(entries.positions[head, i]))
            for name in ("keys", "values", "log_votes", "scores"):
                assert torch.equal(getattr(result.entries, name)[head, slot], getattr(entries, name)[head, i])
        for key, value, total, score, position in expected:
            slot = where.pop(position)
            torch.testing.assert_close(result.entries.keys[head, slot].double(), key, **CLOSE)
            torch.testing.assert_close(result.entries.values[head, slot].double(), value / total, **CLOSE)
            assert result.entries.log_votes[head, slot].item() == pytest.approx(math.log(total), abs=1e-5)
            assert result.entries.scores[head, slot].item() == pytest.approx(score, rel=1e-5)
        assert set(where) <= {DEAD}


@examples(60)
@given(samples(), st.integers(0, 3))
def test_asymkv_over_a_selection(sample, window):
    entries, budget = sample
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
            for name in ("keys", "values"):
                mean = votes @ getattr(entries, name)[head, group] / votes.sum()
                torch.testing.assert_close(getattr(result, name)[head, slot], mean, **CLOSE)
            torch.testing.assert_close(result.log_votes[head, slot], votes.sum().log(), **CLOSE)
            torch.testing.assert_close(result.scores[head, slot], entries.scores[head, group].sum(), **CLOSE)
            assert result.positions[head, slot] == max(where[i] for i in group)
    assert count == expected


def test_presets_have_their_papers_numbers():
    # PyramidInfer's released configuration: what 0.9 leaves in the first and the last of 32 layers.
    left = [1.0]
    for layer in range(31):
        left.append(left[-1] * (0.9 + 0.1 * (math.cos(math.pi * layer / 32) + 1) / 2))
    first, last = (0.2 + 0.8 * share for share in (left[0], left[-1]))
    assert PRESETS["pyramidinfer"].defaults["ratio"] == pytest.approx(first / last, abs=0.005)
    assert policy_of({"policy": "pyramidkv"}).allocator.ratio == 2 * 20 - 1  # beta = 20
    tova = policy_of({"policy": "tova"})  # the newest query alone
    assert (tova.tracker.update_decay, tova.tracker.score_window, tova.min_budget) == (0.0, 1, 2)
