"""Merger that averages the entries that leave into a few residual slots (ZSMerge)."""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.policies.base import DEAD, CacheUpdate, CompressionContext, Entries, Merger, ScoreMode
from vllm_kvmerge.policies.indexing import complement, inverse
from vllm_kvmerge.policies.mergers.convex import take_in
from vllm_kvmerge.policies.registry import register

MAX_JOINING = 256
"""Entries that join slots between two updates of the slots' keys; each is multiplied with all others."""


@register
class ResidualMerger(Merger):
    """Residual token merging (ZSMerge eq. 6-8, algorithm 1).

    ``residual_share`` of the budget, B_r entries, are slots. A slot is the mean of w entries; ``aux`` holds w, 0 in an
    ordinary entry, and its logit carries ``alpha ln w`` (eq. 8). At the end of the prompt, what the selector leaves is
    cut, in order of position, into B_r runs of equal length, each averaged into a slot. Later, entries that leave found
    slots while fewer than B_r exist, and then join the slot of largest k_r . k_t. Slots are never selected, so the sum
    of their scores, which they keep, ranks nothing.

    The authors' code has a single slot by default and averages the prompt likewise, except that where runs differ in
    length the longer ones come first; of a prompt shorter than the budget, the first tokens serve as slots. The token
    that leaves its recent window is never merged at that step: while decoding the window is one token shorter than its
    parameter says, so what it selects is what algorithm 1 does with that B_p.
    """

    name = "residual"
    source = "ZSMerge, arXiv:2503.10714"
    tracker_modes = frozenset({ScoreMode.SUM})

    alpha: float = Field(0.6, ge=0.0, le=1.0, description="Factor of ln(fusion count) in a merged entry's logit.")
    residual_share: float = Field(0.125, gt=0.0, lt=1.0, description="Share of the budget for merged entries.")

    def num_slots(self, budget: int) -> int:
        return max(1, round(self.residual_share * budget))

    def is_slot(self, entries: Entries) -> Tensor:
        return entries.is_live & (entries.aux >= 1)

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        if context.at_prompt_end:
            slots = _average_runs(entries.take(complement(kept, len(entries))), context.num_slots)
        else:
            slots = _absorb_one_by_one(entries, kept, context.num_slots)
        # Of dead slots too, whose metadata will be overwritten (``CacheUpdate.emptied``).
        slots = replace(slots, log_votes=self.alpha * torch.log(slots.aux))
        return slots.behind(entries, kept)


def _average_runs(rest: Entries, num_slots: int) -> CacheUpdate:
    """``num_slots`` places per head, all new: means of equal runs of the live entries in order of position.

    The lengths of runs differ by at most one; with fewer entries than slots, the last slots are dead.
    """
    rest.kill(~rest.is_live)  # so that sums need no mask
    weights = rest.aux.clamp(min=1.0).masked_fill(~rest.is_live, 0.0)  # tokens that each stands for
    num_live = rest.is_live.sum(1, keepdim=True)
    # Dead entries come last, in any run: their weight is 0.
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
    return CacheUpdate(
        torch.full_like(positions, DEAD),
        aux,
        total(rest.scores),
        aux,
        positions,
        changed=torch.arange(num_slots, device=run.device).expand_as(positions).masked_fill(positions == DEAD, DEAD),
        keys=total(rest.keys.mul_(share)),
        values=total(rest.values.mul_(share)),
        merged=(num_live - num_slots).clamp(min=0)[:, 0],
    )


def _absorb_one_by_one(entries: Entries, kept: Tensor, num_slots: int) -> CacheUpdate:
    """``num_slots`` places per head: slots with the entries merged in that are not ``kept`` (ZSMerge eq. 6-7).

    In order of position, each founds a slot while there is room, and then joins the slot of largest k_r . k_t. Slots in
    excess of ``num_slots`` join the others, with their weight. kept: ``[H, c]`` int64.
    """
    n = len(entries)
    line = ops.line_up(inverse(kept, n), entries.positions, entries.aux, entries.scores, n - kept.shape[1])
    (slots, newest, aux, sums), (sources, positions, weights, scores) = (
        [plane[:, part].contiguous() for plane in line] for part in (slice(num_slots), slice(num_slots, None))
    )
    # Dead entries come last and weigh nothing; a live source finds all slots of its head taken.
    joined, aux = _join(entries, slots, sources, weights, aux)
    sums.scatter_add_(1, joined, scores)
    newest.scatter_reduce_(1, joined, positions, "amax")
    shares = weights / aux.gather(1, joined).clamp_(min=1.0)
    changed, keys, values = take_in(entries, slots, sources, joined, shares)
    return CacheUpdate(slots, aux, sums, aux, newest, changed, keys, values, merged=(sources >= 0).sum(1))


def _join(
    entries: Entries, slots: Tensor, sources: Tensor, weights: Tensor, slot_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The slot that each source joins, ``[H, m]`` int64, one after the other, and the slots' weights then, ``[H, s]``.

    slots: ``[H, s]``, sources: ``[H, m]`` int64, indices of entries. weights: ``[H, m]``, slot_weights: ``[H, s]``.
    Sources are taken in parts, between which the slots' keys move.
    """
    if sources.shape[1] <= MAX_JOINING:
        return entries.join_slots(slots, sources, weights, slot_weights)
    keys, total, joined = entries.keys_at(slots), slot_weights, torch.zeros_like(sources)
    for start in range(0, sources.shape[1], MAX_JOINING):
        part = slice(start, start + MAX_JOINING)
        joining = entries.keys_at(sources[:, part])
        joined[:, part], total = ops.join_slots(keys, joining, weights[:, part], total)
        if part.stop < sources.shape[1]:
            slot = joined[:, part]
            shares = weights[:, part] / total.gather(1, slot).clamp(min=1.0)
            slot = slot.unsqueeze(-1).expand_as(joining)
            moved = joining.sub_(keys.gather(1, slot)).mul_(shares.unsqueeze(-1))
            # Masked rather than weighted with 0: a dead entry may hold NaN.
            keys.scatter_add_(1, slot, moved.masked_fill_((shares == 0).unsqueeze(-1), 0.0))
    return joined, total
