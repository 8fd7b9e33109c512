"""H2O (arXiv:2306.14048, algorithm 1, and the authors' cache that really drops entries)."""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.policies.oracles.stream import Head, Step, Stream, assert_follows, attend


def h2o(head: Head, heavy: int, recent: int) -> Iterator[Step]:
    """Keeps the ``recent`` newest tokens and the ``heavy`` others of largest accumulated attention.

    Scores are of all queries, the prompt's too. Those of a KV head's query heads are added; the authors' models have
    one each. No first tokens are protected.
    """
    scores = dict(enumerate(head.prompt_attention().sum((0, 1)).tolist()))
    for step in range(head.prompt, len(head.keys)):
        tokens = sorted(scores)
        old = tokens[: len(tokens) - recent]
        for token in sorted(old, key=scores.__getitem__)[: max(0, len(old) - heavy)]:
            del scores[token]
        tokens = [*sorted(scores), step]
        probabilities, output = attend(head.logits(tokens, step), head.values[tokens])
        yield Step(set(tokens), output)
        for token, probability in zip(tokens, probabilities.sum(0).tolist(), strict=True):
            scores[token] = scores.get(token, 0.0) + probability


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize(("heavy", "recent"), [(8, 8), (13, 3)])
def test_h2o(num_groups, heavy, recent):
    request = {"policy": "h2o", "score_window": "all", "num_sink_tokens": 0, "recent_window": recent}
    oracle = partial(h2o, heavy=heavy, recent=recent)
    assert_follows(request, Stream.random(num_groups, num_groups), heavy + recent, oracle)
