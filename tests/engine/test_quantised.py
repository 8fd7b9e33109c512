"""A KV cache of 8 bits: plain requests as stock vLLM's, policies within their budget, and what is refused."""

from typing import Any

import numpy as np
import pytest

from tests.demo_model import BLOCK_SIZE, bytes_per_block
from tests.engine.conftest import random_prompt
from tests.engine.generating import BUDGET, MAX_TOKENS, generate
from tests.presets import SMALL
from vllm_kvmerge import demo
from vllm_kvmerge.policies import PRESETS

NUM_BLOCKS = 150
LENGTHS = (5, 130, 600)
ALL = [name for name in sorted(PRESETS) if name not in ("full", "kvzap")]


@pytest.mark.parametrize(
    ("dtype", "names"), [("fp8_e4m3", ALL), ("fp8_e5m2", ["snapkv", "keepkv", "adakv"])], ids=["e4m3", "e5m2"]
)
def test_a_cache_of_8_bits(dtype: str, names: list[str]) -> None:
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    arguments: dict[str, Any] = {"model": demo.model_path(), "dtype": "bfloat16", "kv_cache_dtype": dtype}
    arguments |= {"max_model_len": 1500, "max_num_batched_tokens": 256, "block_size": BLOCK_SIZE}
    arguments["kv_cache_memory_bytes"] = NUM_BLOCKS * bytes_per_block(itemsize=1)
    stock = generate(arguments, prompts)["tokens"]
    fields = [{"policy": name, "interval": 16, **SMALL.get(name, {})} for name in names]
    others: list[dict[str, Any]] = [
        {"policy": "h2o", "budget": LENGTHS[-1] + MAX_TOKENS - 1},  # scored, and nothing has to go
        {"policy": "snapkv", "positions": "cache"},
        {"policy": "h2o", "prefill": {"chunk": 128}},
        {"policy": "kvzip", "normalized": True},
        {"policy": "keepkv", "refresh": {"every": 16}},
        {"policy": "streaming_llm", "trigger": "pressure"},
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
            assert report["peak_bytes"] <= NUM_BLOCKS * bytes_per_block(itemsize=1)
    assert [tokens for tokens, _ in found["runs"][len(fields)]] == stock
