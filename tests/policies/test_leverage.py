"""Compactor's scores against dense float64 computations."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.policies.sampling import concatenate, for_parts, newest_queries, random_entries, rope
from vllm_kvmerge.policies import CompressionContext, Entries
from vllm_kvmerge.policies.selectors import Leverage
from vllm_kvmerge.policies.selectors.leverage import RIDGE, gaussian, leverage_scores
from vllm_kvmerge.request.spec import parse_compression

HEADS, GROUP, SIZE, TOKENS = 2, 2, 16, 150
SELECTOR = Leverage(num_sink_tokens=8, recent_window=4, attention_window=20, attention_chunk=40, sketch_size=12)
COUNTED = slice(8, TOKENS - 4)


def scene(**fields: object) -> tuple[Entries, CompressionContext]:
    """A prompt of ``TOKENS`` tokens, in any order; queries and keys are turned by RoPE already."""
    entries = random_entries(4, HEADS, TOKENS, SIZE)
    vectors = torch.randn(HEADS, GROUP, 30, SIZE, generator=torch.Generator().manual_seed(5)) / 2
    known = {"queries": newest_queries(vectors, TOKENS), "rotation": rope(SIZE)} | fields
    return entries, for_parts(CompressionContext.of_layer(entries, 60, TOKENS, at_prompt_end=True, **known))


def ordered(entries: Entries, plane: Tensor) -> Tensor:
    """A plane of the entries, ``[H, n, ...]``, in order of position, in float64."""
    return torch.stack([row[order] for row, order in zip(plane, entries.positions.argsort(1), strict=True)]).double()


def dense_leverage(entries: Entries, head: int) -> Tensor:
    keys = ordered(entries, entries.keys)[head].float()
    rows = (
        rope(SIZE).turned_back(keys, torch.arange(TOKENS))[COUNTED].double()
        @ gaussian(SIZE, 12, torch.device("cpu")).double()
    )
    rows = rows - rows.mean(0)
    return (rows @ torch.linalg.inv(rows.T @ rows + RIDGE * torch.eye(12)) @ rows.T).diagonal()


def dense_attention(entries: Entries, context: CompressionContext, head: int) -> Tensor:
    """Each chunk of 40 entries, one query after the other."""
    keys, values = (ordered(entries, plane)[head, COUNTED] for plane in (entries.keys, entries.values))
    votes = ordered(entries, entries.log_votes)[head, COUNTED]
    newest, total = context.queries.newest(20), torch.zeros(len(keys), dtype=torch.float64)
    for start in range(0, len(keys), 40):
        chunk = slice(start, min(start + 40, len(keys)))
        count = chunk.stop - start
        for group in range(GROUP):
            for place in range(20):
                query = rope(SIZE).turned_back(newest.vectors[head, group, place], newest.positions[head, place])
                query = rope(SIZE).turned(query, torch.tensor(8 + start + place * count // 20)).double()
                total[chunk] += (keys[chunk] @ query + votes[chunk]).softmax(0) * count / (20 * GROUP)
    total *= values.norm(dim=-1)
    padded = torch.cat([torch.zeros(1), total, torch.zeros(1)])
    return (padded[:-2] + padded[1:-1] + padded[2:]) / 3


def z(scores: Tensor) -> Tensor:
    return (scores - scores.mean()) / scores.std()


@pytest.mark.parametrize("blending", [None, 0.0, 2.5])
def test_scores_are_those_of_the_paper(blending):
    entries, context = scene()
    entries.log_votes[:, 30:40] = 1.0
    selector = SELECTOR.model_copy(update={"blending": blending})
    protected = selector.protected(entries, context)
    found = ordered(entries, selector.ranking(entries, entries.scores, protected, context))
    weight = 1 - 60 / TOKENS if blending is None else blending
    expected = torch.zeros(HEADS, TOKENS, dtype=torch.float64)
    for head in range(HEADS):
        expected[head, COUNTED] = weight * z(dense_leverage(entries, head)) + z(dense_attention(entries, context, head))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    kept = ordered(entries, selector.select(entries, entries.scores, protected, context)).bool()
    assert kept[:, :8].all() and kept[:, -4:].all()
    best = expected[:, COUNTED].topk(60 - 12, dim=1).values[:, -1:]
    assert torch.equal(kept[:, COUNTED], expected[:, COUNTED] >= best)


def test_leverage_alone_where_there_are_no_queries():
    entries, context = scene(queries=None)
    selector = SELECTOR.model_copy(update={"blending": 1.0})
    found = ordered(entries, selector.ranking(entries, entries.scores, selector.protected(entries, context), context))
    expected = torch.stack([z(dense_leverage(entries, head)) for head in range(HEADS)])
    torch.testing.assert_close(found[:, COUNTED], expected, rtol=0, atol=1e-4)


def test_equal_rows_have_no_leverage():
    counted = torch.ones(1, 6, dtype=torch.bool)
    assert torch.equal(leverage_scores(torch.ones(1, 6, 12), counted), torch.zeros(1, 6))


def test_dead_and_protected_entries_count_nowhere():
    entries, context = scene()
    expected = SELECTOR.mass(entries, context)
    dead = random_entries(7, HEADS, 30, SIZE, num_dead=30)
    found = SELECTOR.mass(concatenate(dead, entries), context)[:, 30:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    entries.keys[SELECTOR.protected(entries, context)] = 50.0
    torch.testing.assert_close(SELECTOR.mass(entries, context), expected)


@pytest.mark.parametrize("fields", [{"allocator": "adaptive"}, {"budget": {"threshold": 0.004, "max": 60}}], ids=str)
def test_budgets_follow_from_it(fields):
    """Allocators read its mass before there are budgets."""
    entries, context = scene()
    policy = parse_compression({"policy": "compactor", "budget": 60} | fields).policy
    kept = policy.compress(entries, replace(context, budgets=None, capacity=TOKENS)).kept
    assert kept.min() > 0 and kept.max() <= TOKENS and len(kept.unique()) > 1


def test_the_sketch_is_always_the_same():
    sketch = gaussian(64, 48, torch.device("cpu"))
    torch.randn(5)
    gaussian.cache_clear()
    assert torch.equal(gaussian(64, 48, torch.device("cpu")), sketch)
    torch.testing.assert_close(sketch.square().mean() * 48, torch.tensor(1.0), rtol=0, atol=0.06)
