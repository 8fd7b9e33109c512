"""Merger that merges evicted entries that are more similar than usual (D2O)."""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import CacheUpdate, CompressionContext, Entries, Merger, ScoreMode
from vllm_kvmerge.policies.indexing import complement
from vllm_kvmerge.policies.mergers.convex import absorb
from vllm_kvmerge.policies.registry import register

AUX_OFFSET = 2.0
"""Added to the threshold in ``aux``: a cosine is at least -1, so 0 stands for no threshold."""


@register
class D2OMerger(Merger):
    """Compensation for evicted tokens (D2O, as in KeepKV eq. 11-12).

    Each evicted entry e has a nearest target c, that of largest cosine similarity u_e of keys, and joins it where
    u_e >= tau; elsewhere it is dropped. Weights within a set are exp(u_j) / sum exp(u), with u_c = 1.

        tau_0 = mean of u_e over the prompt's evicted entries        tau_t = beta mean u_e + (1 - beta) tau_(t-1)

    per layer and head. tau lives in the entries' ``aux``, which the ``sum`` tracker leaves alone. D2O evicts one entry
    per step, so its mean is over one; here a compression evicts an interval's worth.

    The authors' code differs: weights are u_j and u_c = 1 over the number of entries in the set, which do not sum to 1;
    a layer's heads share one tau, with which the mean of their u is compared; and the prompt is compressed after the
    first generated token.
    """

    name = "d2o"
    source = "D2O, Wan et al., arXiv:2406.13035"
    tracker_modes = frozenset({ScoreMode.SUM})

    threshold_share: float = Field(
        0.7,
        ge=0.0,
        le=1.0,
        description="Weight of the newest similarities in the threshold's moving average (D2O's beta).",
    )

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        evicted = complement(kept, len(entries))
        similarity, targets = entries.most_similar(evicted, kept, entries.is_live.gather(1, kept))
        comparable = entries.is_live.gather(1, evicted) & similarity.isfinite()
        aux = self._threshold(entries, similarity, comparable)
        joins = comparable & (similarity + AUX_OFFSET >= aux)
        weights = torch.exp(similarity - 1.0).masked_fill(~joins, 0.0)
        merged = absorb(entries, kept, evicted, targets, weights, protected)
        return replace(merged, aux=aux.expand_as(merged.aux).masked_fill(~merged.is_live, 0.0))

    def _threshold(self, entries: Entries, similarity: Tensor, comparable: Tensor) -> Tensor:
        """``[H, 1]``: tau + ``AUX_OFFSET``; 0 before the first comparison."""
        count = comparable.sum(1, keepdim=True)
        mean = similarity.masked_fill(~comparable, 0.0).sum(1, keepdim=True) / count.clamp(min=1) + AUX_OFFSET
        previous = entries.aux.masked_fill(~entries.is_live, 0.0).amax(1, keepdim=True)
        moved = torch.where(previous > 0, torch.lerp(previous, mean, self.threshold_share), mean)
        return torch.where(count > 0, moved, previous)
