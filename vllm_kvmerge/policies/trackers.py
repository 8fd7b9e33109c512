"""Trackers: rank entries by statistics that attention accumulates."""

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import MAX_TOKENS, Cost, CostShape, Entries, ScoreMode, Tracker
from vllm_kvmerge.policies.registry import register

ScoreWindow = Annotated[int, Field(ge=1, le=MAX_TOKENS)] | Literal["all"]
"""Number of the prompt's last queries to score."""


# Far enough from 0 and 1 for float32 to tell the weights of past and present from 0.
EmaDecay = Annotated[
    float, Field(ge=1e-5, le=1.0 - 1e-5, description="Weight of the past in the moving average of scores.")
]
"""Weight alpha of KeepKV eq. 8."""


def log_bias_correction(counts: Tensor, ema_decay: float) -> Tensor:
    """ln(1 - a^t) of moving averages of ``counts`` (t) queries (KeepKV eq. 8); -inf where t is 0."""
    return torch.log(-torch.expm1(counts * math.log(ema_decay)))


class ScoringTracker(Tracker):
    """Trackers that score the prompt's last queries."""

    score_window: ScoreWindow = Field(
        64, description="How many of the prompt's last tokens are scored as queries, or 'all'."
    )

    @property
    def prompt_window(self) -> ScoreWindow:
        return self.score_window


@register
class NoTracker(Tracker):
    """Attention accumulates nothing."""

    name = "none"
    source = "positions alone decide"
    mode = ScoreMode.NONE

    def importance(self, entries: Entries) -> Tensor:
        return torch.zeros_like(entries.scores)

    def cost(self, shape: CostShape) -> Cost:
        return Cost(numbers=shape.num_entries, touches=shape.num_entries)


@register
class SumTracker(ScoringTracker):
    """Attention probability accumulated over queries: ``s <- decay * s + a`` (ZSMerge eq. 5; H2O has decay 1).

    ``scores`` holds s. ``aux`` is left to the merger.
    """

    name = "sum"
    source = "H2O; ZSMerge eq. 5"
    mode = ScoreMode.SUM

    decay: float = Field(1.0, ge=0.0, le=1.0, description="Factor on the accumulated score at each query.")

    @property
    def update_decay(self) -> float:
        return self.decay

    def importance(self, entries: Entries) -> Tensor:
        return entries.scores

    def cost(self, shape: CostShape) -> Cost:
        return Cost()


@register
class MeanTracker(ScoringTracker):
    """Mean attention probability over the queries that saw the entry (WeightedKV algorithm 1).

    ``scores`` holds the probability accumulated over queries, summed over the query heads that share the KV head, and
    ``aux`` the number of queries.
    """

    name = "mean"
    source = "WeightedKV algorithm 1"
    mode = ScoreMode.MEAN

    def importance(self, entries: Entries) -> Tensor:
        """-inf for an entry that no query has seen."""
        return torch.where(entries.query_counts > 0, entries.scores / entries.query_counts, -torch.inf)

    def cost(self, shape: CostShape) -> Cost:
        return Cost(numbers=3 * shape.num_entries, touches=8 * shape.num_entries)


@register
class LogEmaTracker(ScoringTracker):
    """Moving average of the *unnormalised* attention score s = exp(logit), kept as its logarithm (KeepKV eq. 8).

    ``scores`` holds S, the logarithm of the average before bias correction: with ``a = ema_decay``,
    ``S <- logaddexp(S + ln a, logit + ln(1 - a))``. ``aux`` holds t, the number of queries that updated the entry;
    where it is 0, S means nothing.
    """

    name = "log_ema"
    source = "KeepKV eq. 8"
    mode = ScoreMode.LOG_EMA

    ema_decay: EmaDecay = 0.9

    @property
    def update_decay(self) -> float:
        return self.ema_decay

    def corrected(self, entries: Entries) -> Tensor:
        """``[H, n]``: L = ln s_hat = S - ln(1 - a^t) (KeepKV eq. 8); -inf for an entry that was never scored."""
        counts = entries.query_counts
        return torch.where(counts > 0, entries.scores - log_bias_correction(counts, self.ema_decay), -torch.inf)

    def uncorrected(self, log_scores: Tensor, aux: Tensor) -> Tensor:
        """``[H, n]``: the S whose bias-corrected value after ``aux`` queries is L; the inverse of ``corrected``."""
        return log_scores + log_bias_correction(aux, self.ema_decay)

    def importance(self, entries: Entries) -> Tensor:
        """ln(p s_hat): the logarithm of the entry's contribution to attention's denominator."""
        return entries.log_votes + self.corrected(entries)

    def cost(self, shape: CostShape) -> Cost:
        return Cost(numbers=5 * shape.num_entries, touches=24 * shape.num_entries)


def attention_mass(tracker: Tracker, entries: Entries) -> Tensor:
    """``[H, n]`` float32: each entry's share of its head's attention, by the tracker's importance; 0 for dead entries.

    Unlike importance it is comparable between heads and layers. All 0 if the tracker knows nothing.
    """
    importance = tracker.importance(entries).masked_fill(~entries.is_live, -torch.inf)
    if tracker.mode == ScoreMode.LOG_EMA:
        return importance.softmax(dim=1).nan_to_num(nan=0.0)  # NaN: no entry was ever scored
    mass = importance.clamp(min=0.0)
    return mass / mass.sum(dim=1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
