"""Budgets of the heads of one layer that follow their attention."""

from pydantic import Field
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.policies.base import Allocator, CompressionContext, Entries
from vllm_kvmerge.policies.registry import register


@register
class Adaptive(Allocator):
    """Head-wise budgets (Ada-KV): each head gets the number of its entries among the H * budget largest of the layer.

    What is compared is each entry's share of its head's attention. A head gets at least ``floor_share`` and at most
    ``max_share`` of the budget; budgets add up to H * budget over the heads of one tensor-parallel worker, so that all
    workers hold the same number of blocks: another number of workers may come to another split. Of equal shares, those
    of lower rank in their head come first, so heads that nothing tells apart get the same. Ada-KV compares scores that
    SnapKV has max-pooled; here they are as the tracker has them.
    """

    name = "adaptive"
    source = "Ada-KV, Feng et al., arXiv:2407.11550"
    splits_heads = True

    floor_share: float = Field(0.2, ge=0.0, le=1.0, description="Minimum share of the budget per head.")
    max_share: float = Field(2.0, ge=1.0, le=64.0, description="Largest budget, as a multiple of the average.")

    def capacity(self, budget: int) -> int:
        return int(self.max_share * budget)

    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        budget = context.budget
        floor = max(int(self.floor_share * budget), context.min_budget)
        shares = context.heads.by_sequence_layer(importance.masked_fill(~entries.is_live, -1.0))
        return ops.split_budget(shares, shares.shape[1] * budget, floor, self.capacity(budget)).flatten()
