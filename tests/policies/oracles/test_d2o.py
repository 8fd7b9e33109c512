"""D2O (arXiv:2406.13035): compensation for evicted tokens, as published and in the authors' code."""

from collections.abc import Iterator

import pytest
import torch

from tests.policies.oracles.stream import Head, Step, Stream, assert_follows, attend

SINKS, HEAVY, RECENT, BETA = 4, 10, 8, 0.7
"""``HEAVY`` counts the sinks."""


def d2o(head: Head) -> Iterator[Step]:
    """Keeps sinks, recent tokens and those of largest accumulated attention. What leaves goes into the kept token of
    largest cosine similarity u of keys where u >= tau, a moving average of u; else it is dropped.

    A kept token and what joins it weigh exp(1) and exp(u) over their sum, as in the paper; the authors' code has 1 and
    u over the number of tokens, so that keys shrink. Tokens are named by the newest one in them, unless they are sinks
    or recent.
    """
    keys, values = head.keys.clone(), head.values.clone()  # by the name of the token
    scores = dict(enumerate(head.prompt_attention().sum((0, 1)).tolist()))
    tau = None
    for step in range(head.prompt, len(head.keys) + 1):
        names = sorted(scores)
        fixed = names[:SINKS] + names[-RECENT:]
        old = sorted(names[SINKS:-RECENT], key=scores.__getitem__, reverse=True)
        stays, leaving = sorted(fixed + old[: HEAVY - SINKS]), old[HEAVY - SINKS :]
        units = torch.nn.functional.normalize(keys, dim=-1)
        u, match = (units[leaving] @ units[stays].T).max(-1)
        tau = u.mean() if tau is None else BETA * u.mean() + (1 - BETA) * tau
        joined: dict[int, list[tuple[float, int]]] = {}
        for similarity, target, source in zip(u.tolist(), match.tolist(), leaving, strict=True):
            if similarity >= tau:
                joined.setdefault(stays[target], []).append((similarity, source))
        renamed = {}
        for target, sources in joined.items():
            own = torch.tensor([1.0, *(similarity for similarity, _ in sources)], dtype=keys.dtype)
            weights = own.softmax(0)
            group = [target, *(source for _, source in sources)]
            name = target if target in fixed else max(group)
            key, value = weights @ keys[group], weights @ values[group]
            renamed[name] = (key, value, scores[target])
        scores = {name: scores[name] for name in stays if name not in joined}
        for name, (key, value, score) in renamed.items():
            keys[name], values[name], scores[name] = key, value, score
        if step == len(head.keys):
            return
        names = [*sorted(scores), step]
        logits = head.queries[:, step] @ keys[names].T / keys.shape[1] ** 0.5
        probabilities, output = attend(logits, values[names])
        yield Step(set(names), output)
        for name, probability in zip(names, probabilities.sum(0).tolist(), strict=True):
            scores[name] = scores.get(name, 0.0) + probability


@pytest.mark.parametrize("num_groups", [1, 4])
def test_d2o(num_groups):
    """In a layer of its own, which has nothing to share its budget with."""
    paper = {"selector": "h2o", "score_window": "all", "recent_window": RECENT, "threshold_share": BETA}
    request = {"policy": "d2o", "allocator": "uniform", **paper}
    assert_follows(request, Stream.random(num_groups, num_groups), HEAVY + RECENT, d2o)
