"""Least-squares fits to the attention of a window of queries in Triton."""

import torch
from torch import Tensor

from vllm_kvmerge.ops import reference
from vllm_kvmerge.ops.regression import MOST_PARTS, OutputDerivative
from vllm_kvmerge.ops.triton import regression_kernels
from vllm_kvmerge.ops.triton.descriptors import Fit
from vllm_kvmerge.ops.triton.plan import power_of_two

BLOCK = 1024
"""Entries of a tile, where a program has a row of logits."""

BLOCK_R, BLOCK_N, BLOCK_D = 16, 16, 128
"""Queries, entries and dimensions of a tile, where products are computed: what fits in registers."""

LARGEST_HEAD = 2 * BLOCK_D
"""Head size up to which it is computed in two halves at most."""


def attention_weights(
    queries: Tensor, query_positions: Tensor, keys: Tensor, log_votes: Tensor, positions: Tensor, scale: float
) -> Tensor:
    if queries.dtype != torch.float32:
        return reference.attention_weights(queries, query_positions, keys, log_votes, positions, scale)
    num_heads, groups, window, _ = queries.shape
    logits = queries.new_empty(num_heads, groups * window, keys.shape[1])
    torch.baddbmm(logits, queries.flatten(1, 2), keys.transpose(1, 2), beta=0, alpha=scale, out=logits)
    if logits.numel():
        regression_kernels.seen_softmax[(num_heads * groups * window,)](
            logits, query_positions.contiguous(), log_votes.contiguous(), positions.contiguous(), groups * window,
            window, keys.shape[1], BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return logits.unflatten(1, (groups, window))


def solve_outputs(
    right: Tensor, derivative: OutputDerivative, ridge: float, iterations: int, tolerance: float
) -> Tensor:
    """Heads that have come to their end are skipped: whether any go on would have to be waited for."""
    num_heads, num_rows, size = right.shape
    if right.dtype != torch.float32 or size > LARGEST_HEAD or right.numel() == 0:
        return reference.solve_outputs(right, derivative, ridge, iterations, tolerance)
    num_entries = derivative.values.shape[1]
    num_parts = max(1, min(MOST_PARTS, -(-num_entries // BLOCK_N)))
    residual, direction, solution = (torch.empty_like(right, memory_format=torch.contiguous_format) for _ in range(3))
    mean, numbers = right.new_empty(num_heads, num_rows), right.new_empty(num_heads, 2)
    parts = right.new_empty(num_parts, *right.shape)
    dims = max(16, power_of_two(size))
    constants = {"HEAD_SIZE": size, "BLOCK_R": BLOCK_R, "num_warps": 8 if dims > 64 else 4, "num_stages": 1}
    fit = Fit(derivative.output, residual, direction, solution, mean, numbers)
    tickets = torch.empty(num_heads, dtype=torch.int32, device=right.device)
    regression_kernels.begin_solving[(num_heads,)](
        right.contiguous(), fit, tickets, tolerance, num_rows, BLOCK_D=dims, **constants
    )
    given = (tensor.contiguous() for tensor in (derivative.weights, derivative.values, derivative.queries))
    arguments = *given, derivative.free.contiguous().view(torch.uint8), parts, tickets, fit
    for _ in range(iterations):
        regression_kernels.iterate[(num_heads, num_parts)](
            *arguments, derivative.scale, ridge, num_rows, num_entries, BLOCK_N=BLOCK_N, BLOCK_D=min(BLOCK_D, dims),
            ALL_D=dims, **constants,
        )  # fmt: skip
    return solution
