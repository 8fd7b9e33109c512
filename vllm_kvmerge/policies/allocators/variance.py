"""Budgets that are larger for layers whose attention is spread more evenly."""

import math

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import Allocator, CompressionContext, Entries
from vllm_kvmerge.policies.registry import register


@register
class Variance(Allocator):
    """Dynamic allocation over layers (D2O): a layer's share falls with the variance of its attention mass.

    F_l is the variance, over a head's live entries, of their attention mass in units of its mean, averaged over the
    layer's heads. Shares are softmax(-F_l / mean F): D2O's softmax(-F_l), made independent of the prompt's length and
    of how many queries are scored, on which the mass of a column of attention depends. Shares above ``max_share`` are
    cut and what is over goes to the other layers; shares below the selector's least are raised at their cost. The mean
    over layers is the budget.

    D2O allocates once, for the prompt; here every later compression allocates anew, from the scores that the one before
    it found.
    """

    name = "variance"
    source = "D2O, Wan et al., arXiv:2406.13035"
    has_layer_statistic = True

    max_share: float = Field(2.0, ge=1.0, le=64.0, description="Largest budget, as a multiple of the average.")

    def capacity(self, budget: int) -> int:
        return int(self.max_share * budget)

    def layer_statistic(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        """F_l, ``[sequence layers]`` float32."""
        num_live = entries.is_live.sum(1, keepdim=True).clamp(min=1)
        mass = importance.masked_fill(~entries.is_live, 0.0)
        relative = mass * num_live / mass.sum(1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
        squares = (relative - 1.0).square().masked_fill(~entries.is_live, 0.0)
        return context.heads.of_all_workers(squares.sum(1) / num_live.squeeze(1)).mean(1)

    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        if context.layer_statistics is None:
            # A single layer has nothing to compare it with.
            return torch.full((entries.num_rows,), context.budget, device="cpu")
        statistics = context.layer_statistics.tolist()
        budgets = [self._split(variances, context.budget, context.min_budget) for variances in statistics]
        size = context.heads.num_kv_heads
        by_row = [budgets[row // size][layer] for row, layer in enumerate(context.heads.layers)]
        return torch.tensor(by_row, device="cpu")

    def _split(self, variances: list[float], budget: int, least: int) -> list[int]:
        mean = sum(variances) / len(variances)
        if not 0.0 < mean < math.inf:  # nothing is known, or attention has come to NaN
            return [budget] * len(variances)
        # No weight is 0, as that of a layer with nearly all the variance of very many would be.
        weights = [math.exp(-min(variance / mean, 700.0)) for variance in variances]
        return split(budget * len(weights), weights, least, self.capacity(budget))


def split(total: int, weights: list[float], least: int, most: int) -> list[int]:
    """``total`` in parts proportional to ``weights`` as far as ``least`` and ``most``, around the average, allow.

    Parts that would be too large are cut, then those that would be too small are raised at the others' cost.
    """
    parts = _capped(total, weights, most)
    free = [i for i, part in enumerate(parts) if part > least]
    if len(free) < len(parts):
        surplus = iter(_capped(total - least * len(parts), [parts[i] - least for i in free], most - least))
        parts = [float(least) if part <= least else least + next(surplus) for part in parts]
    whole = [int(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: whole[i] - parts[i])
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def _capped(total: float, weights: list[float], most: float) -> list[float]:
    """``total`` in parts proportional to ``weights``, none above ``most`` (at least the average)."""
    free, scale = set(range(len(weights))), 0.0
    while free:
        scale = (total - most * (len(weights) - len(free))) / sum(weights[i] for i in free)
        too_large = {i for i in free if scale * weights[i] > most}
        if not too_large:
            break
        free -= too_large
    return [scale * weight if i in free else float(most) for i, weight in enumerate(weights)]
