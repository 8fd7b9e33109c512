"""Budgets of a model's heads, measured once on some text, whatever requests are about."""

from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from vllm_kvmerge import ops

BUDGET = 0.25
"""Share of the entries for which shares are measured; they serve others as well."""

FLOOR, MOST = 0.2, 8.0
"""What a head gets at least and at most, in units of the average."""

Share = Annotated[float, Field(gt=0.0, le=64.0)]


class HeadBudgets(BaseModel):
    """What each head needs. shares: ``[layers, KV heads]``, in units of the average budget of layers that see all
    tokens; 1 in others. fingerprint: of the model (``engine.surrogate.fingerprint``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: str
    shares: list[list[Share]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> "HeadBudgets":
        if len({len(heads) for heads in self.shares}) != 1 or not self.shares[0]:
            raise ValueError("shares must have as many KV heads in each layer, at least one")
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and KV heads of each."""
        return len(self.shares), len(self.shares[0])


def measured_shares(scores: Tensor) -> Tensor:
    """``[layers, H]`` float64: heads' shares of the entries of largest ``scores`` (``[layers, H, n]`` float32 of one
    text, not negative), in units of the average, where ``BUDGET`` of all entries stay."""
    layers, heads, n = scores.shape
    average = max(1, round(BUDGET * n))
    counts = ops.split_budget(
        scores.reshape(1, layers * heads, n), layers * heads * average, int(FLOOR * average), int(MOST * average)
    )
    return counts.view(layers, heads).double() / average


def divided(shares: np.ndarray, budget: int, least: int, most: int) -> np.ndarray:
    """Whole numbers in proportion to ``shares`` (``[heads]`` float64), each from ``least`` to ``most``, that add up to
    ``budget`` for each head, or come as near as these bounds allow."""
    total = len(shares) * min(max(budget, least), most)

    def parts(unit: float) -> np.ndarray:
        return np.clip(shares * unit, least, most)

    low, high = 0.0, most / float(shares.min())
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if parts(middle).sum() <= total else (low, middle)
    exact = parts(low)
    counts = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    has_room = by_remainder[counts[by_remainder] < most]
    counts[has_room[: total - int(counts.sum())]] += 1
    return counts
