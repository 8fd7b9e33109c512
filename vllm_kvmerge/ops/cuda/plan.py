"""Launch grids of the CUDA operators: a function of shapes only, so that captured graphs stay valid."""

from dataclasses import dataclass
from functools import cache

import torch

from vllm_kvmerge.ops.pieces import Division
from vllm_kvmerge.ops.types import PagedKVCache
from vllm_kvmerge.ops.workspace import uses_workspace

MAX_ROWS = 16
"""Rows of queries of one KV head, queries times query heads (csrc/cuda/arguments.h)."""

LEAST_ENTRIES = 256
"""The smallest share that rows are cut into pieces of; a multiple of 64, of which a block's warps take 16 each."""

BLOCKS = 2
"""Blocks of attention on a multiprocessor: as many as an H200's shared memory has room for, of a head size of 128."""

EMULATED_MULTIPROCESSORS = 8


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return EMULATED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have."""
    if device.type != "cuda":
        return 163 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@dataclass(frozen=True)
class AttentionPlan(Division):
    """The shape of one call of attention; a tile is all queries of a sequence.

    head_size: as it is padded. kept: rows of logits that are kept for the score update. sizes: elements of each buffer.
    """

    head_size: int
    kept: int
    sizes: dict[str, int]

    @staticmethod
    def padded(head_size: int) -> int:
        """The size that kernels are compiled for."""
        return next(size for size in (64, 128, 256) if size >= head_size)

    @staticmethod
    def obstacle(cache: PagedKVCache, num_heads: int, num_queries: int) -> str | None:
        """Says why there is no plan for so many queries of so many heads; None if there is one."""
        rows = num_queries * num_heads // cache.num_kv_heads
        most = 8 if cache.keys.element_size() == 4 and cache.head_size > 128 else MAX_ROWS
        return None if 0 < rows <= most else f"{rows} rows of queries of a KV head are not from 1 to {most}"

    @classmethod
    def of(cls, cache: PagedKVCache, num_heads: int, num_queries: int, rows: int, max_blocks: int) -> "AttentionPlan":
        """For ``rows`` sequences of up to ``num_queries`` queries of ``num_heads`` heads and ``max_blocks`` blocks."""
        num_blocks, num_kv_heads = cache.keys.shape[:2]
        slots = max(1, BLOCKS * multiprocessors(cache.keys.device) // num_kv_heads)
        most = max(1, min(slots, -(-max_blocks * cache.block_size // LEAST_ENTRIES)))
        kept = num_queries * num_heads // num_kv_heads
        plan = cls(rows, slots, most, cls.padded(cache.head_size), kept, {})
        plan.sizes["lse"] = plan.num_pieces * num_kv_heads * MAX_ROWS
        if most > 1:
            plan.sizes["partial"] = plan.num_split * num_kv_heads * MAX_ROWS * plan.head_size
        plan.sizes["kept"] = num_blocks * num_kv_heads * kept * cache.block_size
        return plan


@uses_workspace
def _sizes(cache: PagedKVCache, num_heads: int, num_queries: int, rows: int, max_blocks: int) -> dict[str, int]:
    if AttentionPlan.obstacle(cache, num_heads, num_queries) is not None:
        return {}
    return AttentionPlan.of(cache, num_heads, num_queries, rows, max_blocks).sizes
