"""ZIP-merging of entries in PyTorch: what groups of entries that become one come to (KeepKV eq. 20-26)."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vllm_kvmerge.ops.types import ScoreMode, Softmax

ZipMode = Literal["scale", "votes", "auto"]
ZIP_MODES: tuple[ZipMode, ...] = ("scale", "votes", "auto")

MAX_SCALE = 10.0
"""``scale`` does not stretch a key beyond this factor."""

AUTO_TOLERANCE = 0.1
"""``auto`` scales a key whose length changes by at most this share."""


class ZipGroups(NamedTuple):
    """Groups of entries: a target that stays, and the sources that join it.

    targets: ``[H, r]``, sources: ``[H, j]`` int64, indices of entries, each once, in any order; -1: none. groups: ``[H,
    j]`` int64, the place in ``targets`` of what each source joins. shares: ``[H, j]`` float32, of sources in the mean
    key and value of their group; the rest is the target's, and 0 where there is none. factors: ``[H, r]`` float32, that
    the mean key is scaled by. log_votes, scores: ``[H, r]`` float32, and positions: ``[H, r]`` int64, of the merged
    entries.
    """

    targets: Tensor
    sources: Tensor
    groups: Tensor
    shares: Tensor
    factors: Tensor
    log_votes: Tensor
    scores: Tensor
    positions: Tensor


class ZipPlanes(NamedTuple):
    """What a merge reads of ``n`` entries.

    log_votes, scores: ``[H, n]`` float32. query_counts: ``[H, n]`` float32, of the tracker ``mean``; any other: not
    read. positions: ``[H, n]`` int64. protected: ``[H, n]`` bool, entries that keep their position. log_scores:
    ``[H, G', n]`` float32, ln s_hat of each query head, or G' = 1: of their mean. log_norms: ``[H, G', 1]`` float32, ln
    of attention's denominator for each of these.
    """

    log_votes: Tensor
    scores: Tensor
    query_counts: Tensor
    positions: Tensor
    protected: Tensor
    log_scores: Tensor
    log_norms: Tensor


def zip_groups(
    planes: ZipPlanes,
    sources: Tensor,
    targets: Tensor,
    joins: Tensor,
    mode: ScoreMode,
    zip_mode: ZipMode,
    softmax: Softmax,
    listed: Callable[[Tensor, int], Tensor],
    inverse: Callable[[Tensor, int], Tensor],
) -> ZipGroups:
    """See ``reference.zip_groups``. listed, inverse: of ``reference``."""
    n = planes.positions.shape[1]
    is_target = torch.zeros(len(targets), n + 1, dtype=torch.bool, device=targets.device)
    is_target.scatter_(1, targets.masked_fill(~joins, n), True)
    target, joining = listed(is_target[:, :n], min(n, targets.shape[1])), listed(joins, joins.shape[1])
    exists, joins = target >= 0, joining >= 0
    source, targets = (
        plane.gather(1, joining.clamp(min=0)).masked_fill(~joins, -1) if plane.shape[1] else joining
        for plane in (sources, targets)
    )
    own, other = target.clamp(min=0), source.clamp(min=0)
    group = inverse(target, n).gather(1, targets.clamp(min=0)).clamp(min=0)

    # Planes [H, r] and [H, j], or [H, G', r] and [H, G', j]. An entry that does not join may hold anything.
    def of_heads(plane: Tensor, index: Tensor) -> Tensor:
        return plane.gather(2, index.unsqueeze(1).expand(-1, plane.shape[1], -1))

    def add(mine: Tensor, theirs: Tensor) -> Tensor:
        where = group.view(len(group), *[1] * (theirs.dim() - 2), -1).expand_as(theirs)
        masked = theirs.masked_fill(~joins if theirs.dim() == 2 else ~joins.unsqueeze(1), 0.0)
        return mine.scatter_add(-1, where, masked)

    def log_sum_exp(mine: Tensor, theirs: Tensor) -> Tensor:
        theirs = theirs.masked_fill(~joins.unsqueeze(1), -torch.inf)
        where = group.unsqueeze(1).expand_as(theirs)
        largest = mine.scatter_reduce(2, where, theirs, "amax")
        total = torch.exp(mine - largest)
        return largest + total.scatter_add(2, where, torch.exp(theirs - largest.gather(2, where))).log()

    log_votes = tuple(planes.log_votes.gather(1, index).unsqueeze(1) for index in (own, other))
    log_scores = of_heads(planes.log_scores, own), of_heads(planes.log_scores, other)
    log_weights = log_votes[0] + log_scores[0], log_votes[1] + log_scores[1]
    log_total = log_sum_exp(*log_weights)  # ln W_g
    head_shares = (2.0 * (log_total - planes.log_norms)).softmax(1)  # a_g
    own_share = (head_shares * torch.exp(log_weights[0] - log_total)).sum(1)  # c_i
    shares = torch.exp(log_weights[1] - of_heads(log_total, group))
    share = (of_heads(head_shares, group) * shares).sum(1).masked_fill(~joins, 0.0)

    log_sum_votes = log_sum_exp(*log_votes)
    log_mean_score = log_total - log_sum_votes  # L_r,g
    logits = tuple(softmax.uncapped(plane) for plane in log_scores)
    mean_logit = add(own_share.unsqueeze(1) * logits[0], share.unsqueeze(1) * logits[1])
    mean_log_score = softmax.capped(mean_logit)  # L_bar_g
    squares = head_shares * mean_logit.square()
    ratio = softmax.uncapped(log_mean_score) / mean_logit
    factor = (squares / squares.sum(1, keepdim=True) * ratio).sum(1)  # f
    scales = _scales(factor, zip_mode)
    votes = torch.where(scales, log_sum_votes.squeeze(1), (head_shares * (log_total - mean_log_score)).sum(1))

    positions = planes.positions.gather(1, own)
    theirs = planes.positions.gather(1, other).masked_fill(~joins, -1)
    newest = positions.scatter_reduce(1, group, theirs, "amax")
    newest = torch.where(planes.protected.gather(1, own), positions, newest)
    gained = torch.zeros_like(own_share)
    if mode == ScoreMode.LOG_EMA:
        # The bias correction depends on the target's query count alone, which stays: S moves by as much as L.
        new = torch.where(scales.unsqueeze(1), log_mean_score, mean_log_score)
        gained = new.logsumexp(1) - log_scores[0].logsumexp(1)
    elif mode == ScoreMode.MEAN:
        means = planes.scores / planes.query_counts
        gained = add(gained, means.gather(1, other)) * planes.query_counts.gather(1, own)
    elif mode == ScoreMode.SUM:
        gained = add(gained, planes.scores.gather(1, other))
    new_scores = planes.scores.gather(1, own) + gained
    factor = torch.where(scales & exists, factor, 1.0)
    return ZipGroups(target, source, group, share, factor, votes, new_scores, newest)


def _scales(factor: Tensor, zip_mode: ZipMode) -> Tensor:
    """``[H, r]`` bool: merges that scale their key by ``factor``; in others the votes make up for it."""
    if zip_mode == "votes":
        return torch.zeros_like(factor, dtype=torch.bool)
    if zip_mode == "scale":
        return (factor > 0.0) & (factor <= MAX_SCALE)
    return (factor - 1.0).abs() <= AUTO_TOLERANCE
