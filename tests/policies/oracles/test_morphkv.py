"""MorphKV (arXiv:2503.00979): algorithm 1 and the authors' code."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.policies.oracles.stream import Head, Step, Stream, assert_follows, attend

CAPACITY, WINDOW = 20, 6

AUTHORS = {"softmax_over": "distant", "group_fusion": "max", "voting_queries": WINDOW - 1}
"""What the authors' code does for Mistral, Qwen2 and Phi-3."""


def chosen(scores: Tensor, tokens: list[int]) -> list[int]:
    """The old tokens of largest score (``[n]``, of the first n tokens), and those that follow."""
    best = scores.topk(CAPACITY - WINDOW).indices.sort().values.tolist()
    return [tokens[i] for i in best] + tokens[len(scores) :]


def fused(scores: Tensor, fusion: str) -> Tensor:
    """``[n]``; scores: ``[w, n]``."""
    return scores.sum(0) if fusion == "sum" else scores.amax(0)


def paper(head: Head, fusion: str) -> Iterator[Step]:
    """Algorithm 1 for one head: a query's probabilities are over all it saw, and are added over the query heads.

    They are spread over what is left each time; the paper remembers them as they were.
    """
    tokens = list(range(head.prompt))
    for step in range(head.prompt, len(head.keys)):
        old, rows = tokens[:-WINDOW], []
        for r in range(step - WINDOW, step):
            seen = [token for token in tokens if token <= r]
            rows.append(head.logits(seen, r).softmax(-1).sum(0)[: len(old)])
        tokens = [*chosen(fused(torch.stack(rows), fusion), tokens), step]
        yield Step(set(tokens), attend(head.logits(tokens, step), head.values[tokens])[1])


def released(head: Head, fusion: str) -> Iterator[Step]:
    """The authors' code for one head: a query's probabilities are over the entries before the window alone, and the
    query heads are fused by their maximum. Of the ``WINDOW`` queries that are kept one is that of the token that comes
    in, which has no vote.

    All see what they have chosen together; in the authors' code each query head sees, for this one step, what it would
    have chosen alone.
    """
    tokens = list(range(head.prompt))
    for step in range(head.prompt, len(head.keys)):
        old = tokens[:-WINDOW]
        window = range(step - WINDOW + 1, step)
        scores = torch.stack([head.logits(old, r).softmax(-1) for r in window], dim=1)  # [G, w, n]
        tokens = [*chosen(fused(scores.amax(0), fusion), tokens), step]
        yield Step(set(tokens), attend(head.logits(tokens, step), head.values[tokens])[1])


@pytest.mark.parametrize("fusion", ["sum", "max"])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_algorithm_1(num_groups, fusion):
    request = {"policy": "morphkv", "recent_window": WINDOW, "fusion": fusion}
    assert_follows(request, Stream.random(num_groups, num_groups), CAPACITY, partial(paper, fusion=fusion))


@pytest.mark.parametrize("fusion", ["sum", "max"])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_authors_code(num_groups, fusion):
    request = {"policy": "morphkv", "recent_window": WINDOW, "fusion": fusion, **AUTHORS}
    assert_follows(request, Stream.random(num_groups, num_groups), CAPACITY, partial(released, fusion=fusion))
