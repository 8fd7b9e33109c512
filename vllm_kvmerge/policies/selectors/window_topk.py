"""Selector that keeps an observation window and, of the entries before it, clusters of high scores."""

from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import max_pool1d

from vllm_kvmerge.policies.base import CompressionContext, Entries, Selector
from vllm_kvmerge.policies.indexing import by_position, newest, top
from vllm_kvmerge.policies.registry import register


def _check_odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("must be odd")
    return value


@register
class WindowTopK(Selector):
    """The newest ``window_size`` entries, and the others of largest max-pooled score (SnapKV section 4, listing 1).

    Pooling runs over neighbours in order of position, among the live entries before the window.
    """

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "SnapKV, arXiv:2404.14469"
    needs_scores: ClassVar[bool] = True

    window_size: int = Field(32, ge=1, description="Newest entries, always kept.")
    kernel_size: Annotated[int, Field(ge=1, le=255), AfterValidator(_check_odd)] = Field(
        7, description="Odd: neighbours, in order of position, over which the score is max-pooled."
    )

    @property
    def min_budget(self) -> int:
        return self.window_size + 1

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        return newest(entries, self.window_size)

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return top(self.pooled(entries, importance, protected), protected, entries, context.num_kept)

    def pooled(self, entries: Entries, importance: Tensor, protected: Tensor) -> Tensor:
        """``[H, n]``: each entry's largest importance over its neighbourhood, itself included."""
        # Dead entries sort before all others, so the live ones are contiguous.
        order = by_position(entries)
        pooled_from = entries.is_live & ~protected
        ordered = importance.masked_fill(~pooled_from, -torch.inf).gather(1, order)
        pooled = max_pool1d(ordered, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return torch.empty_like(pooled).scatter_(1, order, pooled)
