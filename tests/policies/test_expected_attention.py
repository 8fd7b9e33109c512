"""Expected attention against dense float64 computations and samples of queries."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.policies.sampling import newest_queries, random_entries, rope
from tests.policies.test_allocators import on_two_workers
from vllm_kvmerge.policies import CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.allocators import Adaptive, Threshold
from vllm_kvmerge.policies.errors import PartError
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.policies.selectors import ExpectedAttention
from vllm_kvmerge.policies.selectors.expected_attention import log_expectation
from vllm_kvmerge.policies.trackers import NoTracker

HEADS, GROUP, SIZE, TOKENS, SCALE = 3, 2, 16, 120, 0.25


def scene(num_queries: int = 50, **fields: object) -> tuple[Entries, CompressionContext]:
    """A prompt of ``TOKENS`` tokens, in order; queries and keys are turned by RoPE already, values differ in length."""
    entries = random_entries(0, HEADS, TOKENS, SIZE)
    entries.positions.copy_(torch.arange(TOKENS))
    entries.values.mul_(torch.rand(HEADS, TOKENS, 1, generator=torch.Generator().manual_seed(1)))
    vectors = torch.randn(HEADS, GROUP, num_queries, SIZE, generator=torch.Generator().manual_seed(2)) + 0.3
    queries = newest_queries(vectors, TOKENS)
    known = {"scale": SCALE, "queries": queries, "rotation": rope(SIZE)} | fields
    return entries, CompressionContext.of_layer(entries, 40, TOKENS, at_prompt_end=True, **known)


def dense_scores(entries: Entries, context: CompressionContext, selector: ExpectedAttention) -> Tensor:
    """``[H, n]`` float64: for each query head, by matrices of turns; sinks are -1."""
    window, sinks = context.queries.newest(selector.statistics_window), selector.num_sink_tokens

    def matrix(position: int) -> Tensor:
        return rope(SIZE).turned(torch.eye(SIZE), torch.tensor(position)).double().T

    ahead = torch.stack([matrix(TOKENS + step) for step in range(selector.future_positions)]).mean(0)
    scores = torch.full((HEADS, TOKENS), -1.0, dtype=torch.float64)
    keys, values = entries.keys.double()[:, sinks:], entries.values.double()[:, sinks:]
    for head in range(HEADS):
        total = torch.zeros(TOKENS - sinks, dtype=torch.float64)
        for group in range(GROUP):
            pairs = zip(window.positions[head].tolist(), window.vectors[head, group].double(), strict=True)
            queries = torch.stack([matrix(position).T @ query for position, query in pairs if position >= sinks])
            mean, covariance = ahead @ queries.mean(0), ahead @ queries.T.cov(correction=0) @ ahead.T
            logits = SCALE * keys[head] @ mean
            logits += SCALE**2 / 2 * torch.einsum("ni,ij,nj->n", keys[head], covariance, keys[head])
            total += (logits + entries.log_votes[head, sinks:].double()).softmax(0) / GROUP
        scores[head, sinks:] = (total + selector.epsilon) * values[head].norm(dim=-1)
    return scores


@pytest.mark.parametrize("num_queries", [1, 50, TOKENS])
@pytest.mark.parametrize("epsilon", [0.0, 0.02])
def test_scores_are_those_of_the_paper(num_queries, epsilon):
    entries, context = scene(num_queries)
    entries.log_votes[:, 50:60] = 1.5  # what a merger left counts as often as its votes say
    selector = ExpectedAttention(epsilon=epsilon, future_positions=64)
    expected = dense_scores(entries, context, selector)
    found = selector.mass(entries, context).double()
    torch.testing.assert_close(found[:, 4:], expected[:, 4:], rtol=2e-4, atol=1e-8)
    torch.testing.assert_close(found[:, :4], expected.amax(1, keepdim=True).expand(-1, 4), rtol=2e-4, atol=1e-8)
    kept = selector.select(entries, entries.scores, selector.protected(entries, context), context)
    best = expected[:, :-1].argsort(dim=1, descending=True)[:, : 40 - 4 - 1]
    wanted = torch.zeros_like(kept).scatter_(1, best, True)
    wanted[:, [0, 1, 2, 3, -1]] = True  # the sinks, and the newest, which generation needs
    assert torch.equal(kept, wanted)


def test_the_closed_form_is_the_mean_over_queries():
    """Of 200,000 drawn ones, within five standard errors."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(1, 20, 8, generator=generator, dtype=torch.float64) / 2
    mean = torch.randn(8, generator=generator, dtype=torch.float64)
    root = torch.randn(8, 8, generator=generator, dtype=torch.float64) / 4
    drawn = torch.randn(200_000, 8, generator=generator, dtype=torch.float64) @ root.T + mean
    samples = (drawn @ keys[0].T).exp()
    found = log_expectation(keys, mean.view(1, 1, 8), (root @ root.T).view(1, 1, 8, 8)).exp()[0, 0]
    error = samples.std(0) / len(samples) ** 0.5
    assert ((found - samples.mean(0)).abs() < 5 * error).all()
    without_covariance = (keys[0] @ mean).exp()
    assert ((without_covariance - samples.mean(0)).abs() > 5 * error).any()


def test_the_window_ends_with_the_newest_query_and_leaves_sinks_out():
    entries, context = scene(TOKENS)
    selector = ExpectedAttention(statistics_window=30)
    narrow = replace(context, queries=context.queries.newest(30))
    assert torch.equal(selector.mass(entries, context), selector.mass(entries, narrow))
    all_queries = ExpectedAttention(statistics_window=TOKENS)
    before = all_queries.mass(entries, context)
    context.queries.vectors[:, :, :4] += 100.0
    assert torch.equal(all_queries.mass(entries, context), before)
    context.queries.vectors[:, :, 4] += 100.0
    assert not torch.equal(all_queries.mass(entries, context), before)


def test_an_unknown_rotation_is_an_error_and_no_guess():
    entries, context = scene(rotation=None)
    policy = CompressionPolicy(tracker=NoTracker(), selector=ExpectedAttention(), merger=DropMerger())
    with pytest.raises(PartError, match="selector expected_attention: .* rotary position embedding is not known"):
        policy.compress(entries, context)


@pytest.mark.parametrize("allocator", [Adaptive(floor_share=0.0, max_share=4.0), Threshold(threshold=0.012)])
def test_allocators_compare_the_scores_of_all_heads(allocator):
    """As AdaKVPress does: what stays in a layer are its best scores, whichever heads have them."""
    entries, context = scene()
    entries.values.mul_(torch.tensor([0.8, 1.0, 1.25]).view(3, 1, 1))
    selector = ExpectedAttention()
    policy = CompressionPolicy(tracker=NoTracker(), selector=selector, merger=DropMerger(), allocator=allocator)
    scores = selector.mass(entries, context)
    shares = scores / scores.sum(1).mean()
    budgets = policy.head_budgets(entries, replace(context, capacity=TOKENS))
    if isinstance(allocator, Threshold):
        assert budgets == ((shares > 0.012).sum(1) + selector.min_budget).clamp(max=TOKENS).tolist()
    else:
        floor = selector.min_budget
        assert sum(budgets) == HEADS * 40
        best = shares.flatten().sort(descending=True).values[HEADS * 40 - 1]
        wanted = (shares >= best).sum(1)
        assert (wanted >= floor).all() and budgets == wanted.tolist()
    assert budgets[0] < min(budgets[1:])


def test_scores_are_compared_with_those_of_other_workers_heads():
    """So that a threshold leaves each head as many entries, however many workers there are."""
    entries, context = scene()
    entries.values.mul_(torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1))
    parts = {"selector": ExpectedAttention(), "merger": DropMerger(), "allocator": Threshold(threshold=0.012)}
    policy = CompressionPolicy(tracker=NoTracker(), **parts)
    context = replace(context, capacity=TOKENS)

    def budgets(some: Entries, own: CompressionContext) -> list[int]:
        return policy.head_budgets(some, replace(own, queries=context.queries.of_rows(own.heads.indices)))

    first, others = on_two_workers(budgets, entries, context, 1)
    assert first + others == policy.head_budgets(entries, context)
