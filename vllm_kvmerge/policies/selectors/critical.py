"""Selector that also weighs how much an entry's value can change the layer's output."""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Cost, CostShape, Entries, gathering, sorting
from vllm_kvmerge.policies.entries import PART_ENTRIES
from vllm_kvmerge.policies.indexing import first, ranked, top
from vllm_kvmerge.policies.pausing import may_pause
from vllm_kvmerge.policies.pooling import max_pooled
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.window_topk import WindowTopK

MAX_PRODUCT_BYTES = 1 << 20
"""Size of a product W_O v above which values are taken in groups, which fit in the processor's caches."""


@register
class Critical(WindowTopK):
    """SnapKV's window and max-pooled scores s, in two stages (CriticalKV algorithm 1).

    Beside the window, ``first_stage_share`` of the budget goes to the largest s, the rest to the largest
    s * ||W_O v||_1, the norm being the mean over the query heads that share the KV head. s must be a sum of
    probabilities, not a logarithm. A model whose output projection is not known is ranked by s alone.
    """

    name = "criticalkv"
    source = "CriticalKV, arXiv:2502.03805"
    needs_output_weights = True
    needs_probabilities = True

    first_stage_share: float = Field(
        0.5, ge=0.0, le=1.0, description="Share of what is left beside the window that scores alone decide."
    )

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        ranking = max_pooled(importance, protected, entries, self.kernel_size)
        if context.output_weights is None:
            return top(ranking, protected, entries, context.counts)
        num_protected = protected.sum(1)
        num_first = ((context.counts - num_protected) * self.first_stage_share).long()
        order = ranked(ranking, protected, entries).argsort(dim=1, descending=True, stable=True)
        chosen = first(entries.is_live, order, (num_protected + num_first).unsqueeze(1))
        weights = context.output_weights
        norms = [projected_norms(entries.values_at(part), weights) for part in entries.parts()]
        return top(ranking * torch.cat(norms, dim=1), chosen, entries, context.counts)

    def cost(self, shape: CostShape) -> Cost:
        n, weights = shape.num_entries, shape.group_size * shape.hidden_size * shape.head_size
        part = min(n, PART_ENTRIES)
        return super().cost(shape) + Cost(
            numbers=8 * n + part * shape.head_size + min(part * shape.hidden_size, MAX_PRODUCT_BYTES // 4),
            products=n * weights,
            touches=sorting(n) + 3 * n * shape.group_size * shape.hidden_size + gathering(shape.row_numbers),
        )


def projected_norms(values: Tensor, output_weights: Tensor) -> Tensor:
    """``[H, n]``: mean over the G query heads of ||W_O v||_1. values: ``[H, n, d]``; weights: ``[H, G, hidden, d]``."""
    num_groups, hidden = output_weights.shape[1:3]
    size = max(1, MAX_PRODUCT_BYTES // (hidden * values.element_size()))
    norms = torch.zeros_like(values[..., 0])
    for head, weights in enumerate(output_weights):
        for start in range(0, values.shape[1], size):
            part = slice(start, start + size)
            for weight in weights:
                norms[head, part] += torch.linalg.vector_norm(values[head, part] @ weight.T, ord=1, dim=-1)
            num_products = norms[head, part].numel() * num_groups * hidden
            may_pause(products=num_products * values.shape[2], touches=3 * num_products)
    return norms / num_groups
