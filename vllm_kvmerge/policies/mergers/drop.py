"""Merger that drops evicted entries."""

from torch import Tensor

from vllm_kvmerge.policies.base import CacheUpdate, CompressionContext, Entries, Merger, ScoreMode
from vllm_kvmerge.policies.registry import register


@register
class DropMerger(Merger):
    """Drops the entries that are not kept."""

    name = "drop"
    source = "eviction"
    tracker_modes = frozenset(ScoreMode)
    takes_shares = True

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        return CacheUpdate.of(entries, kept)
