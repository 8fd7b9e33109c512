"""Selector that keeps sinks, the newest entries and, of the others, those that attention used most."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import MAX_TOKENS, CompressionContext, Entries, Selector
from vllm_kvmerge.policies.indexing import newest, top
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import SinkTokens


@register
class HeavyHitter(Selector):
    """Recent tokens and heavy hitters (H2O algorithm 1); with other shares, ZSMerge's B_p and B_c (eq. 3-4).

    The recent window gives way where sinks and at least one heavy hitter would not fit beside it.
    """

    name = "h2o"
    source = "H2O, arXiv:2306.14048"
    needs_scores = True
    takes_shares = True

    num_sink_tokens: SinkTokens = 4
    recent_window: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(
        None, description="Newest entries that are always kept; default: recent_share of the budget."
    )
    recent_share: float = Field(
        0.5, gt=0.0, lt=1.0, description="Share of the budget for the newest entries, unless recent_window is given."
    )

    @property
    def min_budget(self) -> int:
        return self.num_sink_tokens + (1 if self.recent_window is None else self.recent_window) + 1

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        return newest(entries, self._num_recent(context), self.num_sink_tokens)

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return top(importance, protected, entries, context.counts)

    def _num_recent(self, context: CompressionContext) -> int | Tensor:
        """Of all rows, or of each, ``[H]`` int64."""
        if self.recent_window is not None:
            return self.recent_window
        assert context.budgets is not None
        rooms = context.counts - (self.num_sink_tokens + 1)
        return (context.budgets.double() * self.recent_share).long().minimum(rooms).clamp_(min=1)
