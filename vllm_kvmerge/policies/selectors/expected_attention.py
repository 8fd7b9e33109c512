"""Selector that keeps the entries that queries still to come are expected to attend to."""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, MAX_QUERIES, MAX_TOKENS, CompressionContext, Entries, HeadShape
from vllm_kvmerge.policies.indexing import sinks
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector, SinkTokens


@register
class ExpectedAttention(RankedSelector):
    """The sinks and the entries with the largest (E[A] + epsilon) ||v|| (Expected Attention).

        E[exp(q.k s)] = exp(mu.k s + k' Sigma k s^2 / 2)        q ~ N(mu, Sigma)

    s is the scale of attention's logits. mu and Sigma are those of a query head's queries before RoPE, turned by the
    mean of RoPE's turns at the next ``future_positions`` positions. E[A] is this expectation, times the entry's votes,
    over its sum over all entries but the sinks, and the mean over the query heads that share the KV head. So a question
    that is not in the cache yet is not what decides: any query of the model's kind may come.

    kvpress takes mu and Sigma from all queries of the prompt; here they come from the newest ``statistics_window``,
    which are kept as they are computed, while those of the whole prompt would be as large as its cache. The sinks'
    queries, which are outliers, are left out by both. kvpress adds no epsilon unless told.

    Where no query is known, the newest entries stay.
    """

    name = "expected_attention"
    source = "Expected Attention, Devoto et al., arXiv:2510.00636"
    needs_scores = False
    needs_rotation = True
    has_mass = True

    num_sink_tokens: SinkTokens = 4
    statistics_window: int = Field(
        256, ge=1, le=MAX_QUERIES, description="Newest queries whose mean and covariance predict future queries."
    )
    future_positions: int = Field(
        512, ge=1, le=MAX_TOKENS, description="Next positions over which RoPE rotations are averaged."
    )
    epsilon: float = Field(
        0.02, ge=0.0, le=1.0, description="Added to the expected attention before it is multiplied by the value's norm."
    )

    @property
    def query_window(self) -> int:
        return self.statistics_window

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        if context.queries is None:
            return entries.positions.to(entries.scores.dtype)
        return self._scores(entries, context)

    def mass(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]``: the ranking; sinks, which it leaves out, count as their head's best."""
        if context.queries is None:
            return entries.is_live.to(entries.scores.dtype)
        scores = self._scores(entries, context)
        return torch.where(sinks(entries, self.num_sink_tokens), scores.amax(1, keepdim=True), scores)

    def _scores(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]``: (E[A] + epsilon) ||v||; 0 for sinks and dead entries."""
        means, covariances = self._future_queries(context)
        logits, norms = [], []
        for part in entries.parts():
            index = part.masked_fill(~entries.is_live.gather(1, part), DEAD)
            logits.append(log_expectation(entries.keys_at(index), means, covariances))
            norms.append(torch.linalg.vector_norm(entries.values_at(index), dim=-1))
        left_out = ~entries.is_live | sinks(entries, self.num_sink_tokens)
        biased = torch.cat(logits, dim=2).add_(entries.log_votes.unsqueeze(1))
        expected = biased.masked_fill_(left_out.unsqueeze(1), -torch.inf).softmax(dim=2).mean(1)
        return ((expected + self.epsilon) * torch.cat(norms, dim=1)).masked_fill(left_out, 0.0)

    def _future_queries(self, context: CompressionContext) -> tuple[Tensor, Tensor]:
        """s mu, ``[H, G, d]``, and s^2 Sigma, ``[H, G, d, d]``, at the positions to come."""
        assert context.queries is not None
        queries, rotation = context.queries.newest(self.query_window), context.known_rotation()
        positions = queries.positions.unsqueeze(1)
        vectors = rotation.turned_back(queries.vectors, positions)
        ahead = rotation.table[: self.future_positions]
        vectors = rotation.turned_ahead(vectors, positions[:, :, -1:] + 1, ahead).mul_(context.scale)
        counted = positions >= self.num_sink_tokens
        counted = counted | ~counted.any(dim=2, keepdim=True)  # none but sinks' are known
        weights = (counted / counted.sum(2, keepdim=True)).unsqueeze(3).to(vectors.dtype)
        means = (weights * vectors).sum(2)
        centred = vectors.sub_(means.unsqueeze(2)).mul_(weights.sqrt())
        return means, centred.mT @ centred

    def held(self, shape: HeadShape) -> int:
        queries = 4 * min(self.query_window, shape.num_entries) * shape.head_size
        return shape.group_size * (queries + 3 * shape.head_size**2 + 3 * shape.num_entries)


def log_expectation(keys: Tensor, means: Tensor, covariances: Tensor) -> Tensor:
    """``[H, G, m]``: ln E[exp(q.k)] = mu.k + k' Sigma k / 2 for q ~ N(mu, Sigma).

    keys: ``[H, m, d]``; means: ``[H, G, d]``; covariances: ``[H, G, d, d]``.
    """
    logits = means @ keys.mT
    for group, covariance in enumerate(covariances.unbind(1)):
        logits[:, group] += torch.linalg.vecdot(keys @ covariance, keys) / 2
    return logits
