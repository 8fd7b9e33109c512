"""A KV cache of 8 bits: plain requests as stock vLLM's, policies within their budget, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.demo_model import BLOCK_SIZE, bytes_per_block
from tests.engine.conftest import random_prompt
from tests.engine.generating import BUDGET, MAX_TOKENS, generate
from tests.models.architectures import ARGUMENTS, write_model
from tests.presets import SMALL
from tests.vllm_library import needs_avx512
from vllm_kvmerge import demo
from vllm_kvmerge.policies import PRESETS

pytestmark = [needs_avx512, pytest.mark.slow]

NUM_BLOCKS = 150
LENGTHS = (5, 130, 600)
ALL = [name for name in sorted(PRESETS) if name not in ("full", "kvzap", "calibrated")]


@pytest.mark.parametrize(
    ("dtype", "names"), [("fp8_e4m3", ALL), ("fp8_e5m2", ["snapkv", "keepkv", "adakv"])], ids=["e4m3", "e5m2"]
)
def test_a_cache_of_8_bits(dtype: str, names: list[str]) -> None:
    others: list[dict[str, Any]] = [
        {"policy": "snapkv", "positions": "cache"},
        {"policy": "kvzip", "normalized": True},
        {"policy": "keepkv", "refresh": {"every": 16}},
    ]
    check(demo.model_path(), dtype, names, others, bytes_per_block(itemsize=1))


def test_plain_requests_on_our_operator() -> None:
    """The two round differently, so an answer may take another way at a tie."""
    rng = np.random.default_rng(1)
    prompts = [random_prompt(rng, length) for length in (40, 130, 300, 600)]
    arguments: dict[str, Any] = {"model": demo.model_path(), "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    arguments |= {"max_model_len": 1500, "block_size": BLOCK_SIZE, "kv_cache_memory_bytes": 1 << 24}
    ours = {"additional_config": {"kvmerge": {"plain_attention": "ours"}}}
    tokens, others = (generate(arguments | own, prompts, [])["tokens"] for own in ({}, ours))
    assert sum(one == other for one, other in zip(tokens, others, strict=True)) >= len(prompts) - 1


@pytest.mark.parametrize("model", ["Gemma 3", "gpt-oss"])
def test_a_cache_of_8_bits_beside_windows(tmp_path: Path, model: str) -> None:
    names = ["streaming_llm", "h2o", "snapkv", "keepkv", "morphkv", "adakv", "kvzip"] * 2
    # Each block belongs to two layers with two KV heads of 32 numbers.
    block_bytes = 2 * 2 * BLOCK_SIZE * (2 * 32 + 16)
    runs = check(str(write_model(tmp_path, model)), "fp8_e4m3", names, [], block_bytes)
    first, again = ([[tokens for tokens, _ in run] for run in some] for some in (runs[:7], runs[7:14]))
    assert first == again  # which begins with the fronts of the first


@pytest.mark.parametrize("model", ["Granite 4, Mamba layers", "Falcon-H1", "Qwen3-Next (bfloat16)"])
def test_a_cache_of_8_bits_beside_states(tmp_path: Path, model: str) -> None:
    """States are vLLM's own, in the model's dtype or float32; pages are as large as a state."""
    names = ["streaming_llm", "h2o", "keepkv", "morphkv", "adakv", "d2o"]
    others: list[dict[str, Any]] = [{"policy": "snapkv", "decode": "bounded"}]
    caching = {"enable_prefix_caching": ARGUMENTS[model].get("enable_prefix_caching", True)}
    folder = str(write_model(tmp_path, model))
    check(folder, "fp8_e4m3", names, others, (1 << 26) // NUM_BLOCKS, may_wait=False, **caching)


def check(
    model: str,
    dtype: str,
    names: list[str],
    others: list[dict[str, Any]],
    block_bytes: int,
    may_wait: bool = True,
    **given: Any,
) -> list[Any]:
    """Compares plain requests with stock vLLM's; returns what policies (names) and fields (others) give, in budget.
    may_wait: compressions may wait for pressure. given: to the engine."""
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    arguments: dict[str, Any] = {"model": model, "dtype": "bfloat16", "kv_cache_dtype": dtype}
    arguments |= {"max_model_len": 1500, "max_num_batched_tokens": 256, "block_size": BLOCK_SIZE}
    arguments |= {"kv_cache_memory_bytes": NUM_BLOCKS * block_bytes} | given
    stock = generate(arguments, prompts)["tokens"]
    fields = [{"policy": name, "interval": 16, **SMALL.get(name, {})} for name in names]
    others = [
        {"policy": "h2o", "budget": LENGTHS[-1] + MAX_TOKENS - 1},  # scored, and nothing has to go
        {"policy": "h2o", "prefill": {"chunk": 128}},
        *([{"policy": "streaming_llm", "trigger": "pressure"}] if may_wait else []),
        *others,
    ]
    external = {"additional_config": {"kvmerge": {"external_cache_bytes": 1 << 24}}}
    found = generate(arguments | external, prompts, fields + others)
    assert found["tokens"] == stock and found["leaked"] == 0
    for asked, outputs in zip(fields + others, found["runs"], strict=True):
        for prompt, (tokens, report) in zip(prompts, outputs, strict=True):
            assert "error" not in report and len(tokens) == MAX_TOKENS, (asked, report)
            budget = len(prompt) if "trigger" in asked else asked.get("budget", BUDGET)
            # The prompt's last step has all of it, as have those that repeat it; some policies let the answer grow.
            assert report["mean_entries"] <= budget + MAX_TOKENS + 4 * len(prompt) / MAX_TOKENS, (asked, report)
            assert report["peak_bytes"] <= NUM_BLOCKS * block_bytes
    # Our operator multiplies bfloat16 where vLLM's has float32, so one prompt may take another way at a tie.
    alike = [tokens == expected for (tokens, _), expected in zip(found["runs"][len(fields)], stock, strict=True)]
    assert sum(alike) >= len(alike) - 1
    return found["runs"]
