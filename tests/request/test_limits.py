"""What requests are held to: refused where they would take too much memory, and told what would do."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.policies.base import HeadShape
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.request.limits import Limits, ModelShape, most_entries, most_positions
from vllm_kvmerge.request.spec import CompressionError, CompressionSpec, parse_compression

LLAMA_8B = ModelShape(
    num_layers=32,
    num_kv_heads=8,
    group_size=4,
    head_size=128,
    hidden_size=4096,
    item_size=2,
    has_surrogate=True,
    has_head_budgets=True,
)
DEMO = ModelShape(
    num_layers=4,
    num_kv_heads=2,
    group_size=4,
    head_size=32,
    hidden_size=256,
    item_size=2,
    has_surrogate=True,
    has_head_budgets=True,
)
LIMITS = Limits(None, 256 << 20, 5.0, DEMO, block_size=32, max_model_len=32768, head_pages=True)


def config(policy: str, **fields: Any) -> CompressionSpec:
    parsed = parse_compression({"policy": policy, **fields})
    assert parsed is not None
    return parsed


def of_model(traits: dict[str, Any]) -> Limits:
    """Beside windows there is no prefix cache, and contexts of a model with states are not shared."""
    beside = {"has_prefix_cache": "has_windows" not in traits, "shares_contexts": "has_states" not in traits}
    return replace(LIMITS, shape=replace(DEMO, **traits), **beside)


def refusal(limits: Limits, request: CompressionSpec, num_prompt_tokens: int, max_tokens: int = 100) -> str:
    with pytest.raises(CompressionError) as caught:
        limits.check(request, num_prompt_tokens, max_tokens)
    assert caught.value.reason == "too_expensive" and caught.value.param == "kv_compression"
    return str(caught.value)


IN_CACHE = {"policy": "h2o", "positions": "cache"}
M_ROPE = {"rotation_obstacle": "has M-RoPE"}
CAPPED = {"caps_logits": True}
SINKS = {"has_sinks": True}
WINDOWS = {"has_windows": True, "window_rotation_obstacle": "declares no RoPE of its chunked-local layers"}
STATES = {"has_states": True}
COMPILED = {"hidden_states_obstacle": "compiles the model"}
LATENT = {"front_obstacles": {"int8": "models that keep one latent for keys and values (MLA)"}}
SMALL = {"front_obstacles": {"int4": "head sizes below 32"}}
CODED = {"policy": "snapkv", "front": "int8"}
BARE = {"has_surrogate": False, "has_head_budgets": False}
MORPHKV_MAX = {"policy": "morphkv", "group_fusion": "max"}
PRESSED = {"policy": "h2o", "trigger": "pressure"}
MATCHING = {"policy": "snapkv", "merger": "attention_matching"}
NORMALIZED = {"policy": "kvzip", "normalized": True, "repeat_prompt": []}


COMPILES = "because the server compiles the model; allowed: with --enforce-eager"
REFUSED = [
    (M_ROPE, "expected_attention", "selector", "before RoPE, but the model has M-RoPE; allowed: another"),
    (M_ROPE, "compactor", "selector", "before RoPE, but the model has M-RoPE; allowed: another"),
    (M_ROPE, "triattention", "selector", "before RoPE, but the model has M-RoPE; allowed: another"),
    (M_ROPE, "fused", "selector", "before RoPE, but the model has M-RoPE; allowed: another"),
    (M_ROPE, "calibrated", "selector", "before RoPE, but the model has M-RoPE; allowed: another"),
    (M_ROPE, "kvzip_once", "tracker", "before RoPE, but the model has M-RoPE; allowed: another"),
    (M_ROPE, IN_CACHE, "positions", "'cache' rotates keys, but the model has M-RoPE; allowed: 'text'"),
    *(
        (traits, asked, param, f"which {said}; allowed: another {param}")
        for traits, said in ((CAPPED, "soft-caps its attention logits"), (SINKS, "has attention sinks"))
        for param, policies in (
            ("merger", ("grkv", MATCHING)),
            ("selector", ("expected_attention", "compactor", "fused")),
        )
        for asked in policies
    ),
    (SINKS, MORPHKV_MAX, "selector", "'morphkv'"),
    (WINDOWS, IN_CACHE, "positions", "chunked-local layers.*; allowed: "),
    (WINDOWS, "kvzip", "tracker", "chunked-local layers.*; allowed: "),
    (STATES, IN_CACHE, "positions", "Mamba or linear-attention layers; allowed: "),
    (STATES, PRESSED, "trigger", "linear-attention layers; allowed: "),
    (STATES, {"policy": "h2o", "reuse": "turns"}, "reuse", "linear-attention layers; allowed: "),
    (STATES, "kvzip", "tracker", "linear-attention layers; allowed: "),
    (LATENT, CODED, "front", "'int8' is not for models that keep one latent.*; allowed: null"),
    (SMALL, CODED | {"front": "int4"}, "front", "'int4' is not for head sizes below 32; allowed: null"),
    (BARE, "kvzap", "tracker", "'predicted' needs a KVzap model, .* allowed: another tracker, or on .* --kvzap"),
    (BARE, "calibrated", "allocator", "'calibrated' needs the budgets of the model's heads, .* --head-budgets"),
    (COMPILED, "kvzap", "tracker", COMPILES),
    (COMPILED, NORMALIZED, "normalized", COMPILES),
]


def asked_for(asked: str | dict[str, Any]) -> CompressionSpec:
    return config(asked) if isinstance(asked, str) else config(**asked)


@pytest.mark.parametrize(("traits", "asked", "param", "said"), REFUSED)
def test_what_the_model_does_not_allow_is_refused(traits, asked, param: str, said: str) -> None:
    request_ = asked_for(asked)
    with pytest.raises(CompressionError, match=rf"^kv_compression\.{param}: .*{said}") as caught:
        of_model(traits).check(request_, 4000, 100)
    assert (caught.value.param, caught.value.reason) == (f"kv_compression.{param}", "unsupported_model")
    assert caught.value.status == 400
    LIMITS.check(request_, 4000, 100)


@pytest.mark.parametrize("traits", [M_ROPE, CAPPED, SINKS, WINDOWS, STATES, LATENT, COMPILED, BARE], ids=str)
def test_what_the_model_allows_passes(traits: dict[str, Any]) -> None:
    refused = [asked for some, asked, _, _ in REFUSED if some == traits]
    for asked in (*PRESETS, MORPHKV_MAX, PRESSED, {"policy": "kvzap", "tracker": "sum"}):
        if asked not in refused:
            of_model(traits).check(asked_for(asked), 4000, 100)
    of_model(BARE).check(asked_for(NORMALIZED), 4000, 100)


@pytest.mark.parametrize(
    ("fields", "prompt", "max_tokens", "positions"),
    [
        ({}, 1000, 30_000, 1000),  # the prompt at once
        ({}, 40, 60, 100),
        ({"interval": 5}, 40, 30_000, 133),
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


def test_layers_with_a_window_take_slots_too() -> None:
    """Two groups of them, of at most three blocks of 32 each."""
    limits = replace(LIMITS, max_model_len=4096, pool_tokens=640, window_blocks=((3, 32), (3, 32)))
    for room, length in ((limits, 640 - 192 - 1), (replace(limits, window_blocks=()), 640 - 1)):
        room.check_room(None, length)
        with pytest.raises(CompressionError, match=f"up to {length} tokens"):
            room.check_room(None, length + 1)
    assert limits.most_generated(None, 100) == 640 - 192 - 100
    assert replace(limits, pool_tokens=96).most_generated(None, 20) == 32 - 20
    # A bounded cache outlasts the pool, if it fits beside the windows.
    bounded = config("h2o", budget=64)
    assert limits.most_generated(bounded, 100) == 4096 - 100
    assert replace(limits, pool_tokens=64 + 32 + 64 + 192).most_generated(bounded, 100) == 4096 - 100
    assert replace(limits, pool_tokens=64 + 64 + 192).most_generated(bounded, 100) < 200
    # One that keeps all entries in some layers does not.
    skipping = config("h2o", budget=64, skip_layers=1)
    assert limits.most_generated(skipping, 100) == 640 - 192 - 100 - 2 * 32


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
    strict.check(config("snapkv", merger="zip", tracker="log_ema"), 1000, 10)
    # Trackers are free, unless they cost the model's time.
    strict.check(config("snapkv", tracker="mean"), 1000, 10)
    for request_, param, said in (
        (config("grkv"), "policy", "'grkv' is not allowed on this server; allowed: full, keepkv, snapkv"),
        (config("snapkv", merger="regression"), "merger", "'regression' is not allowed .* allowed: drop, zip"),
        (config("snapkv", tracker="reconstruction"), "tracker", "allowed: log_ema, sum"),
        (config("snapkv", tracker="predicted"), "tracker", "allowed: log_ema, sum"),
    ):
        with pytest.raises(CompressionError, match=said) as caught:
            strict.check(request_, 1000, 10)
        assert (caught.value.param, caught.value.reason) == (f"kv_compression.{param}", "not_allowed")
    for own in (config("kvzip", repeat_prompt=[]), config("kvzap")):
        replace(LIMITS, allowed_policies=frozenset({own.name})).check(own, 1000, 10)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (config("snapkv", budget=100), 1000),
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
def test_most_entries_that_a_compression_reads(request_: CompressionSpec, expected: int) -> None:
    assert most_entries(request_, 1000, 100, 32) == expected
