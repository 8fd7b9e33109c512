"""Time of decoding over fronts in 8 bits beside the same in bfloat16: ``python benchmarks/front_decode.py``.

Eight requests of one query each, with fronts of 8,000 entries and 16 tokens after them, one layer, one thread, turns
interleaved. Printed: KV heads, query heads of each, head size; the medians in milliseconds; their ratio.
"""

from dataclasses import replace
from statistics import median
from time import perf_counter

import torch

from vllm_kvmerge.ops import AttentionBatch, HeadPages, PagedKVCache, SequenceLayers, cell_bytes, cpu, reference

ROWS, FRONT, TAIL, BLOCK, TURNS = 8, 8000, 16, 32, 40
SHAPES = [(2, 7, 64), (4, 1, 64), (8, 4, 128), (2, 6, 128)]


def batches(cache: PagedKVCache, blocks: torch.Tensor) -> dict[str, AttentionBatch]:
    one = AttentionBatch.single(blocks[0], 1, FRONT + TAIL, FRONT, FRONT)
    plain = one.map(lambda t: t.repeat(ROWS, *[1] * (t.dim() - 1)), 1)
    plain.block_table.copy_(blocks)
    plain.query_starts.copy_(torch.arange(ROWS))
    ids = torch.stack([HeadPages.even(1, 0, cache.num_kv_heads, row[: FRONT // (2 * BLOCK)]) for row in blocks])
    pages = HeadPages((cache,), ids, torch.full(ids.shape[:2], FRONT), torch.ones(ROWS, dtype=torch.bool))
    return {"bfloat16": plain, "int8": replace(plain, pages=pages)}


def main() -> None:
    torch.set_num_threads(1)
    print(cpu.level())
    for heads, groups, size in SHAPES:
        num_blocks = -(-(FRONT + TAIL) // BLOCK)
        shape = ROWS * num_blocks, heads, BLOCK, cell_bytes(size, torch.bfloat16) // 2
        caches = {
            name: PagedKVCache.of(torch.zeros(shape, dtype=torch.bfloat16), size) for name in ("bfloat16", "int8")
        }
        blocks = torch.randperm(ROWS * num_blocks).view(ROWS, num_blocks)
        for cache in caches.values():
            cache.values.normal_()
            cache.keys.normal_()
            cache.log_votes.zero_()
        pages = batches(caches["int8"], blocks)["int8"].pages
        assert pages is not None
        for row in range(ROWS):
            keys, values = torch.randn(2, heads, FRONT, size)
            where = SequenceLayers.of(caches["int8"], blocks[row], 0, 0, 0)
            reference.write_codes(where, pages[row : row + 1], keys, values, torch.zeros(heads, FRONT))
        query = torch.randn(ROWS, heads * groups, size).bfloat16()
        times: dict[str, list[float]] = {name: [] for name in caches}
        for _ in range(TURNS):
            for name, cache in caches.items():
                batch, output = batches(cache, blocks)[name], torch.empty_like(query)
                begun = perf_counter()
                cpu.paged_attention(query, cache, batch, size**-0.5, output)
                times[name].append(1000 * (perf_counter() - begun))
        plain, coded = (median(some) for some in times.values())
        print(f"{heads}, {groups}, {size}: {plain:6.2f} {coded:6.2f} {plain / coded:5.2f}")


if __name__ == "__main__":
    main()
