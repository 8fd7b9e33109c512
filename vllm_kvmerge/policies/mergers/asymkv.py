"""Merger of neighbours: keys averaged, values summed, cardinalities counted (AsymKV)."""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import DEAD, CacheUpdate, CompressionContext, Entries, Merger, ScoreMode
from vllm_kvmerge.policies.indexing import complement, listed, select
from vllm_kvmerge.policies.mergers.convex import take_in
from vllm_kvmerge.policies.registry import register


@register
class AsymKVMerger(Merger):
    """Homogeneous keys, heterogeneous values (AsymKV).

    Before selection, neighbours i and j in order of position, neither protected, are merged until the budget holds.
    With cardinality l (the tokens that an entry stands for; ``log_votes`` is ln l):

        k <- (l_i k_i + l_j k_j) / (l_i + l_j)        v <- v_i + v_j        l <- l_i + l_j

    and attention is sum exp(q k) v / sum l exp(q k) (locally merged attention). Here v is stored divided by l, so that
    attention with votes is that formula. No value is lost: queries that do not tell the keys apart see no difference.

    Pairs of small (s_i + s_j) (l_i + l_j) go first, s being the tracker's score, which adds up. Each round takes as
    many of these as there is surplus, of several in a row every other one, so that no entry is in two; what is left is
    done by further rounds, with the merged entries' own scores and cardinalities.

    With ``merge_first`` false the selector decides what stays, and each entry that leaves is merged, by the same rule,
    into the nearest one that stays (by position, the later of two) and is not protected; where there is none it is
    dropped. That is a merger over another method's selection, as GRKV compares AsymKV (tables 1 and 7; GRKV does not
    say how it ran it): merging first, no selection would have anything left to drop.

    Differences from the source: it weighs keys by the diagonal of the Hessian of the loss, from a backward pass that a
    server does not have; without one its code averages, as here. It ranks pairs for all heads together and prefers
    recent ones; here each head ranks its own. It limits l to 5, which lets values grow: not done. It works while the
    prompt is read, 512 tokens at a time; here at its end.
    """

    name = "asymkv"
    source = "AsymKV, Cui and Xu, arXiv:2506.05410"
    tracker_modes = frozenset({ScoreMode.SUM})

    merge_first: bool = Field(
        True, description="Merge neighbours until the budget is met. false: merge the entries that the selector evicts."
    )

    def before_selection(
        self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate | None:
        if not self.merge_first:
            return None
        candidates = entries.is_live & ~protected
        num_live = entries.is_live.sum(1, keepdim=True)
        # The selector protects less than the budget, so there is always an entry left to merge with.
        surplus = (num_live - context.budget).clamp(min=0).minimum((candidates.sum(1, keepdim=True) - 1).clamp(min=0))
        merged = surplus.squeeze(1)
        last = torch.iinfo(torch.int64).max
        index = entries.positions.masked_fill(~candidates, last).argsort(dim=1, stable=True)
        index = index[:, : _most(candidates)]
        valid = candidates.gather(1, index)
        scores, log_votes = entries.scores.gather(1, index), entries.log_votes.gather(1, index)
        update = CacheUpdate.unchanged(entries)
        into = update.kept.clone()  # the entry that each was merged into, or itself
        # A round merges half of what is left or more: of a run of neighbours every other one. None waits for a GPU.
        num_rounds = max(0, len(entries) - context.budget).bit_length()
        for _ in range(num_rounds):
            if surplus.is_cpu and not surplus.any():
                break
            takes = _disjoint_pairs(_pair_costs(scores, log_votes, valid), surplus)
            into.scatter_(1, index, torch.where(takes, index.roll(-1, dims=1), into.gather(1, index)))
            joined = takes.roll(1, dims=1)
            scores = torch.where(joined, scores + scores.roll(1, dims=1), scores)
            log_votes = torch.where(joined, torch.logaddexp(log_votes, log_votes.roll(1, dims=1)), log_votes)
            surplus = surplus - takes.sum(1, keepdim=True)
            stays = valid & ~takes
            order = stays.int().argsort(dim=1, descending=True, stable=True)[:, : _most(stays)]
            index, scores, log_votes = (plane.gather(1, order) for plane in (index, scores, log_votes))
            valid = stays.gather(1, order)
        for _ in range(num_rounds.bit_length()):  # as many merges lead from an entry to where it is
            into = into.gather(1, into)
        # Entries behind the valid ones may have been merged away: they are emptied below.
        update.scores = update.scores.scatter(1, index, scores)
        update.log_votes = update.log_votes.scatter(1, index, log_votes)
        gone = into != update.kept
        shares = torch.exp(entries.log_votes - update.log_votes.gather(1, into)).masked_fill(~gone, 0.0)
        sources = listed(gone, len(entries) - 1)
        places, shares = select(into, sources).clamp(min=0), shares.gather(1, sources.clamp(min=0))
        shares = shares.masked_fill(sources < 0, 0.0)
        changed, keys, values = take_in(entries, update.kept, sources, places, shares)
        return update.without(gone).write(changed, keys, values, merged)

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        """Drops nothing where entries were merged first: live ones are no more than the budget then."""
        update = CacheUpdate.of(entries, kept)
        if self.merge_first:
            return update
        sources = complement(kept, len(entries))
        positions = entries.positions.gather(1, sources)
        places, is_near = _nearest(update.positions.masked_fill(protected.gather(1, kept), DEAD), positions)
        joins = is_near & (positions != DEAD)
        scores, log_votes = (plane.gather(1, sources) for plane in (entries.scores, entries.log_votes))
        own = update.log_votes.exp()
        votes = own.scatter_add(1, places, log_votes.exp().masked_fill(~joins, 0.0))
        shares = (log_votes.exp() / votes.gather(1, places)).masked_fill(~joins, 0.0)
        changed, keys, values = take_in(entries, kept, sources, places, shares)
        return update.write(
            changed,
            keys,
            values,
            joins.sum(1),
            log_votes=torch.where(votes > own, votes.log(), update.log_votes),
            scores=update.scores.scatter_add(1, places, scores.masked_fill(~joins, 0.0)),
            positions=update.positions.scatter_reduce(1, places, positions.masked_fill(~joins, DEAD), "amax"),
        )


def _nearest(targets: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """``[H, m]`` int64: index of the target whose position is nearest to each of ``positions``, the later of two; and
    ``[H, m]`` bool: whether there is any.

    targets: ``[H, c]`` int64, positions; ``DEAD``: no target. positions: ``[H, m]`` int64.
    """
    in_order, order = targets.sort(dim=1, stable=True)
    after = torch.searchsorted(in_order, positions)
    before = (after - 1).clamp(min=0)
    last = targets.shape[1] - 1
    to_before = positions - in_order.gather(1, before)
    to_after = in_order.gather(1, after.clamp(max=last)) - positions
    has_before = (after > 0) & (in_order.gather(1, before) != DEAD)
    takes_before = has_before & ((after > last) | (to_before < to_after))
    chosen = torch.where(takes_before, before, after.clamp(max=last))
    return order.gather(1, chosen), (in_order.gather(1, chosen) != DEAD)


def _most(mask: Tensor) -> int:
    """The most true elements that a row has, or, on a GPU, which would be waited for, can have."""
    return int(mask.sum(1).max()) if mask.is_cpu else mask.shape[1]


def _pair_costs(scores: Tensor, log_votes: Tensor, valid: Tensor) -> Tensor:
    """``[H, m]``: cost of merging each entry into the next; inf where either is not ``valid`` (``[H, m]`` bool)."""
    cardinality = log_votes.exp()
    cost = torch.full_like(scores, torch.inf)
    pairs = (scores[:, :-1] + scores[:, 1:]) * (cardinality[:, :-1] + cardinality[:, 1:])
    # The cost of a valid pair is finite for any scores, so that there is always one to merge.
    largest = torch.finfo(cost.dtype).max
    pairs = pairs.nan_to_num(nan=largest, posinf=largest, neginf=-largest)
    cost[:, :-1] = pairs.masked_fill(~(valid[:, :-1] & valid[:, 1:]), torch.inf)
    return cost


def _disjoint_pairs(cost: Tensor, surplus: Tensor) -> Tensor:
    """``[H, m]`` bool: the entries that go into the next, at least one and up to ``surplus`` (``[H, 1]``).

    These are the odd ones in each run of adjacent entries among the ``surplus`` cheapest.
    """
    rank = cost.argsort(dim=1, stable=True).argsort(dim=1)
    cheap = (rank < surplus) & cost.isfinite()
    place = torch.arange(cost.shape[1], device=cost.device).expand_as(rank)
    run_start = place.masked_fill(cheap, -1).cummax(dim=1).values
    return cheap & ((place - run_start) % 2 == 1)
