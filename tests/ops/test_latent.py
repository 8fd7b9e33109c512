"""Operators over a cache of latents, whose values are a part of their keys, against dense computations in float64."""

import pytest
import torch

from tests.ops.conftest import SUM, Sequence
from tests.ops.test_operators import dense_attention, dense_scores
from vllm_kvmerge import ops
from vllm_kvmerge.ops import AttentionBatch, HeadPages, LatentKVCache, Rows, SequenceLayers

SIZE, VALUE, BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS = 576, 512, 16, 24, 4
SCALE = 96**-0.5


def make_cache(dtype: torch.dtype = torch.float32) -> LatentKVCache:
    cell = ops.latent_cell_bytes(SIZE, dtype) // dtype.itemsize
    cache = LatentKVCache.of_latents(torch.zeros(NUM_BLOCKS, 1, BLOCK_SIZE, cell, dtype=dtype), VALUE)
    cache.latents.normal_()
    cache.positions.fill_(-1)
    return cache


def entries(cache: LatentKVCache, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``[n, SIZE]`` float64."""
    return cache.latents[blocks[slots // BLOCK_SIZE], slots % BLOCK_SIZE].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout(dtype):
    cache = make_cache(dtype)
    raw = cache.content.view(-1)
    assert cache.latents.data_ptr() == cache.values.data_ptr() == raw.data_ptr() and cache.head_size == SIZE
    assert torch.equal(cache.values, cache.keys.transpose(2, 3)[..., :VALUE])
    cache.log_votes[NUM_BLOCKS - 1, 0, BLOCK_SIZE - 1] = 2.5  # metadata lie behind all latents
    assert torch.equal(cache.content.view(-1), raw)
    before = cache.latents.clone()
    cache.copy_blocks(torch.tensor([NUM_BLOCKS - 1]), torch.tensor([3]))
    assert torch.equal(cache.latents[3], before[-1]) and cache.log_votes[3, 0, -1] == 2.5
    with pytest.raises(ValueError, match="does not hold latents"):
        LatentKVCache.of_latents(torch.zeros(2, 2, BLOCK_SIZE, 580), VALUE)


@pytest.mark.parametrize("num_queries", [1, 5])
def test_attention_over_front_and_tail(num_queries):
    cache, blocks = make_cache(), torch.randperm(NUM_BLOCKS)[:10]
    front, tail, seq_len = 37, 101, 130
    cache.log_votes.normal_()
    cache.scores.uniform_()
    query = torch.randn(num_queries, NUM_HEADS, SIZE)
    slots = torch.cat([torch.arange(front), torch.arange(tail, seq_len)])
    where = blocks[slots // BLOCK_SIZE], 0, slots % BLOCK_SIZE
    votes, before, latents = cache.log_votes[where], cache.scores[where], entries(cache, blocks, slots)
    votes[front:] = 0.0
    sequence = Sequence(front, tail, seq_len, blocks, latents[None], latents[None, :, :VALUE], votes[None].double())
    expected, logits, probabilities = dense_attention(query, sequence, SCALE)
    scores, _ = dense_scores(SUM, logits, probabilities, before[None], before[None], num_queries)
    output = torch.empty(num_queries, NUM_HEADS, VALUE)
    batch = AttentionBatch.single(blocks, num_queries, seq_len, front, tail, SUM)
    ops.paged_attention(query, cache, batch, SCALE, output)
    assert (output - expected).abs().max() < 1e-5
    assert (cache.scores[where] - scores[0]).abs().max() < 1e-5


@pytest.mark.parametrize("has_pages", [False, True])
def test_evictions_move_whole_latents(has_pages):
    """Entries move among blocks that overlap, or to pages, and take their metadata with them."""
    layers = [make_cache(), make_cache()]
    blocks, front, seq_len, capacity = torch.randperm(NUM_BLOCKS)[:8], 20, 128, 40
    destination: torch.Tensor | HeadPages = blocks[None, :3]
    if has_pages:
        pages = torch.tensor([[[NUM_BLOCKS * 2 - 1, 6, 3]]])  # of both layers
        others = {int(page) // 2 for page in pages.flatten()}
        blocks = torch.tensor([block for block in range(NUM_BLOCKS) if block not in others])[:8]
        destination = HeadPages(layers, pages, torch.tensor([[capacity]]))
    located = SequenceLayers(layers, torch.tensor([1]), blocks[None], torch.tensor([[front, front, seq_len]]))
    kept = torch.stack([torch.randperm(seq_len)[:capacity]])
    expected, metadata = entries(layers[1], blocks, kept[0]), torch.randn(3, 1, capacity)
    ops.merge_entries(located, destination, kept, (*metadata, kept), Rows(kept[:, :0], None, None))
    for place in range(capacity):
        page, slot = divmod(place, BLOCK_SIZE)
        block, layer = int(blocks[page]), 1
        if has_pages:
            block, layer = divmod(int(destination.ids[0, 0, page]), 2)
        assert torch.equal(layers[layer].latents[block, slot].double(), expected[place])
        assert layers[layer].positions[block, 0, slot] == kept[0, place]
        assert layers[layer].scores[block, 0, slot] == metadata[1, 0, place]


def test_rows_that_policies_read():
    cache, blocks = make_cache(torch.bfloat16), torch.arange(4)
    located = SequenceLayers.of(cache, blocks, 0, 0, 50)
    index = torch.tensor([[3, 49, -1]])
    keys, values = ops.gather_rows(located, "keys", index), ops.gather_rows(located, "values", index)
    assert keys.shape == (1, 3, SIZE) and torch.equal(values, keys[..., :VALUE])
    assert torch.equal(keys[0, 1].double(), entries(cache, blocks, torch.tensor([49]))[0]) and not keys[0, 2].any()
