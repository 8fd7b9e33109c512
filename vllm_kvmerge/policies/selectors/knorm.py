"""Selector that keeps the entries whose keys are short."""

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import NewestEntries, RankedSelector


@register
class KeyNorm(RankedSelector):
    """The keys with the smallest L2 norm, which attract attention (Devoto et al.)."""

    name = "knorm"
    source = "L2 norm, Devoto et al., arXiv:2406.11430"
    needs_scores = False

    recent_window: NewestEntries = 8

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return -torch.cat([entries.keys_at(part).norm(dim=-1) for part in entries.parts()], dim=1)
