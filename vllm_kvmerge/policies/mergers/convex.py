"""Convex combinations of keys and values, for mergers that take entries (sources) into others (targets)."""

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.policies.base import DEAD, CacheUpdate, Entries
from vllm_kvmerge.policies.indexing import inverse, select


def take_in(
    entries: Entries, kept: Tensor, sources: Tensor, places: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Places that sources join, and their new keys and values: k + sum over the sources of share_j (k_j - k).

    kept: ``[H, c]`` int64, the entry that each place holds. sources: ``[H, m]`` int64, indices of entries. places:
    ``[H, m]`` int64, the one that each joins. shares: ``[H, m]`` float32, each source's in its group; 0: it does not
    join. Returns ``[H, r]`` int64, negative where a head has fewer, and twice ``[H, r, d]``. Reads only entries that
    join or are joined.
    """
    joins = shares > 0
    changed, row = ops.list_joined(places, joins, kept.shape[1])
    joining = sources.masked_fill(~joins, DEAD), row, shares, select(kept, changed)
    return changed, entries.mixed("keys", *joining), entries.mixed("values", *joining)


def absorb(
    entries: Entries, kept: Tensor, sources: Tensor, targets: Tensor, weights: Tensor, protected: Tensor
) -> CacheUpdate:
    """The entries at ``kept``, each with the sources that join it taken in (KeepKV eq. 11).

    A target c with the sources M that join it becomes k_r = (k_c + sum over M of w_j k_j) / (1 + sum over M of w_j),
    and its value likewise: its own weight is 1. Votes and statistics stay the target's.

    kept: ``[H, c]`` int64. sources: ``[H, m]`` int64, none of them kept. targets: ``[H, m]`` int64, indices of kept
    entries. weights: ``[H, m]`` float32, 0 for a source that does not join. protected: ``[H, n]`` bool: such a target
    keeps its position.
    """
    place = inverse(kept, len(entries)).gather(1, targets)
    update = CacheUpdate.of(entries, kept)
    total = torch.ones_like(update.scores).scatter_add_(1, place, weights)
    changed, keys, values = take_in(entries, kept, sources, place, weights / total.gather(1, place))
    joining = entries.positions.gather(1, sources).masked_fill(weights == 0, DEAD)
    newest = update.positions.scatter_reduce(1, place, joining, "amax")
    newest = torch.where(protected.gather(1, kept), update.positions, newest)
    return update.write(changed, keys, values, (weights > 0).sum(1), positions=newest)
