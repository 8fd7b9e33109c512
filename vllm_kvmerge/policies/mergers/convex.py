"""What mergers share that take entries into others as convex combinations of keys and values."""

from dataclasses import replace

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, CacheUpdate, Entries
from vllm_kvmerge.policies.cost import Cost, gathering
from vllm_kvmerge.policies.indexing import any_at, inverse, padded_nonzero, select


def take_in(
    entries: Entries, kept: Tensor, members: Tensor, places: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Places that members join, and their new keys and values: k + sum over the members of share_j (k_j - k).

    kept: ``[H, c]`` int64, the entry that each place holds. members: ``[H, m]`` int64, indices of entries. places:
    ``[H, m]`` int64, what each joins. shares: ``[H, m]`` float32, each member's in its group; 0: it does not join.
    Returns ``[H, r]`` int64, negative where a head has fewer, and twice ``[H, r, d]``. Only what joins is read, and
    what it joins.
    """
    joins = shares > 0
    is_joined = any_at(places, joins, kept.shape[1])
    changed = padded_nonzero(is_joined)
    row = (is_joined.cumsum(1) - 1).gather(1, places).masked_fill(~joins, 0)
    carriers, members = select(kept, changed), members.masked_fill(~joins, DEAD)

    def combined(own: Tensor, joining: Tensor) -> Tensor:
        if own.shape[1] == 0:
            return own
        index = row.unsqueeze(-1).expand_as(joining)
        moved = joining.sub_(own.gather(1, index)).mul_(shares.unsqueeze(-1))
        # Masked rather than weighted with 0: a dead entry may hold NaN.
        return own.scatter_add_(1, index, moved.masked_fill_(~joins.unsqueeze(-1), 0.0))

    keys = combined(entries.keys_at(carriers), entries.keys_at(members))
    values = combined(entries.values_at(carriers), entries.values_at(members))
    return changed, keys, values


def absorbing(num_members: int, num_carriers: int, head_size: int) -> Cost:
    """Of ``take_in`` where so many members join as many carriers at most, with what ``absorb`` does besides."""
    rows = (num_members + num_carriers) * head_size
    return Cost(
        numbers=2 * rows + 16 * num_members + 12 * num_carriers,
        touches=4 * gathering(rows) + 12 * num_members * head_size + 40 * (num_members + num_carriers),
    )


def absorb(
    entries: Entries, kept: Tensor, members: Tensor, carriers: Tensor, weights: Tensor, protected: Tensor
) -> CacheUpdate:
    """The entries at ``kept``, each with the members that join it taken in (KeepKV eq. 11).

    A carrier c with the members M that join it becomes k_r = (k_c + sum over M of w_j k_j) / (1 + sum over M of w_j),
    and its value likewise: its own weight is 1. Votes and statistics stay the carrier's.

    kept: ``[H, c]`` int64. members: ``[H, m]`` int64, none of them kept. carriers: ``[H, m]`` int64, indices of kept
    entries. weights: ``[H, m]`` float32, 0 for a member that does not join. protected: ``[H, n]`` bool: such a carrier
    keeps its position.
    """
    place = inverse(kept, len(entries)).gather(1, carriers)
    outcome = CacheUpdate.of(entries, kept)
    total = torch.ones_like(outcome.scores).scatter_add_(1, place, weights)
    changed, keys, values = take_in(entries, kept, members, place, weights / total.gather(1, place))
    joining = entries.positions.gather(1, members).masked_fill(weights == 0, DEAD)
    newest = outcome.positions.scatter_reduce(1, place, joining, "amax")
    return replace(
        outcome,
        positions=torch.where(protected.gather(1, kept), outcome.positions, newest),
        changed=changed,
        keys=keys,
        values=values,
        merged=(weights > 0).sum(1),
    )
