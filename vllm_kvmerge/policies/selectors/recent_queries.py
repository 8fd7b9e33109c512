"""Selector that keeps the newest entries and, of the others, those that the newest queries attend to."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.ops import Fusion, Softmax
from vllm_kvmerge.policies.base import MAX_QUERIES, CompressionContext, Entries
from vllm_kvmerge.policies.context import Queries
from vllm_kvmerge.policies.indexing import newest
from vllm_kvmerge.policies.pooling import KernelSize, max_pooled
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector


@register
class RecentQueries(RankedSelector):
    """The R newest entries and the C others with most fused attention (MorphKV eq. 3-7, algorithm 1); budget = C + R.

        S_r[k] = sum over the query heads of AW_r[k]        F[k] = sum or max over the last R queries r of S_r[k]

    AW_r is query r's attention to the entries that are live now, where the paper keeps what r saw when it was computed:
    a query's probabilities are spread over what has since stayed, in the same proportions. With ``kernel_size`` above
    1, F is max-pooled over neighbours as SnapKV's scores are, which MorphKV's paper does not do.

    The authors' code for Mistral, Qwen2 and Phi-3 differs from the paper in three respects, which are parameters here.
    ``softmax_over: distant`` leaves the R newest entries out of AW_r, so that all queries weigh alike, however much
    they attend to their neighbours. ``group_fusion: max`` takes the largest over the query heads, not the sum. And
    R - 1 queries vote (``voting_queries``): of the R that are kept, one is that of the token that comes in. For that
    step each query head then sees what it would have chosen alone; the cache keeps the common choice, as here. (For
    Llama, their code adds the query heads' logits before the softmax, which is not offered.)
    """

    name = "morphkv"
    source = "MorphKV, arXiv:2503.00979"
    needs_scores = False

    recent_window: int = Field(
        32, ge=1, le=MAX_QUERIES, description="Newest entries, always kept, whose queries rank the others."
    )
    voting_queries: Annotated[int, Field(ge=1, le=MAX_QUERIES)] | None = Field(
        None, description="Newest queries that rank the others; default: recent_window."
    )
    fusion: Fusion = Field("sum", description="How an entry's attention is combined over queries.")
    group_fusion: Fusion = Field(
        "sum", description="How an entry's attention is combined over the query heads of a KV head."
    )
    softmax_over: Literal["all", "distant"] = Field(
        "all", description="Entries over which a query's probabilities add up to 1: all, or those before the newest."
    )
    kernel_size: KernelSize = Field(
        1, description="Odd number of neighbours, by position, over which scores are max-pooled; 1: none."
    )

    @property
    def query_window(self) -> int:
        return self.recent_window if self.voting_queries is None else self.voting_queries

    @property
    def takes_cap(self) -> bool:
        return True

    @property
    def takes_sinks(self) -> bool:
        return self.group_fusion == "sum"  # else query heads are read as queries of one head

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        """``[H, n]``: F (eq. 4), pooled; positions, so that the newest stay, where there are no queries."""
        if context.queries is None:
            return entries.positions.to(entries.scores.dtype)
        queries = context.queries.newest(self.query_window)
        fused = self._fused(entries, queries, context.scale, context.softmax)
        return fused if self.kernel_size == 1 else max_pooled(fused, protected, entries, self.kernel_size)

    def _fused(self, entries: Entries, queries: Queries, scale: float, softmax: Softmax) -> Tensor:
        """``[H, n]``: F before pooling."""
        if self.softmax_over == "distant":
            entries = entries.without(newest(entries, self.recent_window))
        if self.group_fusion == "sum":
            return entries.fused_attention(queries.kept, queries.positions, scale, self.fusion, softmax)
        # Query heads that count as queries of their own are fused by their maximum: those of all queries at once, or
        # those of each query before the sum.
        num_groups, num_queries = queries.kept.shape[1:3]
        size = num_queries if self.fusion == "max" else 1
        parts = zip(queries.kept.split(size, dim=2), queries.positions.split(size, dim=1), strict=True)
        fused = torch.zeros_like(entries.log_votes)
        for vectors, positions in parts:
            heads = vectors.flatten(1, 2).unsqueeze(1)
            fused += entries.fused_attention(heads, positions.repeat(1, num_groups), scale, "max", softmax)
        return fused
