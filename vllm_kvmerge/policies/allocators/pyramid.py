"""Budgets that fall with depth."""

import math
from typing import Literal

from pydantic import Field

from vllm_kvmerge.policies.base import Allocator
from vllm_kvmerge.policies.registry import register


@register
class Pyramid(Allocator):
    """Budgets fall by ``ratio`` from the first layer to the last, linearly (PyramidKV) or as a cosine from crest to
    trough (KeepKV's code, and close to PyramidInfer's); their mean over layers is the budget.

    PyramidKV's last layer has budget / beta entries and its first the rest of twice the budget, so ``ratio`` is
    2 beta - 1: its default, beta = 20, is the default here. Where the last layer's share is less than its selector's
    least, budgets fall to that instead. PyramidKV divides what is left beside the window; here the window counts.

    The first layer's share is nearly twice the budget where ``ratio`` is large.
    """

    name = "pyramid"
    source = "PyramidKV, arXiv:2406.02069; PyramidInfer, arXiv:2405.12532"
    reads_attention = False

    shape: Literal["linear", "cosine"] = Field("linear", description="How budgets fall from first to last layer.")
    ratio: float = Field(39.0, ge=1.0, le=1000.0, description="The first layer's budget over the last layer's.")

    def capacity(self, budget: int) -> int:
        return budget + round(self._amplitude(budget))

    def layer_budgets(self, budget: int, num_entries: int, num_layers: int, least: int) -> list[int]:
        amplitude, last = min(self._amplitude(budget), budget - least), num_layers - 1
        # 1 for the first layer, -1 for the last; odd about the middle, as rounding is, so that layers' budgets add up.
        heights = [(last - 2 * layer) / last if last > 0 else 0.0 for layer in range(num_layers)]
        if self.shape == "cosine":
            heights = [math.sin(math.pi / 2 * height) for height in heights]
        return [budget + round(amplitude * height) for height in heights]

    def _amplitude(self, budget: int) -> float:
        return budget * (self.ratio - 1.0) / (self.ratio + 1.0)
