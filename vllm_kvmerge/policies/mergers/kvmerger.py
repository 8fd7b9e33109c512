"""Merger with Gaussian kernel weights (KVMerger)."""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, CacheUpdate, CompressionContext, Entries, Merger, ScoreMode
from vllm_kvmerge.policies.indexing import complement
from vllm_kvmerge.policies.mergers.convex import absorb
from vllm_kvmerge.policies.registry import register


@register
class KVMergerMerger(Merger):
    """Gaussian kernel weighted merging (KVMerger, as in KeepKV eq. 11-12).

    Each evicted entry joins the target c of largest cosine similarity of keys where that exceeds ``merge_threshold``,
    and is dropped elsewhere. Within a set, with d_j = ||k_j - k_c||:

        w_j ~ exp(-d_j^2 / (2 sigma^2)), w_c ~ 1        sigma = mean of d_j over the sources other than c

    Differences from the source: its sets are runs of neighbours with similar keys, around the entry of largest score,
    and alone decide how much is compressed; here the selector's entries are the centres, and sources come from
    anywhere, as KeepKV and GRKV describe it. Its sigma refers to the weights that it defines; it is read as the mean
    distance. It multiplies values by the size of the set, which makes the combination not convex.
    """

    name = "kvmerger"
    source = "KVMerger, Wang et al., arXiv:2407.08454"
    tracker_modes = frozenset(ScoreMode)

    merge_threshold: float = Field(
        0.75, ge=-1.0, le=1.0, description="Cosine similarity of keys above which an evicted entry is merged."
    )

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        evicted = complement(kept, len(entries))
        similarity, targets = entries.most_similar(evicted, kept, entries.is_live.gather(1, kept))
        joins = entries.is_live.gather(1, evicted) & (similarity > self.merge_threshold)
        distance = _distances(entries, evicted.masked_fill(~joins, DEAD), targets.masked_fill(~joins, DEAD))
        none = torch.zeros_like(entries.scores)
        total = none.scatter_add(1, targets, distance)
        count = none.scatter_add(1, targets, joins.to(none.dtype))
        sigma = (total / count.clamp(min=1.0)).gather(1, targets)
        # A distance is 0 where sigma is.
        scaled = torch.where(sigma > 0, distance / sigma, 0.0)
        weights = torch.exp(-0.5 * scaled**2).masked_fill(~joins, 0.0)
        return absorb(entries, kept, evicted, targets, weights, protected)


def _distances(entries: Entries, sources: Tensor, centres: Tensor) -> Tensor:
    """``[H, m]``: length of the difference of the keys of the entries at ``sources`` and ``centres`` (``[H, m]``).

    A function of its own, so that both keys are freed before anything else is made.
    """
    return entries.keys_at(sources).sub_(entries.keys_at(centres)).norm(dim=-1)
