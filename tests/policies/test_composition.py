"""What holds for every combination of parts."""

import itertools
import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_same, assert_sound, concatenate, newest_queries, random_entries, rope
from vllm_kvmerge.policies import (
    ALLOCATORS,
    DEAD,
    PARTS,
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
from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.policies.base import ScoreMode
from vllm_kvmerge.policies.choice import PartNames, choose
from vllm_kvmerge.policies.mergers import DropMerger, ResidualMerger, ZipMerger
from vllm_kvmerge.policies.selectors import (
    Critical,
    HeavyHitter,
    Recent,
    RedundancyAware,
    SinkRecent,
    Tova,
    WindowTopK,
)
from vllm_kvmerge.policies.trackers import LogEmaTracker, NoTracker, ReconstructionTracker, SumTracker

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
    return tracker.mode in merger.tracker_modes and (tracker.mode != ScoreMode.NONE or not selector.needs_scores)


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
    if policy.tracker.mode == ScoreMode.LOG_EMA:
        generator = torch.Generator().manual_seed(seed)
        entries.aux[entries.is_live] = torch.randint(0, 5, (num_heads, n), generator=generator).float()[entries.is_live]
    return entries


def context_for(policy: CompressionPolicy, entries: Entries, budget: int) -> CompressionContext:
    """At the end of a prompt, with all that any policy may ask for; two query heads per KV head."""
    num_heads, n, head_size = entries.keys.shape
    window = min(policy.query_window, n)
    generator = torch.Generator().manual_seed(0)
    return CompressionContext.of_layer(
        entries,
        budget,
        n,
        at_prompt_end=True,
        capacity=policy.allocator.capacity(budget),
        queries=newest_queries(torch.randn(num_heads, 2, window, head_size, generator=generator), n),
        output_weights=torch.randn(num_heads, 2, 4 * head_size, head_size, generator=generator),
        rotation=rope(head_size),
        layer_statistics=torch.ones(1, 1),
    )


@examples(250)
@given(st.sampled_from(POLICIES), SEEDS, st.integers(1, 3), st.integers(2, 40), st.booleans(), st.data())
def test_every_policy(policy, seed, num_heads, n, at_prompt_end, data):
    n += policy.min_budget
    num_dead = data.draw(st.integers(0, n))
    budget = data.draw(st.integers(policy.min_budget, n - 1))
    entries = entries_for(policy, seed, num_heads, n, num_dead)
    untouched = entries.clone()
    context = CompressionContext.of_layer(entries, budget, n, at_prompt_end)
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
    entries.aux.fill_(1.0 if policy.tracker.mode == ScoreMode.LOG_EMA else 0.0)
    budget = policy.min_budget + 2
    for step in range(4):
        context = CompressionContext.of_layer(entries, budget, n + step * 6, at_prompt_end=step == 0)
        entries = policy.compress(entries, context).entries
        positions = entries.positions.sort(dim=1).values
        assert (positions[:, :num_sinks] == torch.arange(num_sinks)).all()
        fresh = entries_for(policy, step, 2, 6, num_dead=0)
        fresh.positions += n + step * 6
        fresh.aux.fill_(entries.aux.min())
        entries = concatenate(entries, fresh)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("surplus", [0, 1])
def test_nothing_to_do_is_a_copy(policy, surplus):
    entries = random_entries(0, n=40, num_dead=3)
    result = policy.compress(entries, CompressionContext.of_layer(entries, 40 + surplus, 40, at_prompt_end=True))
    assert (result.num_merged, result.num_evicted) == (0, 0)
    assert_sound(result.entries, 40)
    entries.kill(~entries.is_live)
    assert_same(result.entries, entries)
    result.entries.keys.zero_()
    assert entries.keys.any()


def test_a_budget_below_the_protected_entries_is_refused():
    policy = CompressionPolicy(tracker=SumTracker(), selector=HeavyHitter(), merger=DropMerger())
    entries = random_entries(0)
    with pytest.raises(ValueError, match=r"budget 5 .* 6"):
        policy.compress(entries, CompressionContext.of_layer(entries, 5, 16, at_prompt_end=True))


def test_min_budget_leaves_room_for_a_slot():
    selector = HeavyHitter(num_sink_tokens=1, recent_window=2)
    for merger, least in ((DropMerger(), 4), (ResidualMerger(), 5), (ResidualMerger(residual_share=0.999), 5)):
        policy = CompressionPolicy(tracker=SumTracker(), selector=selector, merger=merger)
        assert policy.min_budget == least
        entries = random_entries(1)
        result = policy.compress(entries, CompressionContext.of_layer(entries, least, 16, at_prompt_end=True))
        assert_sound(result.entries, least)


@pytest.mark.parametrize(
    ("tracker", "selector", "merger", "message"),
    [
        (NoTracker(), HeavyHitter(), DropMerger(), "selector 'h2o' needs scores"),
        (NoTracker(), WindowTopK(), DropMerger(), "selector 'snapkv' needs scores"),
        (NoTracker(), Recent(), ResidualMerger(), "merger 'residual' .*mode 'none'"),
        (LogEmaTracker(), HeavyHitter(), ResidualMerger(), "merger 'residual' .*allowed modes: sum"),
        (LogEmaTracker(), Critical(), DropMerger(), "selector 'criticalkv' needs probabilities, tracker 'log_ema'"),
        (LogEmaTracker(), RedundancyAware(), DropMerger(), "selector 'rkv' needs probabilities"),
        (LogEmaTracker(), Tova(), ZipMerger(), "selector 'tova' needs probabilities"),
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
    names = PartNames.of(preset)
    assert names.misfit() is None
    assert set(preset.defaults) <= {name for part in names.classes.values() for name in part.model_fields}
    parts = {
        kind: part(**{name: value for name, value in preset.defaults.items() if name in part.model_fields})
        for kind, part in names.classes.items()
    }
    policy = CompressionPolicy(**parts)
    entries = entries_for(policy, 0, 2, 200, num_dead=0)
    context = context_for(policy, entries, max(40, policy.min_budget))
    assert_sound(policy.compress(entries, context).entries, context.capacity)


def test_parts_that_fit_can_be_told_apart_by_their_fields():
    """A request gives all parameters in one object: a name that two parts share must mean the same to both."""
    for kinds in itertools.combinations(PARTS, 2):
        for one, other in itertools.product(*(PARTS[kind].values() for kind in kinds)):
            for name in one.model_fields.keys() & other.model_fields.keys():
                assert repr(one.model_fields[name]) == repr(other.model_fields[name]), (one, other, name)


def test_names_are_unique():
    with pytest.raises(ValueError, match="merger 'drop' is registered already"):
        register(type("Again", (DropMerger,), {"__module__": __name__}))
    with pytest.raises(TypeError, match="neither"):
        register(Preset)
    for name in ("h2o", "full"):
        with pytest.raises(ValueError, match="registered already"):
            register_preset(Preset(name, "", "none", "local", "drop"))


def test_incomplete_parts_are_refused():
    class Empty(Selector):
        pass

    class Clashing(Recent):
        name: ClassVar[str] = "clashing"
        budget: int = 3

    class Demanding(Recent):
        name: ClassVar[str] = "demanding"
        stride: int

    class NotJson(Recent):
        name: ClassVar[str] = "not_json"
        function: Callable[[int], int] = abs

    class Endless(Recent):
        name: ClassVar[str] = "endless"
        stride: int = Field(1, ge=1)

    class Bottomless(Recent):
        name: ClassVar[str] = "bottomless"
        weights: list[Annotated[float, Field(le=1.0)]] | None = None

    class Infinite(Recent):
        name: ClassVar[str] = "infinite"
        weight: float = Field(0.0, ge=0.0, le=math.inf)

    class Nested(Recent):
        class Options(BaseModel):
            stride: int = 1

        name: ClassVar[str] = "nested"
        options: Options = Options()

    class Windowless(Tracker):
        name: ClassVar[str] = "windowless"
        source: ClassVar[str] = ""
        mode: ClassVar[ScoreMode] = ScoreMode.SUM

        def importance(self, entries: Entries) -> torch.Tensor:
            return entries.scores

    for part, message in {
        Endless: r"Endless\.stride allows numbers without a finite lower and upper bound",
        Bottomless: r"Bottomless\.weights allows",
        Infinite: r"Infinite\.weight allows",
        Nested: r"Nested\.options allows",
        Windowless: r"Windowless\.prompt_window is 0",
        Empty: "Empty does not define min_budget, name, needs_scores, select, source",
        Clashing: r"Clashing\.budget: every request has a field of that name",
        Demanding: r"Demanding\.stride has no default",
        NotJson: "JsonSchema",
    }.items():
        with pytest.raises(Exception, match=message):
            register(part)
    names = {"clashing", "demanding", "not_json", "endless", "bottomless", "infinite", "nested", "windowless"}
    assert not names & (SELECTORS.keys() | TRACKERS.keys())


class Tree(BaseModel):
    depth: int = Field(1, gt=0, lt=9)
    branch: "Tree | None" = None


def test_bounded_numbers_of_any_kind_are_accepted():
    class Bounded(Recent):
        name: ClassVar[str] = "bounded"
        choice: Literal[1, 2] = 1
        flag: bool = False
        weight: Annotated[float, Field(ge=0.0, lt=1.0)] | Literal["all"] | None = None
        text: str = ""
        tree: Tree = Tree()

    assert register(Bounded) is SELECTORS.pop("bounded")


def test_prompt_windows():
    for tracker in TRACKERS.values():
        scores_prompt = tracker.mode != ScoreMode.NONE or tracker.predicts_scores
        assert (tracker().prompt_window != 0) == scores_prompt
    assert TRACKERS["mean"](score_window="all").prompt_window == "all"


@pytest.mark.parametrize(("normalized", "largest"), [(False, 1.0), (True, 100.0)])
def test_the_first_tokens_of_a_repeated_context_have_the_largest_score(normalized, largest):
    """Where scores are weighed, others may exceed 1."""
    tracker = ReconstructionTracker(num_prefix_tokens=3, normalized=normalized)
    entries = random_entries(0)
    entries.scores *= largest / entries.scores.max()
    importance, first = tracker.importance(entries), entries.positions < 3
    assert (importance[first] >= largest).all()
    assert torch.equal(importance[~first], entries.scores[~first])


def test_the_tracker_follows_the_other_parts():
    def tracker(policy: str, **overrides: str) -> str:
        return choose(PRESETS[policy], overrides).tracker

    assert tracker("snapkv", merger="zip") == "sum"
    assert tracker("keepkv", merger="residual") == "sum"
    assert tracker("streaming_llm", selector="h2o") == "sum"
    assert tracker("streaming_llm", merger="zip") == "none"
    assert tracker("weightedkv", merger="asymkv") == "sum"
    # What suits stays, and what is asked for is taken.
    assert tracker("keepkv", merger="drop") == "log_ema"
    assert tracker("h2o", selector="local") == "sum"
    assert tracker("h2o", selector="local", tracker="none") == "none"
    with pytest.raises(ValueError, match="merger 'residual' cannot work from tracker 'log_ema'"):
        choose(PRESETS["snapkv"], {"merger": "residual", "tracker": "log_ema"})


def test_parts_no_tracker_suits_are_refused_for_what_is_wrong_with_most(monkeypatch):
    class Pooling(Recent):
        name: ClassVar[str] = "pooling"
        needs_scores: ClassVar[bool] = True
        pools_heads: ClassVar[bool] = True

    class PerHead(Uniform):
        name: ClassVar[str] = "per_head"
        splits_heads: ClassVar[bool] = True

    monkeypatch.setitem(SELECTORS, "pooling", Pooling)
    monkeypatch.setitem(ALLOCATORS, "per_head", PerHead)
    with pytest.raises(ValueError, match="'pooling' ranks all heads together, allocator 'per_head' gives each its own"):
        choose(PRESETS["local"], {"selector": "pooling", "allocator": "per_head"})


def test_parts_with_fields_of_one_name_and_two_meanings_are_refused(monkeypatch):
    class Decaying(Recent):
        name: ClassVar[str] = "decaying"
        decay: int = 3

    monkeypatch.setitem(SELECTORS, "decaying", Decaying)
    with pytest.raises(ValueError, match="tracker 'sum' and selector 'decaying' both have a parameter 'decay'"):
        choose(PRESETS["h2o"], {"selector": "decaying", "tracker": "sum"})
    assert choose(PRESETS["h2o"], {"selector": "decaying"}).tracker == "none"


def test_part_names_have_the_registered_kinds():
    assert PartNames._fields == tuple(PARTS)


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


def test_a_copy_is_asked_anew():
    policy = CompressionPolicy(tracker=TRACKERS["log_ema"](), selector=HeavyHitter(), merger=ZipMerger())
    reading = policy.model_copy(update={"merger": ZipMerger(head_fit="least_squares")})
    assert policy.query_window == 0 and reading.query_window > 0
