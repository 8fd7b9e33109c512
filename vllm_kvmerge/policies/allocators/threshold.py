"""Budgets that depend on the scores alone, up to a maximum."""

from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import Allocator, CompressionContext, Entries
from vllm_kvmerge.policies.registry import register


@register
class Threshold(Allocator):
    """Each head gets room for its entries with more than ``threshold`` of its attention, and for those that its
    selector protects (KVzap's rule, with attention in place of predicted scores).

    The budget is the most that heads may hold on average; blocks that no head needs go back to the pool. If heads want
    more than that together, what each wants beyond its least is cut by the same share.
    """

    name = "threshold"
    source = "KVzap, arXiv:2601.07891"
    splits_heads = True
    fills_budget = False
    needs_scores = True

    threshold: float = Field(
        0.001, gt=0.0, le=1.0, description="Share of a head's attention above which an entry counts."
    )
    max_share: float = Field(4.0, ge=1.0, le=64.0, description="Largest budget, as a multiple of the average.")

    def capacity(self, budget: int) -> int:
        return int(self.max_share * budget)

    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        counts = (importance > self.threshold).sum(1) + context.min_budget
        return counts.minimum(entries.num_live).clamp(max=self.capacity(context.budget))
