"""MorphKV (arXiv:2503.00979): algorithm 1 and the authors' code."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.policies.every import policy_of
from tests.policies.oracles.stream import Head, Step, Stream, assert_same_steps, attend, follow

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


def paper(head: Head, fusion: str, anew: bool = False) -> Iterator[Step]:
    """Algorithm 1 for one head: a query's probabilities are over all it saw, and are added over the query heads.

    anew: a query's probabilities are spread over what is left each time, instead of remembered as they were.
    """
    tokens = list(range(head.prompt))
    profiles = {r: dict(enumerate(row)) for r, row in enumerate(head.prompt_attention().sum(0).tolist())}
    for step in range(head.prompt, len(head.keys)):
        window, old = range(step - WINDOW, step), tokens[:-WINDOW]
        if anew:
            for r in window:
                seen = [token for token in tokens if token <= r]
                row = head.logits(seen, r).softmax(-1).sum(0).tolist()
                profiles[r] = dict(zip(seen, row, strict=True))
        scores = torch.tensor([[profiles[r][token] for token in old] for r in window])
        tokens = [*chosen(fused(scores, fusion), tokens), step]
        probabilities, output = attend(head.logits(tokens, step), head.values[tokens])
        yield Step(set(tokens), output)
        profiles[step] = dict(zip(tokens, probabilities.sum(0).tolist(), strict=True))


def released(head: Head, fusion: str, each_its_own: bool = True) -> Iterator[Step]:
    """The authors' code for one head: a query's probabilities are over the entries before the window alone, and the
    query heads are fused by their maximum. Of the ``WINDOW`` queries that are kept one is that of the token that comes
    in, which has no vote.

    each_its_own: each query head sees, for this one step, what it would have chosen alone; the cache keeps what all
    have chosen together.
    """
    tokens = list(range(head.prompt))
    for step in range(head.prompt, len(head.keys)):
        old = tokens[:-WINDOW]
        window = range(step - WINDOW + 1, step)
        scores = torch.stack([head.logits(old, r).softmax(-1) for r in window], dim=1)  # [G, w, n]
        together = [*chosen(fused(scores.amax(0), fusion), tokens), step]
        own = [[*chosen(fused(one, fusion), tokens), step] if each_its_own else together for one in scores]
        outputs = [attend(head.logits(seen, step)[g], head.values[seen])[1] for g, seen in enumerate(own)]
        tokens = together
        yield Step(set(tokens), torch.stack(outputs))


def ours(stream: Stream, fusion: str, **fields: object) -> list[list[Step]]:
    request = {"policy": "morphkv", "recent_window": WINDOW, "fusion": fusion, **fields}
    return follow(policy_of(request), stream, CAPACITY)


def agreement(some: list[Step], other: list[Step]) -> float:
    """Share of the old entries that both chose, of all steps."""
    common = sum(len(a.attended & b.attended) - WINDOW - 1 for a, b in zip(some, other, strict=True))
    return common / (len(some) * (CAPACITY - WINDOW))


@pytest.mark.parametrize("fusion", ["sum", "max"])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_algorithm_1(num_groups, fusion):
    """The same where a query's probabilities are spread anew; remembered ones make the same choice at first."""
    stream = Stream.random(num_groups, num_groups)
    shares = []
    for mine, head in zip(ours(stream, fusion), stream.heads(), strict=True):
        assert_same_steps(mine, paper(head, fusion, anew=True))
        remembered = list(paper(head, fusion))
        assert remembered[0].attended == mine[0].attended
        shares.append(agreement(mine, remembered))
    assert 0.7 < min(shares) < 1.0


@pytest.mark.parametrize("fusion", ["sum", "max"])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_authors_code(num_groups, fusion):
    """The same where a KV head has one query head; with more, so is what the cache keeps, and what they see is the
    common choice here."""
    stream = Stream.random(num_groups, num_groups)
    for mine, head in zip(ours(stream, fusion, **AUTHORS), stream.heads(), strict=True):
        assert_same_steps(mine, released(head, fusion, each_its_own=num_groups == 1))
        theirs = list(released(head, fusion))
        assert [step.attended for step in theirs] == [step.attended for step in mine]
        differ = [(a.output - b.output).abs().max() > 1e-6 for a, b in zip(mine, theirs, strict=True)]
        assert all(differ) if num_groups > 1 else not any(differ)
