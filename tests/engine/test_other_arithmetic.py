"""Models that compute otherwise than others: with quantised weights, or logits of attention that are capped."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.generating import BUDGET, MAX_TOKENS, generate
from tests.engine.test_vllm_features import random_text
from tests.models.architectures import write_model
from tests.random_model import write_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ARGUMENTS = {"max_model_len": 1024, "max_num_batched_tokens": 256, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}


def test_attention_whose_logits_are_capped(tmp_path: Path) -> None:
    """By our operator as by vLLM's. What is refused: ``docs/support-matrix.md``."""
    prompts = [random_text(seed, length) for seed, length in enumerate((5, 130, 333))]
    full = {"layer_types": ["full_attention"] * 4, "sliding_window": None, "initializer_range": 0.1}
    arguments = ARGUMENTS | {"dtype": "float32", "model": str(tmp_path)}
    wide, stock = (
        write_model(tmp_path, "Gemma 2", attn_logit_softcapping=cap, **full) and generate(arguments, prompts)["tokens"]
        for cap in (50.0, 0.5)
    )
    assert stock != wide  # the cap decides
    roomy = [{"policy": name, "budget": 333 + MAX_TOKENS - 1} for name in ("keepkv", "h2o")]
    found = generate(arguments, prompts, roomy)
    assert found["tokens"] == stock and found["leaked"] == 0
    assert [[tokens for tokens, _ in run] for run in found["runs"]] == [stock] * 2


def quantise(folder: Path) -> None:
    """Weights to int8, one scale for each output; inputs are quantised as they come."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().to(torch.int8)
        weights[name.replace("weight", "weight_scale")] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config, integers = json.loads((folder / "config.json").read_text()), {"num_bits": 8, "type": "int"}
    integers["symmetric"] = True
    linear = {
        "targets": ["Linear"],
        "weights": integers | {"strategy": "channel", "dynamic": False},
        "input_activations": integers | {"strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": linear},
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_weights_and_inputs_of_8_bits(tmp_path: Path) -> None:
    """Of linear layers (compressed-tensors). criticalkv reads a layer's output projection."""
    folder = write_llama(tmp_path)
    arguments = ARGUMENTS | {"model": str(folder), "dtype": "bfloat16"}
    prompts = [random_text(seed, 100 + 100 * seed) for seed in range(4)]
    exact = generate(arguments, prompts)["tokens"]
    quantise(folder)
    stock = generate(arguments, prompts)["tokens"]
    assert stock != exact
    roomy = {"policy": "h2o", "budget": 500, "interval": 64}
    policies = "snapkv", "criticalkv", "h2o", "keepkv"
    runs = [{"policy": policy, "interval": 8, "decode": "bounded"} for policy in policies]
    found = generate(arguments, prompts, [roomy, *runs])
    assert found["tokens"] == stock == [tokens for tokens, _ in found["runs"][0]] and not found["leaked"]
    for run in found["runs"][1:]:
        assert all(report["compressions"] > 1 for _, report in run)
        assert all(report["mean_entries"] <= BUDGET + 8 for _, report in run)
    assert len({str([tokens for tokens, _ in run]) for run in found["runs"]}) == len(policies) + 1
