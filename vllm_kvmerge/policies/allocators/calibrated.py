"""Budgets of heads that were measured beforehand."""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import Allocator, CompressionContext, Entries
from vllm_kvmerge.policies.head_budgets import MOST, divided
from vllm_kvmerge.policies.registry import register


@register
class Calibrated(Allocator):
    """Budgets in proportion to what each head of the model got of KVzip's scores of a text (``vllm-kvmerge
    calibrate``): a head needs much the same share whatever is read. Requests measure nothing.

    A head gets at least what its selector protects, and at most ``max_share`` times the budget. The heads are those of
    one tensor-parallel worker, so that all workers hold the same number of blocks.
    """

    name = "calibrated"
    source = "own design, after KVzip, arXiv:2505.23416"
    reads_attention = False
    splits_heads = True
    pools_layers = True
    needs_head_budgets = True

    max_share: float = Field(MOST, ge=1.0, le=64.0, description="Largest budget, as a multiple of the average.")

    def capacity(self, budget: int) -> int:
        return int(self.max_share * budget)

    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        return self.pooled_budgets(importance, context).view(context.heads.num_layers, -1)[
            context.heads.layers, [self._own(context).index(index) for index in context.heads.indices]
        ]

    def pooled_budgets(self, importance: Tensor, context: CompressionContext) -> Tensor:
        shares = np.asarray(context.known_head_budgets().shares)[:, self._own(context)].flatten()
        most = max(context.min_budget, min(importance.shape[1], self.capacity(context.budget)))
        return torch.from_numpy(divided(shares, context.budget, context.min_budget, most))

    @staticmethod
    def _own(context: CompressionContext) -> list[int]:
        """This worker's heads, counted over all workers."""
        return list(dict.fromkeys(context.heads.indices))
