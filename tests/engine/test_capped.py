"""A model that soft-caps its attention logits: plain requests as stock vLLM, policies, and those that are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.generating import BUDGET, MAX_TOKENS, generate
from tests.presets import SMALL
from vllm_kvmerge.policies import PRESETS

pytestmark = pytest.mark.slow

REFUSED = {"grkv": "merger", "expected_attention": "selector", "compactor": "selector"}


def save_gemma(folder: Path) -> None:
    """A random Gemma 2 with full attention in every layer, whose cap changes what it says."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32}
    full = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
    config = Gemma2Config(**sizes, **heads, **full, attn_logit_softcapping=2.0, initializer_range=0.1)
    model = Gemma2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "post_attention_layernorm" in name:  # what attention says outweighs what the embedding says
            weight.data += 8.0
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 3.0
    model.save_pretrained(folder)


def test_a_model_with_a_cap(tmp_path: Path) -> None:
    save_gemma(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 290, length).tolist() for length in (5, 130, 333)]
    arguments = {"model": str(tmp_path), "dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 256}
    arguments |= {"block_size": 32, "kv_cache_memory_bytes": 8 << 20}
    stock = generate(arguments, prompts)["tokens"]
    assert len({token for answer in stock for token in answer}) > 10
    names = [name for name in sorted(PRESETS) if name not in ("full", "kvzap")]
    fields = [{"policy": name, "interval": 16, **SMALL.get(name, {})} for name in names]
    roomy = [{"policy": name, "budget": 333 + MAX_TOKENS - 1} for name in ("keepkv", "h2o")]
    found = generate(arguments, prompts, fields + roomy)
    assert found["tokens"] == stock and found["leaked"] == 0
    for name, outputs in zip(names, found["runs"], strict=False):
        for prompt, (tokens, report) in zip(prompts, outputs, strict=True):
            if name in REFUSED:
                assert f"kv_compression.{REFUSED[name]}" in report["error"] and "soft-caps" in report["error"]
                continue
            assert "error" not in report, (name, report)
            assert len(tokens) == MAX_TOKENS
            # The step of the prompt has all of it, and some policies let the answer grow.
            most = BUDGET + MAX_TOKENS + len(prompt) / MAX_TOKENS
            assert report["mean_entries"] <= most, (name, report)
    for outputs in found["runs"][len(names) :]:
        assert [tokens for tokens, _ in outputs] == stock
