"""Merger that leaves the current attention output unchanged (KeepKV)."""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import CacheUpdate, CompressionContext, Entries, Merger, ScoreMode
from vllm_kvmerge.policies.cost import Cost, CostShape, comparing, comparing_tensors, gathering, sorting
from vllm_kvmerge.policies.indexing import any_at, first, inverse, mask_of, padded_nonzero, select
from vllm_kvmerge.policies.registry import register

ZipMode = Literal["scale", "votes", "auto"]

MAX_SCALE = 10.0
"""``scale`` does not stretch a key beyond this factor."""

AUTO_TOLERANCE = 0.1
"""``auto`` scales a key whose length changes by at most this share."""


@register
class ZipMerger(Merger):
    """ZIP-merging with electoral votes (KeepKV eq. 6-8, 20-26, algorithm 1).

    Each evicted entry e joins the kept entry c of largest cosine similarity of keys where that exceeds
    ``merge_threshold`` (T), and is dropped elsewhere; many e may join one c. Over c and all that join it, with votes
    p_i = exp(log_votes), log-scores L_i = ln s_hat_i and W_i = p_i exp(L_i):

        v_r = sum W_i v_i / sum W_i        k_bar = sum W_i k_i / sum W_i        L_bar = sum W_i L_i / sum W_i
        L_r = ln(sum W_i / sum p_i)

        scale   k_r = k_bar * L_r / L_bar    p_r = sum p_i                         (eq. 25)
        votes   k_r = k_bar                  p_r = sum p_i * exp(L_r - L_bar)

    Both give the merged entry the mass and value of its sources for a query whose scores are the s_hat_i (theorem 3).
    eq. 25 explodes where L_bar is near 0 or its sign is not L_r's: ``scale`` refuses to explode, and merges an entry
    whose factor is outside (0, 10] as ``votes`` does. ``auto`` scales where |L_r / L_bar - 1| <= 0.1, and does as
    ``votes`` elsewhere.

    ``merge_first`` (table 3): at the end of the prompt, similar pairs of unprotected entries are merged before
    selection, the less important half into the more important one, the most similar first, until the budget is met or
    no pair exceeds T. Its cost is quadratic in the length of the prompt.

    Entries that were never scored have no weight: they neither join nor are joined.
    """

    name = "zip"
    source = "KeepKV, arXiv:2504.09936"
    tracker_modes = frozenset({ScoreMode.LOG_EMA})

    merge_threshold: float = Field(
        0.8, ge=-1.0, le=1.0, description="Cosine similarity of keys above which an evicted entry is merged."
    )
    zip_mode: ZipMode = Field(
        "auto", description="What makes a merge lossless: scaling the key (the paper), its votes, or the safer of both."
    )
    merge_first: bool = Field(True, description="Merge similar entries of the prompt before evicting any.")

    def before_selection(
        self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate | None:
        if not (self.merge_first and context.at_prompt_end):
            return None
        n = len(entries)
        can_merge = _is_scored(entries, importance)
        candidates = can_merge & ~protected
        num_candidates = candidates.sum(1, keepdim=True)
        num_lower = num_candidates // 2
        # Candidates come first, the least important ahead: ranks [0, num_lower) may join [num_lower, num_candidates).
        order = importance.masked_fill(~candidates, torch.inf).argsort(dim=1, stable=True)
        rank = torch.arange(n, device=order.device)
        sources = order[:, : n // 2]
        upper = num_lower + rank[: n - n // 2]
        similarity, targets = entries.most_similar(
            sources, order.gather(1, upper.clamp(max=n - 1)), upper < num_candidates
        )
        joins = (rank[: n // 2] < num_lower) & (similarity > self.merge_threshold)
        by_similarity = similarity.masked_fill(~joins, -torch.inf).argsort(dim=1, descending=True, stable=True)
        surplus = (entries.is_live.sum(1, keepdim=True) - context.budget).clamp(min=0)
        joins = first(joins, by_similarity, surplus)
        merged = self._absorb(entries, rank.repeat(len(sources), 1), importance, sources, targets, joins, protected)
        gone = any_at(sources, joins, n)
        return merged.without(gone)

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        can_merge = _is_scored(entries, importance)
        evicted = padded_nonzero(can_merge & ~mask_of(kept, len(entries)))
        if evicted.shape[1] == 0:
            return CacheUpdate.of(entries, kept)
        sources = evicted.clamp(min=0)
        similarity, targets = entries.most_similar(sources, kept, can_merge.gather(1, kept))
        joins = (evicted >= 0) & (similarity > self.merge_threshold)
        return self._absorb(entries, kept, importance, sources, targets, joins, protected)

    def _absorb(
        self,
        entries: Entries,
        kept: Tensor,
        importance: Tensor,
        sources: Tensor,
        targets: Tensor,
        joins: Tensor,
        protected: Tensor,
    ) -> CacheUpdate:
        """KeepKV eq. 25: the entries at ``kept``, in which each target has taken in the sources that join it.

        kept: ``[H, c]`` int64. importance: ``[H, n]``, ln(p s_hat). sources, targets: ``[H, m]`` int64, indices of
        entries; targets are kept, and no entry is both. joins: ``[H, m]`` bool. protected: ``[H, n]`` bool.
        """
        n = len(entries)
        # A group is a target that something joins, and all that join it: [H, r] and [H, j], padded.
        target = padded_nonzero(any_at(targets, joins, n))
        joining = padded_nonzero(joins)
        source, targets = select(sources, joining), select(targets, joining)
        exists, joins = target >= 0, source >= 0
        own, other = target.clamp(min=0), source.clamp(min=0)
        group = inverse(target, n).gather(1, targets.clamp(min=0)).clamp(min=0)

        def log_sum_exp(mine: Tensor, theirs: Tensor) -> Tensor:
            theirs = theirs.masked_fill(~joins, -torch.inf)
            largest = mine.scatter_reduce(1, group, theirs, "amax")
            total = torch.exp(mine - largest)
            return largest + total.scatter_add(1, group, torch.exp(theirs - largest.gather(1, group))).log()

        log_votes = entries.log_votes.gather(1, own), entries.log_votes.gather(1, other)
        log_weights = importance.gather(1, own), importance.gather(1, other)
        log_scores = log_weights[0] - log_votes[0], log_weights[1] - log_votes[1]
        log_total = log_sum_exp(*log_weights)
        own_share = torch.exp(log_weights[0] - log_total)  # W_i / sum W_i
        share = torch.exp(log_weights[1] - log_total.gather(1, group)).masked_fill(~joins, 0.0)

        def mean(mine: Tensor, theirs: Tensor) -> Tensor:
            # An entry that does not join has no share, but may hold anything.
            given = (share * theirs).masked_fill(~joins, 0.0)
            return (own_share * mine).scatter_add(1, group, given)

        def mean_rows(read: Callable[[Tensor], Tensor]) -> Tensor:
            rows, given = read(target), read(source)  # zeros where there is none
            rows *= own_share.masked_fill(~exists, 0.0).unsqueeze(-1)
            given *= share.unsqueeze(-1)
            return rows.scatter_add_(1, group.unsqueeze(-1).expand_as(given), given)

        log_sum_votes = log_sum_exp(*log_votes)
        log_mean_score = log_total - log_sum_votes  # L_r
        mean_log_score = mean(*log_scores)  # L_bar
        factor = log_mean_score / mean_log_score
        scales = self._scales(factor)
        new_log_scores = torch.where(scales, log_mean_score, mean_log_score)
        positions = entries.positions.gather(1, own)
        newest = positions.scatter_reduce(1, group, select(entries.positions, source), "amax")
        newest = torch.where(protected.gather(1, own), positions, newest)

        keys = mean_rows(entries.keys_at) * torch.where(scales & exists, factor, 1.0).unsqueeze(-1)
        update = CacheUpdate.of(entries, kept)
        changed = select(inverse(kept, n), target)
        row = exists.nonzero(as_tuple=True)
        place = row[0], changed[row]
        update.log_votes[place] = torch.where(scales, log_sum_votes, log_total - mean_log_score)[row]
        update.positions[place] = newest[row]
        # The bias correction depends on the target's query count alone, which stays: S moves by as much as L.
        update.scores[place] += (new_log_scores - log_scores[0])[row]
        values = mean_rows(entries.values_at)
        return update.write(changed, keys, values, joins.sum(1))

    def _scales(self, factor: Tensor) -> Tensor:
        """``[H, r]`` bool: merges that scale their key, by L_r / L_bar; in others the votes make up for it."""
        if self.zip_mode == "votes":
            return torch.zeros_like(factor, dtype=torch.bool)
        if self.zip_mode == "scale":
            return (factor > 0.0) & (factor <= MAX_SCALE)
        return (factor - 1.0).abs() <= AUTO_TOLERANCE

    def cost(self, shape: CostShape) -> Cost:
        n, m, c = shape.num_entries, shape.num_leaving, shape.num_kept
        if not (self.merge_first and shape.at_prompt_end):
            return comparing(m, c, shape.head_size) + self._absorb_cost(m, min(m, c), shape)
        # Half of the entries may go into the other half, and the rest again: compared as tensors where merges have
        # changed them, while the rows of these are held.
        joined = min(n // 2, m)
        first = comparing(n // 2, n - n // 2, shape.head_size) + self._absorb_cost(joined, joined, shape)
        later = comparing(m, c, shape.head_size) + self._absorb_cost(m, min(m, c), shape)
        held = 2 * joined * shape.head_size + comparing_tensors(m, c, shape.head_size)
        return Cost(
            max(first.numbers, held + later.numbers),
            first.products + later.products,
            first.touches + later.touches + 2 * sorting(n),
        )

    def _absorb_cost(self, num_sources: int, num_targets: int, shape: CostShape) -> Cost:
        """Cost of ``_absorb`` if all sources join."""
        rows = (num_sources + num_targets) * shape.head_size
        return Cost(
            numbers=rows + 2 * num_targets * shape.head_size + 30 * shape.num_entries,
            touches=3 * gathering(rows) + 6 * rows + 120 * shape.num_entries,
        )


def _is_scored(entries: Entries, importance: Tensor) -> Tensor:
    return entries.is_live & (importance.abs() < torch.inf)  # in half the time of isfinite()
