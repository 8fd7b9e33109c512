"""Division of attention into programs: a function of shapes alone, so that captured graphs hold for any batch."""

from dataclasses import dataclass
from functools import cache

import torch

from vllm_kvmerge.ops.triton.tuning import Settings, settings
from vllm_kvmerge.ops.types import PagedKVCache
from vllm_kvmerge.ops.workspace import uses_workspace

KEPT_ROWS = 16
"""Rows of logits of one KV head, queries times query heads, that are kept for the score update; one tile has as many.
Those of more queries are recomputed, since keeping them would take more memory traffic than reading keys."""

MAX_SPLITS = 128

INTERPRETED_MULTIPROCESSORS = 8
"""Few, so that the interpreter runs few programs, but enough for some splits."""


@cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(size: int) -> int:
    """Smallest power of two that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()


def settings_for(kernel: str, cache: PagedKVCache, groups: int = 1) -> Settings:
    head_size = power_of_two(cache.head_size)
    row_bytes = head_size * cache.keys.element_size()
    return settings(kernel, device_name(cache.keys.device), head_size, row_bytes, groups)


def shares(programs: int, others: int, most: int, cache: PagedKVCache) -> int:
    """Number of parts, up to ``most``, to cut work into: ``others`` times as many put ``programs`` on each of the GPU's
    multiprocessors."""
    wanted = programs * multiprocessors(cache.keys.device) // max(1, others)
    return max(1, min(wanted, most))


@dataclass(frozen=True)
class AttentionPlan:
    """The shape of one call of attention.

    settings: those of ``attend``. block_m: its rows. tiles: of queries in each sequence. splits: of the entries, a
    power of two. kept: rows of logits kept for the score update; 0 if they are recomputed. sizes: elements of each
    buffer.
    """

    settings: Settings
    block_m: int
    tiles: int
    splits: int
    kept: int
    sizes: dict[str, int]

    @classmethod
    def of(
        cls, cache: PagedKVCache, num_heads: int, num_queries: int, rows: int, max_blocks: int, keeps: bool = True
    ) -> "AttentionPlan":
        """For ``rows`` sequences with up to ``num_queries`` queries of ``num_heads`` heads and ``max_blocks`` blocks.

        keeps: true if logits may be kept.
        """
        num_blocks, num_kv_heads = cache.keys.shape[:2]
        groups = num_heads // num_kv_heads
        few = groups * num_queries <= max(groups, KEPT_ROWS)
        chosen = settings_for("decode" if few else "prefill", cache, groups)
        block_m = power_of_two(max(16, groups * num_queries if few else max(groups, chosen.block_m)))
        tiles = -(-num_queries // (block_m // groups))
        most = min(MAX_SPLITS, -(-max_blocks * cache.block_size // chosen.least))
        splits = shares(chosen.programs, rows * tiles * num_kv_heads, most, cache)
        splits = 1 << (splits.bit_length() - 1)
        kept = groups * num_queries if few and keeps else 0
        lse = rows * tiles * num_kv_heads * splits * block_m
        sizes = {"lse": lse}
        if splits > 1:
            sizes["partial"] = lse * power_of_two(cache.head_size)
        if kept:
            sizes["kept"] = num_blocks * num_kv_heads * kept * cache.block_size
        return cls(chosen, block_m, tiles, splits, kept, sizes)


@uses_workspace
def _sizes(cache: PagedKVCache, num_heads: int, num_queries: int, rows: int, max_blocks: int) -> dict[str, int]:
    return AttentionPlan.of(cache, num_heads, num_queries, rows, max_blocks).sizes
