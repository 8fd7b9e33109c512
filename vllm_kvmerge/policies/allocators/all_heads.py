"""Budgets of all heads of all layers that follow their attention."""

from pydantic import Field
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.policies.base import Allocator, CompressionContext, Entries
from vllm_kvmerge.policies.registry import register


@register
class AllHeads(Allocator):
    """One threshold for all heads of all layers (KVzip): each head gets the number of its entries among the model's
    largest, so that the average is the budget.

    What is compared is as for ``adaptive``. A head gets at least ``floor_share`` of the budget and what its selector
    protects, and at most ``max_share`` times the budget. The heads are those of one tensor-parallel worker, so that all
    workers hold the same number of blocks: another number of workers may come to another split. Where entries are
    hardly more than the budget, so that pages of their own would save nothing, a layer's heads share the layer's part
    of the budget.
    """

    name = "global"
    source = "KVzip, arXiv:2505.23416"
    splits_heads = True
    pools_layers = True
    needs_scores = True

    floor_share: float = Field(0.0, ge=0.0, le=1.0, description="Minimum share of the budget per head.")
    max_share: float = Field(8.0, ge=1.0, le=64.0, description="Largest budget, as a multiple of the average.")

    def capacity(self, budget: int) -> int:
        return int(self.max_share * budget)

    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        return self._split(context.heads.by_sequence_layer(importance.masked_fill(~entries.is_live, -1.0)), context)

    def pooled_budgets(self, importance: Tensor, context: CompressionContext) -> Tensor:
        return self._split(importance.unsqueeze(0), context)

    def _split(self, shares: Tensor, context: CompressionContext) -> Tensor:
        """``shares``: ``[groups, heads, n]``, of groups that have a budget each."""
        total, most = shares.shape[1] * context.budget, self.capacity(context.budget)
        floor = max(int(self.floor_share * context.budget), context.min_budget)
        return ops.split_budget(shares, total, floor, most).flatten()
