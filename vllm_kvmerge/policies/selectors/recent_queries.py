"""Selector that keeps the newest entries and, of the others, those that the newest queries attend to."""

from pydantic import Field
from torch import Tensor

from vllm_kvmerge.ops import Fusion
from vllm_kvmerge.policies.base import MAX_QUERIES, CompressionContext, Cost, CostShape, Entries, gathering
from vllm_kvmerge.policies.pooling import KernelSize, max_pooled
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector


@register
class RecentQueries(RankedSelector):
    """The R newest entries and the C others of largest fused attention (MorphKV eq. 3-7, algorithm 1); budget = C + R.

        S_r[k] = sum over the query heads of AW_r[k]        F[k] = sum or max over the last R queries r of S_r[k]

    AW_r is query r's attention to the entries that are live now, where the paper keeps what r saw when it was computed:
    a query's probabilities are spread over what has since stayed, in the same proportions. With ``kernel_size`` above
    1, F is max-pooled over neighbours as SnapKV's scores are, which MorphKV's paper does not do.
    """

    name = "morphkv"
    source = "MorphKV, arXiv:2503.00979"
    needs_scores = False

    recent_window: int = Field(
        32, ge=1, le=MAX_QUERIES, description="Newest entries, always kept, whose queries rank the others."
    )
    fusion: Fusion = Field("sum", description="How an entry's attention from several queries becomes one number.")
    kernel_size: KernelSize = Field(
        1, description="Odd: neighbours, in order of position, over which the score is max-pooled; 1: none."
    )

    @property
    def query_window(self) -> int:
        return self.recent_window

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        """``[H, n]``: F (eq. 4), pooled; positions, so that the newest stay, where there are no queries."""
        if context.queries is None:
            return entries.positions.to(entries.scores.dtype)
        newest = context.queries.newest(self.recent_window)
        fused = entries.fused_attention(newest.vectors, newest.positions, context.scale, self.fusion)
        return fused if self.kernel_size == 1 else max_pooled(fused, protected, entries, self.kernel_size)

    def cost(self, shape: CostShape) -> Cost:
        n, queries = shape.num_entries, min(self.recent_window, shape.num_entries)
        rows = shape.group_size * queries
        pooling = 0 if self.kernel_size == 1 else 8 * n
        return super().cost(shape) + Cost(
            numbers=2 * n + pooling,  # keys are multiplied where they lie
            products=rows * shape.row_numbers,
            touches=6 * rows * n + gathering(shape.row_numbers) + 8 * pooling,
        )
