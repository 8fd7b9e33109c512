"""Least-squares fits of kept entries to the attention of the newest queries over the full cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops.attention import head_parts, query_groups
from vllm_kvmerge.policies.base import Entries, HeadShape, Queries


def held_by_fit(shape: HeadShape, num_rows: int) -> int:
    """``Part.held`` of a fit of what is kept to the attention of ``num_rows`` query rows over everything."""
    kept, size = shape.num_kept, shape.head_size
    fit = 10 * (kept + num_rows) * size + 5 * num_rows * kept + 2 * min(num_rows, kept) ** 2
    return max(2 * shape.num_entries * size, fit)


def attention(queries: Queries, entries: Entries, scale: float) -> Tensor:
    """``[H, G, m, n]``: softmax over entries of scale * q.k + log_votes.

    A query sees live entries up to its own position, and gives no weight to any where it sees none.
    """
    planes = entries.keys, entries.log_votes, entries.positions
    return ops.attention_weights(queries.vectors, queries.positions, *planes, scale)


def kept_entries(entries: Entries, kept: Tensor) -> tuple[Entries, Tensor]:
    """Copies of the entries at ``kept``, and how many of each head's live entries are not among them, ``[H]``."""
    result = entries.take_live(kept)
    return result, entries.is_live.sum(1) - result.is_live.sum(1)


def full_attention(
    entries: Entries, queries: Queries, scale: float, look: Callable[[slice, slice, Tensor], object]
) -> Tensor:
    """Y, ``[H, G, m, d]``: the attention output of the queries over all entries.

    Goes through heads and queries in parts, and calls ``look`` with the slices of each part (of the heads and of the
    ``m`` queries) and its probabilities, ``[h, G * q, n]``, the query heads' rows one after the other.
    """
    everything = entries.take_live(entries.all_indices)
    outputs, start = [], 0
    for vectors, positions in query_groups(queries.vectors, queries.positions, len(entries)):
        window = slice(start, start + vectors.shape[2])
        output = torch.empty_like(vectors)
        for heads in head_parts(vectors, len(entries)):
            planes = everything.keys[heads], everything.log_votes[heads], everything.positions[heads]
            # A head's values are not repeated for each query head.
            rows = ops.attention_weights(vectors[heads], positions[heads], *planes, scale).flatten(1, 2)
            output[heads] = (rows @ everything.values[heads]).view_as(output[heads])
            look(heads, window, rows)
        outputs.append(output)
        start = window.stop
    return torch.cat(outputs, dim=2)


def ridge_regression(
    start: Tensor, matrix: Tensor, free: Tensor, target: Tensor, ridge: Tensor | float
) -> tuple[Tensor, Tensor]:
    """X that minimises ||target - matrix X||^2 + ridge ||X - start||^2 over its free rows; the others stay.

    start: ``[H, c, d]``. matrix: ``[H, r, c]``. free: ``[H, c]`` bool. target: ``[H, r, d]``. ridge: of all heads, or
    ``[H, 1]``. Returns X, ``[H, c, d]``, and the heads, ``[H]`` bool, where it is finite and could be computed.
    """
    free_matrix = matrix * free.unsqueeze(1)
    residual = target - matrix @ start
    # A^T (A A^T + lambda I)^-1 = (A^T A + lambda I)^-1 A^T: the smaller system is solved.
    by_entry = matrix.shape[1] > matrix.shape[2]
    if by_entry:
        free_matrix, residual = free_matrix.transpose(1, 2), free_matrix.transpose(1, 2) @ residual
    gram = free_matrix @ free_matrix.transpose(1, 2)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    # Float32 rounding can make a Gram matrix indefinite if the ridge is smaller than the jitter.
    jitter = torch.finfo(gram.dtype).eps * gram.shape[1] * diagonal.amax(1, keepdim=True)
    diagonal += ridge + jitter
    factor, failed = torch.linalg.cholesky_ex(gram)
    solution = torch.cholesky_solve(residual, factor)
    fitted = start + (solution if by_entry else free_matrix.transpose(1, 2) @ solution)
    return fitted, (failed == 0) & is_finite(fitted)


def is_finite(rows: Tensor) -> Tensor:
    """``[H]`` bool: all of a head's numbers (``[H, c, d]``) are finite."""
    return rows.abs().amax((1, 2)) < torch.inf  # false for NaN
