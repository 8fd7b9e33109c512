"""The paged KV cache of multi-head latent attention (MLA)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_kvmerge.ops.types import METADATA_BYTES, PagedKVCache


def latent_cell_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes of one cell: one token's latent of ``size`` numbers, and its metadata."""
    return size * dtype.itemsize + METADATA_BYTES


@dataclass(frozen=True)
class LatentKVCache(PagedKVCache):
    """A layer's latents as keys and values of one KV head, which all query heads share.

    A token's entry is one vector: what keys and values are made of, then the part of the key that RoPE turns. Absorbed
    queries multiply all of it, so it is the key; its first numbers are the value. ``values`` are a view of ``keys``.
    """

    row_planes = ("keys",)

    @classmethod
    def of_latents(cls, cache: Tensor, value_size: int) -> "LatentKVCache":
        """Views of ``cache``, contiguous ``[B, 1, bs, cell]`` in the cache dtype: first the latents, ``[B, bs, size]``,
        then metadata as in any ``PagedKVCache``. value_size: numbers of a latent that are its value."""
        num_blocks, num_heads, block_size, cell = cache.shape
        size = cell - METADATA_BYTES // cache.element_size()
        if num_heads != 1 or not value_size <= size or not cache.is_contiguous():
            raise ValueError(f"cache of shape {tuple(cache.shape)} does not hold latents with values of {value_size}")
        length = num_blocks * block_size * size
        latents = cache.view(-1)[:length].view(num_blocks, 1, block_size, size)
        metadata = cache.view(-1)[length:].view(torch.float32).view(num_blocks, 1, 4, block_size)
        return cls(
            keys=latents.transpose(2, 3),
            values=latents[..., :value_size],
            log_votes=metadata[:, :, 0],
            scores=metadata[:, :, 1],
            aux=metadata[:, :, 2],
            positions=metadata[:, :, 3].view(torch.int32),
        )

    @cached_property
    def latents(self) -> Tensor:
        """``[B, bs, size]``, contiguous: the cache as vLLM's MLA operators know it."""
        return self.keys.transpose(2, 3).squeeze(1)

    @property
    def head_size(self) -> int:
        return self.keys.shape[2]

    @property
    def content(self) -> Tensor:  # type: ignore[override]
        """``[B, 1, bs * size]``: the latents as they lie."""
        return self.keys.transpose(2, 3).flatten(2)
