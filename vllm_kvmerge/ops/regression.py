"""The derivative of attention's output with respect to keys, and least squares with it (GRKV, section 3.3)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

MOST_PARTS = 32
"""Programs that share a head's entries on a GPU: enough for one with the heads of a few layers."""


@dataclass(frozen=True)
class OutputDerivative:
    """J, the derivative of the attention output F = A V with respect to the keys K of the free entries.

    weights A: ``[H, r, c]``, softmax over c of scale Q K^T + votes. values V: ``[H, c, d]``. queries Q: ``[H, r, d]``.
    free: ``[H, c]`` bool; the other keys do not move.
    """

    weights: Tensor
    values: Tensor
    queries: Tensor
    scale: float
    free: Tensor

    def forward(self, keys: Tensor) -> Tensor:
        """J dK, ``[H, r, d]``, for ``keys`` dK, ``[H, c, d]``: A' V with dS = scale Q dK^T, A' = A (dS - sum A dS)."""
        keys = keys * self.free.unsqueeze(-1)
        return self._forward_logits(self.scale * (self.queries @ keys.transpose(1, 2)))

    def adjoint(self, output: Tensor) -> Tensor:
        """J^T R, ``[H, c, d]``, for ``output`` R, ``[H, r, d]``: scale (A (B - sum A B))^T Q with B = R V^T."""
        return self.scale * (self._adjoint_logits(output).transpose(1, 2) @ self.queries)

    def forward_adjoint(self, output: Tensor) -> Tensor:
        """J J^T R, ``[H, r, d]``, without the keys in between, of which there are more than queries; with many queries,
        without their products."""
        logits = self._adjoint_logits(output)
        if self.queries.shape[1] > 2 * self.queries.shape[2]:
            return self._forward_logits(self.scale**2 * self.queries @ (self.queries.transpose(1, 2) @ logits))
        return self._forward_logits(self._query_products @ logits)

    @cached_property
    def output(self) -> Tensor:
        """A V, ``[H, r, d]``."""
        return self.weights @ self.values

    @cached_property
    def _query_products(self) -> Tensor:
        """``[H, r, r]``: scale^2 Q Q^T."""
        return self.scale**2 * (self.queries @ self.queries.transpose(1, 2))

    @cached_property
    def _free_weights(self) -> Tensor:
        return self.weights * self.free.unsqueeze(1)

    @cached_property
    def _values_and_one(self) -> Tensor:
        """``[H, c, d + 1]``: one product gives both the weighted sum of values and the sum of weights."""
        return pad(self.values, (0, 1), value=1.0)

    def _forward_logits(self, change: Tensor) -> Tensor:
        """``[H, r, d]``: (A dS) V - (sum A dS) A V for ``change`` dS, ``[H, r, c]``, which it overwrites."""
        moved = change.mul_(self.weights) @ self._values_and_one
        return moved[..., :-1] - moved[..., -1:] * self.output

    def _adjoint_logits(self, output: Tensor) -> Tensor:
        """``[H, r, c]``: A (B - sum A B) where free, with B = R V^T, so that sum A B is the product of R and A V."""
        mean = (output * self.output).sum(-1, keepdim=True)
        centred = torch.cat([output, -mean], -1) @ self._values_and_one.transpose(1, 2)
        return centred.mul_(self._free_weights)


def conjugate_gradients(
    operator: Callable[[Tensor], Tensor], right: Tensor, iterations: int, tolerance: float
) -> Tensor:
    """x with operator(x) = ``right``, ``[H, r, d]``, for an operator that is symmetric and positive in each head.

    A head stops when its residual is ``tolerance`` times its right-hand side, all of them after ``iterations``.
    """

    def dot(one: Tensor, other: Tensor) -> Tensor:
        return (one * other).sum((1, 2), keepdim=True)

    solution = torch.zeros_like(right)
    residual = direction = right
    size = dot(residual, residual)
    enough = tolerance**2 * size
    for _ in range(iterations):
        goes_on = size > enough
        if not goes_on.any():
            break
        image = operator(direction)
        step = torch.where(goes_on, size / dot(direction, image), 0.0)
        solution = solution + step * direction
        residual = residual - step * image
        old_size, size = size, dot(residual, residual)
        direction = residual + torch.where(goes_on, size / old_size, 0.0) * direction
    return solution
