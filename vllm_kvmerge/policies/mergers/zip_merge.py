"""Merger that leaves the attention output of the scored queries unchanged, as far as one entry can (KeepKV)."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops import Softmax
from vllm_kvmerge.ops.attention import log_bias_correction
from vllm_kvmerge.ops.zipping import ZipGroups, ZipMode, ZipPlanes
from vllm_kvmerge.policies.base import (
    DEAD,
    MAX_QUERIES,
    CacheUpdate,
    CompressionContext,
    Entries,
    Merger,
    Queries,
    ScoreMode,
)
from vllm_kvmerge.policies.indexing import inverse, largest, listed, select
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.trackers import EmaDecay

HeadFit = Literal["mean", "least_squares"]


@dataclass(frozen=True)
class _Scores:
    """What entries weigh in a merge.

    log_weights: ``[H, n]``, ln(p s_hat) by the mean of the query heads' scores. usable: ``[H, n]`` bool, live entries
    that were scored. log_scores: ``[H, G', n]``, ln s_hat of each query head, or G' = 1: of their mean. log_norms:
    ``[H, G', 1]``, ln of attention's denominator for each of these.
    """

    log_weights: Tensor
    usable: Tensor
    log_scores: Tensor
    log_norms: Tensor


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

    eq. 25 explodes where L_bar is near 0 or its sign is not L_r's: ``scale`` refuses to explode, and merges an entry
    whose factor is outside (0, 10] as ``votes`` does. ``auto`` scales where |L_r / L_bar - 1| <= 0.1, and does as
    ``votes`` elsewhere.

    Scores: the tracker ``log_ema`` keeps s_hat. Beside any other tracker, whose statistic selection needs as it
    is, s_hat comes from the newest ``zip_window`` queries, which eq. 8 averages just so at the end of the prompt. That
    needs no second statistic in the cache, which attention would have to update at each step (``aux`` holds one number
    where a moving average takes two, and ``mean`` has it), and a merged entry's scores are those of its own key. The
    entry's statistic becomes the sum of its sources': what it would be had they always been one.

    When the output is unchanged (theorem 3): for a query q if s_hat_i = exp(scale q k_i) of every entry that is merged,
    if all evicted entries join one, and if one query head reads them (G = 1). So with scores of one query
    (``zip_window`` or ``score_window`` 1), ``merge_threshold`` -1, G = 1, up to rounding; with the defaults it changes:
    s_hat is an average over queries, and what is not similar enough is dropped.

    Query heads that share a KV head (G > 1) have scores of their own, but one merged entry. ``head_fit`` ``mean``
    averages their scores, W_i = p_i mean_g exp(L_gi), which is exact for no head unless all agree. ``least_squares``
    minimises sum_g |o'_g - o_g|^2 to first order. With W_g = sum_i p_i exp(L_gi), A_g = W_g / Z_g, v_g = the mean value
    by W_gi, and d_g = ln(p_r exp(l_g) / W_g), where l_g is the score of k_r by head g:

        o'_g - o_g = A_g [(v_r - v_g) + d_g (v_g - o_g)] + higher orders

    The first term is least for v_r = sum_g a_g v_g with a_g = A_g^2 / sum A^2, thus for a mean of the v_i with shares
    c_i = sum_g a_g W_gi / W_g, with which keys are averaged as well: k_bar = sum c_i k_i, L_bar_g = sum c_i L_gi. The
    second, with all |v_g - o_g| taken for equal, is least where sum_g a_g d_g^2 is:

        votes   ln p_r = sum_g a_g (ln W_g - L_bar_g)
        scale   k_r = f k_bar, f = sum_g a_g L_bar_g L_r,g / sum_g a_g L_bar_g^2,  L_r,g = ln(W_g / sum p_i)

    For G = 1 that is the above. It always reads queries, because trackers keep the heads' mean.

    A model that caps its logits (C(x) = cap tanh(x / cap)) has L_i = C(x_i), and a sum of keys adds up x_i, not L_i. So
    x_i = C^-1(L_i) takes the place of L_i in means, and L_r, which lies between the L_i, becomes the logit of a key:

        scale   k_r = k_bar * C^-1(L_r) / x_bar        votes   p_r = sum p_i * exp(L_r - C(x_bar))

    which leaves the output unchanged where the above does. Sinks have no part in it but in ``least_squares``, in Z_g.

    Before selection (``merge_first``, table 3): at the end of the prompt, similar pairs of unprotected entries are
    merged, the most similar first, until the budget is met or no pair exceeds T. Its cost is quadratic in the length
    of the prompt. A pass compares sources with targets: the less important half with the more important one, then, in
    further ``merge_passes``, halves within halves, so that any two entries are compared within log2(n) passes. Of what
    is equally important or similar, the entry of lower index comes first.

    Entries that were never scored have no weight: they neither join nor are joined.
    """

    name = "zip"
    source = "KeepKV, arXiv:2504.09936"
    tracker_modes = frozenset(ScoreMode)

    merge_threshold: float = Field(
        0.8, ge=-1.0, le=1.0, description="Cosine similarity of keys above which an evicted entry is merged."
    )
    zip_mode: ZipMode = Field(
        "auto",
        description="How a merge is made lossless: by scaling the key (the paper), by votes, or the safer of both.",
    )
    head_fit: HeadFit = Field(
        "mean",
        description="What a merge fits if query heads share a KV head: their mean score, or all by least squares.",
    )
    merge_first: bool = Field(True, description="Merge similar entries of the prompt before evicting any.")
    merge_passes: int = Field(1, ge=1, le=64, description="Maximum number of merging passes before evicting.")
    zip_window: int = Field(
        32, ge=1, le=MAX_QUERIES, description="Newest queries that score entries, unless the tracker log_ema does."
    )
    ema_decay: EmaDecay = 0.9

    def query_window_with(self, mode: ScoreMode) -> int:
        return self.zip_window if self._reads_queries(mode) else 0

    @property
    def takes_cap(self) -> bool:
        return True

    @property
    def takes_sinks(self) -> bool:
        return True

    def _reads_queries(self, mode: ScoreMode) -> bool:
        return mode != ScoreMode.LOG_EMA or self.head_fit == "least_squares"

    def before_selection(
        self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate | None:
        if not (self.merge_first and context.at_prompt_end):
            return None
        update = self._pass(0, entries, importance, protected, context)
        for number in range(1, self.merge_passes):
            is_met = update.num_live <= context.counts
            if is_met.is_cpu and is_met.all():  # a GPU would be waited for
                break
            view = update.view(entries)
            if context.tracker_mode == ScoreMode.LOG_EMA:
                # The logarithms add up; others' importance is asked for nothing but whether it is finite.
                changes = (view.scores - entries.scores) + (view.log_votes - entries.log_votes)
                update = self._pass(number, view, importance + changes, protected, context).after(update, view)
            else:
                update = self._pass(number, view, importance, protected, context).after(update, view)
        return update

    def _pass(
        self, number: int, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        """One pass of ``before_selection``; its ``number``, from 0, decides which entries may join which."""
        n = len(entries)
        scores = self._scores(entries, importance, context)
        candidates = scores.usable & ~protected
        num_candidates = candidates.sum(1)
        if number == 0:
            # The least important half of the candidates; others come last.
            may_join = ops.top(-scores.log_weights, ~candidates, candidates, num_candidates // 2)
            may_take, num_targets = candidates ^ may_join, n - n // 2
        else:
            # Entries that first differ in this binary digit of their rank, as a share of all, are on different sides.
            num_digits = (num_candidates - 1).clamp(min=1).double().frexp().exponent
            digit = (number % num_digits).unsqueeze(1)
            ranked = scores.log_weights.masked_fill(~candidates, torch.inf)
            from_top = num_candidates.unsqueeze(1) - 1 - ranked.argsort(dim=1, stable=True).argsort(dim=1)
            odd = (from_top << (digit + 1)) // num_candidates.clamp(min=1).unsqueeze(1) % 2 == 1
            may_join, may_take, num_targets = candidates & odd, candidates & ~odd, n
        sources, targets = listed(may_join, n // 2), listed(may_take, num_targets)
        if not (sources.shape[1] and targets.shape[1]):
            return CacheUpdate.unchanged(entries)
        similarity, targets = entries.most_similar(sources, targets, targets >= 0)
        surplus = entries.num_live - context.counts
        joins = (similarity > self.merge_threshold) & largest(similarity, surplus)
        merged, groups = self._absorb(entries, None, scores, sources, targets, joins, protected, context)
        nothing = torch.full_like(groups.sources, DEAD)
        kept, positions = ops.put(groups.sources, [merged.kept, merged.positions], [nothing, nothing])
        return replace(merged, kept=kept, positions=positions)

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        scores = self._scores(entries, importance, context)
        evicted = listed(scores.usable & (inverse(kept, len(entries)) < 0), len(entries) - kept.shape[1])
        if evicted.shape[1] == 0:
            return CacheUpdate.of(entries, kept)
        similarity, targets = entries.most_similar(evicted, kept, scores.usable.gather(1, kept))
        joins = similarity > self.merge_threshold
        return self._absorb(entries, kept, scores, evicted, targets, joins, protected, context)[0]

    def _scores(self, entries: Entries, importance: Tensor, context: CompressionContext) -> _Scores:
        """importance: ``[H, n]``, the tracker's; ``log_ema``'s is ln(p s_hat) itself."""
        is_scored = entries.is_live & (importance.abs() < torch.inf)  # in half the time of isfinite()
        if not self._reads_queries(context.tracker_mode):
            log_scores = (importance - entries.log_votes).unsqueeze(1)
            return _Scores(importance, is_scored, log_scores, torch.zeros_like(log_scores[..., :1]))
        if context.queries is None:
            nothing = torch.full_like(entries.log_votes, -torch.inf)
            return _Scores(nothing, torch.zeros_like(is_scored), nothing.unsqueeze(1), nothing[:, None, :1])
        log_scores = self._log_ema(entries, context.queries.newest(self.zip_window), context.scale, context.softmax)
        mean = log_scores.logsumexp(1) - math.log(log_scores.shape[1])
        log_weights = entries.log_votes + mean
        usable = is_scored & (log_weights.abs() < torch.inf)
        if self.head_fit == "mean":
            log_scores = mean.unsqueeze(1)
            return _Scores(log_weights, usable, log_scores, torch.zeros_like(log_scores[..., :1]))
        by_head = (entries.log_votes.unsqueeze(1) + log_scores).masked_fill(~usable.unsqueeze(1), -torch.inf)
        return _Scores(log_weights, usable, log_scores, context.softmax.log_norms(by_head.unsqueeze(2)).squeeze(2))

    def _log_ema(self, entries: Entries, queries: Queries, scale: float, softmax: Softmax) -> Tensor:
        """``[H, G, n]``: ln s_hat of each query head over these queries (KeepKV eq. 8 at t = L); -inf for dead ones."""
        age = torch.arange(queries.vectors.shape[2] - 1, -1, -1, device=queries.vectors.device)
        log_shares = age * math.log(self.ema_decay) + math.log1p(-self.ema_decay)
        rows, parts = (queries.vectors * scale).flatten(1, 2), []
        for index in entries.parts():
            products = (rows @ entries.keys_at(index).transpose(1, 2)).unflatten(1, queries.vectors.shape[1:3])
            logits = softmax.capped(products)
            positions = entries.positions.gather(1, index).unsqueeze(1)
            seen = (positions >= 0) & (positions <= queries.positions.unsqueeze(-1))  # a dead entry's is negative
            logits = (logits + log_shares.unsqueeze(-1)).masked_fill(~seen.unsqueeze(1), -torch.inf)
            correction = log_bias_correction(seen.sum(1, keepdim=True).to(logits.dtype), self.ema_decay)
            parts.append(torch.where(seen.any(1, keepdim=True), logits.logsumexp(2) - correction, -torch.inf))
        return torch.cat(parts, 2)

    def _absorb(
        self,
        entries: Entries,
        kept: Tensor | None,
        scores: _Scores,
        sources: Tensor,
        targets: Tensor,
        joins: Tensor,
        protected: Tensor,
        context: CompressionContext,
    ) -> tuple[CacheUpdate, ZipGroups]:
        """KeepKV eq. 25: the entries at ``kept``, in which each target has taken in the sources that join it.

        kept: ``[H, c]`` int64; None: all entries, those that join others too. sources, targets: ``[H, m]`` int64,
        indices of entries; targets are kept, and no entry is both. joins: ``[H, m]`` bool. protected: ``[H, n]`` bool.
        """
        known = entries.log_votes, entries.scores, entries.aux, entries.positions, protected
        planes = ZipPlanes(*known, scores.log_scores, scores.log_norms)
        of_model = context.tracker_mode, self.zip_mode, context.softmax
        groups = ops.zip_groups(sources, targets, joins, planes, *of_model)

        joining = groups.sources, groups.groups, groups.shares, groups.targets
        keys, values = entries.mixed("keys", *joining), entries.mixed("values", *joining)
        keys *= groups.factors.unsqueeze(-1)
        if kept is None:
            update, changed = CacheUpdate.unchanged(entries), groups.targets
        else:
            update, changed = CacheUpdate.of(entries, kept), select(inverse(kept, len(entries)), groups.targets)
        before, new = (
            [update.log_votes, update.positions, update.scores],
            [groups.log_votes, groups.positions, groups.scores],
        )
        log_votes, positions, merged_scores = ops.put(changed, before, new)
        metadata = {"log_votes": log_votes, "positions": positions, "scores": merged_scores}
        return update.write(changed, keys, values, joins.sum(1), **metadata), groups
