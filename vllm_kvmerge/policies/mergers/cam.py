"""Merger that spreads an evicted value over the entries that follow (CaM)."""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from vllm_kvmerge.policies.base import DEAD, CacheUpdate, CompressionContext, Entries, HeadShape, Merger, ScoreMode
from vllm_kvmerge.policies.indexing import complement, listed, select
from vllm_kvmerge.policies.noise import uniform
from vllm_kvmerge.policies.registry import register

SEED = 1
"""Not the default of the ``random`` selector, whose draws would otherwise be the same."""


@register
class CamMerger(Merger):
    """Cache merging (CaM).

    The m kept entries that follow an evicted entry e in order of position each gain v_e / m, with probability
    clamp(s_e / mean of their scores s, 0, 1); else e is dropped, as where none follows. Keys, positions, votes and
    scores stay. Where fewer than m follow, each still gains v_e / m. The draw is a hash of layer, head and position.

    The source's code for generation merges one entry per step, that which leaves a sliding window behind its sinks, by
    the attention it has had so far and into 16 receivers, and drops the prompt's surplus. That is the preset's default
    too: summed over a prompt's evicted entries, values grow out of proportion, as they do more slowly in a long
    generation. Its code for tasks differs: as many receivers as the window holds, judged by the newest query's
    attention over the largest of theirs, prompt included.
    """

    name = "cam"
    source = "CaM, Zhang et al., ICML 2024"
    tracker_modes = frozenset({ScoreMode.SUM, ScoreMode.MEAN})

    num_receivers: int = Field(
        16, ge=1, le=4096, description="Entries among which an evicted value is divided (CaM's m)."
    )
    merge_prompt: bool = Field(False, description="Merge at the end of the prompt too, where the source drops.")

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        update = CacheUpdate.of(entries, kept)
        if context.at_prompt_end and not self.merge_prompt:
            return update
        evicted = complement(kept, len(entries))
        positions = entries.positions.gather(1, evicted)
        scores = importance.clamp(min=0.0)
        # Targets in order of position, dead ones last: their values are not used.
        place = update.positions.masked_fill(~update.is_live, torch.iinfo(torch.int64).max)
        order = place.argsort(dim=1, stable=True)
        follower = torch.searchsorted(place.gather(1, order), positions)
        num_following = update.is_live.sum(1, keepdim=True) - follower
        received = scores.gather(1, kept).masked_fill(~update.is_live, 0.0).gather(1, order)
        mean = self._sum_ahead(received, follower) / num_following.clamp(min=1, max=self.num_receivers)
        # s_e / mean > u, false for 0 / 0.
        draws = uniform(SEED, entries, context).gather(1, evicted)
        merges = (positions != DEAD) & (num_following > 0) & (scores.gather(1, evicted) > draws * mean)
        first = follower.clamp(max=kept.shape[1] - 1)
        given = entries.values_at(evicted.masked_fill(~merges, DEAD))
        spread = given.new_zeros(*kept.shape, given.shape[2])
        spread.scatter_add_(1, first.unsqueeze(-1).expand_as(given), given)
        num_given = torch.zeros_like(kept).scatter_add_(1, first, merges.long()).cumsum(1)
        gaining = num_given > pad(num_given, (self.num_receivers, 0))[:, : kept.shape[1]]
        gains = listed(gaining, min(kept.shape[1], evicted.shape[1] * self.num_receivers))
        rows = self._mean_behind(spread, gains.clamp(min=0))
        changed = select(order, gains)
        return update.write(changed, None, entries.values_at(select(kept, changed)) + rows, merges.sum(1))

    def _sum_ahead(self, scores: Tensor, start: Tensor) -> Tensor:
        """``[H, m]``: sum of ``scores`` (``[H, c]``) over the receivers from ``start`` (``[H, m]`` int64) on."""
        # One infinite score must not make all later sums NaN.
        total = pad(scores.nan_to_num().cumsum(1, dtype=torch.float64), (1, 0))
        end = (start + self.num_receivers).clamp(max=scores.shape[1])
        return (total.gather(1, end) - total.gather(1, start)).to(scores.dtype)

    def _mean_behind(self, spread: Tensor, receivers: Tensor) -> Tensor:
        """``[H, r, d]``: gains of ``receivers`` (``[H, r]`` int64): sums of ``spread`` (``[H, c, d]``) over each and
        the m - 1 before it, divided by m."""

        def total(end: Tensor) -> Tensor:
            """Sum of ``spread`` up to and including ``end``; 0 where that is negative."""
            rows = sums.gather(1, end.clamp(min=0).unsqueeze(-1).expand(-1, -1, sums.shape[2]))
            return rows.masked_fill_((end < 0).unsqueeze(-1), 0.0)

        sums = spread.cumsum(1, dtype=torch.float64)
        return ((total(receivers) - total(receivers - self.num_receivers)) / self.num_receivers).to(spread.dtype)

    def held(self, shape: HeadShape) -> int:
        receivers = min(shape.num_kept, shape.num_leaving * self.num_receivers)
        return (shape.num_leaving + 3 * shape.num_kept + 6 * receivers) * shape.head_size
