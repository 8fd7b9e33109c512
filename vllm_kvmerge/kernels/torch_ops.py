"""The operators that a traced graph may contain, as torch custom ops in the namespace ``vllm_kvmerge``.

They take a layer's cache as vLLM allocates it, ``[B, H, bs, cell]``, instead of ``Pages``. Inside vLLM attention is an
opaque op already, and the backend calls ``paged_attention`` directly; these are for graphs without it.
"""

import torch
from torch import Tensor

from vllm_kvmerge import kernels
from vllm_kvmerge.kernels.page import Pages


@torch.library.custom_op("vllm_kvmerge::paged_attention", mutates_args=("cache", "output"))
def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    fronts: Tensor,
    tails: Tensor,
    update_modes: Tensor,
    update_decays: Tensor,
    scale: float,
    output: Tensor,
) -> None:
    """See ``reference.paged_attention``."""
    kernels.paged_attention(
        query,
        Pages.of(cache, query.shape[2]),
        block_table,
        query_starts,
        query_lens,
        seq_lens,
        fronts,
        tails,
        update_modes,
        update_decays,
        scale,
        output,
    )


@torch.library.custom_op("vllm_kvmerge::write_tokens", mutates_args=("cache",))
def write_tokens(cache: Tensor, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    """See ``reference.write_tokens``."""
    kernels.write_tokens(Pages.of(cache, key.shape[2]), slot_mapping, key, value)


@paged_attention.register_fake
@write_tokens.register_fake
def _(*args: object) -> None:
    """Nothing is returned, so there are no shapes to tell."""
