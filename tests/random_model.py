"""A Llama with random weights, large enough that what attention reads decides what comes next."""

from pathlib import Path

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

    from vllm_kvmerge.demo.train import build_tokenizer

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES | sizes)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
