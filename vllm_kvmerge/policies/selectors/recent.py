"""Selector that keeps the newest entries."""

from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries, Selector
from vllm_kvmerge.policies.indexing import largest
from vllm_kvmerge.policies.registry import register


@register
class Recent(Selector):
    """A sliding window: the newest entries ("Local" of KeepKV table 2)."""

    name = "local"
    source = "sliding-window attention; KeepKV table 2"
    needs_scores = False
    takes_shares = True

    @property
    def min_budget(self) -> int:
        return 1

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return largest(entries.positions, context.counts)
