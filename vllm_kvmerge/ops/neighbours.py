"""Merges of values into right neighbours, one evicted entry after the other (WeightedKV algorithm 1)."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def shares_of(scores: Tensor, leaves: Tensor) -> Tensor:
    """``[H, n]``: each entry's share in the value of the next entry to its right that stays, or in its own.

    scores, leaves: ``[H, n]``, in order of position. An entry e's target is the first to its right that leaves after
    it, or stays. Its value first shrinks as others merge into e; moves on, with share m_e / (m_e + m_c); shrinks as
    others merge into c, which are the sources of c to the left of e, the nearest first; and moves on with c. So each
    departure is followed by one other, and its chain is multiplied up by doubling steps.
    """
    num_heads, n = scores.shape
    none = torch.full((num_heads, 1), n, device=scores.device)
    # When an entry leaves: 0, 1, 2, ...; never: n.
    turn = scores.masked_fill(~leaves, torch.inf).argsort(dim=1, stable=True).argsort(dim=1).masked_fill(~leaves, n)
    target = torch.cat([_next_larger(turn), none], 1)
    leaves = pad(leaves, (0, 1))

    own, taker = pad(scores, (0, 1)), pad(scores, (0, 1)).gather(1, target)
    total = own + taker
    moved = torch.where(total > 0, own / total, 0.0)
    remained = torch.where(total > 0, taker / total, 1.0)

    # The departure that follows: the nearest one to the left with the same target, else the target's own.
    left = torch.cat([n - 1 - _next_larger(turn.flip(1)).flip(1), none], 1)
    left = torch.where(left < 0, n, left)
    has_left = leaves.gather(1, left) & (target.gather(1, left) == target)
    following = torch.where(has_left, left, target)
    following = torch.where(leaves & leaves.gather(1, following), following, n)
    after = torch.where(has_left, remained.gather(1, left), moved.gather(1, target))
    after = after.masked_fill(following == n, 1.0)
    for _ in range(n.bit_length()):
        after = after * after.gather(1, following)
        following = following.gather(1, following)

    # An entry's value first goes through its own sources' departures, beginning with its left neighbour's.
    has_sources = pad(leaves[:, :n] & (target[:, :n] == torch.arange(1, n + 1, device=target.device)), (1, 0))[:, :n]
    at_departure = (moved * after).masked_fill(~leaves, 1.0)[:, :n]
    at_neighbour = pad((remained * after)[:, :n], (1, 0))[:, :n]
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


def next_true(mask: Tensor) -> Tensor:
    """``[H, n]`` int64: index of the first true entry at or to the right of each; n: none."""
    n = mask.shape[1]
    index = torch.arange(n, device=mask.device).masked_fill(~mask, n)
    return index.flip(1).cummin(dim=1).values.flip(1)
