"""Expected attention against dense float64 computations."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.policies.sampling import for_parts, newest_queries, on_two_workers, random_entries, rope
from vllm_kvmerge.policies import Allocator, CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.allocators import Adaptive, Threshold
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.policies.selectors import ExpectedAttention, Fused
from vllm_kvmerge.policies.trackers import NoTracker

HEADS, GROUP, SIZE, TOKENS, SCALE = 3, 2, 16, 120, 0.25


def scene(num_queries: int = 50) -> tuple[Entries, CompressionContext]:
    """A prompt of ``TOKENS`` tokens, in order; queries and keys are turned by RoPE already, values differ in length."""
    entries = random_entries(0, HEADS, TOKENS, SIZE)
    entries.positions.copy_(torch.arange(TOKENS))
    entries.values.mul_(torch.rand(HEADS, TOKENS, 1, generator=torch.Generator().manual_seed(1)))
    vectors = torch.randn(HEADS, GROUP, num_queries, SIZE, generator=torch.Generator().manual_seed(2)) + 0.3
    known = {"scale": SCALE, "queries": newest_queries(vectors, TOKENS), "rotation": rope(SIZE)}
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


@pytest.mark.parametrize(("num_queries", "window"), [(1, 256), (50, 256), (TOKENS, 256), (TOKENS, 30)])
@pytest.mark.parametrize("epsilon", [0.0, 0.02])
def test_scores_are_those_of_the_paper(num_queries, window, epsilon):
    entries, context = scene(num_queries)
    entries.log_votes[:, 50:60] = 1.5  # what a merger left counts as often as its votes say
    selector = ExpectedAttention(epsilon=epsilon, future_positions=64, statistics_window=window)
    expected = dense_scores(entries, context, selector)
    found = selector.mass(entries, context).double()
    torch.testing.assert_close(found[:, 4:], expected[:, 4:], rtol=2e-4, atol=1e-8)
    torch.testing.assert_close(found[:, :4], expected.amax(1, keepdim=True).expand(-1, 4), rtol=2e-4, atol=1e-8)
    kept = selector.select(entries, entries.scores, selector.protected(entries, context), for_parts(context))
    best = expected[:, :-1].argsort(dim=1, descending=True)[:, : 40 - 4 - 1]
    wanted = torch.zeros_like(kept).scatter_(1, best, True)
    wanted[:, [0, 1, 2, 3, -1]] = True  # the sinks, and the newest, which generation needs
    assert torch.equal(kept, wanted)


def test_allocators_compare_the_scores_of_all_heads():
    """As AdaKVPress does: what stays in a layer are its best scores, whichever heads have them. On two workers a
    threshold leaves each head as many entries as on one."""
    entries, context = scene()
    entries.values.mul_(torch.tensor([0.8, 1.0, 1.25]).view(3, 1, 1))
    context, selector = replace(context, capacity=TOKENS), ExpectedAttention()
    shares = selector.mass(entries, context)
    shares /= shares.sum(1).mean()

    def policy(allocator: Allocator) -> CompressionPolicy:
        return CompressionPolicy(tracker=NoTracker(), selector=selector, merger=DropMerger(), allocator=allocator)

    by_threshold = policy(Threshold(threshold=0.012))
    budgets = by_threshold.head_budgets(entries, context).tolist()
    assert budgets == ((shares > 0.012).sum(1) + selector.min_budget).clamp(max=TOKENS).tolist()
    first, others = on_two_workers(by_threshold.head_budgets, entries, context, 1)
    assert first.tolist() + others.tolist() == budgets
    budgets = policy(Adaptive(floor_share=0.0, max_share=4.0)).head_budgets(entries, context).tolist()
    best = shares.flatten().sort(descending=True).values[HEADS * 40 - 1]
    assert budgets == (shares >= best).sum(1).tolist() and min(budgets) >= selector.min_budget
    assert sum(budgets) == HEADS * 40 and budgets[0] < min(budgets[1:])
    fused = policy(Adaptive(floor_share=0.0, max_share=4.0)).model_copy(update={"selector": Fused()})
    assert fused.head_budgets(entries, context).tolist() == budgets
