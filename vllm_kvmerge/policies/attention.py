"""Attention of a request's newest queries to its live entries, as parts evaluate it when they compress."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm_kvmerge.policies.base import CompressionContext
    from vllm_kvmerge.policies.entries import Entries

Fusion = Literal["sum", "max"]

MAX_ATTENTION_BYTES = 1 << 18
"""Size of one head's matrix of probabilities above which queries are taken in groups."""

PART_BYTES = 1 << 20
"""Size of a matrix of probabilities above which heads are taken in parts, which a processor's caches can hold."""


def attention(queries: Tensor, query_positions: Tensor, entries: "Entries", scale: float) -> Tensor:
    """``[H, G, w, n]``: softmax over entries of scale * q.k + log_votes, for ``w`` queries.

    queries: ``[H, G, w, d]``. query_positions: ``[w]`` or ``[H, w]`` int64; a query sees live entries up to its own
    position, and gives no weight to any where it sees none.
    """
    return _attention(queries, query_positions, entries.keys, entries.log_votes, entries.positions, scale)


def _attention(
    queries: Tensor, query_positions: Tensor, keys: Tensor, log_votes: Tensor, positions: Tensor, scale: float
) -> Tensor:
    # The query heads' rows one after the other: a head's keys are not repeated for each.
    products = (queries * scale).flatten(1, 2) @ keys.transpose(1, 2)
    logits = products.unflatten(1, queries.shape[1:3]).add_(log_votes[:, None, None])
    positions = positions.unsqueeze(1)
    seen = (positions >= 0) & (positions <= query_positions.unsqueeze(-1))  # a dead entry's is negative
    # Masked rather than added: what a dead entry's key or votes hold must not matter. Most entries are seen by all
    # queries, and masking takes more time than anything but the products.
    hidden = (~seen.all(1)).any(0).nonzero().squeeze(1)
    if len(hidden) > 0:
        masked = logits[..., hidden].masked_fill_(~seen[..., hidden].unsqueeze(1), -torch.inf)
        logits[..., hidden] = masked
    probabilities = logits.softmax(dim=-1)
    sees = seen.any(-1)
    return probabilities if sees.all() else probabilities.masked_fill_(~sees[:, None, :, None], 0.0)


def fused_attention(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    log_votes: Tensor,
    positions: Tensor,
    scale: float,
    fusion: Fusion,
) -> Tensor:
    """``[H, n]``: attention to each entry, summed over the G query heads, then ``fusion`` over the ``w`` queries
    (MorphKV eq. 3-4).

    queries: ``[H, G, w, d]``. query_positions: ``[w]`` or ``[H, w]`` int64; a query sees live entries up to its own
    position. keys: ``[H, n, d]``, log_votes: ``[H, n]``, positions: ``[H, n]`` int64, negative where dead.
    """
    fused = torch.zeros_like(log_votes)
    query_positions = query_positions.expand(len(queries), -1)
    for some, some_positions in _groups(queries, query_positions, keys.shape[1]):
        for heads in _parts(some, keys.shape[1]):
            arguments = some[heads], some_positions[heads], keys[heads], log_votes[heads], positions[heads]
            per_query = _attention(*arguments, scale).sum(1)
            if fusion == "sum":
                fused[heads] += per_query.sum(1)
            else:
                fused[heads] = fused[heads].maximum(per_query.amax(1))
    return fused


def attention_by_parts(
    queries: Tensor, query_positions: Tensor, entries: "Entries", scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """``attention`` of some heads after the other, which are said; each part fits in a processor's caches."""
    query_positions = query_positions.expand(len(queries), -1)
    keys = entries.keys
    for heads in _parts(queries, len(entries)):
        planes = keys[heads], entries.log_votes[heads], entries.positions[heads]
        yield heads, _attention(queries[heads], query_positions[heads], *planes, scale)


def _parts(queries: Tensor, num_entries: int) -> Iterator[slice]:
    num_heads, num_groups, window, _ = queries.shape
    size = max(1, PART_BYTES // (num_groups * window * num_entries * queries.element_size()))
    for start in range(0, num_heads, size):
        yield slice(start, start + size)


def query_groups(context: "CompressionContext", count: int, num_entries: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The newest ``count`` of the context's queries, or as many as there are, and their positions; oldest first.

    In groups ``[H, G, w', d]`` and ``[..., w']``, whose attention to ``num_entries`` entries fits in memory.
    """
    if context.queries is None or context.query_positions is None:
        return
    yield from _groups(context.queries[:, :, -count:], context.query_positions[..., -count:], num_entries)


def _groups(queries: Tensor, positions: Tensor, num_entries: int) -> Iterator[tuple[Tensor, Tensor]]:
    # Groups do not depend on how many heads there are, so that what comes out for a head does not either.
    size = max(1, MAX_ATTENTION_BYTES // (queries.shape[1] * num_entries * queries.element_size()))
    yield from zip(queries.split(size, dim=2), positions.split(size, dim=-1), strict=True)
