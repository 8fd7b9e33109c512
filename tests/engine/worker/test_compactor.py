"""Compaction through the paged operators: what the papers prove for tensors must hold for pages."""

import pytest
import torch

from tests.entries import gather_entries
from tests.ops.conftest import SOFTMAXES, CacheMaker, softmax_of
from vllm_kvmerge.engine.attention.rows import PromptScores
from vllm_kvmerge.engine.plan import CompressionPlan
from vllm_kvmerge.engine.worker.compactor import Compaction, Compactor
from vllm_kvmerge.ops import (
    NO_UPDATE,
    PLAIN_SOFTMAX,
    AttentionBatch,
    ScoreMode,
    ScoreUpdate,
    paged_attention,
    score_prompt_queries,
)
from vllm_kvmerge.request.parameters import parse_compression

NUM_HEADS, HEAD_SIZE, SCALE = 3, 32, 32**-0.5
EMA = ScoreUpdate(ScoreMode.LOG_EMA, 0.9)


def attend(maker, blocks, query, front, tail, seq_len, update=NO_UPDATE, softmax=PLAIN_SOFTMAX):
    output = torch.full_like(query, torch.nan)
    batch = AttentionBatch.single(blocks, len(query), seq_len, front, tail, update)
    paged_attention(query, maker.pages, batch, SCALE, output, softmax)
    return output


def plan_for(compression, front, tail, num_tokens, new_front, blocks):
    return CompressionPlan("r", compression, front, tail, num_tokens, new_front, new_front, blocks.tolist())


def compact(layers, plan, config, source_blocks, prompt_scores, softmax=PLAIN_SOFTMAX):
    compaction = Compaction(plan, config.policy, source_blocks, prompt_scores)
    return Compactor(layers, SCALE, list(range(NUM_HEADS)), softmax=lambda layer: softmax).run([compaction])[0]


def keepkv(mode: str, merge_first: bool) -> str:
    return (
        '{"policy": "keepkv", "selector": "h2o", "budget": 40, "recent_window": 4, "merge_threshold": -1.0, '
        f'"zip_mode": "{mode}", "merge_first": {str(merge_first).lower()}}}'
    )


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
    before = attend(maker, sequence.blocks, query, 0, 0, 200, softmax=softmax)
    text = keepkv(mode, merge_first)
    plan = plan_for(text, 0, 0, 200, 40, sequence.blocks[:2])
    num_merged, num_evicted = compact([maker.pages], plan, parse_compression(text), sequence.blocks, scores, softmax)
    assert (num_merged, num_evicted) == (160 * NUM_HEADS, 0)
    after = attend(maker, sequence.blocks, query, 40, 200, 200, softmax=softmax)
    # Near the cap its inverse amplifies rounding.
    assert float((after - before).norm() / before.norm()) < (1e-4 if softmax.cap else 1e-5)


@pytest.mark.parametrize("mode", ["scale", "votes", "auto"])
def test_a_second_merge_of_front_and_tail_is_lossless_too(mode):
    """Votes, scores and a hole from a first merge are carried through a second one."""
    maker = CacheMaker(12, NUM_HEADS, HEAD_SIZE, 32, torch.float32)
    sequence = maker.sequence(front=60, tail=130, seq_len=190)
    live = gather_entries(maker.pages, sequence.blocks, 60, 130, 190)
    assert (live.log_votes[:, :60] > 0).any()
    maker.pages.aux.fill_(0.0)
    maker.pages.scores.fill_(0.0)
    query = maker.randn(1, NUM_HEADS, HEAD_SIZE)
    before = attend(maker, sequence.blocks, query, 60, 130, 190, EMA)
    text = keepkv(mode, False)
    plan = plan_for(text, 60, 130, 190, 40, sequence.blocks[:2])
    num_merged, num_evicted = compact([maker.pages], plan, parse_compression(text), sequence.blocks, None)
    assert (num_merged, num_evicted) == (80 * NUM_HEADS, 0)
    after = attend(maker, sequence.blocks, query, 40, 190, 190)
    assert float((after - before).norm() / before.norm()) < 1e-5


@pytest.mark.parametrize("policy", ["local", "streaming_llm", "h2o", "snapkv", "keepkv", "zsmerge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_budget_of_all_entries_is_a_plain_copy(policy, dtype):
    maker = CacheMaker(13, NUM_HEADS, HEAD_SIZE, 32, dtype)
    sequence = maker.sequence(front=0, tail=0, seq_len=75)
    fresh = maker.sequence(front=0, tail=0, seq_len=75)
    text = f'{{"policy": "{policy}", "budget": 75}}'
    plan = plan_for(text, 0, 0, 75, 75, fresh.blocks)
    assert compact([maker.pages], plan, parse_compression(text), sequence.blocks, None) == (0, 0)
    source = gather_entries(maker.pages, sequence.blocks, 0, 0, 75)
    copy = gather_entries(maker.pages, fresh.blocks, 75, 75, 75)
    assert torch.equal(source.keys, copy.keys)
    assert torch.equal(source.values, copy.values)
    assert torch.equal(copy.positions, torch.arange(75).expand(NUM_HEADS, -1))
    assert (copy.log_votes == 0).all()


def test_statistics_left_in_a_recycled_block_are_not_believed():
    """Blocks come from a pool: before its first compression a request owns no score in them."""
    results = []
    for poison in (0.0, 1e6):
        maker = CacheMaker(14, NUM_HEADS, HEAD_SIZE, 32, torch.float32)
        sequence = maker.sequence(front=0, tail=0, seq_len=150)
        maker.pages.scores.fill_(poison)
        maker.pages.aux.fill_(poison)
        maker.pages.log_votes.fill_(poison)
        text = '{"policy": "h2o", "budget": 40}'
        scores = PromptScores.empty(1, NUM_HEADS, 150)
        query = torch.randn(9, NUM_HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(1))
        update = ScoreUpdate(ScoreMode.SUM, 1.0)
        score_prompt_queries(query, maker.pages, sequence.blocks, update, SCALE, scores.scores[0], scores.aux[0])
        plan = plan_for(text, 0, 0, 150, 40, sequence.blocks[:2])
        compact([maker.pages], plan, parse_compression(text), sequence.blocks, scores)
        results.append(gather_entries(maker.pages, sequence.blocks, 40, 150, 150))
    for name in ("keys", "values", "log_votes", "scores", "positions"):
        assert torch.equal(getattr(results[0], name), getattr(results[1], name))
