"""Merger that evicts."""

from typing import ClassVar

from torch import Tensor

from vllm_kvmerge.policies.base import CacheUpdate, CompressionContext, Entries, Merger, ScoreMode
from vllm_kvmerge.policies.cost import Cost, CostShape
from vllm_kvmerge.policies.registry import register


@register
class DropMerger(Merger):
    """Entries that are not kept are lost."""

    name: ClassVar[str] = "drop"
    source: ClassVar[str] = "eviction"
    tracker_modes: ClassVar[frozenset[ScoreMode]] = frozenset(
        {ScoreMode.NONE, ScoreMode.SUM, ScoreMode.MEAN, ScoreMode.LOG_EMA}
    )

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        return CacheUpdate.of(entries, kept)

    def cost(self, shape: CostShape) -> Cost:
        return Cost()
