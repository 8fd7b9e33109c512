"""Models with random weights, large enough that what attention reads decides what comes next."""

from pathlib import Path
from typing import Any

import torch

SIZES = {
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

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
"""Configuration of a model without weights."""


def write_llama(folder: Path, **sizes) -> Path:
    """Saves the model and the demo model's tokenizer; ``sizes`` as in ``LlamaConfig``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return _write(folder, LlamaForCausalLM(LlamaConfig(**SIZES | sizes)))


WINDOW, CHUNK = 48, 64


def write_gemma(folder: Path, **sizes) -> Path:
    """Saves a model of sliding-window layers and, every third, one of full attention; ``sizes`` as in
    ``Gemma3TextConfig``."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    gemma = {"num_hidden_layers": 6, "layer_types": layer_types, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}
    gemma["tie_word_embeddings"] = False  # or a token's successor would be itself
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES | gemma | sizes))
    for weight in model.parameters():
        if weight.ndim == 1:  # of norms: keys are normalized, and would all be equally long
            weight.data.normal_(0.0, 0.3)
    return _write(folder, model)


def write_gemma3n(folder: Path) -> Path:
    """Saves a model whose layers slide and see everything by turns; the last four read the caches of the second two."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    gemma = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
    gemma |= {"num_kv_shared_layers": 4, "sliding_window": WINDOW, "activation_sparsity_pattern": [0.0] * 8}
    gemma |= {"vocab_size_per_layer_input": 832, "hidden_size_per_layer_input": 16, "laurel_rank": 8}
    torch.manual_seed(0)
    return _write(folder, Gemma3nForCausalLM(Gemma3nTextConfig(**SIZES | gemma, altup_num_inputs=2)))


def write_gemma4(folder: Path, **sizes) -> Path:
    """Saves a model whose layers of full attention, every third, have heads of twice the size; ``sizes`` as in
    ``Gemma4TextConfig``."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    gemma = {"num_hidden_layers": 6, "layer_types": layer_types, "sliding_window": WINDOW, "global_head_dim": 64}
    gemma |= {"vocab_size_per_layer_input": 832, "hidden_size_per_layer_input": 16, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**SIZES | gemma | sizes))
    for weight in model.parameters():
        if weight.ndim == 1:  # of norms: keys are normalized, and would all be equally long
            weight.data.normal_(1.0, 0.3)
    return _write(folder, model)


def write_llama4(folder: Path) -> Path:
    """Saves a model of chunked-local layers and, every third, one of full attention without RoPE; none has experts."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    llama = {"num_hidden_layers": 6, "no_rope_layers": [1, 1, 0] * 2, "attention_chunk_size": CHUNK}
    llama |= {"intermediate_size_mlp": 128, "interleave_moe_layer_step": 0, "moe_layers": []}
    torch.manual_seed(0)
    return _write(folder, Llama4ForCausalLM(Llama4TextConfig(**SIZES | llama, attn_temperature_tuning=False)))


def write_granite(folder: Path) -> Path:
    """Saves a model of Mamba layers and, every third, one of full attention."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    granite = {"num_hidden_layers": 6, "layer_types": ["mamba", "mamba", "attention"] * 2, "attention_multiplier": 0.2}
    granite |= {"position_embedding_type": "rope", "num_local_experts": 0, "shared_intermediate_size": 128}
    granite |= {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
    sizes = {name: value for name, value in (SIZES | granite).items() if name != "head_dim"}
    torch.manual_seed(0)
    return _write(folder, GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**sizes)))


def write_qwen3_next(folder: Path) -> Path:
    """Saves a model of linear attention and, every third layer, full attention, which vLLM's CPU build runs in
    bfloat16."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    qwen = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}
    qwen |= {"head_dim": 256, "linear_num_key_heads": 1, "linear_num_value_heads": 1}
    qwen |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    qwen |= {"shared_expert_intermediate_size": 64}
    torch.manual_seed(0)
    return _write(folder, Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES | qwen)))


def _write(folder: Path, model: Any) -> Path:
    """Saves the model and the demo model's tokenizer."""
    from vllm_kvmerge.demo.train import build_tokenizer

    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
