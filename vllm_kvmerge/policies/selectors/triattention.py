"""Selector that ranks keys by what queries before RoPE have in common."""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, MAX_QUERIES, CompressionContext, Entries, HeadShape
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector

OFFSETS = [1 << power for power in range(17)]
"""Future positions, counted from the next one."""


@register
class TriAttention(RankedSelector):
    """The entries with the largest logits that the mean query has at positions to come (TriAttention).

        S(k) = sum_f |E q_f| |k_f| mean_t cos(omega_f (D + t) + phi_f) + sum_f (E |q_f| - |E q_f|) |k_f|

    f: RoPE's pairs of numbers, with angle omega_f per position. q: a query head's queries before RoPE; phi_f: angle
    between E q_f and k_f before RoPE. D: the next position minus the key's. t: 1, 2, 4, ..., 2^16, as far as the model
    has positions. The second sum is large for keys that are long in pairs where queries agree on no direction. Each
    query head's S has mean 0 and standard deviation 1 over the entries; an entry's score is its largest.

    The source takes the means from any text, once per model; here they come from the newest ``statistics_window``
    queries. Where no query is known, the newest entries stay.
    """

    name = "triattention"
    source = "TriAttention, Mao et al., arXiv:2604.04921"
    needs_scores = False
    needs_rotation = True

    statistics_window: int = Field(
        256, ge=1, le=MAX_QUERIES, description="Newest queries whose means predict future queries."
    )

    @property
    def query_window(self) -> int:
        return self.statistics_window

    @property
    def takes_cap(self) -> bool:
        return True  # which keeps the logits' order

    @property
    def takes_sinks(self) -> bool:
        return True

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        if context.queries is None:
            return entries.positions.to(entries.scores.dtype)
        rotation, (centres, spreads) = context.known_rotation(), self._future_queries(context)
        parts = []
        for part in entries.parts():
            keys = entries.keys_at(part.masked_fill(~entries.is_live.gather(1, part), DEAD))
            parts.append(centres @ keys.mT + spreads @ rotation.lengths(keys).mT)
        scores, is_live = torch.cat(parts, dim=2), entries.is_live.unsqueeze(1)  # 0 where dead
        count = is_live.sum(2, keepdim=True).clamp(min=1)
        scores = (scores - scores.sum(2, keepdim=True) / count).mul_(is_live)
        deviation = (scores.square().sum(2, keepdim=True) / count).sqrt_().clamp_(min=1e-6)
        return (scores / deviation).amax(1)

    def _future_queries(self, context: CompressionContext) -> tuple[Tensor, Tensor]:
        """E q at the positions to come, ``[H, G, d]``, and E |q_f| - |E q_f|, ``[H, G, r/2]``."""
        assert context.queries is not None
        queries, rotation = context.queries.newest(self.query_window), context.known_rotation()
        positions = queries.positions.unsqueeze(1)
        centre = rotation.turned_back(queries.vectors, positions).mean(2)
        start = positions[:, :, -1] + 1
        spread = rotation.lengths(queries.vectors).mean(2) - rotation.lengths(rotation.turned(centre, start))
        ahead = torch.stack([rotation.table[offset] for offset in OFFSETS if offset < len(rotation.table)])
        return rotation.turned_ahead(centre, start, ahead), spread

    def held(self, shape: HeadShape) -> int:
        queries = 3 * min(self.query_window, shape.num_entries) * shape.head_size
        return shape.group_size * (queries + 3 * shape.num_entries)
