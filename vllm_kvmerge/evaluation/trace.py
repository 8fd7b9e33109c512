"""Queries, keys and values of a Transformers model that reads documents."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_kvmerge.demo import language
from vllm_kvmerge.evaluation.tasks.data import read_texts


@dataclass(frozen=True)
class LayerTrace:
    """Inputs of one attention layer: queries ``[T, H * G, d]``, keys and values ``[T, H, d]``, all float32, after RoPE.

    output_weights: ``[H, G, hidden, d]``, its output projection by query head.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    output_weights: Tensor
    scale: float


def trace(model_path: str, documents: list[list[int]]) -> list[list[LayerTrace]]:
    """For each document (token ids), the inputs of every attention layer of a Transformers model that reads it."""
    return list(trace_one_by_one(model_path, documents))


def trace_one_by_one(model_path: str, documents: Iterable[list[int]]) -> Iterator[list[LayerTrace]]:
    """``trace``, one document at a time."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen: list[LayerTrace] = []

    def attention(module, query, key, value, *args, scaling, **kwargs):  # type: ignore[no-untyped-def]
        weight = module.o_proj.weight.detach().float()
        num_kv_heads, head_size = key.shape[1], key.shape[3]
        split = weight.view(weight.shape[0], num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
        seen.append(LayerTrace(*(tensor[0].transpose(0, 1).float() for tensor in (query, key, value)), split, scaling))
        return sdpa_attention_forward(module, query, key, value, *args, scaling=scaling, **kwargs)

    AttentionInterface.register("kvmerge_trace", attention)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="kvmerge_trace", local_files_only=True
    )
    for document in documents:
        with torch.no_grad():
            model(torch.tensor([document]), use_cache=False)
        layers, seen[:] = list(seen), []
        yield layers


def num_layers_of(model_path: str) -> int:
    return int(_text_config(model_path).num_hidden_layers)


def model_type_of(model_path: str) -> str:
    """Transformers' name of the model's type, such as ``llama``."""
    return str(_text_config(model_path).model_type)


def _text_config(model_path: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path, local_files_only=True).get_text_config()


def knows_demo_task(model_path: str) -> bool:
    """True if the model's tokens are those that documents of the demo task are written in."""
    words = language.VOCABULARY
    tokenizer = _tokenizer(model_path)
    return bool(tokenizer.convert_tokens_to_ids(list(words)) == list(range(len(words))))


def text_documents(model_path: str, path: Path, count: int, length: int) -> list[list[int]]:
    """A text's first tokens, cut into at most ``count`` documents of ``length``; each begins as the tokenizer's do.

    path: a text, or JSON lines with one each in their field ``text``, of which no document joins two.

    Raises:
        ValueError: the text cannot be read, is not in UTF-8, or is too short for one document.
    """
    tokenizer = _tokenizer(model_path)
    start = tokenizer("").input_ids[:1]
    start = start if start == [tokenizer.bos_token_id] else []
    size = length - len(start)
    documents: list[list[int]] = []
    longest = 0
    for text in read_texts("text", str(path)):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        longest = max(longest, len(ids))
        documents += [start + ids[first : first + size] for first in range(0, len(ids) - size + 1, size)]
        if len(documents) >= count:
            return documents[:count]
    if not documents:
        raise ValueError(f"{path} has {longest} tokens, and a document takes {size}: prompt and queries")
    return documents


def _tokenizer(model_path: str):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
