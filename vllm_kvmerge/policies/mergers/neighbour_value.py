"""Merger that hands an evicted entry's value to its neighbour (WeightedKV)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_kvmerge.policies.base import DEAD, CacheUpdate, CompressionContext, Entries, Merger, ScoreMode
from vllm_kvmerge.policies.cost import Cost, CostShape, gathering, sorting
from vllm_kvmerge.policies.indexing import by_position, inverse, listed, mask_of, select
from vllm_kvmerge.policies.registry import register


@register
class NeighbourValueMerger(Merger):
    """Keys go, values merge into the next entry to the right, by position (WeightedKV section IV, algorithm 1).

    One after the other, the smallest mean score m first, the entries e that leave give their values to whichever entry
    c is then their right neighbour, which may itself be about to leave:

        v_c <- (m_e v_e + m_c v_c) / (m_e + m_c)

    c keeps its key, its position, its votes and its m. The ``sum`` tracker's accumulated scores serve as m likewise. An
    entry that attention has not used has no weight. An entry without a right neighbour is lost, which only happens if
    the selector does not keep the newest.
    """

    name = "neighbour_value"
    source = "WeightedKV, arXiv:2503.01330"
    tracker_modes = frozenset({ScoreMode.MEAN, ScoreMode.SUM})

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        n = len(entries)
        # Everything below is in order of position; dead entries come first, and never lie between two others.
        order = by_position(entries)
        leaves = (entries.is_live & ~mask_of(kept, n)).gather(1, order)
        rank = torch.arange(n, device=order.device)
        last = rank.masked_fill(leaves, -1).amax(1, keepdim=True)
        leaves &= rank < last  # an entry without a right neighbour is lost
        # Of those that stay only the ones that follow one that leaves take part: few, except at the prompt's end.
        column = listed(leaves | pad(leaves, (1, -1)), min(n, 2 * (n - kept.shape[1])))
        index = select(order, column)
        leaves = leaves.gather(1, column.clamp(min=0)) & (column >= 0)
        scores = importance.gather(1, index.clamp(min=0)).clamp(min=0.0).masked_fill(index < 0, 0.0)
        given = entries.values_at(index)
        given *= torch.exp(_log_shares(scores, leaves)).unsqueeze(-1)
        target = _next_true(~leaves)  # an entry that stays is its own
        values = torch.zeros_like(given).scatter_add_(1, target.unsqueeze(-1).expand_as(given), given)
        changed = select(inverse(kept, n), index.masked_fill(leaves, DEAD))
        return CacheUpdate.of(entries, kept).write(changed, None, values, leaves.sum(1))

    def cost(self, shape: CostShape) -> Cost:
        n, m = shape.num_entries, shape.num_leaving
        column = min(n, 2 * m)  # entries that leave, and those that follow them
        steps = 4 * column.bit_length()
        rows = column * shape.head_size
        index_touches = (4 * steps + 40) * column + 2 * sorting(column) + 60 * n
        return Cost(2 * rows + (24 + steps) * column + 12 * n, 0, 2 * gathering(rows) + 3 * rows + index_touches)


def _log_shares(scores: Tensor, leaves: Tensor) -> Tensor:
    """``[H, n]``: ln of each entry's share in the value of the next entry to its right that stays, or in its own.

    scores, leaves: ``[H, n]``, in order of position. An entry e's target is the first to its right that leaves after
    it, or stays. Its value first shrinks as others merge into e; moves on, with share m_e / (m_e + m_c); shrinks as
    others merge into c, which are the sources of c to the left of e, the nearest first; and moves on with c. So each
    departure is followed by one other, and its chain is summed up by doubling steps.
    """
    num_heads, n = scores.shape
    none = torch.full((num_heads, 1), n, device=scores.device)
    # When an entry leaves: 0, 1, 2, ...; never: n.
    turn = scores.masked_fill(~leaves, torch.inf).argsort(dim=1, stable=True).argsort(dim=1).masked_fill(~leaves, n)
    target = torch.cat([_next_larger(turn), none], 1)
    leaves = pad(leaves, (0, 1))

    own, taker = pad(scores, (0, 1)), pad(scores, (0, 1)).gather(1, target)
    total = own + taker
    log_moved = torch.where(total > 0, own / total, 0.0).log()
    log_remained = torch.where(total > 0, taker / total, 1.0).log()

    # The departure that follows: the nearest one to the left with the same target, else the target's own.
    left = torch.cat([n - 1 - _next_larger(turn.flip(1)).flip(1), none], 1)
    left = torch.where(left < 0, n, left)
    has_left = leaves.gather(1, left) & (target.gather(1, left) == target)
    following = torch.where(has_left, left, target)
    following = torch.where(leaves & leaves.gather(1, following), following, n)
    after = torch.where(has_left, log_remained.gather(1, left), log_moved.gather(1, target))
    after = after.masked_fill(following == n, 0.0)
    for _ in range(n.bit_length()):
        after = after + after.gather(1, following)
        following = following.gather(1, following)

    # An entry's value first goes through its own sources' departures, beginning with its left neighbour's.
    has_sources = pad(leaves[:, :n] & (target[:, :n] == torch.arange(1, n + 1, device=target.device)), (1, 0))[:, :n]
    at_departure = (log_moved + after).masked_fill(~leaves, 0.0)[:, :n]
    at_neighbour = pad((log_remained + after)[:, :n], (1, 0))[:, :n]
    return torch.where(has_sources, at_neighbour, at_departure)


def _next_larger(turn: Tensor) -> Tensor:
    """``[H, n]`` int64: index of the nearest entry to the right with a larger ``turn`` (``[H, n]``); n: none."""
    n = turn.shape[1]
    beyond = n + 1
    maxima = [pad(turn, (0, 1), value=beyond)]  # maxima[k][i]: the largest of turn[i : i + 2^k]; beyond the end: larger
    while (width := 1 << (len(maxima) - 1)) < n:
        maxima.append(maxima[-1].maximum(pad(maxima[-1][:, width:], (0, width), value=beyond)))
    found = torch.arange(1, n + 1, device=turn.device).expand_as(turn)
    for exponent in reversed(range(len(maxima))):
        found = found + (maxima[exponent].gather(1, found) <= turn) * (1 << exponent)
    return found


def _next_true(mask: Tensor) -> Tensor:
    """``[H, n]`` int64: index of the first true entry at or to the right of each; n: none."""
    n = mask.shape[1]
    index = torch.arange(n, device=mask.device).masked_fill(~mask, n)
    return index.flip(1).cummin(dim=1).values.flip(1)
