"""Selector that keeps an observation window and, of the entries before it, clusters of high scores."""

from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import MAX_TOKENS, CompressionContext, Entries, Selector
from vllm_kvmerge.policies.indexing import newest, top
from vllm_kvmerge.policies.pooling import ChunkLength, KernelSize, chunk_means, max_pooled
from vllm_kvmerge.policies.registry import register


@register
class WindowTopK(Selector):
    """The newest ``window_size`` entries, and those of highest max-pooled score (SnapKV section 4, listing 1).

    Pooling runs over neighbours in order of position, among the live entries before the window. With ``chunk_length``,
    chunks of neighbours are ranked by their mean instead of single entries (ChunkKV algorithm 1), each head its own
    where kvpress has all heads of a layer keep the same.
    """

    name = "snapkv"
    source = "SnapKV, arXiv:2404.14469"
    needs_scores = True
    takes_shares = True

    window_size: int = Field(32, ge=1, le=MAX_TOKENS, description="Newest entries, always kept.")
    kernel_size: KernelSize = Field(
        7, description="Odd number of neighbours, by position, over which scores are max-pooled."
    )
    chunk_length: ChunkLength = 1

    @property
    def min_budget(self) -> int:
        return self.window_size + 1

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        return newest(entries, self.window_size)

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        """``[H, n]``: pooled scores of the entries before the window."""
        ranking = max_pooled(importance, protected, entries, self.kernel_size)
        return chunk_means(ranking, protected, entries, self.chunk_length)

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return top(self.ranking(entries, importance, protected, context), protected, entries, context.counts)
