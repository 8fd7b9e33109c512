"""A model with quantised weights: linear layers of int8 weights and inputs (compressed-tensors)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.generating import BUDGET, generate
from tests.engine.test_vllm_features import random_text
from tests.random_model import write_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow]

INTERVAL = 8
POLICIES = "snapkv", "criticalkv", "h2o", "keepkv"
"""criticalkv reads a layer's output projection."""


def quantise(folder: Path) -> None:
    """Weights to int8, one scale for each output; inputs are quantised as they come."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().to(torch.int8)
        weights[name.replace("weight", "weight_scale")] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config, integers = json.loads((folder / "config.json").read_text()), {"num_bits": 8, "type": "int"}
    linear = {
        "targets": ["Linear"],
        "weights": integers | {"symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": integers | {"symmetric": True, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": linear},
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_a_quantised_model(tmp_path):
    folder = write_llama(tmp_path)
    arguments = {"model": str(folder), "dtype": "bfloat16", "max_model_len": 1024, "block_size": 32}
    arguments["kv_cache_memory_bytes"] = 64 << 20
    prompts = [random_text(seed, 100 + 100 * seed) for seed in range(4)]
    exact = generate(arguments, prompts)["tokens"]
    quantise(folder)
    stock = generate(arguments, prompts)["tokens"]
    assert stock != exact
    roomy = {"policy": "h2o", "budget": 500, "interval": 64}
    runs = [{"policy": policy, "interval": INTERVAL, "decode": "bounded"} for policy in POLICIES]
    found = generate(arguments, prompts, [roomy, *runs])
    assert found["tokens"] == stock == [tokens for tokens, _ in found["runs"][0]] and not found["leaked"]
    for run in found["runs"][1:]:
        assert all(report["compressions"] > 1 for _, report in run)
        assert all(report["mean_entries"] <= BUDGET + INTERVAL for _, report in run)
    assert len({str([tokens for tokens, _ in run]) for run in found["runs"]}) == len(POLICIES) + 1
