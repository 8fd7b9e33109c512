"""A package of somebody else's: a merger that calls an operator as soon as it is imported."""

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.policies import CacheUpdate, CompressionContext, Entries, Merger, register
from vllm_kvmerge.policies.mergers import DropMerger

FIRST = ops.largest(torch.tensor([[3.0, 1.0, 2.0]]), 1)


@register
class Halving(Merger):
    """Drops what leaves, and halves the votes of what stays."""

    name = "halving"
    source = "a test"
    tracker_modes = DropMerger.tracker_modes

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        update = CacheUpdate.of(entries, kept)
        update.log_votes = update.log_votes - 0.5
        return update
