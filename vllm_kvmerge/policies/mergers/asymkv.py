"""Merger of neighbours: keys averaged, values summed, cardinalities counted (AsymKV)."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries, Merger, TrackerMode
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

    What differs from the source: it weighs keys by the diagonal of the Hessian of the loss, from a backward pass that a
    server does not have; without one its code averages, as here. It ranks pairs for all heads together and prefers
    recent ones; here each head ranks its own. It limits l to 5, which lets values grow: not done. It works while the
    prompt is read, 512 tokens at a time; here at its end.
    """

    name: ClassVar[str] = "asymkv"
    source: ClassVar[str] = "AsymKV, Cui and Xu, arXiv:2506.05410"
    tracker_modes: ClassVar[frozenset[TrackerMode]] = frozenset({"sum"})

    def before_selection(
        self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> tuple[Entries, Tensor]:
        candidates = entries.is_live & ~protected
        num_live = entries.is_live.sum(1, keepdim=True)
        # The selector protects less than the budget, so there is always something left to merge with.
        surplus = (num_live - context.budget).clamp(min=0).minimum((candidates.sum(1, keepdim=True) - 1).clamp(min=0))
        total = surplus.sum()
        last = torch.iinfo(torch.int64).max
        index = entries.positions.masked_fill(~candidates, last).argsort(dim=1, stable=True)
        index = index[:, : int(candidates.sum(1).max())]
        valid = candidates.gather(1, index)
        run = entries.take(index)
        merged_away = torch.zeros_like(candidates)
        while surplus.any():
            takes = _disjoint_pairs(_pair_costs(run, valid), surplus)
            run = _merge_pairs(run, takes)
            merged_away.scatter_(1, index, merged_away.gather(1, index) | takes)
            surplus = surplus - takes.sum(1, keepdim=True)
            stays = valid & ~takes
            order = stays.int().argsort(dim=1, descending=True, stable=True)[:, : int(stays.sum(1).max())]
            run, index, valid = run.take(order), index.gather(1, order), stays.gather(1, order)
        result = _replaced(entries, index, run)
        result.kill(merged_away)
        return result, total

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> tuple[Entries, Tensor]:
        """Nothing is left to leave: live entries are no more than the budget."""
        return entries.take(kept), torch.zeros((), dtype=torch.int64, device=kept.device)


def _pair_costs(run: Entries, valid: Tensor) -> Tensor:
    """``[H, m]``: what merging each entry into the next costs; inf where either is not ``valid`` (``[H, m]`` bool)."""
    scores, cardinality = run.scores, run.log_votes.exp()
    cost = torch.full_like(scores, torch.inf)
    pairs = (scores[:, :-1] + scores[:, 1:]) * (cardinality[:, :-1] + cardinality[:, 1:])
    # Whatever scores are, the cost of a valid pair is finite, so that there is always one to merge.
    largest = torch.finfo(cost.dtype).max
    pairs = pairs.nan_to_num(nan=largest, posinf=largest, neginf=-largest)
    cost[:, :-1] = pairs.masked_fill(~(valid[:, :-1] & valid[:, 1:]), torch.inf)
    return cost


def _disjoint_pairs(cost: Tensor, surplus: Tensor) -> Tensor:
    """``[H, m]`` bool: whether each entry goes into the next: no more than ``surplus`` (``[H, 1]``), one at least.

    Of the ``surplus`` cheapest, those in odd places of each run of adjacent ones.
    """
    rank = cost.argsort(dim=1, stable=True).argsort(dim=1)
    cheap = (rank < surplus) & cost.isfinite()
    place = torch.arange(cost.shape[1], device=cost.device).expand_as(rank)
    run_start = place.masked_fill(cheap, -1).cummax(dim=1).values
    return cheap & ((place - run_start) % 2 == 1)


def _merge_pairs(run: Entries, takes: Tensor) -> Entries:
    """Each entry with the one before it taken in, where that one ``takes`` (``[H, m]`` bool) part; such remain, too."""
    joined = takes.roll(1, dims=1)
    log_votes = run.log_votes.roll(1, dims=1)
    share = torch.sigmoid(log_votes - run.log_votes).masked_fill(~joined, 0.0).unsqueeze(-1)

    def combined(tensor: Tensor) -> Tensor:
        return torch.where(joined.unsqueeze(-1), torch.lerp(tensor, tensor.roll(1, dims=1), share), tensor)

    return replace(
        run,
        keys=combined(run.keys),
        values=combined(run.values),
        log_votes=torch.where(joined, torch.logaddexp(run.log_votes, log_votes), run.log_votes),
        scores=torch.where(joined, run.scores + run.scores.roll(1, dims=1), run.scores),
    )


def _replaced(entries: Entries, index: Tensor, run: Entries) -> Entries:
    """A copy with ``run`` in the places ``index`` (``[H, m]`` int64)."""
    result = entries.clone()
    head = torch.arange(len(index), device=index.device).unsqueeze(1)
    for name in ("keys", "values", "log_votes", "scores"):
        getattr(result, name)[head, index] = getattr(run, name)
    return result
