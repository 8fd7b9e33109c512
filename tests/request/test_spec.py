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

from vllm_kvmerge.ops.coded import CODINGS
from vllm_kvmerge.policies import PARTS, PRESETS, SELECTORS
from vllm_kvmerge.policies.base import ServedModel
from vllm_kvmerge.policies.mergers import ZipMerger
from vllm_kvmerge.policies.selectors import HeavyHitter, Recent, WindowTopK
from vllm_kvmerge.policies.trackers import LogEmaTracker, SumTracker
from vllm_kvmerge.request.catalogue import describe_policies
from vllm_kvmerge.request.schema import request_schema
from vllm_kvmerge.request.spec import (
    EXTRA_ARGS_KEY,
    FULL,
    CompressionError,
    CompressionSpec,
    compression,
    parse_compression,
    text_of,
)


def test_what_may_be_given():
    """Nothing, JSON text, or an object, which is checked where clients in Python make it."""
    assert parse_compression(None) is None
    assert parse_compression({"policy": FULL}) is None
    value = {"policy": "h2o", "budget": 64, "recent_window": None}
    assert parse_compression(json.dumps(value)) == parse_compression(value)
    assert parse_compression(compression(**value)[EXTRA_ARGS_KEY]) == parse_compression(value)
    with pytest.raises(ValueError, match=r"kv_compression\.budget"):
        compression("keepkv", budget=-1)


def test_a_process_keeps_one_object_per_text():
    value, model = {"policy": "grkv", "budget": 64}, ServedModel("mistral")
    spec = parse_compression(value)
    for same in (dict(reversed(value.items())), json.dumps(value, indent=1), compression(**value)[EXTRA_ARGS_KEY]):
        assert parse_compression(same) is spec
    assert spec.for_model(model) is spec.for_model(model) is CompressionSpec.of(spec.for_model(model).text)
    assert text_of(parse_compression({"policy": FULL})) == '{"policy": "full"}'


def test_fields_reach_the_parts_and_the_presets_defaults_stay():
    request = {"policy": "snapkv", "budget": 128, "interval": 8, "merger": "zip", "zip_mode": "votes", "ema_decay": 0.5}
    config = parse_compression(request | {"window_size": 8})
    assert (config.budget, config.interval) == (128, 8)
    assert config.policy.merger == ZipMerger(zip_mode="votes", ema_decay=0.5)
    assert config.policy.selector == WindowTopK(window_size=8)
    assert config.policy.tracker == SumTracker(score_window=32)
    policy = parse_compression(request | {"tracker": "log_ema"}).policy
    assert policy.tracker == LogEmaTracker(score_window=32, ema_decay=0.5)  # 32 is SnapKV's
    policy = parse_compression({"policy": "zsmerge", "selector": "h2o", "num_sink_tokens": 0}).policy
    assert policy.selector == HeavyHitter(num_sink_tokens=0)
    assert policy.tracker == SumTracker(score_window=32, decay=0.98)  # as in ZSMerge


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        ({"policy": "snapkv", "merger": "zip"}, {"tracker": "sum", "selector": "snapkv", "merger": "zip"}),
        ({"policy": "keepkv", "merger": "residual"}, {"tracker": "sum", "selector": "snapkv", "merger": "residual"}),
        ({"policy": "streaming_llm", "selector": "h2o"}, {"tracker": "sum", "selector": "h2o", "merger": "drop"}),
        ({"policy": "h2o", "selector": "local", "tracker": "none"}, {"tracker": "none", "selector": "local"}),
    ],
)
def test_parts_can_be_replaced(request_, parts):
    config = parse_compression(request_)
    assert config.name == request_["policy"]
    assert config.decode == PRESETS[config.name].decode
    found = {kind: getattr(config.policy, kind).name for kind in PARTS}
    assert found == {kind: getattr(PRESETS[config.name], kind) for kind in PARTS} | parts


def test_defaults_that_depend_on_the_model_are_filled_in_once():
    for fields, model_type, expected in (
        ({"policy": "grkv"}, "qwen3_moe", (0.1, 0.1)),
        ({"policy": "grkv"}, "mixtral", (0.1, 0.1)),
        ({"policy": "criticalkv", "merger": "regression"}, "llama", (0.01, 0.01)),
        ({"policy": "grkv", "lambda_k": 0.0, "lambda_v": None}, "mistral", (0.0, 0.1)),
        ({"policy": "grkv", "lambda_k": 0.01, "lambda_v": 0.01}, "mistral", (0.01, 0.01)),
    ):
        config = parse_compression(fields).for_model(ServedModel(model_type))
        assert (config.policy.merger.lambda_k, config.policy.merger.lambda_v) == expected
        # Workers parse the text again, and do not ask for the model.
        assert parse_compression(config.text) == config
        assert config.for_model(ServedModel("another")) == config
        spelled_out = config.parameters
        assert (spelled_out["lambda_k"], spelled_out["lambda_v"]) == expected
        assert parse_compression(spelled_out).policy == config.policy
    config = parse_compression({"policy": "h2o"})
    assert config.for_model(ServedModel("qwen3")) is config


# Of every number tests/policies/test_ranges.py tries the extremes that are allowed.
REFUSALS = [
    ({"policy": "h3o"}, "policy", "unknown_policy", ["'h3o'", "h2o", "keepkv", "full"]),
    ({}, "policy", "unknown_policy", ["no policy and no budget", "keepkv"]),
    ({"context_tokens": 5}, "policy", "unknown_policy", ["no policy and no budget"]),
    ({"policy": None, "budget": 0.5}, "policy", "unknown_policy", ["None"]),
    ({"policy": ["h2o"]}, "policy", "unknown_policy", ["['h2o']", "h2o"]),
    ({"policy": "h2o", "bugdet": 5}, "bugdet", "unknown_field", ["h2o", "budget", "recent_window"]),
    ({"policy": "full", "budget": 5}, "budget", "unknown_field", ["full", "policy"]),
    ({"policy": "snapkv", "merger": "zap"}, "merger", "unknown_part", ["'zap'", "drop", "zip"]),
    ({"policy": "snapkv", "selector": ["h2o"]}, "selector", "unknown_part", ["['h2o']", "h2o", "local"]),
    ({"policy": "h2o", "tracker": "none"}, "tracker", "incompatible_parts", ["selector 'h2o' needs scores", "sum"]),
    ({"policy": "criticalkv", "tracker": "log_ema"}, "tracker", "incompatible_parts", ["needs probabilities"]),
    ({"policy": "tova", "allocator": "adaptive"}, "allocator", "incompatible_parts", ["ranks all heads together"]),
    (
        {"policy": "keydiff", "selector": "fused", "of": ["keydiff", "snapkv"]},
        "of",
        "incompatible_parts",
        ["selector 'snapkv' needs scores", "allowed: compactor, expected_attention, keydiff, knorm, morphkv"],
    ),
    ({"policy": "h2o", "selector": "fused", "of": ["h2o", "rkv"]}, "of", "invalid_value", ["'rkv'", "got 'h2o'"]),
    (
        {"policy": "h2o", "selector": "fused", "knorm": {"window": 1}},
        "knorm.window",
        "unknown_field",
        ["allowed: num_sink_tokens, recent_window"],
    ),
    (
        {"policy": "snapkv", "merger": "residual", "tracker": "log_ema"},
        "merger",
        "incompatible_parts",
        ["merger 'residual' cannot work from tracker 'log_ema'", "allowed as merger: ", "drop", "zip"],
    ),
    (
        {"policy": "zsmerge", "selector": "tova", "allocator": "adaptive", "tracker": "mean"},
        "",
        "incompatible_parts",
        [],
    ),
    ({"policy": "snapkv", "merger": "zip", "alpha": 0.9}, "alpha", "unknown_field", ["with merger zip", "zip_mode"]),
    ({"policy": "keepkv", "zip_mode": "zap"}, "zip_mode", "invalid_value", ["'zap'", "scale", "votes", "auto"]),
    ({"policy": "h2o", "budget": 0}, "budget", "invalid_value", ["0", "integer from 1 to", "(0, 1]"]),
    ({"policy": "h2o", "budget": 1.5}, "budget", "invalid_value", ["1.5", "(0, 1]"]),
    ({"policy": "h2o", "budget": True}, "budget", "wrong_type", ["True", "integer", "number"]),
    ({"policy": "h2o", "budget": "0.2"}, "budget", "wrong_type", ["'0.2'", "integer", "number"]),
    ({"policy": "local", "selector": "h2o", "budget": 5}, "budget", "budget_too_small", ["selector h2o", ">= 6"]),
    ({"policy": "zsmerge", "budget": 2}, "budget", "budget_too_small", ["2 entries", ">= 3"]),
    ({"policy": "h2o", "interval": 0}, "interval", "invalid_value", ["0", "equal to 1"]),
    ({"policy": "h2o", "decode": "never"}, "decode", "invalid_value", ["'never'", "bounded", "grow"]),
    ({"policy": "h2o", "context_tokens": True}, "context_tokens", "wrong_type", ["True", "integer"]),
    ({"policy": "h2o", "context_messages": 0}, "context_messages", "invalid_value", ["0", "equal to 1"]),
    ({"policy": "h2o", "context_messages": 2, "context_tokens": 9}, "context_messages", "given_twice", ["one of them"]),
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
    ({"policy": "h2o", "prefill": {"chunk": 9}, "refresh": {"every": 9}}, "prefill", "incompatible_fields", []),
    ({"policy": "kvzip", "prefill": {"chunk": 9}}, "prefill", "incompatible_fields", ["'reconstruction'"]),
    *(
        ({"positions": "cache", **other}, "positions", "incompatible_fields", [said, "allowed: 'text'"])
        for said, other in {
            "'cache' with a refresh": {"policy": "h2o", "refresh": {"every": 9}},
            "trigger 'pressure', which may keep all entries": {"policy": "h2o", "trigger": "pressure"},
            "'cache' with 'expected_attention'": {"policy": "expected_attention"},
            "'uniform', some of whose layers keep all entries": {"policy": "snapkv", "skip_layers": 1},
        }.items()
    ),
    ({"policy": "h2o", "front": "int8"}, "decode", "incompatible_fields", ["'bounded' with front 'int8'", "'grow'"]),
    ({"policy": "h2o", "front": "int2"}, "front", "invalid_value", ["'int8' or 'int4'", "'int2'"]),
    *(
        (
            {"policy": "snapkv", "front": front, field: value},
            field,
            "incompatible_fields",
            [f"with front '{front}'", allowed],
        )
        for front in CODINGS
        for field, value, allowed in [
            ("prefill", {"chunk": 9}, "null"),
            ("refresh", {"every": 9}, "null"),
            ("reuse", "turns", "null"),
            ("trigger", "pressure", "'budget'"),
            ("positions", "cache", "'text'"),
        ]
    ),
    ({"policy": "h2o", "refresh": {"every": "9"}}, "refresh.every", "wrong_type", ["'9'", "integer"]),
    ({"policy": "h2o", "refresh": {"every": 9, "queries": 0}}, "refresh.queries", "invalid_value", ["equal to 1"]),
    ({"policy": "h2o", "refresh": {"every": 9, "x": 0}}, "refresh.x", "unknown_field", ["every, queries"]),
    ({"policy": "h2o", "score_window": "most"}, "score_window", "wrong_type", ["'most'", "integer", "'all'"]),
    ({"policy": "zsmerge", "residual_share": 1.0}, "residual_share", "invalid_value", ["1.0", "less than 1"]),
    ({"policy": "keepkv", "merge_first": 1}, "merge_first", "wrong_type", ["1", "boolean"]),
    ({"policy": "snapkv", "kernel_size": 4}, "kernel_size", "invalid_value", ["4", "odd"]),
    ({"policy": "h2o", "decay": float("nan")}, "", "wrong_type", ["JSON"]),
    ([1], "", "wrong_type", ["object", "list"]),
    ('{"policy":', "", "wrong_type", ["JSON"]),
    ({"policy": "h2o", "budget": object()}, "", "wrong_type", ["JSON"]),
    *(
        ({"policy": "snapkv", "budget": 64, "protect": protect}, field, reason, said)
        for protect, field, reason, said in [
            ({"tokens": [[3, 3]]}, "protect.tokens", "invalid_value", ["after its start"]),
            ({"tokens": [[-1, 3]]}, "protect.tokens", "invalid_value", ["equal to 0", "-1"]),
            ({"tokens": [[0, 1]] * 65}, "protect.tokens", "invalid_value", ["64"]),
            ({"messages": [1.5]}, "protect.messages", "wrong_type", ["1.5", "string"]),
            ({"roles": []}, "protect.roles", "unknown_field", ["tokens, messages"]),
            ({"tokens": [[0, 32]]}, "protect", "protects_too_much", ["32 tokens", "up to 31 tokens", "at least 65"]),
        ]
    ),
]


@pytest.mark.parametrize(("value", "param", "reason", "said"), REFUSALS)
def test_refusals_name_field_value_and_what_is_allowed(value, param, reason, said):
    with pytest.raises(CompressionError) as caught:
        parse_compression(value)
    assert caught.value.param == ".".join(filter(None, [EXTRA_ARGS_KEY, param]))
    assert caught.value.reason == reason
    assert str(caught.value).startswith(f"{caught.value.param}: ")
    assert all(words in str(caught.value) for words in said)


def test_a_share_is_rounded_up_and_raised_to_what_the_policy_protects():
    config = parse_compression({"policy": "h2o", "budget": 0.2})
    assert [config.resolve_budget(n) for n in (1000, 1001, 10, 1)] == [200, 201, 6, 6]
    assert parse_compression({"policy": "h2o", "budget": 77}).resolve_budget(5) == 77
    # 0.07 * 100 is a little more than 7 in floats.
    assert parse_compression({"policy": "local", "budget": 0.07}).resolve_budget(100) == 7
    assert parse_compression({"policy": "local", "budget": 1.0}).resolve_budget(9) == 9
    assert parse_compression({"policy": "local", "budget": 1}).resolve_budget(9) == 1


PROTECTED = {"protect": {"tokens": [[10, 30], [25, 40], [0, 4]]}}


def test_a_context_is_part_of_the_prompt():
    config, everything = (parse_compression({"policy": "h2o", **of}) for of in ({"context_tokens": 1000}, {}))
    for length in (1000, 1500):
        config.check_prompt(length)
        assert (config.resolve_context(length), everything.resolve_context(length)) == (1000, length)
    everything.check_prompt(1)


@pytest.mark.parametrize(
    ("fields", "length", "param", "reason", "said"),
    [
        ({"context_tokens": 1000}, 999, "context_tokens", "context_too_long", "than the prompt has; allowed: 1 to 999"),
        ({"context_messages": 3}, 1000, "context_messages", "unknown_messages", "alone; allowed: context_tokens"),
        ({"protect": {"messages": ["system"]}}, 1000, "protect.messages", "unknown_messages", "alone; allowed: tokens"),
        (PROTECTED, 39, "protect.tokens", "range_too_long", "a range ends at 40, after the prompt; allowed: up to 39"),
        (PROTECTED, 195, "protect", "protects_too_much", "34 tokens are .* needs 6 .* is 39; allowed: up to 33"),
    ],
)
def test_what_a_prompt_does_not_have_is_refused(fields, length, param, reason, said):
    with pytest.raises(CompressionError, match=said) as caught:
        parse_compression({"policy": "h2o", "budget": 0.2, **fields}).check_prompt(length)
    assert (caught.value.param, caught.value.reason) == (f"kv_compression.{param}", reason)


def test_protected_tokens_count_in_the_budget():
    config = parse_compression({"policy": "h2o", "budget": 0.2, **PROTECTED})
    assert config.policy.protect == ((0, 4), (10, 40))
    assert (config.policy.num_protected, config.policy.min_unprotected, config.policy.min_budget) == (34, 6, 40)
    config.check_prompt(200)
    assert parse_compression({"policy": "h2o", "protect": {}}).policy.protect == ()


def test_the_capacity_is_the_allocators():
    """Protected tokens have a place in every head, whatever its share of the rest."""
    fields = {"policy": "h2o", "budget": 0.2}
    adaptive = fields | {"allocator": "adaptive", "max_share": 2.0}
    cases = (fields, adaptive, adaptive | {"protect": {"tokens": [[0, 50]]}})
    assert [parse_compression(case).resolve_capacity(1001) for case in cases] == [201, 402, 352]


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


def test_request_schema_accepts_what_the_parser_accepts():
    schema = request_schema()
    # References point into OpenAPI's components; here they stand beside the schema.
    text = json.dumps(schema).replace("#/components/schemas/", "#/$defs/")
    validator = jsonschema.Draft202012Validator(json.loads(text))
    validator.check_schema(validator.schema)
    assert schema["discriminator"]["propertyName"] == "policy"
    assert set(schema["discriminator"]["mapping"]) == {FULL, *PRESETS}
    for name in (FULL, *PRESETS):
        assert validator.is_valid({"policy": name})
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
