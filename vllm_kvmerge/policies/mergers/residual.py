"""Merger that averages what leaves the cache into a few residual slots (ZSMerge)."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, CompressionContext, Entries, Merger, TrackerMode
from vllm_kvmerge.policies.indexing import complement
from vllm_kvmerge.policies.registry import register


@register
class ResidualMerger(Merger):
    """Residual token merging (ZSMerge eq. 6-8, algorithm 1).

    ``residual_share`` of the budget, B_r entries, are slots. A slot is the mean of w entries; ``aux`` holds w, 0 in an
    ordinary entry, and its logit carries ``alpha ln w`` (eq. 8). At the end of the prompt, what the selector leaves is
    cut, in order of position, into B_r runs of equal length, each averaged into a slot. Later, entries that leave found
    slots while fewer than B_r exist, and then join the slot of largest k_r . k_t. Slots are never selected, so the sum
    of their scores, which they keep, ranks nothing.
    """

    name: ClassVar[str] = "residual"
    source: ClassVar[str] = "ZSMerge, arXiv:2503.10714"
    tracker_modes: ClassVar[frozenset[TrackerMode]] = frozenset({"sum"})

    alpha: float = Field(
        0.6, ge=0.0, le=1.0, description="How much of ln(fusion count) a merged entry's logit carries."
    )
    residual_share: float = Field(0.125, gt=0.0, lt=1.0, description="Share of the budget for merged entries.")

    def num_slots(self, budget: int) -> int:
        return max(1, round(self.residual_share * budget))

    def is_slot(self, entries: Entries) -> Tensor:
        return entries.is_live & (entries.aux >= 1)

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> tuple[Entries, Tensor]:
        rest = entries.take(complement(kept, len(entries)))
        if context.at_prompt_end:
            slots = _average_runs(rest, context.num_slots)
        else:
            slots = _absorb_one_by_one(rest, self.is_slot(rest), context.num_slots)
        num_merged = rest.is_live.sum() - slots.is_live.sum()
        slots.log_votes = torch.where(slots.is_live, self.alpha * torch.log(slots.aux), -torch.inf)
        return entries.take(kept).concatenate(slots), num_merged


def _weights(entries: Entries) -> Tensor:
    """``[H, n]``: tokens that a live entry stands for, w_t; 0 for a dead one."""
    return torch.where(entries.is_live, entries.aux.clamp(min=1.0), 0.0)


def _cleared(entries: Entries) -> Entries:
    """A copy whose dead entries hold zeros, so that sums need no mask."""
    copy = entries.clone()
    copy.kill(~entries.is_live)
    return copy


def _average_runs(rest: Entries, num_slots: int) -> Entries:
    """``num_slots`` entries per head: means of equal runs of the live entries in order of position.

    The lengths of runs differ by one at most; where there are fewer entries than slots, the last slots are dead.
    """
    rest = _cleared(rest)
    weights = _weights(rest)
    num_live = rest.is_live.sum(1, keepdim=True)
    # Dead entries come last in this order, in whichever run: their weight is 0.
    order = rest.positions.masked_fill(~rest.is_live, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
    rank = torch.arange(len(rest), device=order.device).expand_as(order)
    run_of_rank = (rank * num_live.clamp(max=num_slots) // num_live.clamp(min=1)).clamp(max=num_slots - 1)
    run = torch.empty_like(order).scatter_(1, order, run_of_rank)

    def total(tensor: Tensor) -> Tensor:
        index = run if tensor.ndim == 2 else run.unsqueeze(-1).expand_as(tensor)
        shape = (tensor.shape[0], num_slots, *tensor.shape[2:])
        return tensor.new_zeros(shape).scatter_add_(1, index, tensor)

    aux = total(weights)
    share = (weights / aux.clamp(min=1.0).gather(1, run)).unsqueeze(-1)
    positions = rest.positions.new_full(aux.shape, DEAD).scatter_reduce(1, run, rest.positions, "amax")
    return Entries(total(share * rest.keys), total(share * rest.values), aux, total(rest.scores), aux, positions)


def _absorb_one_by_one(rest: Entries, is_slot: Tensor, num_slots: int) -> Entries:
    """``num_slots`` entries per head: the slots in ``rest`` with its other entries merged in (ZSMerge eq. 6-7).

    In order of position, each founds a slot while there is room, and then joins the slot of largest k_r . k_t.
    is_slot: ``[H, n]`` bool; slots in excess of ``num_slots`` join the others, with their weight.
    """
    last = torch.iinfo(torch.int64).max
    turn = torch.where(is_slot, rest.positions - last, rest.positions).masked_fill(~rest.is_live, last)
    rest = _cleared(rest).take(turn.argsort(dim=1, stable=True))
    rest.aux = _weights(rest)
    slots = rest.take(torch.arange(num_slots, device=turn.device).expand(len(turn), -1))
    head = torch.arange(len(turn), device=turn.device)
    for i in range(num_slots, len(rest)):
        # Dead entries come last and weigh nothing; whoever is alive here finds all slots of its head taken.
        key, value, weight = rest.keys[:, i], rest.values[:, i], rest.aux[:, i]
        at = head, torch.linalg.vecdot(slots.keys, key.unsqueeze(1)).argmax(dim=1)
        slots.aux[at] += weight
        share = (weight / slots.aux[at].clamp(min=1.0)).unsqueeze(-1)
        slots.keys[at] += share * (key - slots.keys[at])
        slots.values[at] += share * (value - slots.values[at])
        slots.scores[at] += rest.scores[:, i]
        slots.positions[at] = torch.maximum(slots.positions[at], rest.positions[:, i])
    return slots
