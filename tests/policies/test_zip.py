"""KeepKV's theorems, and what the zip merger does with the entries it is given."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.policies.sampling import (
    SEEDS,
    assert_sound,
    attend,
    for_parts,
    logits,
    nearest,
    newest_queries,
    probabilities,
    random_entries,
    random_query,
)
from vllm_kvmerge.ops import ScoreMode, ScoreUpdate
from vllm_kvmerge.ops.attention import accumulate_scores, log_bias_correction
from vllm_kvmerge.policies import CompressionContext, CompressionPolicy, Entries, Queries, Tracker
from vllm_kvmerge.policies.mergers import ZipMerger
from vllm_kvmerge.policies.selectors import HeavyHitter, Recent
from vllm_kvmerge.policies.trackers import LogEmaTracker, MeanTracker, NoTracker, SumTracker

TRACKER = LogEmaTracker()


MODES = st.sampled_from(["scale", "votes", "auto"])


def scored_entries(seed: int, num_heads: int, n: int, num_dead: int = 0, size: float = 1.0) -> tuple[Entries, Tensor]:
    """Entries with arbitrary votes whose log-scores are exactly the logits of one query; and that query, ``[H, d]``."""
    entries = random_entries(seed, num_heads, n, num_dead=num_dead, dtype=torch.float64)
    query = random_query(seed, entries, size)
    generator = torch.Generator().manual_seed(seed + 2)
    live = entries.is_live
    votes = torch.rand(live.shape, generator=generator, dtype=torch.float64) * 7 + 0.1
    queries = torch.randint(1, 50, live.shape, generator=generator).double()
    entries.log_votes[live] = votes.log()[live]
    entries.aux[live] = queries[live]
    entries.scores[live] = (logits(entries, query) + log_bias_correction(queries, TRACKER.ema_decay))[live]
    return entries, query


def policy(num_sinks: int = 1, recent: int | None = None, **merger: object) -> CompressionPolicy:
    return CompressionPolicy(
        tracker=TRACKER,
        selector=HeavyHitter(num_sink_tokens=num_sinks, recent_window=recent),
        merger=ZipMerger(**merger),
    )


def context_of(entries: Entries, budget: int, queries: Queries | None = None, **fields: object) -> CompressionContext:
    """At the prompt's end. Without queries the tracker is ``log_ema``, with some it is ``sum``."""
    mode = ScoreMode.LOG_EMA if queries is None else ScoreMode.SUM
    scale = entries.keys.shape[2] ** -0.5
    fields = {"at_prompt_end": True, "scale": scale, "queries": queries, "tracker_mode": mode} | fields
    return for_parts(CompressionContext.of_layer(entries, budget, len(entries), **fields))


def absorb(
    merger: ZipMerger, entries: Entries, carrier: int, members: list[int], queries: Queries | None = None
) -> Entries:
    """``entries`` after ``members`` joined ``carrier`` in every head; the members are dead. queries: see
    ``context_of``."""
    shape = (len(entries.positions), len(members))
    joins = torch.ones(shape, dtype=torch.bool)
    index = torch.tensor(members).expand(shape)
    protected = torch.zeros_like(entries.is_live)
    carriers = torch.full(shape, carrier)
    context = context_of(entries, len(entries), queries)
    scores = merger._scores(entries, TRACKER.importance(entries), context)
    merged = merger._absorb(entries, None, scores, index, carriers, joins, protected, context)[0].apply(entries)
    merged.kill(torch.zeros_like(protected).scatter_(1, index, True))
    return merged


def corrected(entries: Entries) -> Tensor:
    """``[H, n]``: L = ln s_hat (KeepKV eq. 8), without votes."""
    return TRACKER.importance(entries) - entries.log_votes


@examples(150)
@given(
    SEEDS,
    st.integers(1, 4),
    st.integers(4, 40),
    st.sampled_from([LogEmaTracker(), SumTracker(), MeanTracker(), NoTracker()]),
    st.sampled_from(["mean", "least_squares"]),
    MODES,
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_theorem_3_output_is_unchanged_for_exact_scores(
    seed, num_heads, n, tracker, head_fit, mode, passes, at_prompt_end, data
):
    """Scores are those of ``log_ema``, or of the newest query where ZIP reads queries."""
    size = data.draw(st.sampled_from([0.01, 1.0, 30.0]))
    entries, query = scored_entries(seed, num_heads, n, data.draw(st.integers(0, n // 4)), size)
    fields = {"zip_window": 1, "zip_mode": mode, "head_fit": head_fit, "merge_passes": passes, "ema_decay": 0.3}
    merger = ZipMerger(merge_threshold=-1.0, merge_first=data.draw(st.booleans()), **fields)
    selector = HeavyHitter(num_sink_tokens=1) if tracker.mode != ScoreMode.NONE else Recent()
    parts = CompressionPolicy(tracker=tracker, selector=selector, merger=merger)
    assert parts.query_window == (0 if tracker.mode == ScoreMode.LOG_EMA and head_fit == "mean" else 1)
    queries = newest_queries(query[:, None, None], n) if parts.query_window else None
    context = context_of(entries, data.draw(st.integers(3, n)), queries, at_prompt_end=at_prompt_end)
    result = parts.compress(entries, context)
    assert_sound(result.entries, context.budget)
    assert result.num_evicted == 0
    torch.testing.assert_close(attend(result.entries, query), attend(entries, query), rtol=1e-7, atol=1e-7)
    if tracker.mode == ScoreMode.LOG_EMA:
        live = result.entries.is_live
        expected = logits(result.entries, query)[live]
        torch.testing.assert_close(corrected(result.entries)[live], expected, rtol=1e-6, atol=1e-7)


@examples(150)
@given(SEEDS, st.integers(1, 3), st.integers(2, 12), MODES, st.floats(0.001, 0.3), st.data())
def test_theorem_5_bounds_the_perturbation_at_another_query(seed, num_heads, n, mode, change, data):
    entries, query = scored_entries(seed, num_heads, n)
    members = list(range(1, data.draw(st.integers(2, n))))
    merged = absorb(ZipMerger(zip_mode=mode), entries, 0, members)
    later = query + change * random_query(seed + 3, entries)

    joined = [0, *members]
    predicted = torch.cat([corrected(entries)[:, joined], corrected(merged)[:, :1]], 1)
    actual = torch.cat([logits(entries, later)[:, joined], logits(merged, later)[:, :1]], 1)
    error = (1 - (predicted - actual).exp()).abs().amax(dim=1)  # epsilon
    distance = torch.cdist(entries.values, entries.values[:, joined]).amax(dim=(1, 2))  # gamma
    bound = 2 * error * (1 + error) * distance / (1 - error) ** 2
    perturbation = (attend(entries, later) - attend(merged, later)).norm(dim=-1)
    assert ((perturbation <= bound + 1e-9) | (error >= 1)).all()


@pytest.mark.parametrize(
    ("mode", "log_scores", "scaled"),
    [
        ("scale", (5.0, 4.0), True),
        ("scale", (0.3, -10.0), False),  # L_r / L_bar < 0: eq. 25 would turn the key around
        ("scale", (0.0, 0.0), False),  # 0 / 0
        ("scale", (-0.001, -8.0), False),  # L_bar near 0: a factor of 187
        ("auto", (5.0, 4.9), True),
        ("auto", (5.0, 2.0), False),
        ("auto", (0.0, 0.0), False),
        ("votes", (5.0, 4.9), False),
    ],
)
def test_modes(mode, log_scores, scaled):
    entries = random_entries(0, num_heads=1, n=2, dtype=torch.float64)
    entries.aux.fill_(1000.0)
    entries.scores[:] = torch.tensor([log_scores], dtype=torch.float64)
    merged = absorb(ZipMerger(zip_mode=mode), entries, 0, [1])
    total = entries.scores.logsumexp(1)
    weights = entries.scores.softmax(1)
    factor = (total - torch.tensor(2.0).log()) / (weights * entries.scores).sum(1) if scaled else 1.0
    torch.testing.assert_close(merged.keys[:, 0], factor * torch.einsum("hn,hnd->hd", weights, entries.keys))
    assert not scaled or abs(merged.log_votes[0, 0].exp().item() - 2.0) < 1e-6
    torch.testing.assert_close(TRACKER.importance(merged)[:, 0], total)
    assert merged.keys.norm() < 100


@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(4, 30), st.floats(-1.0, 1.0), MODES, st.data())
def test_each_entry_joins_its_most_similar_carrier_or_goes(seed, num_heads, n, threshold, mode, data):
    entries, _ = scored_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n // 2)))
    budget = data.draw(st.integers(3, n - 1))
    parts = policy(recent=0, merge_threshold=threshold, zip_mode=mode, merge_first=False)
    result = parts.compress(entries, context_of(entries, budget))
    assert_sound(result.entries, budget)

    num_merged = 0
    importance = TRACKER.importance(entries)
    for head in range(num_heads):
        live = entries.is_live[head].nonzero().flatten().tolist()
        sinks = [i for i in live if entries.positions[head, i] < 1]
        ranked = sinks + sorted((i for i in live if i not in sinks), key=lambda i: -importance[head, i].item())
        kept, evicted = ranked[:budget], ranked[budget:]
        groups = {i: [i] for i in kept}
        for e, (cosine, carrier) in nearest(entries, head, evicted, kept).items():
            if cosine > threshold:
                groups[carrier].append(e)
                num_merged += 1
        where = {int(p): slot for slot, p in enumerate(result.entries.positions[head])}
        for c in kept:
            slot = where[0 if c in sinks else max(int(entries.positions[head, i]) for i in groups[c])]
            weights = importance[head, groups[c]].softmax(0)
            mean_value = torch.einsum("m,md->d", weights, entries.values[head, groups[c]])
            torch.testing.assert_close(result.entries.values[head, slot], mean_value)
            newest = max(int(entries.positions[head, i]) for i in groups[c])
            assert result.entries.positions[head, slot] == (0 if c in sinks else newest)
            if len(groups[c]) == 1:
                assert_same_entry(result.entries, slot, entries, c, head)
    assert result.num_merged == num_merged


def assert_same_entry(one: Entries, i: int, other: Entries, j: int, head: int) -> None:
    for name in ("keys", "values", "log_votes", "scores", "aux", "positions"):
        assert torch.equal(getattr(one, name)[head, i], getattr(other, name)[head, j]), name


@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(6, 30), st.floats(-1.0, 1.0), st.data())
def test_merge_first(seed, num_heads, n, threshold, data):
    num_dead = data.draw(st.integers(0, n // 2))
    entries, _ = scored_entries(seed, num_heads, n, num_dead)
    budget = data.draw(st.integers(3, n - 1))
    context = context_of(entries, budget)
    merger, selector = ZipMerger(merge_threshold=threshold), HeavyHitter(num_sink_tokens=1)
    importance, protected = TRACKER.importance(entries), selector.protected(entries, context)
    update = merger.before_selection(entries, importance, protected, context)
    merged, count = update.apply(entries), update.merged.sum()
    later = replace(context, at_prompt_end=False)
    assert merger.before_selection(entries, importance, protected, later) is None

    gone = entries.is_live & ~merged.is_live
    assert gone.sum() == count
    for head in range(num_heads):
        free = (entries.is_live & ~protected)[head].nonzero().flatten().tolist()
        free.sort(key=lambda i: importance[head, i].item())
        lower, upper = free[: len(free) // 2], free[len(free) // 2 :]
        matches = nearest(entries, head, lower, upper)
        pairs = sorted((-cosine, i, carrier) for i, (cosine, carrier) in matches.items() if cosine > threshold)
        pairs = pairs[: max(0, n - num_dead - budget)]
        assert set(gone[head].nonzero().flatten().tolist()) == {member for _, member, _ in pairs}
        carriers = {carrier for _, _, carrier in pairs}
        for i in set(range(n)) - carriers - {member for _, member, _ in pairs}:
            if entries.is_live[head, i]:
                assert_same_entry(merged, i, entries, i, head)
        for c in carriers:
            group = [c, *(member for _, member, carrier in pairs if carrier == c)]
            torch.testing.assert_close(
                TRACKER.importance(merged)[head, c], importance[head, group].logsumexp(0), rtol=1e-9, atol=1e-9
            )


@examples(30)
@given(SEEDS, st.integers(1, 4), st.integers(1, 12), st.floats(0.01, 0.99))
def test_queries_give_the_average_that_the_tracker_keeps(seed, num_groups, window, ema_decay):
    """Equation 8 of the newest queries is what ``log_ema`` has after these, with entries that only some have seen."""
    n, d = 16, 8
    entries = random_entries(seed, 2, n, num_dead=3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, num_groups, window, d, generator=generator, dtype=torch.float64)
    queries = newest_queries(vectors, n)
    tracker = LogEmaTracker(ema_decay=ema_decay)
    scores = torch.einsum("hgwd,hnd->hgwn", vectors, entries.keys) * d**-0.5
    seen = entries.positions.unsqueeze(1) <= queries.positions.unsqueeze(-1)
    nothing = torch.zeros(2, n, dtype=torch.float64)
    update = ScoreUpdate(ScoreMode.LOG_EMA, ema_decay)
    entries.scores, entries.aux = accumulate_scores(update, scores, scores, seen, nothing, nothing)
    found = ZipMerger(ema_decay=ema_decay)._scores(entries, torch.zeros_like(nothing), context_of(entries, n, queries))
    assert torch.equal(found.usable, entries.is_live & (entries.aux > 0)) and found.usable.any()
    expected = tracker.importance(entries)
    torch.testing.assert_close(found.log_weights[found.usable], expected[found.usable], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tracker", [SumTracker(), MeanTracker()])
def test_a_merged_entry_has_the_statistic_of_its_sources(tracker: Tracker):
    entries, query = scored_entries(3, 2, 30)
    entries.scores = entries.scores.abs()
    parts = policy(merge_threshold=-1.0).model_copy(update={"tracker": tracker})
    result = parts.compress(entries, context_of(entries, 10, newest_queries(query[:, None, None], 30)))
    assert result.num_merged == 2 * 20
    torch.testing.assert_close(tracker.importance(result.entries).sum(1), tracker.importance(entries).sum(1))


def test_without_queries_nothing_merges():
    entries, _ = scored_entries(0, 2, 20)
    parts = policy(merge_threshold=-1.0).model_copy(update={"tracker": SumTracker()})
    result = parts.compress(entries, context_of(entries, 10))
    assert (result.num_merged, result.num_evicted) == (0, 20)


@examples(30)
@given(SEEDS, st.sampled_from([2, 4, 8]))
def test_least_squares_is_least_to_first_order(seed, num_groups):
    """Of a merge with little mass: another value gives the query heads a larger error, whatever the direction; other
    votes give them a larger sum of a_g d_g^2."""
    n, members = 12, [1, 2, 3]
    entries, _ = scored_entries(seed, 3, n)
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(3, num_groups, 1, 8, generator=generator, dtype=torch.float64)
    merger, queries = ZipMerger(head_fit="least_squares", zip_mode="votes", zip_window=1), newest_queries(vectors, n)
    merged = absorb(merger, entries, 0, members, queries)
    joined = [0, *members]

    def losses(changed: Entries) -> Tensor:
        """``[2, H]``: of the value, and of the votes."""
        total = torch.zeros(2, 3, dtype=torch.float64)
        for query in vectors.squeeze(2).unbind(1):
            mass = probabilities(entries, query)[:, joined]
            share = mass.sum(1)
            target = torch.einsum("hm,hmd->hd", mass / share.unsqueeze(1), entries.values[:, joined])
            logit = logits(changed, query)[:, 0] + changed.log_votes[:, 0]
            wanted = (logits(entries, query) + entries.log_votes)[:, joined].logsumexp(1)
            errors = (changed.values[:, 0] - target).square().sum(-1), (logit - wanted).square()
            total += share.square() * torch.stack(errors)
        return total

    least = losses(merged)
    for _ in range(4):
        other = merged.clone()
        other.values[:, 0] += 0.01 * torch.randn(3, 8, generator=generator, dtype=torch.float64)
        other.log_votes[:, 0] += 0.01 * torch.randn(3, generator=generator, dtype=torch.float64)
        assert (losses(other) > least).all()


@pytest.mark.parametrize("mode", ["scale", "votes"])
def test_further_passes_leave_the_output_unchanged_for_exact_scores(mode):
    entries, query = scored_entries(0, 2, 40)
    nothing = torch.zeros_like(entries.is_live)
    merger = ZipMerger(merge_threshold=-1.0, merge_passes=9, zip_mode=mode)
    update = merger.before_selection(entries, TRACKER.importance(entries), nothing, context_of(entries, 3))
    assert (update.merged == 37).all()
    torch.testing.assert_close(attend(update.apply(entries), query), attend(entries, query), rtol=1e-7, atol=1e-7)


@examples(5)
@given(SEEDS, st.integers(3, 8))
def test_enough_passes_leave_no_similar_pair(seed, n):
    """Of n entries at most n - 1 can merge, so one of the rounds of log2(n) passes must have merged nothing."""
    entries, _ = scored_entries(seed, 1, n)
    entries.keys[:] = entries.keys[..., :3].repeat(1, 1, 3)[..., :8]  # few directions: many are similar
    nothing = torch.zeros_like(entries.is_live)
    merger, threshold = ZipMerger(merge_passes=24, merge_threshold=0.9), 0.9
    update = merger.before_selection(entries, TRACKER.importance(entries), nothing, context_of(entries, 1))
    result = update.apply(entries)
    keys = torch.nn.functional.normalize(result.keys[result.is_live], dim=-1)
    assert ((keys @ keys.T).triu(1) <= threshold).all()


def test_entries_without_a_score_neither_join_nor_are_joined():
    entries, _ = scored_entries(0, 2, 20)
    entries.aux[:, ::2] = 0
    entries.scores[:, ::2] = torch.nan
    result = policy(merge_threshold=-1.0).compress(entries, context_of(entries, 14, at_prompt_end=False)).entries
    unscored = result.aux == 0
    assert unscored.any() and result.scores[~unscored].isfinite().all()
    assert all(getattr(result, name).isfinite().all() for name in ("keys", "values", "log_votes"))


@examples(50)
@given(SEEDS, st.floats(0.001, 0.999))
def test_tracker_follows_equation_8(seed, ema_decay):
    """Importance is the votes' logarithm plus that of eq. 8's average, which the statistic holds without correction."""
    entries = random_entries(seed, 1, 4, dtype=torch.float64)
    average = torch.zeros(1, 4, dtype=torch.float64)
    entries.log_votes[:, 2] = 3.0
    for count, scores in enumerate(entries.values.exp().unbind(2), start=1):
        average = ema_decay * average + (1 - ema_decay) * scores
        entries.scores, entries.aux = average.log(), torch.full_like(average, count)
        entries.aux[:, 1] = 0
        expected = (average / (1 - ema_decay**count)).log() + entries.log_votes
        expected[:, 1] = -torch.inf
        torch.testing.assert_close(LogEmaTracker(ema_decay=ema_decay).importance(entries), expected)
