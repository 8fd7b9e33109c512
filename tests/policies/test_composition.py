"""Parts: what is registered, what goes together, and what they share."""

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import pytest
import torch
from pydantic import BaseModel, Field

from tests.policies.sampling import random_entries
from vllm_kvmerge.policies import (
    PARTS,
    PRESETS,
    SELECTORS,
    TRACKERS,
    CacheUpdate,
    CompressionPolicy,
    Preset,
    Selector,
    Tracker,
    register,
    register_preset,
)
from vllm_kvmerge.policies.base import ScoreMode
from vllm_kvmerge.policies.choice import choose
from vllm_kvmerge.policies.mergers import DropMerger, ZipMerger
from vllm_kvmerge.policies.selectors import HeavyHitter, Recent
from vllm_kvmerge.policies.trackers import LogEmaTracker, ReconstructionTracker, SumTracker


def test_parts_that_fit_can_be_told_apart_by_their_fields():
    """A request gives all parameters in one object: a name that two parts share must mean the same to both."""
    for kinds in itertools.combinations(PARTS, 2):
        for one, other in itertools.product(*(PARTS[kind].values() for kind in kinds)):
            for name in one.model_fields.keys() & other.model_fields.keys():
                assert repr(one.model_fields[name]) == repr(other.model_fields[name]), (one, other, name)


def test_parts_with_fields_of_one_name_and_two_meanings_are_refused(monkeypatch):
    class Decaying(Recent):
        name: ClassVar[str] = "decaying"
        decay: int = 3

    monkeypatch.setitem(SELECTORS, "decaying", Decaying)
    with pytest.raises(ValueError, match="tracker 'sum' and selector 'decaying' both have a parameter 'decay'"):
        choose(PRESETS["h2o"], {"selector": "decaying", "tracker": "sum"})
    assert choose(PRESETS["h2o"], {"selector": "decaying"}).tracker == "none"


def test_names_are_unique():
    with pytest.raises(ValueError, match="merger 'drop' is registered already"):
        register(type("Again", (DropMerger,), {"__module__": __name__}))
    with pytest.raises(TypeError, match="neither"):
        register(Preset)
    for name in ("h2o", "full"):
        with pytest.raises(ValueError, match="registered already"):
            register_preset(Preset(name, "", "none", "local", "drop"))


class Options(BaseModel):
    stride: int = 1


@pytest.mark.parametrize(
    ("annotation", "default", "message"),
    [
        (int, Field(1, ge=1), "allows numbers without a finite lower and upper bound"),
        (list[Annotated[float, Field(le=1.0)]] | None, None, "allows numbers"),
        (float, Field(0.0, ge=0.0, le=math.inf), "allows numbers"),
        (Options, Options(), "allows numbers"),
        (int, Field(ge=0, le=1), "has no default"),
        (Callable[[int], int], abs, "JsonSchema"),
    ],
)
def test_fields_that_a_request_cannot_give_safely_are_refused(annotation: Any, default: Any, message: str) -> None:
    fields = {"name": "odd", "field": default, "__annotations__": {"name": ClassVar[str], "field": annotation}}
    with pytest.raises(Exception, match=message):
        register(type("Odd", (Recent,), fields | {"__module__": __name__}))
    assert "odd" not in SELECTORS


def test_incomplete_parts_are_refused():
    class Empty(Selector):
        pass

    class Clashing(Recent):
        name: ClassVar[str] = "clashing"
        budget: int = 3

    class Windowless(Tracker):
        name: ClassVar[str] = "windowless"
        source: ClassVar[str] = ""
        mode: ClassVar[ScoreMode] = ScoreMode.SUM
        importance = SumTracker.importance

    for part, message in {
        Windowless: r"Windowless\.prompt_window is 0",
        Empty: "Empty does not define min_budget, name, needs_scores, select, source",
        Clashing: r"Clashing\.budget: every request has a field of that name",
    }.items():
        with pytest.raises(Exception, match=message):
            register(part)
    assert "clashing" not in SELECTORS and "windowless" not in TRACKERS


@pytest.mark.parametrize(("normalized", "largest"), [(False, 1.0), (True, 100.0)])
def test_the_first_tokens_of_a_repeated_context_have_the_largest_score(normalized, largest):
    """Where scores are weighed, others may exceed 1."""
    tracker = ReconstructionTracker(num_prefix_tokens=3, normalized=normalized)
    entries = random_entries(0)
    entries.scores *= largest / entries.scores.max()
    importance, first = tracker.importance(entries), entries.positions < 3
    assert (importance[first] >= largest).all()
    assert torch.equal(importance[~first], entries.scores[~first])


def test_hidden_entries_are_dead_in_the_view_alone():
    dense = random_entries(0, n=4)
    hidden = dense.positions < 1
    for entries in (dense, CacheUpdate.unchanged(dense).view(dense)):
        assert entries.is_live.all()
        view = entries.without(hidden)
        assert torch.equal(view.is_live, ~hidden) and torch.equal(view.keys, dense.keys)
        assert entries.is_live.all()


def test_a_copy_is_asked_anew():
    policy = CompressionPolicy(tracker=LogEmaTracker(), selector=HeavyHitter(), merger=ZipMerger())
    reading = policy.model_copy(update={"merger": ZipMerger(head_fit="least_squares")})
    assert policy.query_window == 0 and reading.query_window > 0
