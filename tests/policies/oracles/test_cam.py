"""CaM (ICML 2024): the authors' cache for long texts."""

from collections.abc import Iterator

import pytest

from tests.policies.oracles.stream import Head, Step, Stream, assert_same_steps, attend, follow, policy_of
from vllm_kvmerge.policies import CompressionContext
from vllm_kvmerge.policies.mergers import cam as merger
from vllm_kvmerge.policies.noise import uniform

SINKS, RECENT, RECEIVERS = 4, 16, 5


def cam(head: Head, draws: list[float]) -> Iterator[Step]:
    """Keeps the ``SINKS`` first tokens and the ``RECENT`` newest ones. Before a token leaves the window, its value is
    added to those of the ``RECEIVERS`` tokens that follow, a share of 1 / RECEIVERS to each, with the probability
    clamp(its accumulated attention / the mean of theirs, 0, 1).

    draws: the random number of each token. The authors' code reads long texts token by token; a prompt that is longer
    than the cache loses what is over, as in their other code, for HELM.
    """
    values = head.values.clone()
    scores = head.prompt_attention().sum((0, 1)).tolist() + [0.0] * len(head.keys)
    tokens = [token for token in range(head.prompt) if token < SINKS or token >= head.prompt - RECENT]
    for step in range(head.prompt, len(head.keys)):
        tokens.append(step)
        probabilities, output = attend(head.logits(tokens, step), values[tokens])
        yield Step(set(tokens), output)
        for token, probability in zip(tokens, probabilities.sum(0).tolist(), strict=True):
            scores[token] += probability
        leaving, following = tokens[SINKS], tokens[SINKS + 1 :][:RECEIVERS]
        mean = sum(scores[token] for token in following) / len(following)
        if draws[leaving] < min(1.0, max(0.0, scores[leaving] / mean)):
            values[following] += values[leaving] / RECEIVERS
        tokens.remove(leaving)


def ours(stream: Stream) -> list[list[Step]]:
    """The authors' window of sinks and newest tokens, with this package's merger and accumulated attention."""
    request = {"policy": "streaming_llm", "merger": "cam", "num_receivers": RECEIVERS, "score_window": "all"}
    return follow(policy_of(request), stream, SINKS + RECENT)


def draws(stream: Stream) -> list[list[float]]:
    """The random numbers with which this package decides, by head and position."""
    entries = stream.entries(0, stream.keys.shape[1])
    context = CompressionContext.of_layer(entries, SINKS + RECENT, len(entries), at_prompt_end=False)
    return uniform(merger.SEED, entries, context).tolist()


@pytest.mark.parametrize("prompt", [SINKS + RECENT, 40])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_cam(num_groups, prompt):
    stream = Stream.random(num_groups, num_groups, prompt)
    for mine, head, numbers in zip(ours(stream), stream.heads(), draws(stream), strict=True):
        assert_same_steps(mine, cam(head, numbers))
        never = list(cam(head, [1.0] * len(numbers)))
        assert (never[-1].output - mine[-1].output).abs().max() > 1e-3, "nothing has merged"
