"""Merger that fits votes and values of the kept entries to the full cache (Attention Matching)."""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.ops import ScoreMode
from vllm_kvmerge.policies.base import MAX_QUERIES, CacheUpdate, CompressionContext, Entries, HeadShape, Merger, Queries
from vllm_kvmerge.policies.indexing import listed
from vllm_kvmerge.policies.mergers.least_squares import (
    attention,
    full_attention,
    held_by_fit,
    kept_entries,
    ridge_regression,
)
from vllm_kvmerge.policies.registry import register

STEPS = 8
"""Most Newton steps for the votes: twice as many as usually leave nothing to gain."""

STEP_LENGTHS = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
"""Shares of a Newton step, of which the best is taken."""

NEGLIGIBLE = 1e-7
"""Share of the output's squared norm that an error may have though dropping's is smaller."""


@register
class AttentionMatchingMerger(Merger):
    """Least squares for the kept entries' votes, then for their values (Attention Matching, sections 3.2 and 3.3).

    With Q the last ``matching_window`` queries of the G query heads that share a KV head, as rows; M their attention in
    the full cache to the kept entries, and Y their output there:

        votes   w = argmin ||M w - 1||^2 + lambda_b ||w - 1||^2     where w changes an entry's log_votes by ln w
        values  V = argmin ||A V - Y||^2 + lambda_v ||V - V0||^2    with A the attention to the kept entries, votes w

    1 is the attention of a query to the whole cache, so the first line gives the kept entries the mass of all, which
    counts as soon as other entries join them. There each query counts alike; the authors' code divides a query's masses
    by its largest one instead. Queries see entries up to their own position, in M, Y and A.

    The ridges hold entries that Q hardly attends to as they are. They are in units of the mean eigenvalue of M^T M and
    of A^T A (``frobenius`` in the authors' code, whose default is no ridge). w is bounded such that log_votes stay
    within ``max_log_votes``.

    Unchanged: keys, positions and scores, and a head whose output for Q would be further from Y. In a head that was
    changed, entries not kept count as merged. Without queries all of them are evicted.
    """

    name = "attention_matching"
    source = "Attention Matching, Zweiger et al., arXiv:2602.16284"
    tracker_modes = frozenset(ScoreMode)

    matching_window: int = Field(
        64, ge=1, le=MAX_QUERIES, description="Newest queries whose attention mass and output are preserved."
    )
    votes_ridge: float = Field(
        0.1, ge=1e-6, le=1e6, description="Ridge towards the previous votes, in mean eigenvalues."
    )
    values_ridge: float = Field(
        1.0, ge=1e-6, le=1e6, description="Ridge towards the previous values, in mean eigenvalues."
    )
    max_log_votes: float = Field(3.0, ge=0.0, le=20.0, description="Largest absolute logarithm of an entry's votes.")

    @property
    def query_window(self) -> int:
        return self.matching_window

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        update = CacheUpdate.of(entries, kept)
        if context.queries is None:
            return update
        queries = context.queries.newest(self.matching_window)
        before, num_gone = kept_entries(entries, kept)
        # A head that loses nothing has nothing to fit but rounding errors.
        free = before.is_live & (num_gone > 0).unsqueeze(1)
        target, mass = _full_attention(entries, kept, queries, context.scale)
        log_votes = before.log_votes + self._change_of_votes(mass, before.log_votes, free)
        fitted = replace(before, log_votes=log_votes)
        weights = attention(queries, fitted, context.scale).flatten(1, 2)
        fitted.values, taken = ridge_regression(
            before.values, weights, free, target, self.values_ridge * _mean_eigenvalue(weights)
        )
        loss = (target - weights @ fitted.values).square().sum((1, 2))
        weights = attention(queries, before, context.scale).flatten(1, 2)
        allowed = (target - weights @ before.values).square().sum((1, 2))
        # Where dropping costs nothing but mass, votes give it back.
        taken &= (num_gone > 0) & (loss <= allowed.maximum(NEGLIGIBLE * target.square().sum((1, 2))))
        is_changed = (fitted.values != before.values).any(-1) | (log_votes != before.log_votes)
        changed = listed(is_changed & free & taken.unsqueeze(1), len(before))
        rows = changed.clamp(min=0).unsqueeze(-1).expand(-1, -1, before.values.shape[2])
        return update.write(
            changed,
            None,
            fitted.values.gather(1, rows),
            merged=num_gone * taken,
            log_votes=torch.where(taken.unsqueeze(1) & free, log_votes, update.log_votes),
        )

    def _change_of_votes(self, mass: Tensor, log_votes: Tensor, free: Tensor) -> Tensor:
        """``[H, c]``: ln w, 0 where not ``free``; ``mass`` M, ``[H, r, c]``."""
        log_votes = log_votes.masked_fill(~free, 0.0)
        # An entry that is beyond a bound may stay there.
        least = (-self.max_log_votes - log_votes).clamp(max=0.0).exp()
        most = (self.max_log_votes - log_votes).clamp(min=0.0).exp()
        ridge = self.votes_ridge * _mean_eigenvalue(mass)
        return fit_votes(mass, free, ridge, least, most, STEPS).log()

    def held(self, shape: HeadShape) -> int:
        rows = shape.group_size * min(self.matching_window, shape.num_entries)
        return held_by_fit(shape, rows)


def _full_attention(entries: Entries, kept: Tensor, queries: Queries, scale: float) -> tuple[Tensor, Tensor]:
    """Y, ``[H, r, d]``, and M, ``[H, r, c]``: the queries' attention in the full cache to the entries at ``kept``."""
    num_heads, num_groups, window, _ = queries.vectors.shape
    mass = queries.vectors.new_empty(num_heads, num_groups, window, kept.shape[1])
    live = entries.is_live.gather(1, kept)

    def look(heads: slice, some: slice, rows: Tensor) -> None:
        index = kept[heads].unsqueeze(1).expand(-1, rows.shape[1], -1)
        mass[heads, :, some] = rows.gather(2, index).mul_(live[heads].unsqueeze(1)).unflatten(1, (num_groups, -1))

    output = full_attention(entries, queries, scale, look)
    return output.flatten(1, 2), mass.flatten(1, 2)


def _mean_eigenvalue(matrix: Tensor) -> Tensor:
    """``[H, 1]``: of A^T A for A ``[H, r, c]``; the smallest normal number where that is 0."""
    mean = matrix.square().sum((1, 2)) / matrix.shape[2]
    return mean.clamp(min=torch.finfo(mean.dtype).tiny).unsqueeze(1)


def fit_votes(mass: Tensor, free: Tensor, ridge: Tensor, least: Tensor, most: Tensor, steps: int) -> Tensor:
    """w that minimises ||M w - 1||^2 + ridge ||w - 1||^2 between ``least`` and ``most``; 1 where not free.

    mass M: ``[H, r, c]``. free: ``[H, c]`` bool. ridge: ``[H, 1]``. least, most: ``[H, c]``, around 1. Returns
    ``[H, c]``.

    Projected Newton's method (Bertsekas, 1982): each step solves for the entries that are not held at a bound, and
    takes the best of several shares of the step, clamped to the bounds, and of a gradient step of a length that cannot
    raise the objective. So none raises it, and it falls at least as fast as by projected gradient descent.
    """
    free_mass = mass * free.unsqueeze(1)
    target = 1.0 - (mass * ~free.unsqueeze(1)).sum(2, keepdim=True)
    ones = torch.ones_like(least)
    # No eigenvalue of M^T M is above its trace.
    safe_length = 1.0 / (free_mass.square().sum((1, 2)).unsqueeze(1) + ridge)
    lengths = least.new_tensor(STEP_LENGTHS)

    def objective(votes: Tensor) -> Tensor:
        """``[H, t]``, of ``votes``, ``[H, c, t]``."""
        misfit = (free_mass @ votes - target).square().sum(1)
        return misfit + ridge * (votes - 1.0).square().sum(1)

    votes = ones
    value = objective(votes.unsqueeze(2)).squeeze(1)
    for _ in range(steps):
        misfit = free_mass @ votes.unsqueeze(2) - target
        gradient = (free_mass.transpose(1, 2) @ misfit).squeeze(2) + ridge * (votes - 1.0)
        held = ((votes <= least) & (gradient > 0)) | ((votes >= most) & (gradient < 0))
        # The minimum for the entries that are not held, from 1, where the ridge holds them.
        start = torch.where(held, votes, ones).unsqueeze(2)
        goal, solved = ridge_regression(start, free_mass, ~held, target, ridge)
        newton = torch.where(solved.unsqueeze(1), goal.squeeze(2) - votes, 0.0)
        trials = votes.unsqueeze(2) + newton.unsqueeze(2) * lengths
        trials = torch.cat([trials, (votes - safe_length * gradient).unsqueeze(2)], 2)
        trials = trials.clamp(least.unsqueeze(2), most.unsqueeze(2))
        best, index = objective(trials).min(1)
        better = best < value
        if better.is_cpu and not better.any():  # a GPU would be waited for
            break
        chosen = trials.gather(2, index[:, None, None].expand(-1, trials.shape[1], 1)).squeeze(2)
        votes = torch.where(better.unsqueeze(1), chosen, votes)
        value = torch.where(better, best, value)
    return votes
