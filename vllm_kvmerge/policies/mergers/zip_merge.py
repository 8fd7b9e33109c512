"""Merger that leaves the current attention output unchanged (KeepKV)."""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, CompressionContext, Entries, Merger, Outcome, TrackerMode
from vllm_kvmerge.policies.indexing import any_at, complement, first, inverse, padded, select
from vllm_kvmerge.policies.registry import register

AUTO_TOLERANCE = 0.1
"""``auto`` scales a key whose length changes by at most this share."""

MAX_SCALE = 10.0
"""``scale`` does not stretch a key beyond this factor."""


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

    Both give the merged entry the mass and value of its members for a query whose scores are the s_hat_i (theorem 3).
    eq. 25 explodes where L_bar is near 0 or its sign is not L_r's: ``scale`` refuses to explode, and merges an entry
    whose factor is outside (0, 10] as ``votes`` does. ``auto`` scales where |L_r / L_bar - 1| <= 0.1, and does as
    ``votes`` elsewhere.

    ``merge_first`` (table 3): at the end of the prompt, similar pairs of unprotected entries are merged before
    selection, the less important half into the more important one, the most similar first, until the budget is met or
    no pair exceeds T. Its cost is quadratic in the length of the prompt.

    Entries that were never scored have no weight: they neither join nor are joined.
    """

    name: ClassVar[str] = "zip"
    source: ClassVar[str] = "KeepKV, arXiv:2504.09936"
    tracker_modes: ClassVar[frozenset[TrackerMode]] = frozenset({"log_ema"})

    merge_threshold: float = Field(
        0.8, ge=-1.0, le=1.0, description="Cosine similarity of keys above which an evicted entry is merged."
    )
    zip_mode: Literal["scale", "votes", "auto"] = Field(
        "auto", description="What makes a merge lossless: scaling the key (the paper), its votes, or the safer of both."
    )
    merge_first: bool = Field(True, description="Merge similar entries of the prompt before evicting any.")

    def before_selection(
        self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> Outcome | None:
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
        members = order[:, : n // 2]
        upper = num_lower + rank[: n - n // 2]
        similarity, carriers = entries.most_similar(
            members, order.gather(1, upper.clamp(max=n - 1)), upper < num_candidates
        )
        joins = (rank[: n // 2] < num_lower) & (similarity > self.merge_threshold)
        by_similarity = similarity.masked_fill(~joins, -torch.inf).argsort(dim=1, descending=True, stable=True)
        surplus = (entries.is_live.sum(1, keepdim=True) - context.budget).clamp(min=0)
        joins = first(joins, by_similarity, surplus)
        merged = self._absorb(entries, rank.repeat(len(members), 1), importance, members, carriers, joins, protected)
        gone = any_at(members, joins, n)
        return replace(
            merged, kept=merged.kept.masked_fill(gone, DEAD), positions=merged.positions.masked_fill(gone, DEAD)
        )

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> Outcome:
        can_merge = _is_scored(entries, importance)
        evicted = complement(kept, len(entries))
        similarity, carriers = entries.most_similar(evicted, kept, can_merge.gather(1, kept))
        joins = can_merge.gather(1, evicted) & (similarity > self.merge_threshold)
        return self._absorb(entries, kept, importance, evicted, carriers, joins, protected)

    def _absorb(
        self,
        entries: Entries,
        kept: Tensor,
        importance: Tensor,
        members: Tensor,
        carriers: Tensor,
        joins: Tensor,
        protected: Tensor,
    ) -> Outcome:
        """KeepKV eq. 25: the entries at ``kept``, in which each carrier has taken in the members that join it.

        kept: ``[H, c]`` int64. importance: ``[H, n]``, ln(p s_hat). members, carriers: ``[H, m]`` int64, indices of
        entries; carriers are kept, and no entry is both. joins: ``[H, m]`` bool. protected: ``[H, n]`` bool.
        """
        n = len(entries)
        is_joined = any_at(carriers, joins, n)
        carrier = is_joined.nonzero(as_tuple=True)  # of all heads in one list, each carrier a group
        num_groups = len(carrier[0])
        number = torch.zeros_like(entries.positions)
        number[carrier] = torch.arange(num_groups, device=number.device)
        # First each group's carrier, then all that join.
        group = torch.cat([number[carrier], number.gather(1, carriers)[joins]])
        head = torch.arange(len(members), device=members.device).unsqueeze(1).expand_as(members)
        entry = torch.cat([carrier[0], head[joins]]), torch.cat([carrier[1], members[joins]])

        log_votes, log_weights = entries.log_votes[entry], importance[entry]
        log_scores = log_weights - log_votes
        log_total = _log_sum_exp(log_weights, group, num_groups)
        weights = torch.exp(log_weights - log_total[group])  # W_i / sum W_i

        def mean(tensor: Tensor) -> Tensor:
            weighted = tensor * weights.view(-1, *(1 for _ in tensor.shape[1:]))
            return tensor.new_zeros(num_groups, *tensor.shape[1:]).index_add_(0, group, weighted)

        log_sum_votes = _log_sum_exp(log_votes, group, num_groups)
        log_mean_score = log_total - log_sum_votes  # L_r
        mean_log_score = mean(log_scores)  # L_bar
        factor = log_mean_score / mean_log_score
        scales = self._scales(factor)
        new_log_scores = torch.where(scales, log_mean_score, mean_log_score)
        newest = entries.positions[carrier].scatter_reduce(0, group, entries.positions[entry], "amax")

        index, joining = padded(is_joined), members.masked_fill(~joins, DEAD)
        wanted = index >= 0
        keys, values = entries.keys_at(index), entries.values_at(index)
        keys[wanted] = mean(torch.cat([keys[wanted], entries.keys_at(joining)[joins]]))
        keys[wanted] *= torch.where(scales, factor, 1.0).unsqueeze(-1)
        values[wanted] = mean(torch.cat([values[wanted], entries.values_at(joining)[joins]]))
        outcome = Outcome.of(entries, kept)
        changed = select(inverse(kept, n), index)
        place = carrier[0], changed[wanted]
        outcome.log_votes[place] = torch.where(scales, log_sum_votes, log_total - mean_log_score)
        outcome.positions[place] = torch.where(protected[carrier], entries.positions[carrier], newest)
        # The bias correction depends on the carrier's aux alone, which stays: S moves by as much as L.
        outcome.scores[place] += new_log_scores - log_scores[:num_groups]
        return replace(outcome, changed=changed, keys=keys, values=values, merged=joins.sum(1))

    def _scales(self, factor: Tensor) -> Tensor:
        """``[r]`` bool: whether a merge scales its key, by L_r / L_bar; elsewhere the votes make up for it."""
        if self.zip_mode == "votes":
            return torch.zeros_like(factor, dtype=torch.bool)
        if self.zip_mode == "scale":
            return (factor > 0.0) & (factor <= MAX_SCALE)
        return (factor - 1.0).abs() <= AUTO_TOLERANCE


def _is_scored(entries: Entries, importance: Tensor) -> Tensor:
    return entries.is_live & importance.isfinite()


def _log_sum_exp(tensor: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """``[num_groups]``: ln sum exp over the elements of ``tensor`` (``[m]``) that belong to each group."""
    largest = tensor.new_full((num_groups,), -torch.inf).scatter_reduce(0, group, tensor, "amax")
    total = tensor.new_zeros(num_groups).index_add_(0, group, torch.exp(tensor - largest[group]))
    return largest + torch.log(total)
