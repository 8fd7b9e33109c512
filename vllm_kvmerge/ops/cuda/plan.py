"""The blocks that calls of CUDA's operators are cut into: a function of shapes alone, so that captured graphs hold."""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from vllm_kvmerge.ops.types import PagedKVCache
from vllm_kvmerge.ops.workspace import uses_workspace

MAX_ROWS = 16
"""Rows of queries of one KV head, queries times query heads (csrc/cuda/arguments.h)."""

MAX_SPLITS = 128

LEAST_ENTRIES = 256
"""Entries of the smallest split; a multiple of 64, of which its warps take 16 each."""

BEGIN_ENTRIES = 128
"""As many could be read while a block begins and ends. Counted, not measured: some 4 us at 1/264 of a bandwidth."""

WAVES = 8
"""No more splits than fill a GPU so often."""

BLOCKS = 2
"""Blocks of attention on a multiprocessor: as many as an H200's shared memory has room for, of a head size of 128."""

UPDATE_BLOCKS = 8
"""Blocks, on a multiprocessor, of the launch that puts splits together, of 128 entries each: a thread has 32 bytes or
so of an entry under way, so that fewer would not have as many as a GPU can load meanwhile."""

BYTES_STAGED = 48 << 10
"""What a block of a compaction holds of keys or values at a time, unless it has more than 3,072 places."""

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


def merge_bytes(capacity: int, num_places: int) -> int:
    """Bytes of shared memory of a block of a compaction: what it stages, then its lists (csrc/cuda/merge.h)."""
    return capacity + 4 * (3 * num_places + 1)


def _shares(blocks: int, others: int, most: int, device: torch.device) -> int:
    return max(1, min(blocks * multiprocessors(device) // max(1, others), most))


@lru_cache(maxsize=4096)
def _splits(others: int, max_entries: int, room: int) -> int:
    """Number of splits that the entries of ``others`` sequences and heads are cut into.

    A GPU runs blocks in waves of ``room``, of which the last one may leave most of it idle: as few splits as take no
    more than 5% longer than the best number would, if every wave took as long as one block.
    """
    most = max(1, min(-(-max_entries // LEAST_ENTRIES), WAVES * room // max(1, others), MAX_SPLITS))
    times = [-(-splits * others // room) * (max_entries / splits + BEGIN_ENTRIES) for splits in range(1, most + 1)]
    return 1 + next(number for number, time in enumerate(times) if time <= 1.05 * min(times))


@dataclass(frozen=True)
class AttentionPlan:
    """The shape of one call of attention.

    splits: parts of the entries, of at least ``least`` each. head_size: as it is padded. kept: rows of logits
    that are kept for the score update. num_combined, num_parts: blocks, for each sequence and head, that put splits
    together and that update scores. sizes: elements of each buffer.
    """

    splits: int
    least: int
    head_size: int
    kept: int
    num_combined: int
    num_parts: int
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
        device = cache.keys.device
        max_entries = max_blocks * cache.block_size
        padded = cls.padded(cache.head_size)
        splits = _splits(rows * num_kv_heads, max_entries, BLOCKS * multiprocessors(device))
        kept = num_queries * num_heads // num_kv_heads
        parts = _shares(UPDATE_BLOCKS, rows * num_kv_heads, -(-max_entries // 128), device)
        sizes = {"lse": rows * num_kv_heads * splits * MAX_ROWS}
        if splits > 1:
            sizes["partial"] = sizes["lse"] * padded
        sizes["kept"] = num_blocks * num_kv_heads * kept * cache.block_size
        return cls(splits, LEAST_ENTRIES, padded, kept, kept if splits > 1 else 0, parts, sizes)


@uses_workspace
def _sizes(cache: PagedKVCache, num_heads: int, num_queries: int, rows: int, max_blocks: int) -> dict[str, int]:
    if AttentionPlan.obstacle(cache, num_heads, num_queries) is not None:
        return {}
    return AttentionPlan.of(cache, num_heads, num_queries, rows, max_blocks).sizes
