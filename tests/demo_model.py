"""Sizes of the demo model's KV cache, read off its configuration."""

import json
from pathlib import Path

from vllm_kvmerge import demo

_CONFIG = json.loads((Path(demo.model_path()) / "config.json").read_text())
BLOCK_SIZE = 32
NUM_LAYERS = _CONFIG["num_hidden_layers"]
HEADS_TIMES_LAYERS = NUM_LAYERS * _CONFIG["num_key_value_heads"]
BYTES_PER_BLOCK = HEADS_TIMES_LAYERS * BLOCK_SIZE * (2 * _CONFIG["head_dim"] * 4 + 16)
"""All layers; keys and values in float32, and the metadata."""
