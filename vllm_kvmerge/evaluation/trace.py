"""Queries, keys and values of a Transformers model that reads documents."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_kvmerge.demo import language
from vllm_kvmerge.evaluation.tasks.data import read_texts
from vllm_kvmerge.policies.rotation import Rotation


@dataclass(frozen=True)
class LayerTrace:
    """Inputs of one attention layer: queries ``[T, H * G, d]``, keys and values ``[T, H, d]``, all float32, after RoPE.

    output_weights: ``[H, G, hidden, d]``, its output projection by query head. rotation: the model's RoPE, for as many
    positions as the document has tokens; None if it has none, or one that a table of positions does not describe.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    output_weights: Tensor
    scale: float
    rotation: Rotation | None = None


def trace(model_path: str, documents: list[list[int]]) -> list[list[LayerTrace]]:
    """For each document (token ids), the inputs of every attention layer of a Transformers model that reads it."""
    return list(trace_one_by_one(model_path, documents))


def trace_one_by_one(model_path: str, documents: Iterable[list[int]]) -> Iterator[list[LayerTrace]]:
    """``trace``, one document at a time."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen: list[LayerTrace] = []
    rotation: Rotation | None = None

    def attention(module, query, key, value, *args, scaling, **kwargs):  # type: ignore[no-untyped-def]
        if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
            raise ValueError(f"{model_path}: its attention caps logits or has sinks, which traces do not have")
        weight = module.o_proj.weight.detach().float()
        num_kv_heads, head_size = key.shape[1], key.shape[3]
        split = weight.view(weight.shape[0], num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
        inputs = (tensor[0].transpose(0, 1).float() for tensor in (query, key, value))
        seen.append(LayerTrace(*inputs, split, scaling, rotation))
        return sdpa_attention_forward(module, query, key, value, *args, scaling=scaling, **kwargs)

    AttentionInterface.register("kvmerge_trace", attention)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="kvmerge_trace", local_files_only=True
    )
    for document in documents:
        rotation = rotation_of(model, len(document))
        with torch.no_grad():
            model(torch.tensor([document]), use_cache=False)
        layers, seen[:] = list(seen), []
        yield layers


def rotation_of(model: nn.Module, num_positions: int) -> Rotation | None:
    """The RoPE of a Transformers model at the first positions; None if the model has none for all layers alike, or one
    that is not found to turn as ``Rotation`` does."""
    modules = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
    apply = getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)
    if len(modules) != 1 or apply is None:
        return None
    positions = torch.arange(num_positions)
    cosines, sines = (plane[0].float() for plane in modules[0](torch.zeros(1), positions.unsqueeze(0)))
    vectors = torch.randn(num_positions, cosines.shape[1], generator=torch.Generator().manual_seed(0))
    turned = apply(vectors[None, None], vectors[None, None], cosines[None], sines[None])[0][0, 0]
    # Some repeat the angles in halves, some pair by pair.
    halves, alternate = slice(cosines.shape[1] // 2), slice(0, None, 2)
    for is_neox, columns in ((True, halves), (False, halves), (False, alternate)):
        rotation = Rotation(torch.cat([cosines[:, columns], sines[:, columns]], dim=1), is_neox)
        if torch.allclose(rotation.turned(vectors, positions), turned, atol=1e-4):
            return rotation
    return None


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
