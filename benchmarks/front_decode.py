"""Time of decoding over coded fronts beside the same in bfloat16: ``python benchmarks/front_decode.py``.

Eight requests of one query each, with fronts of 8,000 entries and 16 tokens after them, one layer, one thread, turns
interleaved. Printed: KV heads, query heads of each, head size; the medians in milliseconds, in bfloat16 and coded; how
many times as fast these are.
"""

from dataclasses import replace
from statistics import median
from time import perf_counter

import torch

from vllm_kvmerge.ops import AttentionBatch, HeadPages, PagedKVCache, SequenceLayers, cell_bytes, cpu, reference
from vllm_kvmerge.ops.coded import CODINGS, number_of, slots_of

ROWS, FRONT, TAIL, BLOCK, TURNS = 8, 8000, 16, 32, 40
SHAPES = [(2, 7, 64), (4, 1, 64), (8, 4, 128), (2, 6, 128)]


def batch_of(blocks: torch.Tensor) -> AttentionBatch:
    one = AttentionBatch.single(blocks[0], 1, FRONT + TAIL, FRONT, FRONT)
    batch = one.map(lambda t: t.repeat(ROWS, *[1] * (t.dim() - 1)), 1)
    batch.block_table.copy_(blocks)
    batch.query_starts.copy_(torch.arange(ROWS))
    return batch


def main() -> None:
    torch.set_num_threads(1)
    print(cpu.level())
    for heads, groups, size in SHAPES:
        num_blocks = -(-(FRONT + TAIL) // BLOCK)
        shape = ROWS * num_blocks, heads, BLOCK, cell_bytes(size, torch.bfloat16) // 2
        blocks, names = torch.randperm(ROWS * num_blocks).view(ROWS, num_blocks), (None, *CODINGS)
        caches = [PagedKVCache.of(torch.zeros(shape, dtype=torch.bfloat16), size) for _ in names]
        for cache in caches:
            cache.values.normal_()
            cache.keys.normal_()
            cache.log_votes.zero_()
        batches = [batch_of(blocks)] * len(names)
        for number, (coding, cache) in enumerate(zip(names, caches, strict=True)):
            if coding is None:
                continue
            in_front = -(-FRONT // (slots_of(coding) * BLOCK))
            ids = torch.stack([HeadPages.even(1, 0, heads, row[:in_front]) for row in blocks])
            coded = torch.full((ROWS,), number_of(coding), dtype=torch.uint8)
            pages = HeadPages((cache,), ids, torch.full(ids.shape[:2], FRONT), coded)
            batches[number] = replace(batches[number], pages=pages)
            for row in range(ROWS):
                keys, values = torch.randn(2, heads, FRONT, size)
                where = SequenceLayers.of(cache, blocks[row], 0, 0, 0)
                reference.write_codes(where, pages[row : row + 1], keys, values, torch.zeros(heads, FRONT))
        query = torch.randn(ROWS, heads * groups, size).bfloat16()
        times: list[list[float]] = [[] for _ in names]
        for _ in range(TURNS):
            for cache, batch, taken in zip(caches, batches, times, strict=True):
                output = torch.empty_like(query)
                begun = perf_counter()
                cpu.paged_attention(query, cache, batch, size**-0.5, output)
                taken.append(1000 * (perf_counter() - begun))
        plain, *others = map(median, times)
        figures = [f"{name} {taken:6.2f} {plain / taken:5.2f}" for name, taken in zip(CODINGS, others, strict=True)]
        print(f"{heads}, {groups}, {size}: {plain:6.2f} ", *figures, flush=True)


if __name__ == "__main__":
    main()
