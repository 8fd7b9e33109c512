"""The policy of requests that name none."""

import json

import jsonschema
import pytest

from vllm_kvmerge.policies.base import ServedModel
from vllm_kvmerge.request.catalogue import describe_policies
from vllm_kvmerge.request.recommended import recommendations
from vllm_kvmerge.request.schema import field_schema
from vllm_kvmerge.request.spec import parse_compression

CASES = [
    ("known", False, {"budget": 0.25}),
    ("later", False, {"budget": 0.25, "context_tokens": 100}),
    ("later", False, {"budget": 0.25, "context_messages": 1}),
    ("known", True, {"budget": 0.25, "allocator": "uniform"}),
    ("later", True, {"budget": 0.25, "context_tokens": 100, "allocator": "uniform"}),
]


def test_a_chat_gets_what_later_turns_need_and_reads_nothing_twice():
    best = recommendations().best("later", for_turns=True)
    assert (
        best.for_turns
        and parse_compression({"budget": 512, "reuse": "turns"}).policy
        == parse_compression(best.parameters | {"budget": 512}).policy
    )


def test_a_server_that_knows_what_heads_need_has_its_own_default():
    """It reads a context once, and compresses what later turns need; its text says so to whoever parses it."""
    plain, calibrated = ServedModel("llama"), ServedModel("llama", is_calibrated=True)
    for asked in ({"budget": 0.25, "context_tokens": 100}, {"budget": 512, "reuse": "turns", "interval": 9}):
        spec = parse_compression(asked)
        assert spec.for_model(plain).policy == spec.policy
        found = spec.for_model(calibrated)
        assert found.name == "calibrated" and parse_compression(found.text) == found
        assert json.loads(found.text).items() >= asked.items()
        assert found.decode == ("bounded" if "reuse" in asked else "grow")
    for named in ({"policy": "snapkv", "budget": 0.25}, {"budget": 0.25, "allocator": "uniform", "context_tokens": 9}):
        spec = parse_compression(named)
        assert spec.for_model(calibrated).policy == spec.policy
    assert describe_policies(is_calibrated=True)["recommended"]["later"] == "calibrated"


def test_what_a_request_asks_for_comes_before_what_its_case_gets():
    asked = {"budget": 0.25, "context_tokens": 100, "allocator": "uniform"}
    assert [parse_compression(asked | more).decode for more in ({}, {"decode": "bounded"})] == ["grow", "bounded"]


@pytest.mark.parametrize("case", ["known", "later"])
def test_the_list_of_policies_says_what_is_recommended(case):
    assert describe_policies()["recommended"][case] == recommendations().best(case).parameters["policy"]


@pytest.mark.parametrize(("case", "even", "asked"), CASES)
def test_a_request_without_a_policy_gets_the_best_for_its_case(case, even, asked):
    config, best = parse_compression(asked), recommendations().best(case, even)
    decode = {"decode": "grow"} if case == "later" else {}
    assert config == parse_compression(decode | best.parameters | asked).model_copy(update={"text": config.text})
    assert config.parameters["policy"] == best.parameters["policy"] and config.budget == 0.25
    # Workers and schedulers parse the text again.
    assert parse_compression(config.text) == config
    assert config.policy.allocator.name == "uniform" or not even


def test_the_table_has_policies_for_every_case():
    found = recommendations()
    assert set(found.cases) == {"known", "later"}
    for rows in found.cases.values():
        assert all(low <= mean <= high for row in rows for mean, low, high in row.score.values())
        assert any(not row.uneven for row in rows)
        for row in rows:
            config = parse_compression(row.parameters | {"budget": 0.5})
            assert not (row.for_turns and config.policy.tracker.repeats_context)
            assert row.uneven == (config.policy.allocator.name != "uniform")
            assert row.calibrated == config.policy.allocator.needs_head_budgets
            # Every server can run it.
            assert not config.policy.tracker.predicts_scores and not config.policy.tracker.normalizes


def test_the_documented_field_allows_both():
    # References point into OpenAPI's components; here they stand beside the schema.
    schema = json.loads(json.dumps(field_schema()).replace("#/components/schemas/", "#/$defs/"))
    validator = jsonschema.Draft202012Validator(schema)
    for asked in (*(asked for _, _, asked in CASES), {"policy": "snapkv"}, {"policy": "full"}):
        assert validator.is_valid(asked)
    for wrong in ({}, {"context_tokens": 5}, {"policy": "h3o", "budget": 0.5}, {"budget": -1}):
        assert not validator.is_valid(wrong)
