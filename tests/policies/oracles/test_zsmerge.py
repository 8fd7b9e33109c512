"""ZSMerge (arXiv:2503.10714): algorithm 1 and the authors' code."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.policies.oracles.stream import Head, Step, Stream, assert_follows, attend

DECAY = 0.98

REQUEST = {"policy": "zsmerge", "selector": "h2o", "score_window": "all", "num_sink_tokens": 0, "recent_share": 0.25}

AUTHORS = {"recent_share": 0.4, "residual_share": 0.001}
"""Of the authors' script: 0.4 of the budget for the newest tokens, a single slot, the rest by score."""


def evenly(count: int, slots: int) -> list[int]:
    """Lengths of the prompt's runs: run i begins at i count / slots, rounded up. The authors' longer ones are first."""
    starts = [-(-i * count // slots) for i in range(slots + 1)]
    return [end - start for start, end in zip(starts, starts[1:], strict=False)]


def zsmerge(head: Head, budget: int, window: int, slots: int, ring: int, alpha: float = 0.6) -> Iterator[Step]:
    """One head, token by token. ring: tokens in the recent window while decoding; ``window`` in algorithm 1, where the
    one that leaves it may be merged at once; ``window - 1`` in the authors' code, where that one takes the place of the
    merged one. The prompt keeps its ``window`` newest tokens and the best others; the rest is averaged in runs."""
    may_go_at_once = ring == window
    ages = torch.arange(head.prompt - 1, -1, -1)
    scores = (head.prompt_attention().sum(0) * (DECAY**ages)[:, None]).sum(0).tolist()
    old = list(range(head.prompt - window))
    best = sorted(old, key=lambda token: scores[token], reverse=True)[: budget - window - slots]
    rest = torch.tensor([token for token in old if token not in best])
    runs = rest.split(evenly(len(rest), slots))
    keys = [head.keys[run].mean(0) for run in runs]
    values = [head.values[run].mean(0) for run in runs]
    weights = [len(run) for run in runs]
    recent = list(range(head.prompt - ring, head.prompt))
    context = best + list(range(head.prompt - window, head.prompt - ring))
    for step in range(head.prompt, len(head.keys)):
        tokens = [*context, *recent, step]
        slot_logits = head.queries[:, step] @ torch.stack(keys).T / head.keys.shape[1] ** 0.5
        slot_logits += alpha * torch.tensor(weights, dtype=torch.float64).log()
        logits = torch.cat([slot_logits, head.logits(tokens, step)], dim=1)
        probabilities, output = attend(logits, torch.cat([torch.stack(values), head.values[tokens]]))
        yield Step(set(tokens), output)
        scores.append(0.0)
        for token, probability in zip(tokens, probabilities[:, slots:].sum(0).tolist(), strict=True):
            scores[token] = DECAY * scores[token] + probability
        recent.append(step)
        leaving = recent.pop(0)
        gone = min(context + [leaving] * may_go_at_once, key=lambda token: scores[token])
        context = [token for token in [*context, leaving] if token != gone]
        slot = int((torch.stack(keys) @ head.keys[gone]).argmax())
        keys[slot] = (weights[slot] * keys[slot] + head.keys[gone]) / (weights[slot] + 1)
        values[slot] = (weights[slot] * values[slot] + head.values[gone]) / (weights[slot] + 1)
        weights[slot] += 1


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_authors_shares(num_groups):
    """Their ring of one token less, from which none is merged at once, is the same as a window of one more."""
    oracle = partial(zsmerge, budget=20, window=8, slots=1, ring=7)
    assert_follows(REQUEST | AUTHORS, Stream.random(num_groups, num_groups), 20, oracle)


@pytest.mark.parametrize(("num_groups", "alpha"), [(1, 0.6), (4, 1.0), (4, 0.0)])
def test_algorithm_1(num_groups, alpha):
    """Our shares: of 24 entries 6 are recent and 3 are slots."""
    oracle = partial(zsmerge, budget=24, window=6, slots=3, ring=6, alpha=alpha)
    assert_follows(REQUEST | {"alpha": alpha}, Stream.random(10 + num_groups, num_groups), 24, oracle)
