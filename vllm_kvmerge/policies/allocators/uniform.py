"""The same budget for every layer and head, the first layers perhaps excepted."""

from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import Allocator, CompressionContext, Cost, CostShape, Entries
from vllm_kvmerge.policies.registry import register


@register
class Uniform(Allocator):
    """Every layer and head alike, except that the first ``skip_layers`` keep all their tokens (MorphKV appendix A.6).

    Then all other layers hold dead entries instead of giving memory back (see ``capacity``).
    """

    name = "uniform"
    source = "every layer and head alike"
    reads_attention = False

    skip_layers: int = Field(default=0, ge=0, le=1024, description="First layers of the model that are not compressed.")

    def capacity(self, budget: int) -> int | None:
        return budget if self.skip_layers == 0 else None

    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> list[int]:
        return [context.budget if layer >= self.skip_layers else len(entries) for layer in context.heads.layers]

    def cost(self, shape: CostShape) -> Cost:
        return Cost()
