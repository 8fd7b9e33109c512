"""Division of attention into programs: a function of shapes only, so that captured graphs stay valid for any batch."""

from dataclasses import dataclass
from functools import cache

import torch

from vllm_kvmerge.ops.pieces import Division
from vllm_kvmerge.ops.triton.tuning import Settings, settings
from vllm_kvmerge.ops.types import PagedKVCache
from vllm_kvmerge.ops.workspace import uses_workspace

KEPT_ROWS = 16
"""Rows of logits of one KV head, queries times query heads, that are kept for the score update; one tile has as many.
Those of more queries are recomputed, since keeping them would take more memory traffic than reading keys."""

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
class AttentionPlan(Division):
    """The shape of one call of attention.

    settings: those of ``attend``. block_m: its rows. tiles: in each sequence. kept: rows of logits kept for the score
    update; 0 if they are recomputed. sizes: elements of each buffer.
    """

    settings: Settings
    block_m: int
    tiles: int
    kept: int
    sizes: dict[str, int]

    @classmethod
    def of(
        cls,
        cache: PagedKVCache,
        num_heads: int,
        num_queries: int,
        rows: int,
        max_blocks: int,
        window: int = 0,
        is_prompt: bool = False,
    ) -> "AttentionPlan":
        """For ``rows`` sequences with up to ``num_queries`` queries of ``num_heads`` heads and ``max_blocks`` blocks.

        window: entries that a query sees, 0: all. is_prompt: prompts are scored, so that tiles are those of many
        queries, however many there are.
        """
        num_blocks, num_kv_heads = cache.keys.shape[:2]
        groups = num_heads // num_kv_heads
        few = groups * num_queries <= max(groups, KEPT_ROWS) and not is_prompt
        chosen = settings_for("decode" if few else "prefill", cache, groups)
        # As many rows whatever the number of queries: each size is a kernel of its own to compile.
        block_m = power_of_two(max(KEPT_ROWS, groups, 0 if few else chosen.block_m))
        tiles = -(-num_queries // (block_m // groups))
        slots = max(1, chosen.programs * multiprocessors(cache.keys.device) // num_kv_heads)
        most_entries = max_blocks * cache.block_size
        if window:
            most_entries = min(most_entries, window + block_m // groups - 1)
        most = min(slots, -(-most_entries // chosen.least))
        kept = groups * num_queries if few and not window else 0
        plan = cls(rows * tiles, slots, most, chosen, block_m, tiles, kept, {})
        plan.sizes["lse"] = plan.num_pieces * num_kv_heads * block_m
        if most > 1:
            plan.sizes["partial"] = plan.num_split * num_kv_heads * block_m * power_of_two(cache.head_size)
        if kept:
            plan.sizes["kept"] = num_blocks * num_kv_heads * kept * cache.block_size
        return plan


@uses_workspace
def _sizes(cache: PagedKVCache, num_heads: int, num_queries: int, rows: int, max_blocks: int) -> dict[str, int]:
    return AttentionPlan.of(cache, num_heads, num_queries, rows, max_blocks).sizes
