"""Engines whose keys and values are as large as their dtype takes, and requests that generate for a long time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.engine.conftest import random_prompt
from tests.engine.watched import answer
from tests.random_model import write_llama
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.parameters import parse_compression

POLICIES = sorted(set(PRESETS) - {"kvzap"})
"""kvzap needs a model of its own."""

MERGING = sorted(name for name in POLICIES if PRESETS[name].merger != "drop")
LENGTH, BUDGET, INTERVAL = 150, 64, 32

ARGUMENTS: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [random_prompt(rng, LENGTH) for _ in range(count)]


@pytest.mark.parametrize(
    ("dtype", "of_keys", "of_values"), [("bfloat16", 1e30, 1e15), ("float16", 5e3, 1e3)], ids=["bfloat16", "float16"]
)
def test_keys_and_values_of_extreme_norm(tmp_path: Path, dtype: str, of_keys: float, of_values: float) -> None:
    """Every policy, and none, in one batch: log-probabilities are finite."""
    file = write_llama(tmp_path) / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        weight.mul_(of_keys if "k_proj" in name else of_values if "v_proj" in name else 1.0)
    save_file(weights, file, {"format": "pt"})
    fields = [{"policy": name, "budget": BUDGET, "interval": 8} for name in POLICIES]
    arguments = {"model": str(tmp_path), "dtype": dtype, "max_model_len": 512, **ARGUMENTS}
    found = answer(arguments, prompts(len(fields) + 1), [{"policy": "full"}, *fields], 40, timeout=500)
    for name, one in zip(["full", *POLICIES], found, strict=True):
        assert (one["tokens"], one["finite"], one["reason"]) == (40, 40, "length"), name
        assert name == "full" or one["compressions"] >= 1, name


@pytest.mark.parametrize(
    "num_tokens", [1500, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_long_answers(tmp_path: Path, num_tokens: int) -> None:
    """Every policy that merges, in one batch: finite, within the budget all the time, and nothing remains."""
    model = write_llama(tmp_path, max_position_embeddings=24_000)
    fields = [{"policy": name, "budget": BUDGET, "interval": INTERVAL, "decode": "bounded"} for name in MERGING]
    arguments = {"model": str(model), "dtype": "bfloat16", "max_model_len": 24_000, **ARGUMENTS}
    found = answer(arguments, prompts(len(fields)), fields, num_tokens, timeout=7000)
    for asked, one in zip(fields, found, strict=True):
        assert (one["tokens"], one["finite"], one["reason"]) == (num_tokens, num_tokens, "length"), asked
        assert one["compressions"] >= num_tokens // INTERVAL - 1, asked
        capacity = parse_compression(asked).resolve_capacity(LENGTH)
        assert capacity is not None and BUDGET < one["highest"] < capacity + INTERVAL, (asked, one)
