"""A stream of tokens of one layer, and what a policy makes of it, compressed after every token.

An oracle of this package is a published algorithm, written down from its description for one KV head at a time, in
dense PyTorch and without anything of ``vllm_kvmerge``. It yields a ``Step`` for each decoded token, as ``follow`` does
for a policy, and both must be the same.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.policies.every import policy_of
from tests.policies.sampling import concatenate, newest_queries
from vllm_kvmerge.ops import ScoreMode, ScoreUpdate
from vllm_kvmerge.ops.attention import accumulate_scores
from vllm_kvmerge.policies import CompressionContext, CompressionPolicy, Entries

STEPS = 60


class Step(NamedTuple):
    """attended: positions of the entries that the token's query sees, merged ones of a merger's slots left out.
    output: ``[G, d]``, attention's output."""

    attended: set[int]
    output: Tensor


class Head(NamedTuple):
    """One KV head's stream. keys, values: ``[T, d]``, queries: ``[G, T, d]``; ``prompt``: tokens of the prompt."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    prompt: int

    def logits(self, tokens: Iterable[int], step: int) -> Tensor:
        """``[G, n]``: logits of the query of token ``step``."""
        return self.queries[:, step] @ self.keys[list(tokens)].T / self.keys.shape[1] ** 0.5

    def prompt_attention(self) -> Tensor:
        """``[G, prompt, prompt]``: causal attention of the prompt's queries."""
        keys, queries = self.keys[: self.prompt], self.queries[:, : self.prompt]
        hidden = torch.ones(self.prompt, self.prompt).triu(1).bool()
        return (queries @ keys.T / keys.shape[1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)


class Stream(NamedTuple):
    """keys, values: ``[H, T, d]``, queries: ``[H, G, T, d]`` float64."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    prompt: int

    @classmethod
    def random(cls, seed: int, num_groups: int, prompt: int = 40) -> "Stream":
        """Two heads, and queries large enough to tell keys apart."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(2, size, prompt + STEPS, 8) for size in (1, 1, num_groups)]
        keys, values, queries = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return cls(keys[:, 0], values[:, 0], 1.5 * queries, prompt)

    def heads(self) -> list[Head]:
        rows = zip(self.keys, self.values, self.queries, strict=True)
        return [Head(*row, self.prompt) for row in rows]

    def entries(self, start: int, end: int) -> Entries:
        """The tokens from ``start`` to ``end`` as new entries."""
        keys, values = self.keys[:, start:end], self.values[:, start:end]
        zeros = torch.zeros_like(keys[..., 0])
        positions = torch.arange(start, end).repeat(len(keys), 1)
        return Entries(keys.clone(), values.clone(), zeros, zeros.clone(), zeros.clone(), positions)


def follow(policy: CompressionPolicy, stream: Stream, budget: int) -> list[list[Step]]:
    """What each head's decoded tokens see: the prompt is compressed at its end, and the cache after every token."""
    entries, _ = _attended(policy, stream, stream.entries(0, stream.prompt), range(stream.prompt))
    entries = _compressed(policy, stream, entries, budget, stream.prompt)
    steps = []
    for step in range(stream.prompt, stream.keys.shape[1]):
        entries = concatenate(entries, stream.entries(step, step + 1))
        visible = entries.is_live & ~policy.merger.is_slot(entries)
        attended = [set(row[mask].tolist()) for row, mask in zip(entries.positions, visible, strict=True)]
        entries, output = _attended(policy, stream, entries, range(step, step + 1))
        steps.append([Step(*head) for head in zip(attended, output[:, :, 0], strict=True)])
        entries = _compressed(policy, stream, entries, budget, step + 1)
    return [list(head) for head in zip(*steps, strict=True)]


def _attended(policy: CompressionPolicy, stream: Stream, entries: Entries, tokens: range) -> tuple[Entries, Tensor]:
    """The entries with the statistics that attention of these tokens' queries leaves, and its output,
    ``[H, G, q, d]``."""
    queries = stream.queries[:, :, tokens.start : tokens.stop]
    logits = torch.einsum("hgqd,hnd->hgqn", queries, entries.keys) / entries.keys.shape[2] ** 0.5
    visible = entries.is_live[:, None] & (entries.positions[:, None] <= torch.tensor(tokens)[:, None])
    biased = (logits + entries.log_votes[:, None, None]).masked_fill(~visible[:, None], -torch.inf)
    probabilities = biased.softmax(-1)
    output = torch.einsum("hgqn,hnd->hgqd", probabilities, entries.values)
    if policy.tracker.mode == ScoreMode.NONE:
        return entries, output
    assert policy.tracker.prompt_window == "all"
    update = ScoreUpdate(policy.tracker.mode, policy.tracker.update_decay)
    scores, aux = accumulate_scores(update, logits, probabilities, visible, entries.scores, entries.aux)
    return replace(entries, scores=scores, aux=aux), output


def _compressed(policy: CompressionPolicy, stream: Stream, entries: Entries, budget: int, seen: int) -> Entries:
    queries = stream.queries[:, :, max(0, seen - policy.query_window) : seen] if policy.query_window else None
    context = CompressionContext.of_layer(
        entries,
        budget,
        seen,
        at_prompt_end=seen == stream.prompt,
        scale=entries.keys.shape[2] ** -0.5,
        queries=None if queries is None else newest_queries(queries, seen),
    )
    return policy.compress(entries, context).entries


def attend(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, ``[G, n]``, and output, ``[G, d]``; values: ``[n, d]``."""
    probabilities = logits.softmax(-1)
    return probabilities, probabilities @ values


def assert_follows(
    request: dict[str, Any], stream: Stream, budget: int, oracle: Callable[[Head], Iterator[Step]]
) -> None:
    """The policy and the oracle see the same entries and give the same outputs, to 1e-6, at every step."""
    for ours, head in zip(follow(policy_of(request), stream, budget), stream.heads(), strict=True):
        for number, (step, expected) in enumerate(zip(ours, oracle(head), strict=True)):
            assert step.attended == expected.attended, f"step {number}"
            error = (step.output - expected.output).abs().max().item()
            assert error <= 1e-6, f"step {number}"
