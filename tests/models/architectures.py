"""Models of many architectures with random weights, made from Transformers' configurations."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.random_model import SIZES, WINDOW

LAYERS = ["sliding_attention", "full_attention"] * 2
"""Types of layers where both occur."""

WINDOWS = {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "sliding_window": WINDOW}
SHARED = {"num_hidden_layers": 8, "layer_types": LAYERS * 2, "num_kv_shared_layers": 4, "sliding_window": WINDOW}
LINEAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
PER_LAYER = {"vocab_size_per_layer_input": 832, "hidden_size_per_layer_input": 16}
GEMMA4 = {"global_head_dim": 64, "tie_word_embeddings": False} | PER_LAYER
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "original_max_position_embeddings": 4096}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
"""As published models of DeepSeek-V3's have it; with plain RoPE, vLLM 0.32 computes other numbers on the CPU."""

LATENTS = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 32,
    "rope_parameters": YARN,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral, window in all layers": ("mistral", {"sliding_window": WINDOW}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS | {"num_experts": 4}),
    "Qwen3-Next (bfloat16)": (
        "qwen3_next",
        EXPERTS
        | LINEAR
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "head_dim": 256,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
        },
    ),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", WINDOWS | {"query_pre_attn_scalar": 32}),
    "Gemma 3": ("gemma3_text", WINDOWS | {"query_pre_attn_scalar": 32, "tie_word_embeddings": False}),
    "Gemma 3n": (
        "gemma3n_text",
        SHARED | PER_LAYER | {"activation_sparsity_pattern": [0.0] * 8, "laurel_rank": 8, "altup_num_inputs": 2},
    ),
    "Gemma 4, shared caches": ("gemma4_text", GEMMA4 | SHARED),
    "Gemma 4, fewer KV heads in full attention": (
        "gemma4_text",
        GEMMA4 | WINDOWS | {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "Llama 4": (
        "llama4_text",
        {
            "num_hidden_layers": 6,
            "no_rope_layers": [1, 1, 0] * 2,
            "attention_chunk_size": 64,
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 0,
            "moe_layers": [],
            "attn_temperature_tuning": False,
        },
    ),
    "Phi-3": ("phi3", {"pad_token_id": 0, "sliding_window": None}),
    "OLMo 2": ("olmo2", {}),
    "Granite": ("granite", {"attention_multiplier": 32**-0.5}),
    "Granite 4, Mamba layers": (
        "granitemoehybrid",
        MAMBA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "position_embedding_type": "rope",
            "attention_multiplier": 32**-0.5,
            "head_dim": None,
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
        },
    ),
    "Falcon-H1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 256}),
    "GLM-4": ("glm4", {"pad_token_id": 0}),
    "SmolLM3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "pad_token_id": 0}),
    "Cohere 2": ("cohere2", WINDOWS),
    "EXAONE 4": ("exaone4", WINDOWS | {"sliding_window_pattern": "LG"}),
    "gpt-oss": ("gpt_oss", WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-2": ("gpt2", {}),
    "OPT": ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 128}),
    "GPT-NeoX": ("gpt_neox", {"rotary_pct": 1.0}),
    "Falcon": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False, "head_dim": None},
    ),
    "Falcon with ALiBi": ("falcon", {"alibi": True, "multi_query": False, "bias": False, "head_dim": None}),
    "DeepSeek-V3": ("deepseek_v3", LATENTS),
    "Kimi K2": ("deepseek_v3", LATENTS),
    "Kimi Linear": (
        "kimi_linear",
        LATENTS
        | LINEAR
        | {
            "q_lora_rank": None,
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
    ),
}
"""Type of the configuration, and what differs from ``SIZES`` (None: what is left out), by name."""

SERVED_AS = {"Kimi K2": "kimi_k2"}
"""Types that are served as another one, by which Transformers knows them."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "Qwen3-Next (bfloat16)": {
        "dtype": "bfloat16",
        "additional_config": {"kvmerge": {"plain_attention": "vllm"}},  # which rounds as stock vLLM does
    },
    **dict.fromkeys(("Granite 4, Mamba layers", "Falcon-H1"), {"enable_prefix_caching": False}),
}
"""With which vLLM's CPU build runs the model, if not with any."""


def write_model(folder: Path, name: str, **changes: Any) -> Path:
    """Saves the model, in float32, and the demo model's tokenizer. changes: fields that differ from the model's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from vllm_kvmerge.demo.train import build_tokenizer

    kind, fields = MODELS[name]
    sizes = {
        key: value for key, value in (SIZES | fields | changes).items() if key == "sliding_window" or value is not None
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)
    for weight in model.parameters():
        if weight.ndim == 1:  # of norms: where keys are normalized, all would be equally long
            weight.data += torch.randn_like(weight) * 0.3
    model.save_pretrained(folder)
    if name in SERVED_AS:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": SERVED_AS[name]}))
    build_tokenizer().save_pretrained(folder)
    return folder
