"""Models with random weights, large enough that what attention reads decides what comes next."""

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 832,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}

LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
"""Configuration of a model without weights."""

WINDOW, CHUNK = 48, 64


def write_llama(folder: Path, **sizes) -> Path:
    """Saves the model and the demo model's tokenizer, as all of these; ``sizes`` as in ``LlamaConfig``."""
    return _save(folder, _model("Llama", "LlamaConfig", **sizes))


def write_gemma(folder: Path, **sizes) -> Path:
    """Sliding-window layers and, every third, one of full attention; ``sizes`` as in ``Gemma3TextConfig``."""
    # With tied embeddings a token's successor would be itself.
    gemma = {"sliding_window": WINDOW, "query_pre_attn_scalar": 32, "tie_word_embeddings": False}
    model = _model("Gemma3", "Gemma3TextConfig", **_every_third("sliding_attention", "full_attention") | gemma | sizes)
    return _save(folder, _with_norms(model, mean=0.0))


def write_gemma3n(folder: Path) -> Path:
    """Layers that slide and see everything by turns; the last four read the caches of the second two."""
    gemma = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
    gemma |= {"num_kv_shared_layers": 4, "sliding_window": WINDOW, "activation_sparsity_pattern": [0.0] * 8}
    gemma |= {"vocab_size_per_layer_input": 832, "hidden_size_per_layer_input": 16, "laurel_rank": 8}
    model = _model("Gemma3n", "Gemma3nTextConfig", **gemma, altup_num_inputs=2)
    return _save(folder, _with_norms(model, mean=1.0))


def write_gemma4(folder: Path, **sizes) -> Path:
    """Layers of full attention, every third, have heads of twice the size; ``sizes`` as in ``Gemma4TextConfig``."""
    gemma = {"sliding_window": WINDOW, "global_head_dim": 64, "tie_word_embeddings": False}
    gemma |= {"vocab_size_per_layer_input": 832, "hidden_size_per_layer_input": 16}
    model = _model("Gemma4", "Gemma4TextConfig", **_every_third("sliding_attention", "full_attention") | gemma | sizes)
    return _save(folder, _with_norms(model, mean=1.0))


def write_llama4(folder: Path) -> Path:
    """Chunked-local layers and, every third, one of full attention without RoPE; none has experts."""
    llama = {"num_hidden_layers": 6, "no_rope_layers": [1, 1, 0] * 2, "attention_chunk_size": CHUNK}
    llama |= {"intermediate_size_mlp": 128, "interleave_moe_layer_step": 0, "moe_layers": []}
    return _save(folder, _model("Llama4", "Llama4TextConfig", **llama, attn_temperature_tuning=False))


def write_granite(folder: Path) -> Path:
    """Mamba layers and, every third, one of full attention."""
    granite = {"position_embedding_type": "rope", "num_local_experts": 0, "shared_intermediate_size": 128}
    granite |= {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "head_dim": None}
    granite |= _every_third("mamba", "attention") | {"attention_multiplier": 0.2}
    return _save(folder, _model("GraniteMoeHybrid", "GraniteMoeHybridConfig", **granite))


def write_qwen3_next(folder: Path) -> Path:
    """Linear attention and, every third layer, full attention, which vLLM's CPU build runs in bfloat16."""
    qwen = _every_third("linear_attention", "full_attention") | {"head_dim": 256, "linear_num_key_heads": 1}
    qwen |= {"linear_num_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    qwen |= {"shared_expert_intermediate_size": 64}
    return _save(folder, _model("Qwen3Next", "Qwen3NextConfig", **qwen))


def _every_third(others: str, third: str) -> dict[str, Any]:
    return {"num_hidden_layers": 6, "layer_types": [others, others, third] * 2}


def _model(name: str, config: str, **sizes: Any) -> Any:
    import transformers

    given = {name: value for name, value in (SIZES | sizes).items() if value is not None}
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**given))


def _with_norms(model: Any, mean: float) -> Any:
    """With uneven norms: keys are normalized, and would all be equally long."""
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.normal_(mean, 0.3)
    return model


def _save(folder: Path, model: Any) -> Path:
    from vllm_kvmerge.demo.train import build_tokenizer

    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
