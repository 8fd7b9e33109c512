"""Merger that leaves the current attention output unchanged (KeepKV)."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from vllm_kvmerge.policies.base import CompressionContext, Entries, Merger, TrackerMode
from vllm_kvmerge.policies.indexing import complement, first
from vllm_kvmerge.policies.registry import register

AUTO_TOLERANCE = 0.1
"""``auto`` scales a key whose length changes by at most this share."""

MAX_SCALE = 10.0
"""``scale`` does not stretch a key beyond this factor."""

MAX_SIMILARITY_BYTES = 64 << 20
"""Size of the similarity matrix above which it is computed in pieces."""


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
    ) -> tuple[Entries, Tensor]:
        if not (self.merge_first and context.at_prompt_end):
            return super().before_selection(entries, importance, protected, context)
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
        similarity, carriers = _most_similar(
            entries.keys, members, order.gather(1, upper.clamp(max=n - 1)), upper < num_candidates
        )
        joins = (rank[: n // 2] < num_lower) & (similarity > self.merge_threshold)
        by_similarity = similarity.masked_fill(~joins, -torch.inf).argsort(dim=1, descending=True, stable=True)
        surplus = (entries.is_live.sum(1, keepdim=True) - context.budget).clamp(min=0)
        joins = first(joins, by_similarity, surplus)
        merged = self._absorb(entries, importance, members, carriers, joins, protected)
        merged.kill(torch.zeros_like(protected).scatter_(1, members, joins))
        return merged, joins.sum()

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> tuple[Entries, Tensor]:
        can_merge = _is_scored(entries, importance)
        evicted = complement(kept, len(entries))
        similarity, carriers = _most_similar(entries.keys, evicted, kept, can_merge.gather(1, kept))
        joins = can_merge.gather(1, evicted) & (similarity > self.merge_threshold)
        merged = self._absorb(entries, importance, evicted, carriers, joins, protected)
        return merged.take(kept), joins.sum()

    def _absorb(
        self, entries: Entries, importance: Tensor, members: Tensor, carriers: Tensor, joins: Tensor, protected: Tensor
    ) -> Entries:
        """KeepKV eq. 25: a copy of ``entries`` in which each carrier has taken in the members that join it.

        importance: ``[H, n]``, ln(p s_hat). members, carriers: ``[H, m]`` int64, indices of entries; no entry is both.
        joins: ``[H, m]`` bool. protected: ``[H, n]`` bool. Entries that nothing joins stay as they are, bit for bit.
        """
        # Groups of all heads in one list: first each group's carrier, then all that join. Entries are numbered through
        # the heads, head * n + index.
        n = len(entries)
        first_of_head = torch.arange(len(members), device=members.device).unsqueeze(1) * n
        group_carriers, group_of_member = torch.unique((carriers + first_of_head)[joins], return_inverse=True)
        num_groups = len(group_carriers)
        group = torch.cat([torch.arange(num_groups, device=members.device), group_of_member])
        together = torch.cat([group_carriers, (members + first_of_head)[joins]])
        carrier, entry = (group_carriers // n, group_carriers % n), (together // n, together % n)

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

        result = entries.clone()
        result.keys[carrier] = mean(entries.keys[entry]) * torch.where(scales, factor, 1.0).unsqueeze(-1)
        result.values[carrier] = mean(entries.values[entry])
        result.log_votes[carrier] = torch.where(scales, log_sum_votes, log_total - mean_log_score)
        result.positions[carrier] = torch.where(protected[carrier], entries.positions[carrier], newest)
        # The bias correction depends on the carrier's aux alone, which stays: S moves by as much as L.
        result.scores[carrier] += new_log_scores - log_scores[:num_groups]
        return result

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


def _most_similar(keys: Tensor, members: Tensor, carriers: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """For each member the usable carrier whose key has the largest cosine similarity (KeepKV algorithm 1, lines 4-5).

    keys: ``[H, n, d]``. members: ``[H, m]``, carriers: ``[H, c]`` int64, indices of entries. usable: ``[H, c]`` bool.
    Returns the similarity, ``[H, m]``, -inf where no carrier is usable, and the carrier's index, ``[H, m]``.
    """
    keys = normalize(keys, dim=-1)
    head = torch.arange(len(keys), device=keys.device).unsqueeze(1)
    carrier_keys = keys[head, carriers].transpose(1, 2)
    rows = max(1, MAX_SIMILARITY_BYTES // max(1, carriers.numel() * keys.element_size()))
    similarity = keys.new_empty(members.shape)
    best = torch.empty_like(members)
    for start in range(0, members.shape[1], rows):
        part = slice(start, start + rows)
        cosine = keys[head, members[:, part]] @ carrier_keys
        similarity[:, part], best[:, part] = cosine.masked_fill_(~usable.unsqueeze(1), -torch.inf).max(dim=-1)
    # Rounding must not lift a cosine above every threshold.
    return similarity.clamp(max=1.0), carriers.gather(1, best)
