"""A request's ``kv_compression``: what is accepted, and what is said about what is not."""

import gc
import json
import tracemalloc
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import ClassVar, Self

import jsonschema
import pytest
import yaml
from pydantic import model_validator

from vllm_kvmerge.policies import ALLOCATORS, PARTS, PRESETS, SELECTORS
from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.policies.base import ServedModel
from vllm_kvmerge.policies.mergers import ResidualMerger, ZipMerger
from vllm_kvmerge.policies.selectors import HeavyHitter, Recent, WindowTopK
from vllm_kvmerge.policies.trackers import LogEmaTracker, SumTracker
from vllm_kvmerge.request.catalogue import describe_policies
from vllm_kvmerge.request.parameters import (
    EXTRA_ARGS_KEY,
    FULL,
    CompressionError,
    compression,
    parse_compression,
    request_schema,
)


def test_none_and_full_compress_nothing():
    assert parse_compression(None) is None
    assert parse_compression({"policy": FULL}) is None


def test_fields_reach_the_parts_and_the_presets_defaults_stay():
    request = {"policy": "snapkv", "budget": 128, "interval": 8, "merger": "zip", "zip_mode": "votes", "ema_decay": 0.5}
    config = parse_compression(request | {"window_size": 8})
    assert (config.budget, config.interval) == (128, 8)
    assert config.policy.merger == ZipMerger(zip_mode="votes", ema_decay=0.5)
    assert config.policy.selector == WindowTopK(window_size=8)
    assert config.policy.tracker == SumTracker(score_window=32)
    policy = parse_compression(request | {"tracker": "log_ema"}).policy
    assert policy.tracker == LogEmaTracker(score_window=32, ema_decay=0.5)  # 32 is SnapKV's
    request = {"policy": "zsmerge", "alpha": 1, "residual_share": 0.5, "selector": "h2o", "num_sink_tokens": 0}
    policy = parse_compression(request).policy
    assert policy.merger == ResidualMerger(alpha=1.0, residual_share=0.5)
    assert policy.selector == HeavyHitter(num_sink_tokens=0)
    assert policy.tracker == SumTracker(score_window=32, decay=0.98)  # as in ZSMerge


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        ({"policy": "snapkv", "merger": "zip"}, {"tracker": "sum", "selector": "snapkv", "merger": "zip"}),
        ({"policy": "streaming_llm", "merger": "zip"}, {"tracker": "none", "merger": "zip"}),
        ({"policy": "keepkv", "merger": "residual"}, {"tracker": "sum", "selector": "snapkv", "merger": "residual"}),
        ({"policy": "keepkv", "merger": "drop"}, {"tracker": "log_ema", "selector": "snapkv", "merger": "drop"}),
        ({"policy": "streaming_llm", "selector": "h2o"}, {"tracker": "sum", "selector": "h2o", "merger": "drop"}),
        ({"policy": "h2o", "selector": "local", "tracker": "none"}, {"tracker": "none", "selector": "local"}),
        ({"policy": "weightedkv", "merger": "asymkv"}, {"tracker": "sum", "merger": "asymkv"}),
    ],
)
def test_parts_can_be_replaced(request_, parts):
    config = parse_compression(request_)
    assert config.name == request_["policy"]
    assert config.decode == PRESETS[config.name].decode
    found = {kind: getattr(config.policy, kind).name for kind in PARTS}
    assert found == {kind: getattr(PRESETS[config.name], kind) for kind in PARTS} | parts


def test_defaults_that_depend_on_the_model_are_filled_in_once():
    ridges = [
        (parse_compression({"policy": policy, **fields}).for_model(ServedModel(model_type)), expected)
        for policy in ("grkv", "criticalkv")
        for fields, model_type, expected in (
            ({"merger": "regression"}, "qwen3", (0.1, 0.1)),
            ({"merger": "regression"}, "llama", (0.01, 0.01)),
            ({"merger": "regression", "lambda_k": 0.0, "lambda_v": None}, "mistral", (0.0, 0.1)),
            ({"merger": "regression", "lambda_k": 0.01, "lambda_v": 0.01}, "mistral", (0.01, 0.01)),
        )
    ]
    for config, expected in ridges:
        assert (config.policy.merger.lambda_k, config.policy.merger.lambda_v) == expected
        # Workers parse the text again, and do not ask for the model.
        assert parse_compression(config.text) == config
        assert config.for_model(ServedModel("another")) == config
        spelled_out = config.parameters
        assert (spelled_out["lambda_k"], spelled_out["lambda_v"]) == expected
        assert parse_compression(spelled_out).policy == config.policy
    config = parse_compression({"policy": "h2o"})
    assert config.for_model(ServedModel("qwen3")) is config


def test_json_text_is_parsed():
    value = {"policy": "h2o", "budget": 64, "recent_window": None}
    assert parse_compression(json.dumps(value)) == parse_compression(value)


# Of each policy's own numbers tests/policies/test_ranges.py tries both ends.
REFUSALS = [
    ({"policy": "h3o"}, "policy", "unknown_policy", ["'h3o'", "h2o", "keepkv", "full"]),
    ({}, "policy", "unknown_policy", ["no policy and no budget", "keepkv"]),
    ({"policy": ["h2o"]}, "policy", "unknown_policy", ["['h2o']", "h2o"]),
    ({"policy": "h2o", "bugdet": 5}, "bugdet", "unknown_field", ["h2o", "budget", "recent_window"]),
    ({"policy": "full", "budget": 5}, "budget", "unknown_field", ["full", "policy"]),
    ({"policy": "snapkv", "merger": "zap"}, "merger", "unknown_part", ["'zap'", "drop", "zip"]),
    ({"policy": "snapkv", "selector": ["h2o"]}, "selector", "unknown_part", ["['h2o']", "h2o", "local"]),
    ({"policy": "snapkv", "tracker": None}, "tracker", "unknown_part", ["None", "log_ema"]),
    ({"policy": "h2o", "tracker": "none"}, "tracker", "incompatible_parts", ["selector 'h2o'", "'none'", "sum"]),
    (
        {"policy": "snapkv", "merger": "residual", "tracker": "log_ema"},
        "merger",
        "incompatible_parts",
        ["merger 'residual' cannot work from tracker 'log_ema'", "allowed as merger: ", "drop", "zip"],
    ),
    (
        {"policy": "local", "selector": "h2o", "merger": "zip", "tracker": "none"},
        "selector",
        "incompatible_parts",
        ["selector 'h2o' needs scores", "allowed as selector: ", "streaming_llm"],
    ),
    (
        {"policy": "zsmerge", "selector": "tova", "allocator": "adaptive", "tracker": "mean"},
        "",
        "incompatible_parts",
        ["merger 'residual' cannot work from tracker 'mean'"],
    ),
    (
        {"policy": "snapkv", "merger": "zip", "alpha": 0.9},
        "alpha",
        "unknown_field",
        ["policy snapkv with merger zip", "decay, ", "ema_decay", "zip_mode"],
    ),
    ({"policy": "keepkv", "merger": "drop", "zip_mode": "auto"}, "zip_mode", "unknown_field", ["with merger drop"]),
    ({"policy": "keepkv", "zip_mode": "zap"}, "zip_mode", "invalid_value", ["'zap'", "scale", "votes", "auto"]),
    ({"policy": "h2o", "budget": 0}, "budget", "invalid_value", ["0", "integer from 1 to", "(0, 1]"]),
    ({"policy": "h2o", "budget": 0.0}, "budget", "invalid_value", ["0.0", "(0, 1]"]),
    ({"policy": "h2o", "budget": 1.5}, "budget", "invalid_value", ["1.5", "(0, 1]"]),
    ({"policy": "h2o", "budget": True}, "budget", "wrong_type", ["True", "integer", "number"]),
    ({"policy": "h2o", "budget": "0.2"}, "budget", "wrong_type", ["'0.2'", "integer", "number"]),
    ({"policy": "h2o", "budget": None}, "budget", "wrong_type", ["None", "integer"]),
    ({"policy": "h2o", "budget": 5}, "budget", "budget_too_small", ["5 entries", "h2o", ">= 6"]),
    ({"policy": "local", "selector": "h2o", "budget": 5}, "budget", "budget_too_small", ["selector h2o", ">= 6"]),
    ({"policy": "snapkv", "budget": 32}, "budget", "budget_too_small", ["32 entries", ">= 33"]),
    ({"policy": "zsmerge", "budget": 2}, "budget", "budget_too_small", ["2 entries", ">= 3"]),
    ({"policy": "h2o", "interval": 0}, "interval", "invalid_value", ["0", "equal to 1"]),
    ({"policy": "h2o", "interval": 1.0}, "interval", "wrong_type", ["1.0", "integer"]),
    ({"policy": "h2o", "decode": "never"}, "decode", "invalid_value", ["'never'", "bounded", "grow"]),
    ({"policy": "h2o", "context_tokens": 0}, "context_tokens", "invalid_value", ["0", "equal to 1"]),
    ({"policy": "h2o", "context_tokens": True}, "context_tokens", "wrong_type", ["True", "integer"]),
    ({"policy": "h2o", "context_messages": 0}, "context_messages", "invalid_value", ["0", "equal to 1"]),
    ({"policy": "h2o", "context_messages": "system"}, "context_messages", "wrong_type", ["'system'", "integer"]),
    (
        {"policy": "h2o", "context_messages": 2, "context_tokens": 9},
        "context_messages",
        "given_twice",
        ["2 messages are given beside context_tokens", "one of them"],
    ),
    ({"policy": "h2o", "trigger": "always"}, "trigger", "invalid_value", ["'budget' or 'pressure'"]),
    *(
        ({"policy": "h2o", "trigger": "pressure", field: value}, field, "incompatible_fields", [])
        for field, value in {
            "context_tokens": 9,
            "context_messages": 1,
            "prefill": {"chunk": 9},
            "refresh": {"every": 9},
            "reuse": "turns",
        }.items()
    ),
    ({"policy": "kvzip", "trigger": "pressure"}, "trigger", "incompatible_parts", ["'reconstruction'"]),
    ({"policy": "kvzap", "trigger": "pressure"}, "trigger", "incompatible_parts", ["allowed: 'budget'"]),
    ({"policy": "h2o", "prefill": 16}, "prefill", "wrong_type", ["16"]),
    ({"policy": "h2o", "prefill": {}}, "prefill.chunk", "invalid_value", ["required"]),
    ({"policy": "h2o", "prefill": {"chunk": 0}}, "prefill.chunk", "invalid_value", ["equal to 1"]),
    ({"policy": "h2o", "prefill": {"chunk": 9}, "refresh": {"every": 9}}, "prefill", "incompatible_fields", []),
    ({"policy": "kvzip", "prefill": {"chunk": 9}}, "prefill", "incompatible_fields", ["'reconstruction'"]),
    ({"policy": "h2o", "positions": "sink"}, "positions", "invalid_value", ["'sink'", "'text' or 'cache'"]),
    *(
        (
            {"positions": "cache", **other},
            "positions",
            "incompatible_fields",
            [f"'cache' with {said}", "allowed: 'text'"],
        )
        for said, other in {
            "a refresh": {"policy": "h2o", "refresh": {"every": 9}},
            "trigger 'pressure', which may keep all entries": {"policy": "h2o", "trigger": "pressure"},
            "'expected_attention'": {"policy": "expected_attention"},
            "allocator 'uniform', some of whose layers keep all entries": {"policy": "snapkv", "skip_layers": 1},
        }.items()
    ),
    ({"policy": "h2o", "refresh": 16}, "refresh", "wrong_type", ["16"]),
    ({"policy": "h2o", "refresh": {}}, "refresh.every", "invalid_value", ["required"]),
    ({"policy": "h2o", "refresh": {"every": "9"}}, "refresh.every", "wrong_type", ["'9'", "integer"]),
    ({"policy": "h2o", "refresh": {"every": 9, "queries": 0}}, "refresh.queries", "invalid_value", ["equal to 1"]),
    ({"policy": "h2o", "refresh": {"every": 9, "x": 0}}, "refresh.x", "unknown_field", ["every, queries"]),
    ({"policy": "h2o", "decay": "1"}, "decay", "wrong_type", ["'1'", "number"]),
    ({"policy": "h2o", "score_window": 0}, "score_window", "invalid_value", ["0", "equal to 1", "'all'"]),
    ({"policy": "h2o", "score_window": "most"}, "score_window", "wrong_type", ["'most'", "integer", "'all'"]),
    ({"policy": "keepkv", "merge_first": 1}, "merge_first", "wrong_type", ["1", "boolean"]),
    ({"policy": "snapkv", "kernel_size": 4}, "kernel_size", "invalid_value", ["4", "odd"]),
    ({"policy": "zsmerge", "residual_share": 1.0}, "residual_share", "invalid_value", ["1.0", "less than 1"]),
    ({"policy": "h2o", "decay": float("nan")}, "", "wrong_type", ["JSON"]),
    ([1], "", "wrong_type", ["object", "list"]),
    ('{"policy":', "", "wrong_type", ["JSON"]),
    ({"policy": "h2o", "budget": object()}, "", "wrong_type", ["JSON"]),
    *(
        ({"policy": "local", "protect": protect}, field, reason, said)
        for protect, field, reason, said in [
            ({"tokens": [[3, 3]]}, "protect.tokens", "invalid_value", ["after its start"]),
            ({"tokens": [[-1, 3]]}, "protect.tokens", "invalid_value", ["equal to 0", "-1"]),
            ({"tokens": [[0, 1.5]]}, "protect.tokens", "wrong_type", ["integer", "1.5"]),
            ({"tokens": [[0, 1]] * 65}, "protect.tokens", "invalid_value", ["64"]),
            ({"messages": [1.5]}, "protect.messages", "wrong_type", ["1.5", "string"]),
            ({"roles": []}, "protect.roles", "unknown_field", ["tokens, messages"]),
            ([[0, 4]], "protect", "wrong_type", ["[[0, 4]]"]),
        ]
    ),
    (
        {"policy": "snapkv", "budget": 64, "protect": {"tokens": [[0, 32]]}},
        "protect",
        "protects_too_much",
        ["32 tokens are protected", "needs 33 entries", "budget is 64", "up to 31 tokens", "at least 65"],
    ),
]


@pytest.mark.parametrize(("value", "param", "reason", "said"), REFUSALS)
def test_refusals_name_field_value_and_what_is_allowed(value, param, reason, said):
    with pytest.raises(CompressionError) as caught:
        parse_compression(value)
    assert caught.value.param == ".".join(filter(None, [EXTRA_ARGS_KEY, param]))
    assert caught.value.reason == reason
    message = str(caught.value)
    assert message.startswith(f"{caught.value.param}: ")
    for words in said:
        assert words in message


def test_a_share_is_rounded_up_and_raised_to_what_the_policy_protects():
    config = parse_compression({"policy": "h2o", "budget": 0.2})
    assert [config.resolve_budget(n) for n in (1000, 1001, 10, 1)] == [200, 201, 6, 6]
    assert parse_compression({"policy": "h2o", "budget": 77}).resolve_budget(5) == 77
    # 0.07 * 100 is a little more than 7 in floats.
    assert parse_compression({"policy": "local", "budget": 0.07}).resolve_budget(100) == 7
    assert parse_compression({"policy": "local", "budget": 1.0}).resolve_budget(9) == 9
    assert parse_compression({"policy": "local", "budget": 1}).resolve_budget(9) == 1


def test_a_context_is_part_of_the_prompt():
    config = parse_compression({"policy": "h2o", "budget": 0.2, "context_tokens": 1000})
    assert [config.resolve_context(n) for n in (1000, 1500)] == [1000, 1000]
    for length in (1000, 1500):
        config.check_prompt(length)
    with pytest.raises(CompressionError, match="1000 tokens are more than the prompt has; allowed: 1 to 999") as caught:
        config.check_prompt(999)
    assert (caught.value.param, caught.value.reason) == ("kv_compression.context_tokens", "context_too_long")
    uncounted = parse_compression({"policy": "h2o", "context_messages": 3})
    with pytest.raises(CompressionError, match="3 messages are located in .* alone; allowed: context_tokens") as caught:
        uncounted.check_prompt(1000)
    assert (caught.value.param, caught.value.reason) == ("kv_compression.context_messages", "unknown_messages")
    everything = parse_compression({"policy": "h2o"})
    everything.check_prompt(1)
    assert (everything.context_tokens, everything.resolve_context(77)) == (None, 77)


def test_protected_tokens_count_in_the_budget():
    config = parse_compression({"policy": "h2o", "budget": 0.2, "protect": {"tokens": [[10, 30], [25, 40], [0, 4]]}})
    assert config.policy.protect == ((0, 4), (10, 40))
    assert (config.policy.num_protected, config.policy.min_unprotected, config.policy.min_budget) == (34, 6, 40)
    config.check_prompt(200)
    said = "34 tokens are protected, beside which the policy needs 6 entries, but the budget is 39; allowed: up to 33"
    with pytest.raises(CompressionError, match=said) as caught:
        config.check_prompt(195)
    assert (caught.value.param, caught.value.reason) == ("kv_compression.protect", "protects_too_much")
    with pytest.raises(CompressionError, match="a range ends at 40, after the prompt; allowed: up to 39") as caught:
        config.check_prompt(39)
    assert (caught.value.param, caught.value.reason) == ("kv_compression.protect.tokens", "range_too_long")
    unlocated = parse_compression({"policy": "h2o", "protect": {"messages": ["system"]}})
    with pytest.raises(CompressionError, match="/v1/chat/completions alone; allowed: tokens") as caught:
        unlocated.check_prompt(1000)
    assert (caught.value.param, caught.value.reason) == ("kv_compression.protect.messages", "unknown_messages")
    assert parse_compression({"policy": "h2o", "protect": {}}).policy.protect == ()


def test_the_capacity_is_the_allocators(monkeypatch):
    class Doubling(Uniform):
        name: ClassVar[str] = "doubling"

        def capacity(self, budget: int) -> int:
            return 2 * budget

    assert parse_compression({"policy": "h2o", "budget": 0.2}).resolve_capacity(1001) == 201
    monkeypatch.setitem(ALLOCATORS, "doubling", Doubling)
    config = parse_compression({"policy": "h2o", "budget": 0.2, "allocator": "doubling"})
    assert (config.resolve_budget(1001), config.resolve_capacity(1001)) == (201, 402)
    # Protected tokens have a place in every head, whatever its share of the rest.
    fields = {"policy": "h2o", "budget": 0.2, "allocator": "doubling", "protect": {"tokens": [[0, 50]]}}
    assert parse_compression(fields).resolve_capacity(1001) == 352


def test_a_parameter_that_only_its_part_can_judge(monkeypatch):
    class Picky(Recent):
        name: ClassVar[str] = "picky"
        low: int = 1
        high: int = 2

        @model_validator(mode="after")
        def _check_order(self) -> Self:
            if self.low > self.high:
                raise ValueError("low must not exceed high")
            return self

    monkeypatch.setitem(SELECTORS, "picky", Picky)
    assert parse_compression({"policy": "local", "selector": "picky", "low": 2}).policy.selector == Picky(low=2)
    with pytest.raises(CompressionError, match="kv_compression: low must not exceed high") as caught:
        parse_compression({"policy": "local", "selector": "picky", "low": 3})
    assert caught.value.reason == "invalid_value"


def test_what_is_tracked():
    windows = {"local": 0, "streaming_llm": 0, "h2o": 64, "snapkv": 32, "keepkv": 32, "zsmerge": 32}
    tracked = {name: parse_compression({"policy": name}) for name in windows}
    assert {name: config.prompt_window for name, config in tracked.items()} == windows
    assert {name for name, config in tracked.items() if config.tracks_decode} == {"h2o", "keepkv", "zsmerge"}
    assert parse_compression({"policy": "snapkv", "decode": "bounded"}).tracks_decode
    assert parse_compression({"policy": "h2o", "score_window": "all"}).prompt_window == "all"


def test_compression_round_trip():
    config = parse_compression(compression("keepkv", budget=0.1, merge_threshold=0.9)[EXTRA_ARGS_KEY])
    assert (config.name, config.budget, config.policy.merger) == ("keepkv", 0.1, ZipMerger(merge_threshold=0.9))
    with pytest.raises(ValueError, match=r"kv_compression\.budget"):
        compression("keepkv", budget=-1)


def test_request_schema_accepts_what_the_parser_accepts():
    schema = request_schema()
    # References point into OpenAPI's components; here they stand beside the schema.
    text = json.dumps(schema).replace("#/components/schemas/", "#/$defs/")
    validator = jsonschema.Draft202012Validator(json.loads(text))
    validator.check_schema(validator.schema)
    mapping = schema["discriminator"]["mapping"]
    assert schema["discriminator"]["propertyName"] == "policy"
    assert set(mapping) == {FULL, *PRESETS}
    objects = {"Prefill", "Protect", "Refresh"}
    assert {ref.rpartition("/")[2] for ref in mapping.values()} | objects == set(schema["$defs"])
    for name in mapping:
        assert validator.is_valid({"policy": name})
    assert validator.is_valid({"policy": "keepkv", "budget": 64, "score_window": "all", "zip_mode": "votes"})
    assert validator.is_valid({"policy": "snapkv", "merger": "zip", "zip_mode": "votes", "ema_decay": 0.5})
    assert validator.is_valid({"policy": "h2o", "protect": {"tokens": [[0, 8]], "messages": ["system", 3]}})
    for wrong in (
        {"policy": "h2o", "protect": {"tokens": [[0, 8, 9]]}},
        {"policy": "h3o"},
        {"policy": "full", "merger": "zip"},
        {"policy": "h2o", "merger": "zap"},
        {"policy": "h2o", "decay": 2},
        {},
    ):
        assert not validator.is_valid(wrong)


def test_the_schema_lists_the_parts_that_can_be_named():
    definitions = request_schema()["$defs"]
    properties = definitions["SnapkvRequest"]["properties"]
    for kind, parts in PARTS.items():
        field = properties[kind]
        assert field["enum" if len(parts) > 1 else "const"] == (sorted(parts) if len(parts) > 1 else next(iter(parts)))
        assert field["default"] == getattr(PRESETS["snapkv"], kind)
    assert "window_size" in properties and "zip_mode" not in properties
    assert "/kvmerge/policies" in definitions["SnapkvRequest"]["description"]


def test_every_field_is_described_in_the_schema():
    undescribed = [
        f"{model}.{name}"
        for model, definition in request_schema()["$defs"].items()
        for name, field in definition["properties"].items()
        if name != "policy" and "description" not in field
    ]
    assert undescribed == []


def test_the_shipped_default_names_no_policy():
    default = yaml.safe_load((Path(__file__).parents[2] / "configs" / "default.yaml").read_text())
    assert "policy" not in default and parse_compression(default).name == describe_policies()["recommended"]["known"]


@pytest.mark.engine
def test_what_is_kept_of_parsed_requests_does_not_grow_for_long():
    """Requests of 1,500 kinds: the newest are kept, some 2 MiB of them; and the models that check fields."""
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for budget in range(1000, 2500):
            parse_compression({"policy": "h2o", "budget": budget})
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 4 << 20
    finally:
        tracemalloc.stop()
    for policy, merger in product(sorted(PRESETS), sorted(PARTS["merger"])):
        with suppress(CompressionError):
            parse_compression({"policy": policy, "budget": 900, "merger": merger})
    gc.collect()
    kept = [one for one in gc.get_objects() if isinstance(one, type) and one.__name__.endswith("Request")]
    assert 50 < len([one for one in kept if "merger" in getattr(one, "model_fields", ())]) < 200
