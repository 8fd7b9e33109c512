"""What requests are held to: refused where they would take too much memory, and told what would do."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.policies.base import HeadShape
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.request.limits import Limits, ModelShape, most_entries, most_positions
from vllm_kvmerge.request.parameters import CompressionConfig, CompressionError, parse_compression

LLAMA_8B = ModelShape(
    num_layers=32, num_kv_heads=8, group_size=4, head_size=128, hidden_size=4096, item_size=2, has_surrogate=True
)
DEMO = ModelShape(
    num_layers=4, num_kv_heads=2, group_size=4, head_size=32, hidden_size=256, item_size=2, has_surrogate=True
)
LIMITS = Limits(None, 256 << 20, 5.0, DEMO, block_size=32, max_model_len=32768)


def config(policy: str, **fields: Any) -> CompressionConfig:
    parsed = parse_compression({"policy": policy, **fields})
    assert parsed is not None
    return parsed


def refusal(limits: Limits, request: CompressionConfig, num_prompt_tokens: int, max_tokens: int = 100) -> str:
    with pytest.raises(CompressionError) as caught:
        limits.check(request, num_prompt_tokens, max_tokens)
    assert caught.value.reason == "too_expensive" and caught.value.param == "kv_compression"
    return str(caught.value)


def test_parts_that_turn_keys_back_are_refused_where_they_cannot() -> None:
    limits = replace(LIMITS, shape=replace(DEMO, rotation_obstacle="has M-RoPE"))
    for policy in ("expected_attention", "compactor"):
        with pytest.raises(CompressionError, match="before RoPE, but the model has M-RoPE; allowed: another") as caught:
            limits.check(config(policy), 4000, 100)
        assert caught.value.reason == "unsupported_model" and caught.value.param == "kv_compression.selector"
        assert caught.value.status == 400
        LIMITS.check(config(policy), 4000, 100)
    limits.check(config("expected_attention", selector="keydiff"), 4000, 100)
    with pytest.raises(CompressionError, match=r"^kv_compression\.selector"):
        limits.check(config("snapkv", selector="compactor"), 4000, 100)


@pytest.mark.parametrize(
    ("trait", "said"),
    [("caps_logits", "which soft-caps its attention logits"), ("has_sinks", "which has attention sinks")],
)
def test_parts_that_compute_attention_otherwise_than_the_model_are_refused(trait: str, said: str) -> None:
    limits = replace(LIMITS, shape=replace(DEMO, **{trait: True}))
    refused = {"grkv": "merger", "expected_attention": "selector", "compactor": "selector"}
    for policy in PRESETS:
        if policy not in refused:
            limits.check(config(policy), 4000, 100)
            continue
        with pytest.raises(CompressionError, match=f"{said}; allowed: another {refused[policy]}") as caught:
            limits.check(config(policy), 4000, 100)
        assert caught.value.reason == "unsupported_model" and caught.value.status == 400
        assert caught.value.param == f"kv_compression.{refused[policy]}"
        LIMITS.check(config(policy), 4000, 100)
    with pytest.raises(CompressionError, match="'attention_matching'"):
        limits.check(config("snapkv", merger="attention_matching"), 4000, 100)
    heads = config("morphkv", group_fusion="max")
    if trait == "has_sinks":
        with pytest.raises(CompressionError, match="'morphkv'"):
            limits.check(heads, 4000, 100)
    else:
        limits.check(heads, 4000, 100)


def test_positions_of_the_cache_need_keys_that_can_be_turned() -> None:
    limits = replace(LIMITS, shape=replace(DEMO, rotation_obstacle="has M-RoPE"))
    with pytest.raises(
        CompressionError, match="'cache' needs keys turned, but the model has M-RoPE; allowed: 'text'"
    ) as caught:
        limits.check(config("h2o", positions="cache"), 4000, 100)
    assert caught.value.reason == "unsupported_model" and caught.value.param == "kv_compression.positions"
    limits.check(config("h2o", positions="text"), 4000, 100)


@pytest.mark.parametrize(
    ("fields", "prompt", "max_tokens", "positions"),
    [
        ({}, 1000, 30_000, 1000),  # the prompt at once
        ({}, 40, 30_000, 128 + 32),
        ({}, 40, 60, 100),
        ({"interval": 5}, 40, 30_000, 133),
        ({"prefill": {"chunk": 64}}, 30_000, 30_000, 128 + 64),
        ({"prefill": {"chunk": 64}}, 150, 10, 150),
        ({"prefill": {"chunk": 64}, "context_tokens": 500}, 1000, 30_000, 128 + 500),
        ({"decode": "grow", "prefill": {"chunk": 64}}, 30_000, 900, 128 + 900),
        ({"allocator": "adaptive", "prefill": {"chunk": 16}}, 30_000, 900, 2 * 128 + 32),
        ({"budget": 30_000}, 1000, 900, 1900),
    ],
)
def test_positions_that_are_taken(fields: dict[str, Any], prompt: int, max_tokens: int, positions: int) -> None:
    """A request is held to those that the model has."""
    asked = config("snapkv", **{"budget": 128, "decode": "bounded", "positions": "cache"} | fields)
    assert most_positions(asked, prompt, max_tokens, 32) == positions
    limits = replace(LIMITS, max_model_len=1 << 20, shape=replace(DEMO, num_positions=positions))
    limits.check(asked, prompt, max_tokens)
    limits = replace(limits, shape=replace(DEMO, num_positions=positions - 1))
    with pytest.raises(CompressionError, match=f"comes to {positions} positions at once, and the model has") as caught:
        limits.check(asked, prompt, max_tokens)
    assert caught.value.reason == "too_many_positions" and caught.value.param == "kv_compression.positions"
    limits.check(asked.model_copy(update={"positions": "text"}), prompt, max_tokens)


WINDOWS = replace(
    LIMITS,
    shape=replace(DEMO, has_windows=True, window_rotation_obstacle="declares no RoPE of its chunked-local layers"),
    has_prefix_cache=False,
)
STATES = replace(LIMITS, shape=replace(DEMO, has_states=True), shares_contexts=False)


@pytest.mark.parametrize(
    ("limits", "policy", "fields", "param"),
    [
        (WINDOWS, "h2o", {"positions": "cache"}, "positions"),
        (WINDOWS, "kvzip", {}, "tracker"),
        (STATES, "h2o", {"positions": "cache"}, "positions"),
        (STATES, "h2o", {"trigger": "pressure"}, "trigger"),
        (STATES, "h2o", {"reuse": "turns"}, "reuse"),
        (STATES, "kvzip", {}, "tracker"),
    ],
)
def test_what_does_not_work_beside_windows_or_states_is_refused(limits, policy, fields, param) -> None:
    layers = "chunked-local layers.*" if limits is WINDOWS else "Mamba or linear-attention layers"
    with pytest.raises(CompressionError, match=f"{layers}; allowed: ") as caught:
        limits.check(config(policy, **fields), 4000, 100)
    assert caught.value.reason == "unsupported_model" and caught.value.param == f"kv_compression.{param}"
    LIMITS.check(config(policy, **fields), 4000, 100)
    limits.check(config("h2o", trigger="pressure") if limits is WINDOWS else config("h2o"), 4000, 100)


def test_layers_with_a_window_take_slots_too() -> None:
    """Two groups of them, of at most three blocks of 32 each."""
    limits = replace(LIMITS, max_model_len=4096, pool_tokens=640, window_blocks=((3, 32), (3, 32)))
    for room, length in ((limits, 640 - 192 - 1), (replace(limits, window_blocks=()), 640 - 1)):
        room.check_room(None, length)
        with pytest.raises(CompressionError, match=f"up to {length} tokens"):
            room.check_room(None, length + 1)
    assert limits.most_generated(None, 100) == 640 - 192 - 100
    assert limits.most_generated(None, 20) == 640 - 192 - 20
    assert replace(limits, pool_tokens=96).most_generated(None, 20) == 32 - 20
    # A bounded cache outlasts the pool, if it fits beside the windows.
    bounded = config("h2o", budget=64)
    assert limits.most_generated(bounded, 100) == 4096 - 100
    assert replace(limits, pool_tokens=64 + 32 + 64 + 192).most_generated(bounded, 100) == 4096 - 100
    assert replace(limits, pool_tokens=64 + 64 + 192).most_generated(bounded, 100) < 200
    # One that keeps all entries in some layers does not.
    skipping = config("h2o", budget=64, skip_layers=1)
    assert limits.most_generated(skipping, 100) == 640 - 192 - 100 - 2 * 32


def test_hidden_states_are_refused_where_none_are_seen() -> None:
    """Predictions need a model as well; a compiled model shows nothing, and one without predictions needs nothing."""
    predicted, normalized = config("kvzap"), config("kvzip", normalized=True, repeat_prompt=[])
    bare, compiled = replace(DEMO, has_surrogate=False), replace(DEMO, hidden_states_obstacle="compiles the model")
    for shape, request_, field, message in (
        (bare, predicted, "tracker", "'predicted' needs a KVzap model, .* allowed: another tracker, or on .* --kvzap"),
        (compiled, predicted, "tracker", "because the server compiles the model; allowed: with --enforce-eager"),
        (compiled, normalized, "normalized", "because the server compiles the model; allowed: with --enforce-eager"),
    ):
        with pytest.raises(CompressionError, match=message) as caught:
            replace(LIMITS, shape=shape).check(request_, 1000, 100)
        assert (caught.value.param, caught.value.reason) == (f"kv_compression.{field}", "unsupported_model")
        assert caught.value.status == 400
    for shape, request_ in ((DEMO, predicted), (bare, normalized)):
        replace(LIMITS, shape=shape).check(request_, 1000, 100)
    for request_ in (config("kvzip"), config("snapkv"), config("kvzap", tracker="sum")):
        replace(LIMITS, shape=replace(compiled, has_surrogate=False)).check(request_, 1000, 100)


@pytest.mark.parametrize("policy", PRESETS)
def test_every_preset_passes_as_it_is(policy: str) -> None:
    """Whatever time it takes."""
    LIMITS.check(config(policy), 4000, 100)
    replace(LIMITS, shape=LLAMA_8B).check(config(policy), 30000, 500)


def test_contexts_that_cannot_be_repeated_are_refused() -> None:
    """Where tokens, places or the model's length do not allow it, and the context is compressed at all."""
    repeated = config("kvzip", budget=0.25, repeat_prompt=[7, 500], chunk_size=1000)
    limits = replace(LIMITS, max_model_len=4000, num_token_ids=501, max_num_seqs=2)
    longest = 4000 - 1 - 1000 - 8  # a chunk, and the tokens before it
    limits.check(repeated, longest, 100)
    for changed, length, field, message in (
        (limits, longest + 1, "chunk_size", f"contexts of up to {longest} tokens"),
        (replace(limits, num_token_ids=500), 2000, "repeat_prompt", "no token 500; allowed: 0 to 499"),
        (replace(limits, max_num_seqs=1), 2000, "tracker", "--max-num-seqs of 2 or more"),
    ):
        with pytest.raises(CompressionError, match=message) as caught:
            changed.check(repeated, length, 100)
        assert caught.value.param == f"kv_compression.{field}"
        changed.check(config("kvzip", budget=3990, repeat_prompt=[500]), length, 2000)  # within its budget


def test_work_on_one_head_that_cannot_be_divided_is_limited() -> None:
    small = replace(LIMITS, max_bytes=8 << 20)
    message = refusal(small, config("grkv", regression_window=500), 4000)
    assert message.startswith("kv_compression: compressing 4000 entries of one KV head, most of it merger:regression,")
    assert "MiB, more than 8 MiB; allowed: smaller windows" in message and "--max-compaction-bytes" in message
    LIMITS.check(config("grkv", regression_window=500), 4000, 100)
    small.check(config("local"), 4000, 100)


def test_another_packages_part_is_named_and_not_asked() -> None:
    class Foreign(DropMerger):
        name: ClassVar[str] = "foreign"

        def held(self, shape: HeadShape) -> int:
            raise ZeroDivisionError

    asked = config("snapkv")
    asked = asked.model_copy(update={"policy": asked.policy.model_copy(update={"merger": Foreign()})})
    message = refusal(replace(LIMITS, max_bytes=1 << 20), asked, 4000)
    assert "most of it merger:foreign," in message and "more than 1 MiB" in message
    LIMITS.check(asked, 4000, 100)


def test_queries_that_are_kept_count() -> None:
    large = replace(LIMITS, shape=LLAMA_8B)
    message = refusal(large, config("morphkv", recent_window=4096, budget=8000), 16000)
    assert "its newest queries would take 1024 MiB, more than 256 MiB" in message


def test_what_never_compresses_costs_nothing() -> None:
    replace(LIMITS, max_bytes=1).check(config("grkv", budget=5000), 4000, 100)


def test_only_allowed_policies_pass() -> None:
    strict = replace(LIMITS, allowed_policies=frozenset({"snapkv", "keepkv"}))
    strict.check(config("snapkv"), 1000, 10)
    strict.check(config("snapkv", merger="zip", tracker="log_ema"), 1000, 10)
    with pytest.raises(CompressionError, match="'grkv' is not allowed on this server; allowed: full, keepkv, snapkv"):
        strict.check(config("grkv"), 1000, 10)
    with pytest.raises(CompressionError, match="'regression' is not allowed on this server; allowed: drop, zip"):
        strict.check(config("snapkv", merger="regression"), 1000, 10)
    # Trackers are free, unless they cost the model's time.
    strict.check(config("snapkv", tracker="mean"), 1000, 10)
    for tracker in ("reconstruction", "predicted"):
        with pytest.raises(
            CompressionError, match=f"'{tracker}' is not allowed on this server; allowed: log_ema, sum"
        ) as caught:
            strict.check(config("snapkv", tracker=tracker), 1000, 10)
        assert (caught.value.param, caught.value.reason) == ("kv_compression.tracker", "not_allowed")
    for own in (config("kvzip", repeat_prompt=[]), config("kvzap")):
        replace(LIMITS, allowed_policies=frozenset({own.name})).check(own, 1000, 10)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (config("snapkv", budget=100), 1000),
        (config("h2o", budget=100), 1000),
        (config("local", budget=1010), 1042),
        (config("h2o", budget=1010, interval=5), 1015),
        (config("local", budget=1100), 0),
        # A question is read whole before anything of it is dropped.
        (config("h2o", budget=100, context_tokens=300), 100 + 700),
        (config("h2o", budget=100, prefill={"chunk": 64}), 164),
        # A layer that keeps everything.
        (config("h2o", budget=100, skip_layers=1), 1100),
        (config("h2o", budget=100, refresh={"every": 16}, decode="bounded"), 1100),
    ],
)
def test_most_entries_that_a_compression_reads(request_: CompressionConfig, expected: int) -> None:
    assert most_entries(request_, 1000, 100, 32) == expected
