"""Statistics from the newest queries alone."""

import pytest
import torch

from vllm_kvmerge.ops import PagedKVCache, ScoreMode, ScoreUpdate, cell_bytes, score_prompt_queries
from vllm_kvmerge.policies.context import Queries
from vllm_kvmerge.policies.entries import DEAD, Entries
from vllm_kvmerge.policies.rescoring import newest_scores

HEADS, SIZE, BLOCK = 2, 16, 32
UPDATES = [ScoreUpdate(ScoreMode.SUM, 1.0), ScoreUpdate(ScoreMode.SUM, 0.9), ScoreUpdate(ScoreMode.MEAN, 1.0)]
UPDATES += [ScoreUpdate(ScoreMode.LOG_EMA, 0.9)]


def entries_of(keys: torch.Tensor) -> Entries:
    num_heads, count, _ = keys.shape
    planes = torch.zeros(3, num_heads, count)
    return Entries(keys, torch.randn_like(keys), *planes, torch.arange(count).expand(num_heads, -1).clone())


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: f"{update.mode.value}-{update.decay}")
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("count", "window"), [(5, 5), (77, 32), (130, 1)])
def test_tokens_are_scored_as_at_a_prompts_end(update, group, count, window):
    generator = torch.Generator().manual_seed(count)
    keys = torch.randn(HEADS, count, SIZE, generator=generator)
    query = torch.randn(window, HEADS * group, SIZE, generator=generator)
    memory = torch.zeros(-(-count // BLOCK), HEADS, BLOCK, cell_bytes(SIZE, torch.float32) // 4)
    cache = PagedKVCache.of(memory, SIZE, False)
    blocks = torch.arange(len(memory), dtype=torch.int32)
    for slot in range(count):
        cache.keys[slot // BLOCK, :, :, slot % BLOCK] = keys[:, slot]
    expected = torch.zeros(2, HEADS, count)
    score_prompt_queries(query, cache, blocks, update, 0.3, *expected)
    vectors = query.unflatten(1, (HEADS, group)).permute(1, 2, 0, 3)
    queries = Queries(vectors, torch.arange(count - window, count).expand(HEADS, -1))
    torch.testing.assert_close(torch.stack(newest_scores(entries_of(keys), queries, update, 0.3)), expected)


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: f"{update.mode.value}-{update.decay}")
def test_votes_count_and_dead_entries_do_not(update):
    """An entry of two votes is two entries of one; what a dead entry's key holds is of no account."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(HEADS, 20, SIZE, generator=generator)
    queries = Queries(torch.randn(HEADS, 2, 4, SIZE, generator=generator), torch.arange(30, 34).expand(HEADS, -1))
    once, twice = entries_of(keys), entries_of(torch.cat([keys, keys[:, :1]], 1))
    once.log_votes[:, 0] = torch.tensor(2.0).log()
    scores, aux = newest_scores(once, queries, update, 0.3)
    doubled, doubled_aux = newest_scores(twice, queries, update, 0.3)
    share = 2.0 if update.mode != ScoreMode.LOG_EMA else 1.0  # of a logit there is nothing to share
    torch.testing.assert_close(scores[:, 1:], doubled[:, 1:20])
    torch.testing.assert_close(scores[:, 0], share * doubled[:, 0])
    torch.testing.assert_close(aux, doubled_aux[:, :20])
    dead = entries_of(torch.cat([keys, torch.full_like(keys[:, :3], torch.nan)], 1))
    dead.log_votes[:, 0], dead.log_votes[:, 20:], dead.positions[:, 20:] = once.log_votes[:, 0], -torch.inf, DEAD
    found, found_aux = newest_scores(dead, queries, update, 0.3)
    torch.testing.assert_close(found[:, :20], scores)
    assert not found[:, 20:].any() and not found_aux[:, 20:].any()
