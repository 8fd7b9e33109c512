"""Selector that also weighs how much an entry's value can change the layer's output."""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, CompressionContext, Cost, CostShape, Entries, gathering, sorting
from vllm_kvmerge.policies.entries import PART_ENTRIES
from vllm_kvmerge.policies.indexing import first, ranked, top
from vllm_kvmerge.policies.pausing import may_pause
from vllm_kvmerge.policies.pooling import max_pooled
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.window_topk import WindowTopK

MAX_PRODUCT_BYTES = 1 << 20
"""Size of a product W_O v above which values are taken in groups, which fit in the processor's caches."""

WEIGHED_AT_ONCE = 128
"""Entries of a head whose norms are computed before the next ones are looked at."""


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
        if ranking.is_cpu:
            weighed = largest_weighed(ranking, chosen, entries, context.counts - chosen.sum(1), weights)
        else:  # which entries have to be weighed would be waited for
            norms = [projected_norms(entries.values_at(part), weights) for part in entries.parts()]
            weighed = ranking * torch.cat(norms, dim=1)
        return top(weighed, chosen, entries, context.counts)

    def cost(self, shape: CostShape) -> Cost:
        n, weights = shape.num_entries, shape.group_size * shape.hidden_size * shape.head_size
        part = min(n, PART_ENTRIES)
        return super().cost(shape) + Cost(
            numbers=8 * n + part * shape.head_size + min(part * shape.hidden_size, MAX_PRODUCT_BYTES // 4),
            products=n * weights,
            touches=sorting(n) + 3 * n * shape.group_size * shape.hidden_size + gathering(shape.row_numbers),
        )


def largest_weighed(ranking: Tensor, chosen: Tensor, entries: Entries, counts: Tensor, weights: Tensor) -> Tensor:
    """``[H, n]``: ``ranking`` times the norms where that may be among the head's ``counts`` largest, beside those that
    are ``chosen``; elsewhere the least number there is.

    ||W v||_1 <= sqrt(hidden) ||W v||_2, and the mean over query heads of the latter is at most sqrt(v' M v), M being
    the mean of their W' W: d by d numbers instead of hidden by d. Entries are weighed in order of that bound, until it
    is below what as many as are wanted have come to.
    """
    lowest = torch.finfo(ranking.dtype).min
    mean = (weights.mT @ weights).mean(1)
    diagonal = mean.diagonal(dim1=1, dim2=2)
    diagonal += 1e-5 * diagonal.sum(1, keepdim=True)  # for what rounding takes away
    bounds = []
    for part in entries.parts():
        values = entries.values_at(part)
        bounds.append(((values @ mean) * values).sum(-1).clamp_(min=0.0).sqrt_())
    bound = ranking.clamp(min=0.0) * torch.cat(bounds, 1) * weights.shape[2] ** 0.5
    # What is not a number may be anything.
    bound = bound.nan_to_num(nan=torch.inf).masked_fill(chosen | ~entries.is_live, -torch.inf)
    order = bound.argsort(1, descending=True)
    found = torch.full_like(bound, -torch.inf)
    for part in order.split(max(WEIGHED_AT_ONCE, int(counts.max())), dim=1):
        least = found.sort(1, descending=True).values.gather(1, (counts - 1).clamp(min=0).unsqueeze(1))
        least = least.masked_fill((counts <= 0).unsqueeze(1), torch.inf)
        contends = bound.gather(1, part) > least
        if not contends.any():
            break
        values = entries.values_at(part.masked_fill(~contends, DEAD))
        for head, number in enumerate(contends.sum(1).tolist()):
            index = part[head, :number]
            norms = projected_norms(values[head, None, :number], weights[head, None])[0]
            found[head, index] = (ranking[head, index] * norms).nan_to_num(nan=lowest, neginf=lowest)
    return found.clamp(min=lowest)


def projected_norms(values: Tensor, output_weights: Tensor) -> Tensor:
    """``[H, n]``: mean over the G query heads of ||W_O v||_1. values: ``[H, n, d]``; weights: ``[H, G, hidden, d]``."""
    num_groups, hidden = output_weights.shape[1:3]
    size = max(1, MAX_PRODUCT_BYTES // (hidden * values.element_size()))
    norms = torch.zeros_like(values[..., 0])
    for head, weights in enumerate(output_weights):
        for start in range(0, values.shape[1], size):
            part = slice(start, start + size)
            for weight in weights:
                norms[head, part] += (values[head, part] @ weight.T).abs_().sum(-1)
            num_products = norms[head, part].numel() * num_groups * hidden
            may_pause(products=num_products * values.shape[2], touches=3 * num_products)
    return norms / num_groups
