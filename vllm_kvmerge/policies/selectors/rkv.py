"""Selector that weighs attention against redundancy."""

from functools import partial

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from vllm_kvmerge.ops import newest_repeats
from vllm_kvmerge.policies.base import DEAD, CompressionContext, Entries, HeadShape
from vllm_kvmerge.policies.indexing import by_position
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import NewestEntries, RankedSelector
from vllm_kvmerge.policies.tiles import num_tiles, once


@register
class RedundancyAware(RankedSelector):
    """Important and not redundant: Z = lambda I - (1 - lambda) R (R-KV).

    I: attention max-pooled over neighbours in order of position; the source's is a mean of softmax rows, so scores are
    scaled to sum to 1. R: softmax, over the live entries, of the mean cosine similarity to all other keys, where an
    entry i does not count against the newest entry that is more similar to it than ``redundancy_threshold``: of
    several that repeat each other, the newest stays. Both sum to 1, so lambda compares like with like.

    The source's I is attention of the last 8 queries alone; here it is the tracker's score, which the preset lets decay
    over about as many, and which must be of probabilities, not a logarithm. Costs n^2 / 2 products per head.
    """

    name = "rkv"
    source = "R-KV, Cai et al., arXiv:2505.24133"
    needs_scores = True
    needs_probabilities = True

    recent_window: NewestEntries = 8
    attention_share: float = Field(
        0.1, ge=0.0, le=1.0, description="Weight of attention relative to redundancy (R-KV's lambda)."
    )
    redundancy_threshold: float = Field(
        0.5, ge=0.0, le=1.0, description="Cosine similarity above which keys count as redundant."
    )
    pooling_reach: int = Field(
        3, ge=0, le=127, description="Neighbours on each side, by position, over which attention is max-pooled."
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
        similarity = self._total_similarity(keys)
        similarity = similarity / is_live.sum(1, keepdim=True).clamp(min=1)
        redundancy = similarity.masked_fill(~is_live, -torch.inf).softmax(dim=1).masked_fill(~is_live, 0.0)
        ranking = self.attention_share * attention - (1.0 - self.attention_share) * redundancy
        return torch.empty_like(ranking).scatter_(1, order, ranking)

    def _total_similarity(self, keys: Tensor) -> Tensor:
        """``[H, n]``: sum of cosine similarities to the others, except the excused ones.

        keys: ``[H, n, d]`` in order of position, of length 1, or 0 where dead. All sums together are linear in the
        keys; only the excused ones are searched for.
        """
        num_rows, n, d = keys.shape
        total = -torch.linalg.vector_norm(keys, dim=-1).square_()
        for row, head in zip(total, keys, strict=True):  # whose numbers do not depend on how many others there are
            row += head @ head.sum(0)
        found = torch.full((num_rows, n), -1, device=keys.device)
        count = num_tiles(n, num_rows * n * d // 2, keys.device)
        ends = [n - n * number // count for number in range(count + 1)]

        def search(number: int) -> tuple[Tensor, Tensor]:
            """From the last entries backwards: a range also leaves what it has come across for older ones."""
            repeated = newest_repeats(keys, self.redundancy_threshold, found, ends[number + 1], ends[number])
            return repeated, found.clone() if count > 1 else found

        excused = []
        for number in range(count):
            repeated, known = once(partial(search, number))
            excused.append(repeated)
            found.copy_(known)
        return total.scatter_add_(1, found.clamp_(min=0), -torch.cat(excused[::-1], dim=1))

    def held(self, shape: HeadShape) -> int:
        return shape.num_entries * shape.head_size * 5 // 4
