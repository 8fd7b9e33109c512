"""Complete KV caches of requests, outside the pool, from which their fronts are rebuilt (KeepKV section 1)."""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.ops import PLAIN_SOFTMAX, PagedKVCache, ScoreUpdate, Softmax, cell_bytes, score_prompt_queries
from vllm_kvmerge.ops.types import sent


@dataclass
class ExternalCache:
    """Keys and values of a request's tokens ``[0, num_tokens)`` as the model computed them, in host memory.

    layers: caches as the pool's, in which token ``i`` lies in slot ``i`` and every slot of the ``blocks`` is the
    request's. Pages of memory, or of a file, are taken when they are first written to. Metadata is not kept.
    """

    layers: list[PagedKVCache]
    num_tokens: int = 0

    @classmethod
    def empty(cls, pool: Sequence[PagedKVCache], num_tokens: int, folder: Path | None = None) -> "ExternalCache":
        """Room for ``num_tokens`` tokens. folder: where to keep them, in a file without a name. Raises OSError or
        RuntimeError if there is no room."""
        like = pool[0]
        shape = (-(-num_tokens // like.block_size), like.num_kv_heads, like.block_size)
        cells = shape[0] * shape[1] * shape[2] * cell_bytes(like.head_size, like.keys.dtype)
        size = len(pool) * cells // like.keys.element_size()
        # Not pinned: PyTorch rounds pinned memory up to powers of two, and never gives it back.
        memory = _file(folder, size, like.keys.dtype) if folder else torch.empty(size, dtype=like.keys.dtype)
        row_major = like.keys.stride(3) != 1
        parts = (part.view(*shape, -1) for part in memory.chunk(len(pool)))
        layers = [
            PagedKVCache.of(part, like.head_size, row_major, cache.key_scale, cache.value_scale)
            for part, cache in zip(parts, pool, strict=True)
        ]
        return cls(layers)

    @property
    def blocks(self) -> Tensor:
        """Ids of the blocks in ``layers`` that hold the tokens."""
        return torch.arange(-(-self.num_tokens // self.layers[0].block_size), dtype=torch.int32)

    def append(self, pool: Sequence[PagedKVCache], blocks: Tensor, num_tokens: int, front: int) -> None:
        """Copies the tokens up to ``num_tokens`` that are not there yet.

        blocks: ids of the request's blocks in the pool, where these tokens lie in their own slots. front: slots that
        hold compressed entries instead.
        """
        size = self.layers[0].block_size
        first, last = self.num_tokens // size, -(-num_tokens // size)
        ids = sent(blocks[first:last].long(), pool[0].device)
        # Earlier slots of the first block hold the same tokens there, unless the front reaches into it.
        shared = self.num_tokens % size if front > first * size else 0
        for own, cache in zip(self.layers, pool, strict=True):
            if shared:
                own.keys[first, :, :, shared:] = cache.keys[ids[0], :, :, shared:].cpu()
                own.values[first, :, shared:] = cache.values[ids[0], :, shared:].cpu()
            whole = slice(first + bool(shared), last)
            own.content[whole].copy_(cache.content.index_select(0, ids[bool(shared) :]), non_blocking=True)
        self.num_tokens = num_tokens

    def on(self, device: torch.device, layers: Sequence[int]) -> list[PagedKVCache]:
        """Some layers' caches on a device; copies, where it is not the host."""
        if device.type == "cpu":
            return [self.layers[layer] for layer in layers]
        return [_copied(self.layers[layer], len(self.blocks), device) for layer in layers]

    def scores(
        self,
        ring: QueryRing,
        window: int,
        update: ScoreUpdate,
        scale: float,
        softmax: Callable[[int], Softmax] = lambda layer: PLAIN_SOFTMAX,
    ) -> PromptScores:
        """Statistics of all tokens from the newest ``window`` queries, as at the end of a prompt. softmax: of a
        layer."""
        device, heads = ring.device, self.layers[0].num_kv_heads
        scores = PromptScores.empty(len(self.layers), heads, self.num_tokens, device)
        blocks = sent(self.blocks, device)
        for layer in range(len(self.layers)):
            (cache,) = self.on(device, [layer])
            (queries,) = ring.queries(self.num_tokens, slice(layer, layer + 1), window)
            statistics = scores.scores[layer], scores.aux[layer]
            score_prompt_queries(queries, cache, blocks, update, scale, *statistics, softmax(layer))
        return scores


def _file(folder: Path, size: int, dtype: torch.dtype) -> Tensor:
    """``size`` numbers in a file of the folder that is gone when the tensor is. Raises as ``ExternalCache.empty``."""
    handle, path = tempfile.mkstemp(prefix="vllm-kvmerge-", dir=folder)
    try:
        # A page that finds no room when it is written to would end the process.
        os.posix_fallocate(handle, 0, size * dtype.itemsize)
        return torch.from_file(path, shared=True, size=size, dtype=dtype)
    finally:
        os.close(handle)
        os.unlink(path)


def _copied(cache: PagedKVCache, num_blocks: int, device: torch.device) -> PagedKVCache:
    """The first ``num_blocks`` of a layer's blocks on another device."""
    _, heads, size = cache.log_votes.shape
    cell = cell_bytes(cache.head_size, cache.keys.dtype) // cache.keys.element_size()
    memory = torch.empty(num_blocks, heads, size, cell, dtype=cache.keys.dtype, device=device)
    row_major, scales = cache.keys.stride(3) != 1, (cache.key_scale, cache.value_scale)
    copy = PagedKVCache.of(memory, cache.head_size, row_major, *scales)
    copy.content.copy_(cache.content[:num_blocks], non_blocking=True)
    return copy
