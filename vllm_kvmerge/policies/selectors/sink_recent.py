"""Selector that keeps the sequence's first tokens, and the newest entries."""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import MAX_TOKENS, CompressionContext, Entries, Selector
from vllm_kvmerge.policies.indexing import largest, sinks
from vllm_kvmerge.policies.registry import register


@register
class SinkRecent(Selector):
    """Attention sinks and a sliding window (StreamingLLM section 3.2)."""

    name = "streaming_llm"
    source = "StreamingLLM, arXiv:2309.17453"
    needs_scores = False
    takes_shares = True

    num_sink_tokens: int = Field(
        4, ge=0, le=MAX_TOKENS, description="First tokens of the sequence that are always kept."
    )

    @property
    def min_budget(self) -> int:
        return self.num_sink_tokens + 1

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        return sinks(entries, self.num_sink_tokens)

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        ranking = entries.positions.masked_fill(protected, torch.iinfo(torch.int64).max)
        return largest(ranking, context.counts)
