"""The same budget for every layer and head, optionally except the first layers."""

from pydantic import Field

from vllm_kvmerge.policies.base import Allocator
from vllm_kvmerge.policies.registry import register


@register
class Uniform(Allocator):
    """The same budget for all layers and heads; the first ``skip_layers`` keep all tokens (MorphKV appendix A.6)."""

    name = "uniform"
    source = "every layer and head alike"
    reads_attention = False

    skip_layers: int = Field(default=0, ge=0, le=1024, description="First layers of the model that are not compressed.")

    def capacity(self, budget: int) -> int | None:
        return budget if self.skip_layers == 0 else None

    def layer_budgets(self, budget: int, num_entries: int, num_layers: int, least: int) -> list[int]:
        return [num_entries if layer < self.skip_layers else budget for layer in range(num_layers)]
