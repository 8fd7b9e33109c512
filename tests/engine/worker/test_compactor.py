"""Compaction through the paged operators: what the papers prove for tensors must hold for pages."""

import pytest
import torch

from tests.entries import gather_entries
from tests.ops.conftest import SOFTMAXES, CacheMaker, softmax_of
from vllm_kvmerge.engine.attention.rows import PromptScores
from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.worker.compaction import Compaction
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.ops import (
    NO_UPDATE,
    PLAIN_SOFTMAX,
    AttentionBatch,
    ScoreMode,
    ScoreUpdate,
    paged_attention,
    score_prompt_queries,
)
from vllm_kvmerge.request.spec import parse_compression

NUM_HEADS, HEAD_SIZE, SCALE = 3, 32, 32**-0.5
EMA = ScoreUpdate(ScoreMode.LOG_EMA, 0.9)


def attend(maker, blocks, query, segments, update=NO_UPDATE, softmax=PLAIN_SOFTMAX):
    front, tail, seq_len = segments
    output = torch.full_like(query, torch.nan)
    batch = AttentionBatch.single(blocks, len(query), seq_len, front, tail, update)
    paged_attention(query, maker.pages, batch, SCALE, output, softmax)
    return output


def compact(maker, sequence, segments, scores, mode, merge_first, softmax=PLAIN_SOFTMAX):
    """To 40 entries in the sequence's own blocks, whatever is merged."""
    fields = {"recent_window": 4, "merge_threshold": -1.0, "zip_mode": mode, "merge_first": merge_first}
    config = parse_compression({"policy": "keepkv", "selector": "h2o", "budget": 40, **fields})
    front, tail, end = segments
    plan = Compress("r", config.text, "growth", end, end, 40, 40, sequence.blocks[:2].tolist())
    compaction = Compaction(plan, config.policy, sequence.blocks, scores, front=front, tail=tail)
    return Compactor([maker.pages], SCALE, list(range(NUM_HEADS)), softmax=lambda layer: softmax).run([compaction])[0]


@pytest.mark.parametrize("mode", ["scale", "votes", "auto"])
@pytest.mark.parametrize("merge_first", [True, False])
@pytest.mark.parametrize("kind", SOFTMAXES)
def test_keepkv_is_lossless_for_the_current_query(mode, merge_first, kind):
    """KeepKV theorem 3 through pages: one query head per KV head, the scores are the current query's own."""
    maker = CacheMaker(11, NUM_HEADS, HEAD_SIZE, 32, torch.float32)
    sequence = maker.sequence(front=0, tail=0, seq_len=200)
    query = maker.randn(1, NUM_HEADS, HEAD_SIZE)
    scores, softmax = PromptScores.empty(1, NUM_HEADS, 200), softmax_of(maker, kind, NUM_HEADS, 1)
    score_prompt_queries(query, maker.pages, sequence.blocks, EMA, SCALE, scores.scores[0], scores.aux[0], softmax)
    before = attend(maker, sequence.blocks, query, (0, 0, 200), softmax=softmax)
    counts = compact(maker, sequence, (0, 0, 200), scores, mode, merge_first, softmax)
    assert counts == (160 * NUM_HEADS, 0)  # merged, and evicted
    after = attend(maker, sequence.blocks, query, (40, 200, 200), softmax=softmax)
    # Near the cap its inverse amplifies rounding.
    assert float((after - before).norm() / before.norm()) < (1e-4 if softmax.cap else 1e-5)


@pytest.mark.parametrize("mode", ["scale", "votes", "auto"])
def test_a_second_merge_of_front_and_tail_is_lossless_too(mode):
    """Votes, scores and a hole from a first merge are carried through a second one."""
    maker = CacheMaker(12, NUM_HEADS, HEAD_SIZE, 32, torch.float32)
    segments = 60, 130, 190
    sequence = maker.sequence(*segments)
    live = gather_entries(maker.pages, sequence.blocks, *segments)
    assert (live.log_votes[:, :60] > 0).any()
    maker.pages.aux.fill_(0.0)
    maker.pages.scores.fill_(0.0)
    query = maker.randn(1, NUM_HEADS, HEAD_SIZE)
    before = attend(maker, sequence.blocks, query, segments, EMA)
    assert compact(maker, sequence, segments, None, mode, merge_first=False) == (80 * NUM_HEADS, 0)
    after = attend(maker, sequence.blocks, query, (40, 190, 190))
    assert float((after - before).norm() / before.norm()) < 1e-5
