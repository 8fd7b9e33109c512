"""Merger that fits the kept entries to the attention output of the full cache (GRKV)."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops import ScoreMode
from vllm_kvmerge.ops.regression import OutputDerivative
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies.base import (
    MAX_QUERIES,
    MAX_TOKENS,
    CacheUpdate,
    CompressionContext,
    Entries,
    HeadShape,
    Merger,
    Queries,
    ServedModel,
)
from vllm_kvmerge.policies.indexing import listed, sinks
from vllm_kvmerge.policies.mergers.least_squares import (
    full_attention,
    held_by_fit,
    is_finite,
    kept_entries,
    ridge_regression,
)
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.tiles import once

Ridge = Annotated[float, Field(ge=0.0, le=1e6)]

RIDGE = 1e-2
"""Lambda of the paper's Llama, and of models that it does not have (section 4.1)."""

STRONGER_RIDGE = 1e-1
"""Lambda of the paper's Mistral and Qwen."""

STRONGER_RIDGE_MODELS = ("mistral", "mixtral", "ministral", "qwen")
"""What the names of these models' types begin with."""

STEP_LENGTHS = (1.0, 0.5, 0.25, 0.125)
"""Shares of a guarded step for keys, tried in turn."""


@register
class RegressionMerger(Merger):
    """Ridge regression of the kept entries onto the full cache's output for the newest queries (GRKV algorithm 1).

    With Q the last m queries of the G query heads that share a KV head, as rows; Y the attention output of Q over the
    full cache and A its attention to the kept entries K, V; each of ``steps`` steps minimises ||Y - A V||^2, the window
    loss, plus lambda times the squared distance from what the selector kept, K0 and V0:

        values  V = V0 + A^T (A A^T + lambda_v I)^-1 (Y - A V0)                                              (eq. 8)
        keys    K = K0 + J^T alpha   with   (J J^T + lambda_k I) alpha = Y - A V + J (K - K0)                (eq. 10)

    J, the derivative of A V with respect to K, is applied without being formed; conjugate gradients find alpha. Queries
    see entries up to their own position, in Y as in A, so that Y is what the model computed.

    Fixed, hence unchanged (section 3.4): the first ``num_fixed_sinks`` tokens of the sequence, the tokens whose queries
    these are (``fix_window``), and of the others the ``fixed_share`` of those kept that Q attends to most. All other
    kept entries are free. Positions, votes and scores stay. In a head that was changed, entries not kept count as
    merged. Without queries all of them are evicted.

    ``guard`` is not the paper's. J is a local approximation, so a step for keys can raise the window loss: such a step
    is halved, up to three times, and one that still raises a head's loss, or a step for values that does, is not taken
    for that head. Without it every step with a finite result is taken, as algorithm 1 is written.
    """

    name = "regression"
    source = "GRKV, arXiv:2605.31105"
    tracker_modes = frozenset(ScoreMode)

    regression_window: int = Field(
        32, ge=1, le=MAX_QUERIES, description="Newest queries whose attention output is preserved (m)."
    )
    components: Literal["k", "v", "kv"] = Field("kv", description="What is fitted: keys, values, or both.")
    lambda_k: Ridge | None = Field(
        None, description="Ridge towards the previous keys; default: 0.1 for Mistral and Qwen, else 0.01."
    )
    lambda_v: Ridge | None = Field(
        None, description="Ridge towards the previous values; default: 0.1 for Mistral and Qwen, else 0.01."
    )
    steps: int = Field(1, ge=1, le=32, description="Rounds of fitting values and keys in turn (S).")
    fixed_share: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="Share of the kept entries, those with the most attention, that stays unchanged.",
    )
    num_fixed_sinks: int = Field(
        4, ge=0, le=MAX_TOKENS, description="First tokens of the sequence that stay unchanged if kept."
    )
    fix_window: bool = Field(True, description="Keep the tokens of these queries unchanged.")
    guard: bool = Field(
        True,
        description="Skip steps that raise the window loss. false: take every step, as in the paper's algorithm 1.",
    )
    cg_iterations: int = Field(
        64, ge=1, le=1024, description="Maximum number of conjugate-gradient iterations in a key step."
    )
    cg_tolerance: float = Field(
        1e-2, ge=1e-12, lt=1.0, description="Relative residual at which conjugate gradients stop."
    )

    @classmethod
    def model_defaults(cls, model: ServedModel) -> dict[str, Any]:
        ridge = STRONGER_RIDGE if model.model_type.startswith(STRONGER_RIDGE_MODELS) else RIDGE
        return {"lambda_k": ridge, "lambda_v": ridge}

    @property
    def query_window(self) -> int:
        return self.regression_window

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        update = CacheUpdate.of(entries, kept)
        if context.queries is None:
            return update
        queries = context.queries.newest(self.regression_window)
        result, num_gone = kept_entries(entries, kept)
        target, weight = once(lambda: _target(entries, queries, context.scale))
        # A head that loses nothing has nothing to fit but rounding errors.
        free = self._free(result, weight.gather(1, kept), queries) & (num_gone > 0).unsqueeze(1)
        fit = _Fit(queries, context.scale, target, result, free, self.guard)
        lambda_k, lambda_v = (RIDGE if ridge is None else ridge for ridge in (self.lambda_k, self.lambda_v))
        keys, values = result.keys, result.values
        for _ in range(self.steps):
            keys, values = once(partial(self._step, fit, keys, values, lambda_k, lambda_v))
        is_changed = ((keys != result.keys) | (values != result.values)).any(-1)
        changed = listed(is_changed, len(result))
        rows = changed.clamp(min=0).unsqueeze(-1).expand(-1, -1, keys.shape[2])
        return update.write(
            changed,
            keys.gather(1, rows) if "k" in self.components else None,
            values.gather(1, rows) if "v" in self.components else None,
            merged=num_gone * is_changed.any(1),
        )

    def _step(
        self, fit: "_Fit", keys: Tensor, values: Tensor, lambda_k: float, lambda_v: float
    ) -> tuple[Tensor, Tensor]:
        """Keys and values after a round of fitting."""
        weights = fit.attention(keys)
        if "v" in self.components:
            values = fit.values(weights, values, lambda_v)
        if "k" in self.components:
            keys = fit.keys(keys, weights, values, lambda_k, self.cg_iterations, self.cg_tolerance)
        return keys, values

    def _free(self, kept: Entries, weight: Tensor, queries: Queries) -> Tensor:
        """``[H, c]`` bool: the kept entries that may change."""
        free = kept.is_live & ~sinks(kept, self.num_fixed_sinks)
        if self.fix_window:
            free &= kept.positions < queries.positions.amin(-1, keepdim=True)
        return free & ~ops.top(weight, torch.zeros_like(free), free, int(self.fixed_share * len(kept)))

    def held(self, shape: HeadShape) -> int:
        rows = shape.group_size * min(self.regression_window, shape.num_entries)
        return held_by_fit(shape, rows)


def _target(entries: Entries, queries: Queries, scale: float) -> tuple[Tensor, Tensor]:
    """``full_attention``, and how much of it each entry gets, ``[H, n]``."""
    weight = torch.zeros_like(entries.log_votes)
    target = full_attention(entries, queries, scale, lambda heads, _, rows: weight[heads].add_(rows.sum(1)))
    return target, weight


@dataclass(frozen=True)
class _Fit:
    """The least-squares problem of one layer.

    target Y: ``[H, G, m, d]``. kept: the ``c`` entries of each head as the selector left them, dead ones zero. free:
    ``[H, c]`` bool, entries that may change. guard: whether steps that raise a head's loss are left out. In methods the
    query heads' rows lie one after the other: ``r = G * m``.
    """

    queries: Queries
    scale: float
    target: Tensor
    kept: Entries
    free: Tensor
    guard: bool

    def values(self, weights: Tensor, values: Tensor, ridge: float) -> Tensor:
        """``[H, c, d]``: the values after a value step (eq. 8; algorithm 1, lines 9-13), at these values and keys with
        the attention ``weights``."""
        fitted, taken = ridge_regression(self.kept.values, weights, self.free, self.target.flatten(1, 2), ridge)
        if self.guard:
            taken &= self._loss(weights @ fitted) < self._loss(weights @ values)  # false for NaN
        return torch.where(taken[:, None, None] & self.free.unsqueeze(-1), fitted, values)

    def keys(
        self, keys: Tensor, weights: Tensor, values: Tensor, ridge: float, iterations: int, tolerance: float
    ) -> Tensor:
        """``[H, c, d]``: the keys after a key step (eq. 10; algorithm 1, lines 14-21), at these values, and keys with
        the attention ``weights``."""
        derivative = OutputDerivative(weights, values, self.queries.vectors.flatten(1, 2), self.scale, self.free)
        output = derivative.output
        right, moved = self.target.flatten(1, 2) - output, None
        if keys is not self.kept.keys:
            moved = keys - self.kept.keys
            right += derivative.forward(moved)
        alpha = ops.solve_outputs(right, derivative, ridge, iterations, tolerance)
        change = derivative.adjoint(alpha)
        if moved is not None:
            change -= moved
        if not self.guard:
            trial = keys + change
            return torch.where(is_finite(trial)[:, None, None] & self.free.unsqueeze(-1), trial, keys)
        allowed, length = self._loss(output), torch.zeros_like(output[:, :1, :1])
        lengths = sent(torch.tensor(STEP_LENGTHS, dtype=keys.dtype, device="cpu"), keys.device).view(-1, 1, 1, 1)
        # One after the other until each head has one, or, as a GPU would be waited for to know that, all at once.
        for some in lengths.split(1 if keys.is_cpu else len(lengths)):
            loss = self._loss(self.attention(torch.addcmul(keys, some, change)) @ values)
            # False for NaN. The longest of a head is the first.
            length = ((loss < allowed)[..., None, None] * some).amax(0).maximum(length)
            if keys.is_cpu and (length.flatten() > 0)[self.free.any(1)].all():
                break
        is_changed = (length > 0) & self.free.unsqueeze(-1)
        return torch.where(is_changed, torch.addcmul(keys, length, change), keys)

    def attention(self, keys: Tensor) -> Tensor:
        """A, ``[..., r, c]``, for keys ``[..., H, c, d]``."""
        times = keys.shape[:-3]
        vectors, positions, votes, places = (
            plane.expand(*times, *plane.shape).flatten(0, len(times))
            for plane in (self.queries.vectors, self.queries.positions, self.kept.log_votes, self.kept.positions)
        )
        weights = ops.attention_weights(vectors, positions, keys.flatten(0, -3), votes, places, self.scale)
        return weights.flatten(1, 2).unflatten(0, keys.shape[:-2])

    def _loss(self, output: Tensor) -> Tensor:
        """Square root of the window loss (eq. 4) of each head, for ``output`` (``[..., H, r, d]``)."""
        return torch.linalg.vector_norm(self.target.flatten(1, 2) - output, dim=(-2, -1))
