"""Selector that keeps the entries whose keys are short."""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import MAX_TOKENS, CompressionContext, Cost, CostShape, Entries, gathering
from vllm_kvmerge.policies.entries import PART_ENTRIES
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector


@register
class KeyNorm(RankedSelector):
    """Keys of small L2 norm, which attract attention (Devoto et al.)."""

    name = "knorm"
    source = "L2 norm, Devoto et al., arXiv:2406.11430"
    needs_scores = False
    ignores_dead = True

    recent_window: int = Field(8, ge=0, le=MAX_TOKENS, description="Newest entries that are always kept.")

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return -torch.cat([entries.keys_at(part).norm(dim=-1) for part in entries.parts()], dim=1)

    def cost(self, shape: CostShape) -> Cost:
        part = min(shape.num_entries, PART_ENTRIES) * shape.head_size
        return super().cost(shape) + Cost(
            numbers=part + 2 * shape.num_entries, touches=gathering(shape.row_numbers) + 2 * shape.row_numbers
        )
