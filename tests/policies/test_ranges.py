"""Whatever value a field allows, arithmetic on it is finite."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.examples import examples
from tests.policies.every import context_for, entries_for
from tests.policies.sampling import SEEDS, assert_sound, random_entries
from vllm_kvmerge.policies import (
    ALLOCATORS,
    MAX_TOKENS,
    PARTS,
    PRESETS,
    CompressionContext,
    CompressionPolicy,
    Heads,
)
from vllm_kvmerge.policies.allocators.variance import Variance
from vllm_kvmerge.policies.base import MAX_QUERIES, Allocator, Merger, Part, Selector, Tracker
from vllm_kvmerge.policies.choice import PartNames
from vllm_kvmerge.policies.head_budgets import HeadBudgets

CLASSES = {f"{kind}-{name}": part for kind, classes in PARTS.items() for name, part in classes.items()}

NUMBERS = {
    f"{name}-{field}": (part, field, option)
    for name, part in CLASSES.items()
    for field, schema in part.model_json_schema().get("properties", {}).items()
    for option in schema.get("anyOf", [schema])
    if option.get("type") in ("integer", "number")
}
"""Every numeric field of every part, with its schema."""


def bounds(option: dict[str, Any]) -> tuple[float, float]:
    """Smallest and largest value that a number's schema allows."""
    if option["type"] == "integer":
        lower = option.get("minimum", option.get("exclusiveMinimum", 0) + 1)
        return lower, option.get("maximum", option.get("exclusiveMaximum", 0) - 1)
    lower = option.get("minimum", math.nextafter(option.get("exclusiveMinimum", 0.0), math.inf))
    return float(lower), float(option.get("maximum", math.nextafter(option.get("exclusiveMaximum", 0.0), -math.inf)))


def values(field: str, option: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema allows: a number's extremes, small ones, anything between."""
    if option.get("type") in ("integer", "number"):
        lower, upper = bounds(option)
        anywhere = st.floats if option["type"] == "number" else st.integers
        numbers = st.sampled_from([lower, upper]) | anywhere(lower, min(upper, lower + 8)) | anywhere(lower, upper)
        return numbers.map(lambda value: value | 1) if field == "kernel_size" else numbers  # which is odd
    if option.get("type") == "array":
        return st.lists(values(field, option["items"]), min_size=option.get("minItems", 0), max_size=3)
    if option.get("type") == "object":
        return st.just({})
    if option.get("type") == "boolean":
        return st.booleans()
    return st.sampled_from(option.get("enum", [option.get("const")]))


def parts(part: type[Part], but: str | None = None) -> st.SearchStrategy[Part]:
    """The part with any values that its fields allow. but: a field that keeps its default."""
    schemas = part.model_json_schema().get("properties", {})
    fields = {
        field: st.one_of([values(field, option) for option in schema.get("anyOf", [schema])])
        for field, schema in schemas.items()
        if field != but
    }
    return st.fixed_dictionaries(fields).map(lambda chosen: part(**chosen))


def policies(preset: str) -> st.SearchStrategy[CompressionPolicy]:
    classes = PartNames.of(PRESETS[preset]).classes
    # Members of the default suit the tracker.
    chosen = st.fixed_dictionaries({kind: parts(part, "of") for kind, part in classes.items()})
    return chosen.map(lambda some: CompressionPolicy(**some))


@pytest.mark.parametrize("name", NUMBERS)
def test_what_a_number_may_be(name):
    part, field, option = NUMBERS[name]
    lower, upper = bounds(option)
    for value in (lower, upper):
        if field != "kernel_size" or value % 2:
            assert getattr(part(**{field: value}), field) == value
    step = 1 if option["type"] == "integer" else 1e-7
    for value in (lower - step, upper + step, 10**400, -(10**400), math.inf, math.nan):
        with pytest.raises(ValidationError):
            part(**{field: value})


@pytest.mark.parametrize("name", CLASSES)
@examples(25)
@given(st.data(), st.integers(1, MAX_TOKENS))
def test_counts_of_any_part(name, data, budget):
    """Of all values and budgets: whole numbers that vLLM's scheduler can reckon with."""
    part = data.draw(parts(CLASSES[name]))
    assert 0 <= part.query_window <= MAX_QUERIES
    if isinstance(part, Allocator):
        capacity = part.capacity(budget)
        assert capacity is None or (type(capacity) is int and budget <= capacity <= 64 * MAX_TOKENS)
    elif isinstance(part, Selector):
        assert type(part.min_budget) is int and 1 <= part.min_budget <= 2 * MAX_TOKENS + 1
    elif isinstance(part, Merger):
        assert type(part.num_slots(budget)) is int and 0 <= part.num_slots(budget) <= budget
    else:
        assert isinstance(part, Tracker)
        # What attention's score updates are made of, in float32.
        decay = torch.tensor(part.update_decay)
        assert 0 <= decay <= 1 and (part.mode != "log_ema" or (decay.log().isfinite() and torch.log1p(-decay) < -1e-6))


@pytest.mark.parametrize("preset", PRESETS)
@examples(12)
@given(SEEDS, st.data(), st.booleans())
def test_any_values_compress(preset, seed, data, at_prompt_end):
    policy, n = data.draw(policies(preset)), 24
    entries = entries_for(policy, seed, 2, n, data.draw(st.integers(0, 3)))
    if policy.min_budget < n:
        budget = data.draw(st.integers(policy.min_budget, n - 1))
        context = context_for(policy, entries, budget, at_prompt_end=at_prompt_end, by_layer=True)
        # The rows of dead entries hold NaN, which no part may let through.
        assert_sound(policy.compress(entries, context).entries, context.capacity)


def budgets_of_layers(allocator: Allocator, n: int, budget: int, statistics: torch.Tensor, least: int) -> list[int]:
    """Of one head in each layer. statistics: ``[num_layers]``."""
    num_layers = len(statistics)
    entries, spread = random_entries(0, num_heads=num_layers, n=n), statistics.expand(num_layers, -1)
    known = HeadBudgets(fingerprint="", shares=(1 + spread[0].nan_to_num(0.0).clamp(max=63.0)).unsqueeze(1).tolist())
    fields = {"layer_statistics": spread, "min_budget": least, "head_budgets": known}
    context = CompressionContext.of_layer(entries, budget, n, True, **fields)
    heads = Heads.of(list(range(num_layers)), [0], num_layers, gather=lambda tensor: tensor)
    return allocator.head_budgets(entries, entries.scores, replace(context, heads=heads)).tolist()


@pytest.mark.parametrize("name", ALLOCATORS)
@examples(40)
@given(SEEDS, st.data(), st.sampled_from([1, 2, 61, 256]))
def test_any_split(name, seed, data, num_layers):
    """Budgets of very many, very uneven layers lie between the least and the capacity, and their mean is the budget."""
    allocator = data.draw(parts(ALLOCATORS[name]))
    least = data.draw(st.integers(1, 20))
    budget = data.draw(st.integers(least, 60))
    # From nothing to inf and NaN, which attention may come to.
    powers = torch.rand(num_layers, generator=torch.Generator().manual_seed(seed))
    powers *= data.draw(st.sampled_from([0.0, 1.0, 300.0, math.nan]))
    statistics = torch.zeros(num_layers)
    statistics[0] = data.draw(st.sampled_from([0.0, 1e-30, 2.0**48]))
    statistics = data.draw(st.sampled_from([statistics, torch.exp2(powers - 150)]))
    budgets = budgets_of_layers(allocator, 64, budget, statistics, least)
    capacity = allocator.capacity(budget)
    assert len(budgets) == num_layers and all(int(some) == some for some in budgets)
    assert max(budgets) <= (64 if capacity is None else capacity)
    if name == "variance":
        assert sum(budgets) == budget * num_layers and min(budgets) >= min(least, budget)


def test_one_layer_with_all_of_the_variance():
    """Its weight, exp(-num_layers), is 0 in float64, and nothing may be left over for it to be divided by."""
    statistics = torch.tensor([1.0] + [0.0] * 1023)
    assert budgets_of_layers(Variance(max_share=1.0), 20, 10, statistics, 0) == [10] * 1024
