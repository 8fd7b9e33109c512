"""Selector that weighs attention against redundancy."""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from vllm_kvmerge.policies.base import DEAD, MAX_TOKENS, CompressionContext, Entries
from vllm_kvmerge.policies.cost import Cost, CostShape, gathering, sorting
from vllm_kvmerge.policies.indexing import by_position
from vllm_kvmerge.policies.pausing import may_pause
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector

MAX_SIMILARITY_BYTES = 1 << 19
"""Size of the similarity matrix above which it is computed in pieces, which fit in the processor's caches."""


@register
class RedundancyAware(RankedSelector):
    """Important and not redundant: Z = lambda I - (1 - lambda) R (R-KV).

    I: attention max-pooled over neighbours in order of position; the source's is a mean of softmax rows, so scores are
    scaled to sum to 1. R: softmax, over the live entries, of the mean cosine similarity to all other keys, where an
    entry i does not count against the newest entry that is more similar to it than ``redundancy_threshold``: of
    several that repeat each other, the newest stays. Both sum to 1, so lambda compares like with like.

    The source's I is attention of the last 8 queries alone; here it is the tracker's score, which the preset lets decay
    over about as many, and which must be of probabilities, not a logarithm. Costs n^2 products per head.
    """

    name = "rkv"
    source = "R-KV, Cai et al., arXiv:2505.24133"
    needs_scores = True
    needs_probabilities = True

    recent_window: int = Field(8, ge=0, le=MAX_TOKENS, description="Newest entries that are always kept.")
    attention_share: float = Field(
        0.1, ge=0.0, le=1.0, description="Weight of attention against redundancy, lambda of R-KV."
    )
    redundancy_threshold: float = Field(
        0.5, ge=0.0, le=1.0, description="Cosine similarity above which keys repeat each other."
    )
    pooling_reach: int = Field(
        3, ge=0, le=127, description="Neighbours to each side, by position, over which attention is max-pooled."
    )

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        # Dead entries sort before all others, so the live ones are contiguous.
        order = by_position(entries)
        is_live = entries.is_live.gather(1, order)
        attention = importance.gather(1, order).masked_fill(~is_live, 0.0).clamp(min=0.0)
        attention = attention / attention.sum(1, keepdim=True).clamp(min=torch.finfo(attention.dtype).tiny)
        attention = attention.masked_fill(protected.gather(1, order), 0.0)
        attention = max_pool1d(attention, 2 * self.pooling_reach + 1, stride=1, padding=self.pooling_reach)
        keys = entries.keys_at(order.masked_fill(~is_live, DEAD))
        keys = normalize(keys, dim=-1, out=keys)
        # Head by head, so that a head's numbers do not depend on how many others are on this worker.
        similarity = torch.stack([self._total_similarity(head) for head in keys])
        similarity = similarity / is_live.sum(1, keepdim=True).clamp(min=1)
        redundancy = similarity.masked_fill(~is_live, -torch.inf).softmax(dim=1).masked_fill(~is_live, 0.0)
        ranking = self.attention_share * attention - (1.0 - self.attention_share) * redundancy
        return torch.empty_like(ranking).scatter_(1, order, ranking)

    def _total_similarity(self, keys: Tensor) -> Tensor:
        """``[n]``: sum of cosine similarities to the others, except the excused ones. keys: ``[n, d]`` in order of
        position, of length 1, or 0 where dead."""
        n = len(keys)
        total = torch.zeros(n, dtype=keys.dtype, device=keys.device)
        column = torch.arange(n, dtype=torch.int32, device=keys.device)
        rows = max(1, MAX_SIMILARITY_BYTES // (n * keys.element_size()))
        for start in range(0, n, rows):
            similarity = keys[start : start + rows] @ keys.T
            similarity.diagonal(start).zero_()
            repeats = similarity > self.redundancy_threshold
            newest = torch.where(repeats, column, -1).amax(dim=1)
            repeated = newest >= 0
            newest = newest.clamp(min=0).long()
            excused = similarity.gather(1, newest.unsqueeze(1)).squeeze(1).masked_fill(~repeated, 0.0)
            total += similarity.sum(0)
            total.scatter_add_(0, newest, -excused)
            may_pause(products=similarity.numel() * keys.shape[1], touches=6 * similarity.numel())
        return total

    def cost(self, shape: CostShape) -> Cost:
        n = shape.num_entries
        part = min(n * n, max(n, MAX_SIMILARITY_BYTES // 4))
        return super().cost(shape) + Cost(
            numbers=shape.row_numbers + 10 * n + 5 * part // 2,
            products=n * shape.row_numbers,
            touches=6 * n * n + gathering(shape.row_numbers) + 4 * shape.row_numbers + sorting(n),
        )
