"""The same budget for every layer and head."""

from typing import ClassVar

from torch import Tensor

from vllm_kvmerge.policies.base import Allocator, CompressionContext, Entries
from vllm_kvmerge.policies.registry import register


@register
class Uniform(Allocator):
    name: ClassVar[str] = "uniform"
    source: ClassVar[str] = "every layer and head alike"
    reads_attention: ClassVar[bool] = False

    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> list[int]:
        return [context.budget] * importance.shape[0]
