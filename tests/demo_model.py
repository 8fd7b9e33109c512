"""Sizes of the demo model's KV cache, read off its configuration."""

import json
from pathlib import Path

from vllm_kvmerge import demo

_CONFIG = json.loads((Path(demo.model_path()) / "config.json").read_text())
BLOCK_SIZE = 32
NUM_LAYERS = _CONFIG["num_hidden_layers"]
HEADS_TIMES_LAYERS = NUM_LAYERS * _CONFIG["num_key_value_heads"]


def bytes_per_block(config: dict = _CONFIG, itemsize: int = 4) -> int:
    """Of a model's layers that see all tokens: keys and values of ``itemsize`` bytes a number, and the metadata."""
    layers = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    heads = layers.count("full_attention") * config["num_key_value_heads"]
    return heads * BLOCK_SIZE * (2 * config["head_dim"] * itemsize + 16)


BYTES_PER_BLOCK = bytes_per_block()
"""In float32."""
