"""The model's rotary position embedding, for policies that undo it on keys and queries."""

from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from vllm_kvmerge.policies.rotation import Rotation

MODULE_NAME = "rotary_emb"


def find_rotation(model: nn.Module, layer_names: list[str]) -> Rotation | None:
    """The rotation that all attention layers share; None if one has another or none, or it is not by a table of
    positions (M-RoPE, for instance).

    layer_names: vLLM's names of the attention layers, ``....self_attn.attn``; the embedding is a sibling module.
    """
    parents = [model.get_submodule(name.rsplit(".", 1)[0]) for name in layer_names]
    first, *others = [_embedding(parent) for parent in parents]
    if first is None or not _is_plain(first) or any(other is not first for other in others):
        return None
    return Rotation(first.cos_sin_cache, first.is_neox_style)


def _embedding(parent: nn.Module) -> nn.Module | None:
    found: nn.Module | None = getattr(parent, MODULE_NAME, None)
    if found is None:
        # Falcon-H1 names attention after the block that holds it and Mamba, not after the module that it is in.
        found = getattr(getattr(parent, "self_attn", None), MODULE_NAME, None)
    return found


def _is_plain(module: nn.Module) -> bool:
    """True for vLLM's own rotation, whatever its angles: scaled ones differ in their table alone."""
    return (
        isinstance(module, RotaryEmbedding)
        and type(module).forward_native is RotaryEmbedding.forward_native
        and tuple(module.cos_sin_cache.shape[1:]) == (module.rotary_dim,)
    )
