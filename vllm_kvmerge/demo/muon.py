"""Muon, the optimizer of matrices (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): PyTorch's own works
in bfloat16, which processors without instructions for it emulate."""

from collections.abc import Iterable

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of X <- a X + b (X X^T) X + c (X X^T)^2 X."""
NEWTON_SCHULZ_STEPS = 5


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with all of its singular values brought to about 1 (0.7 to 1.2). ``[M, N]`` float32."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Moves each matrix along its momentum, orthogonalized: all directions change at the same pace.

    lr: of a group, spectral norm of a step for matrices with at least as many columns as rows; others change by more,
        as the root of rows over columns.
    """

    def __init__(
        self, matrices: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalize(matrix.grad.lerp(momentum, group["momentum"]))
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"] * scale)
