"""What mergers share that take entries into carriers as convex combinations of keys and values."""

from dataclasses import replace

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, Entries


def absorb(
    entries: Entries, kept: Tensor, members: Tensor, carriers: Tensor, weights: Tensor, protected: Tensor
) -> Entries:
    """The entries at ``kept``, each with the members that join it taken in (KeepKV eq. 11).

    A carrier c with the members M that join it becomes k_r = (k_c + sum over M of w_j k_j) / (1 + sum over M of w_j),
    and its value likewise: its own weight is 1. Votes and statistics stay the carrier's.

    kept: ``[H, c]`` int64. members: ``[H, m]`` int64, none of them kept. carriers: ``[H, m]`` int64, indices of kept
    entries. weights: ``[H, m]`` float32, 0 for a member that does not join. protected: ``[H, n]`` bool: such a carrier
    keeps its position.
    """
    ranks = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    place = torch.zeros_like(entries.positions).scatter_(1, kept, ranks).gather(1, carriers)
    joins = weights > 0
    own, joining = entries.take(kept), entries.take(members)
    total = torch.ones_like(own.scores).scatter_add_(1, place, weights)
    share = (weights / total.gather(1, place)).unsqueeze(-1)
    index = place.unsqueeze(-1).expand_as(joining.keys)

    def combined(carried: Tensor, taken_in: Tensor) -> Tensor:
        # Masked rather than weighted with 0: a dead entry may hold NaN. Carriers that nothing joins stay bit for bit.
        moved = (share * (taken_in - carried.gather(1, index))).masked_fill(~joins.unsqueeze(-1), 0.0)
        return carried.scatter_add(1, index, moved)

    newest = own.positions.scatter_reduce(1, place, joining.positions.masked_fill(~joins, DEAD), "amax")
    return replace(
        own,
        keys=combined(own.keys, joining.keys),
        values=combined(own.values, joining.values),
        positions=torch.where(protected.gather(1, kept), own.positions, newest),
    )
