"""What holds for every combination of parts."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.policies.sampling import SEEDS, assert_same, assert_sound, random_entries
from vllm_kvmerge.policies import (
    DEAD,
    MERGERS,
    PRESETS,
    SELECTORS,
    TRACKERS,
    CompressionContext,
    CompressionPolicy,
    Entries,
    Merger,
    Preset,
    Selector,
    Tracker,
    register,
    register_preset,
)
from vllm_kvmerge.policies.mergers import DropMerger, ResidualMerger, ZipMerger
from vllm_kvmerge.policies.selectors import HeavyHitter, Recent, SinkRecent, WindowTopK
from vllm_kvmerge.policies.trackers import LogEmaTracker, NoTracker, SumTracker

SELECTOR_EXAMPLES = (
    Recent(),
    SinkRecent(num_sink_tokens=2),
    HeavyHitter(num_sink_tokens=2),
    HeavyHitter(num_sink_tokens=0, recent_window=3),
    WindowTopK(window_size=4, kernel_size=3),
)
MERGER_EXAMPLES = (
    DropMerger(),
    ZipMerger(merge_threshold=0.3),
    ZipMerger(merge_threshold=-1.0, zip_mode="scale", merge_first=False),
    ResidualMerger(),
    ResidualMerger(residual_share=0.99, alpha=0.0),
)


def fits(tracker: Tracker, selector: Selector, merger: Merger) -> bool:
    return tracker.mode in merger.tracker_modes and (tracker.mode != "none" or not selector.needs_scores)


POLICIES = [
    CompressionPolicy(tracker=tracker, selector=selector, merger=merger)
    for tracker, selector, merger in itertools.product(
        (NoTracker(), SumTracker(), LogEmaTracker()), SELECTOR_EXAMPLES, MERGER_EXAMPLES
    )
    if fits(tracker, selector, merger)
]


def entries_for(policy: CompressionPolicy, seed: int, num_heads: int, n: int, num_dead: int) -> Entries:
    """Random entries with statistics as the policy's tracker would have left them."""
    entries = random_entries(seed, num_heads, n, num_dead=num_dead)
    if policy.tracker.mode == "log_ema":
        generator = torch.Generator().manual_seed(seed)
        entries.aux[entries.is_live] = torch.randint(0, 5, (num_heads, n), generator=generator).float()[entries.is_live]
    return entries


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(POLICIES), SEEDS, st.integers(1, 3), st.integers(2, 40), st.booleans(), st.data())
def test_every_policy(policy, seed, num_heads, n, at_prompt_end, data):
    n += policy.min_budget
    num_dead = data.draw(st.integers(0, n))
    budget = data.draw(st.integers(policy.min_budget, n - 1))
    entries = entries_for(policy, seed, num_heads, n, num_dead)
    untouched = entries.clone()
    context = CompressionContext(budget, n, at_prompt_end)
    result = policy.compress(entries, context)

    assert_same(entries, untouched)
    assert_sound(result.entries, budget)
    num_live = n - num_dead
    live_after = result.entries.is_live.sum().item()
    assert result.num_merged + result.num_evicted + live_after == num_live * num_heads
    if not isinstance(policy.merger, ResidualMerger):
        assert (result.entries.is_live.sum(1) == min(budget, num_live)).all()
    assert result.num_merged >= 0 and result.num_evicted >= 0
    if isinstance(policy.merger, DropMerger):
        assert result.num_merged == 0
    if num_live <= budget:
        assert (result.num_merged, result.num_evicted) == (0, 0)
        assert (result.entries.is_live.sum(1) == num_live).all()
    again = policy.compress(entries, context)
    assert_same(again.entries, result.entries)
    assert (again.num_merged, again.num_evicted) == (result.num_merged, result.num_evicted)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_sinks_survive_many_compressions(policy):
    num_sinks = getattr(policy.selector, "num_sink_tokens", 0)
    n = policy.min_budget + 20
    entries = entries_for(policy, 11, 2, n, num_dead=0)
    entries.aux.fill_(1.0 if policy.tracker.mode == "log_ema" else 0.0)
    budget = policy.min_budget + 2
    for step in range(4):
        context = CompressionContext(budget, n + step * 6, at_prompt_end=step == 0)
        entries = policy.compress(entries, context).entries
        positions = entries.positions.sort(dim=1).values
        assert (positions[:, :num_sinks] == torch.arange(num_sinks)).all()
        fresh = entries_for(policy, step, 2, 6, num_dead=0)
        fresh.positions += n + step * 6
        fresh.aux.fill_(entries.aux.min())
        entries = entries.concatenate(fresh)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("surplus", [0, 1])
def test_nothing_to_do_is_a_copy(policy, surplus):
    entries = random_entries(0, n=40, num_dead=3)
    result = policy.compress(entries, CompressionContext(40 + surplus, 40, at_prompt_end=True))
    assert (result.num_merged, result.num_evicted) == (0, 0)
    assert_sound(result.entries, 40)
    entries.kill(~entries.is_live)
    assert_same(result.entries, entries)
    result.entries.keys.zero_()
    assert entries.keys.any()


def test_a_budget_below_the_protected_entries_is_refused():
    policy = CompressionPolicy(tracker=SumTracker(), selector=HeavyHitter(), merger=DropMerger())
    with pytest.raises(ValueError, match=r"budget 5 .* 6"):
        policy.compress(random_entries(0), CompressionContext(5, 16, at_prompt_end=True))


def test_min_budget_leaves_room_for_a_slot():
    selector = HeavyHitter(num_sink_tokens=1, recent_window=2)
    for merger, least in ((DropMerger(), 4), (ResidualMerger(), 5), (ResidualMerger(residual_share=0.999), 5)):
        policy = CompressionPolicy(tracker=SumTracker(), selector=selector, merger=merger)
        assert policy.min_budget == least
        entries = random_entries(1)
        result = policy.compress(entries, CompressionContext(least, 16, at_prompt_end=True))
        assert_sound(result.entries, least)


@pytest.mark.parametrize(
    ("tracker", "selector", "merger", "message"),
    [
        (NoTracker(), HeavyHitter(), DropMerger(), "selector 'h2o' needs scores"),
        (NoTracker(), WindowTopK(), DropMerger(), "selector 'snapkv' needs scores"),
        (SumTracker(), HeavyHitter(), ZipMerger(), "merger 'zip' .*mode 'sum'.*allowed modes: log_ema"),
        (NoTracker(), Recent(), ZipMerger(), "merger 'zip' .*mode 'none'"),
        (LogEmaTracker(), HeavyHitter(), ResidualMerger(), "merger 'residual' .*allowed modes: sum"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tracker, selector, merger, message):
    with pytest.raises(ValidationError, match=message):
        CompressionPolicy(tracker=tracker, selector=selector, merger=merger)


def test_needs_scores_follows_the_tracker():
    policies = {p.tracker.mode: p.needs_scores for p in POLICIES}
    assert policies == {"none": False, "sum": True, "log_ema": True}


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_presets_are_made_of_registered_parts_that_fit(preset):
    assert TRACKERS[preset.tracker.name] is preset.tracker
    assert SELECTORS[preset.selector.name] is preset.selector
    assert MERGERS[preset.merger.name] is preset.merger
    parts = (preset.tracker, preset.selector, preset.merger)
    assert set(preset.defaults) <= {name for part in parts for name in part.model_fields}
    tracker, selector, merger = (
        part(**{name: value for name, value in preset.defaults.items() if name in part.model_fields}) for part in parts
    )
    policy = CompressionPolicy(tracker=tracker, selector=selector, merger=merger)
    entries = entries_for(policy, 0, 2, 100, num_dead=0)
    assert_sound(policy.compress(entries, CompressionContext(40, 100, at_prompt_end=True)).entries, 40)


def test_parts_that_share_a_field_agree_on_it():
    for preset in PRESETS.values():
        seen = {}
        for part in (preset.tracker, preset.selector, preset.merger):
            for name, info in part.model_fields.items():
                assert repr(seen.setdefault(name, info)) == repr(info)


def test_names_are_unique():
    with pytest.raises(ValueError, match="merger 'drop' is registered already"):
        register(type("Again", (DropMerger,), {"__module__": __name__}))
    with pytest.raises(TypeError, match="neither"):
        register(Preset)
    for name in ("h2o", "full"):
        with pytest.raises(ValueError, match="registered already"):
            register_preset(Preset(name, "", NoTracker, Recent, DropMerger))


def test_parts_are_strict_and_frozen():
    with pytest.raises(ValidationError):
        SumTracker(score_window=True)
    with pytest.raises(ValidationError):
        SumTracker(decay="0.5")
    with pytest.raises(ValidationError):
        HeavyHitter(recent=4)
    with pytest.raises(ValidationError):
        SumTracker().decay = 0.5
    assert SumTracker(score_window="all", decay=1).score_window == "all"
    assert len({SumTracker(), SumTracker(), SumTracker(decay=0.5)}) == 2


def test_entries_without_and_kill():
    entries = random_entries(0, n=4)
    hidden = torch.tensor([[True, False, False, False], [False, False, False, True]])
    view = entries.without(hidden)
    assert torch.equal(view.is_live, ~hidden) and view.keys is entries.keys
    assert entries.is_live.all()
    entries.keys[hidden] = torch.nan
    entries.kill(hidden)
    assert (entries.positions[hidden] == DEAD).all() and (entries.log_votes[hidden] == -torch.inf).all()
    assert not entries.keys.isnan().any()
