"""Complete caches outside the pool: what they hold, and fronts that are made from them."""

import os

import pytest
import torch

from tests.entries import gather_entries
from tests.ops.conftest import CacheMaker
from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.worker.compaction import Compaction
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.engine.worker.external import ExternalCache
from vllm_kvmerge.engine.worker.rows import score_update
from vllm_kvmerge.ops import score_prompt_queries
from vllm_kvmerge.ops.types import QUANTISED
from vllm_kvmerge.request.spec import parse_compression

HEADS, GROUP, SIZE, SCALE, LAYERS = 2, 3, 32, 32**-0.5, 2


def pool_of(seq_len, dtype=torch.float32, copies=1):
    """Layers of a pool, and the blocks of one sequence in them for each copy."""
    maker = CacheMaker(31, HEADS, SIZE, 32, dtype)
    blocks = [maker.sequence(front=0, tail=0, seq_len=seq_len).blocks]
    for _ in range(1, copies):
        blocks.append(maker.sequence(front=0, tail=0, seq_len=seq_len).blocks)
        for plane in (maker.pages.keys, maker.pages.values):
            plane[blocks[-1].long()] = plane[blocks[0].long()]
    other = maker.cache.clone()
    if dtype not in QUANTISED:
        other.mul_(-0.7)
    return [maker.pages, maker.views(other)], *blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *QUANTISED], ids=str)
@pytest.mark.parametrize("in_folder", [False, True])
def test_it_holds_the_tokens_whatever_becomes_of_their_blocks(dtype, in_folder, tmp_path):
    pool, blocks = pool_of(200, dtype)
    expected = [gather_entries(cache, blocks, 0, 0, 200) for cache in pool]
    external = ExternalCache.empty(pool, 200, tmp_path if in_folder else None)
    assert not list(tmp_path.iterdir())  # the file has no name: nothing is left, however the process ends
    front = 0
    for end in (70, 71, 96, 130, 200):
        external.append(pool, blocks, end, front)
        front = end - 3  # reaches into the last block
        for cache in pool:
            slots = torch.arange(front)
            ids, offsets = blocks[slots // 32].long(), slots % 32
            cache.keys[ids, :, :, offsets] = torch.nan
            cache.values[ids, :, offsets] = torch.nan
    for cache, entries in zip(external.layers, expected, strict=True):
        found = gather_entries(cache, external.blocks, 0, 0, 200)
        assert torch.equal(found.keys, entries.keys)
        assert torch.equal(found.values, entries.values)


def test_a_folder_without_room_is_an_error_before_anything_is_written(tmp_path):
    pool, _ = pool_of(40)
    free = os.statvfs(tmp_path)
    too_many = 2 * free.f_bavail * free.f_frsize // (LAYERS * HEADS * SIZE * 8)
    with pytest.raises(OSError):
        ExternalCache.empty(pool, too_many, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "policy", ["keepkv", "h2o", "zsmerge", "weightedkv", "grkv", "morphkv", "d2o", "pyramidkv", "streaming_llm"]
)
def test_a_front_from_it_is_what_the_tokens_would_have_been_compressed_to(policy):
    """The pool holds a compressed front and a tail, the complete cache the tokens; and the same tokens lie in the pool
    uncompressed. Both are compressed by the same queries."""
    config = parse_compression({"policy": policy, "budget": 80, "refresh": {"every": 16, "queries": 20}})
    assert config is not None
    total = 240
    pool, blocks, fresh = pool_of(total, copies=2)
    external = ExternalCache.empty(pool, total)
    external.append(pool, blocks, total, 0)
    ring = QueryRing.empty(LAYERS, max(1, config.query_window), HEADS * GROUP, SIZE, torch.float32)
    generator = torch.Generator().manual_seed(7)
    queries = torch.randn(LAYERS, total, HEADS * GROUP, SIZE, generator=generator)
    for layer in range(LAYERS):
        ring.write(layer, queries[layer, -ring.window :], total)

    expected = PromptScores.empty(LAYERS, HEADS, total)
    update, window = score_update(config), config.refresh_window
    for layer in range(LAYERS) if window else ():
        planes = expected.scores[layer], expected.aux[layer]
        score_prompt_queries(queries[layer, -window:], pool[layer], blocks, update, SCALE, *planes)
    scores = external.scores(ring, window, update, SCALE) if window else None
    if scores is not None:
        assert torch.equal(scores.scores, expected.scores)
        assert scores.scores.any()

    capacity = config.resolve_capacity(total) or total
    own_queries = ring if config.policy.query_window else None

    def compressed(front, tail, complete, target):
        purpose = "context" if complete is None else "refresh"
        plan = Compress("r", config.text, purpose, total, total, 80, capacity, target.tolist())
        known, segments = expected if window else None, {"front": front, "tail": tail}
        compaction = Compaction(plan, config.policy, blocks, known, own_queries, complete, **segments)
        compactor = Compactor(pool, SCALE, list(range(HEADS)), group_size=GROUP, max_bytes=1 << 20)
        compactor.run([compaction])
        return [gather_entries(cache, target, capacity, total, total) for cache in pool]

    plain = compressed(0, 0, None, fresh)
    for cache in pool:  # what is left of the front in the pool must not matter
        cache.keys[blocks.long()] = torch.nan
        cache.values[blocks.long()] = torch.nan
    for one, other in zip(plain, compressed(80, 200, external, blocks), strict=True):
        for name in ("keys", "values", "log_votes", "scores", "aux", "positions"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
