"""Selector that keeps the sequence's first tokens, and the newest entries."""

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries, Selector
from vllm_kvmerge.policies.indexing import largest, sinks
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import SinkTokens


@register
class SinkRecent(Selector):
    """Attention sinks and a sliding window (StreamingLLM section 3.2)."""

    name = "streaming_llm"
    source = "StreamingLLM, arXiv:2309.17453"
    needs_scores = False
    takes_shares = True

    num_sink_tokens: SinkTokens = 4

    @property
    def min_budget(self) -> int:
        return self.num_sink_tokens + 1

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        return sinks(entries, self.num_sink_tokens)

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        ranking = entries.positions.masked_fill(protected, torch.iinfo(torch.int64).max)
        return largest(ranking, context.counts)
