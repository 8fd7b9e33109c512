"""Selector that keeps the entries of largest importance."""

from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector


@register
class TopScores(RankedSelector):
    """The entries that the tracker ranks highest (KVzip)."""

    name = "top_scores"
    source = "KVzip, arXiv:2505.23416"
    needs_scores = True

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return importance
