"""Keys and queries after many compactions against those before RoPE, turned to where the cache has them by then."""

import pytest
import torch
from torch import Tensor

from tests.entries import gather_entries
from tests.policies.sampling import rope
from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.worker.cache_positions import moves
from vllm_kvmerge.engine.worker.compaction import Compaction
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.ops import PagedKVCache, cell_bytes, write_tokens
from vllm_kvmerge.policies import DEAD
from vllm_kvmerge.request.spec import parse_compression

LAYERS, HEADS, SIZE, BLOCK = 2, 3, 32, 16
PROMPT, ROUNDS, NEW, BUDGET, WINDOW = 90, 12, 13, 40, 24

POLICIES = [
    {"policy": "streaming_llm"},
    {"policy": "h2o"},
    {"policy": "morphkv", "recent_window": WINDOW},
    {"policy": "snapkv", "decode": "bounded", "window_size": 8, "allocator": "adaptive"},  # with empty places
    {"policy": "h2o", "protect": {"tokens": [[30, 36]]}},
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("turned", "is_neox"), [(SIZE, True), (SIZE, False), (SIZE // 2, True)])
@pytest.mark.parametrize("fields", POLICIES, ids=lambda fields: "-".join(map(str, fields.values())))
def test_keys_and_queries_are_turned_to_their_places(fields, turned, is_neox):
    config = parse_compression({"budget": BUDGET, "positions": "cache"} | fields)
    assert config is not None
    generator, rotation, total = torch.Generator().manual_seed(7), rope(turned, is_neox), PROMPT + ROUNDS * NEW
    cell, num_blocks = cell_bytes(SIZE, torch.float32) // 4, -(-total // BLOCK)
    layers = [PagedKVCache.of(torch.zeros(num_blocks, HEADS, BLOCK, cell), SIZE) for _ in range(LAYERS)]
    compactor = Compactor(layers, SIZE**-0.5, list(range(HEADS)), rotation=rotation)
    ring = QueryRing.empty(LAYERS, WINDOW, HEADS, SIZE, torch.float32)
    keys, queries = torch.randn(2, LAYERS, total, HEADS, SIZE, generator=generator)
    blocks, scores = torch.randperm(num_blocks, generator=generator), PromptScores.empty(LAYERS, HEADS, PROMPT)
    scores.scores.uniform_(generator=generator)
    capacity = config.policy.capacity(BUDGET)

    def turn(vectors: Tensor, first: int) -> Tensor:
        """``[tokens, H, d]`` at positions from ``first`` on."""
        return rotation.turned(vectors, torch.arange(first, first + len(vectors))[:, None])

    front = tail = 0
    for end in range(PROMPT, total + 1, NEW):
        start = end - NEW if tail else 0
        slots = torch.arange(start, end)
        for layer, cache in enumerate(layers):
            key = turn(keys[layer, start:end], front + start - tail)
            write_tokens(cache, blocks[slots // BLOCK] * BLOCK + slots % BLOCK, key, key)
            query = turn(queries[layer, max(start, end - WINDOW) : end], front + max(start, end - WINDOW) - tail)
            ring.write(layer, query, end)
            cache.scores.uniform_(generator=generator)
        new_front = min(capacity, front + end - tail)
        own = blocks[: -(-new_front // BLOCK)].tolist()
        plan, known = Compress("r", config.text, "growth", end, end, BUDGET, new_front, own), None if tail else scores
        compaction = Compaction(plan, config.policy, blocks, known, ring, moves_keys=True, front=front, tail=tail)
        assert not compactor.execute([compaction]).failures
        compactor.move_queries(ring, end, front - tail, new_front - end)
        front, tail = new_front, end
        for layer, cache in enumerate(layers):
            entries = gather_entries(cache, blocks, front, tail, end)
            for head, row in enumerate(entries.positions.tolist()):
                live = sorted(position for position in row if position != DEAD)
                for place, position in enumerate(row):
                    if position != DEAD:
                        at = front - len(live) + live.index(position)
                        expected = rotation.turned(keys[layer, position, head], torch.tensor(at))
                        torch.testing.assert_close(entries.keys[head, place], expected, rtol=0, atol=1e-4)
            newest = turn(queries[layer, end - WINDOW : end], front - WINDOW)
            torch.testing.assert_close(ring.queries(end)[layer], newest, rtol=0, atol=1e-4)
    assert front < PROMPT < tail


def test_a_merged_key_moves_as_its_newest_token_does():
    """Places that are empty count as the oldest entries."""
    source = torch.tensor([[5, DEAD, 0, 9, 20, 21]])  # positions in the cache: 2, 0, 1, 3, 4, 5
    places = torch.tensor([[20, 0, 9]])  # 5 has been merged into the entry that is the first now, 21 has left
    before, after = moves(source, places, 4)
    assert before.tolist() == [[4, 1, 3]] and after.tolist() == [[3, 1, 2]]
