"""Pieces that the commands' tests share."""

import pytest

from vllm_kvmerge.cli import main

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


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line that the command prints on stderr when it refuses to run."""
    capsys.readouterr()
    assert main(list(argv)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("vllm-kvmerge: ")
    return lines[0]
