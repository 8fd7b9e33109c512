"""Base of selectors that keep the newest entries and, of the others, those ranked highest."""

from abc import abstractmethod
from typing import Annotated

from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import MAX_TOKENS, CompressionContext, Entries, Selector
from vllm_kvmerge.policies.indexing import newest, top

SinkTokens = Annotated[
    int, Field(ge=0, le=MAX_TOKENS, description="First tokens of the sequence that are always kept.")
]
NewestEntries = Annotated[int, Field(ge=0, le=MAX_TOKENS, description="Newest entries that are always kept.")]


class RankedSelector(Selector):
    """Selector whose subclass ranks. The newest stay even if the source protects none: generation needs them."""

    takes_shares = True

    num_sink_tokens: SinkTokens = 0
    recent_window: NewestEntries = 1

    @property
    def min_budget(self) -> int:
        return self.num_sink_tokens + self.recent_window + 1

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        return newest(entries, self.recent_window, self.num_sink_tokens)

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return top(self.ranking(entries, importance, protected, context), protected, entries, context.counts)

    @abstractmethod
    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        """``[H, n]`` floating point: the largest stay; dead entries may have any value."""
