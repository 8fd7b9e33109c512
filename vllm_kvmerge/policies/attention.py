"""Attention of a request's newest queries to its live entries, as parts evaluate it when they compress."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries

MAX_ATTENTION_BYTES = 8 << 20
"""Size of one head's matrix of probabilities above which queries are taken in groups."""

PART_BYTES = 1 << 20
"""Size of the matrices of ``attention_in_parts``, unless one head's is larger."""


def attention(queries: Tensor, query_positions: Tensor, entries: Entries, scale: float) -> Tensor:
    """``[H, G, w, n]``: softmax over entries of scale * q.k + log_votes, for ``w`` queries.

    queries: ``[H, G, w, d]``. query_positions: ``[w]`` or ``[H, w]`` int64; a query sees live entries up to its own
    position, and gives no weight to any where it sees none.
    """
    return _attention(queries, query_positions, entries, scale, slice(None))


def attention_in_parts(
    queries: Tensor, query_positions: Tensor, entries: Entries, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """The same for some heads after the other, which are said; each part fits in a processor's caches."""
    num_heads, num_groups, window, _ = queries.shape
    size = max(1, PART_BYTES // (num_groups * window * len(entries) * queries.element_size()))
    query_positions = query_positions.expand(num_heads, -1)
    for start in range(0, num_heads, size):
        heads = slice(start, start + size)
        yield heads, _attention(queries[heads], query_positions[heads], entries, scale, heads)


def _attention(queries: Tensor, query_positions: Tensor, entries: Entries, scale: float, heads: slice) -> Tensor:
    # The query heads' rows one after the other: a head's keys are not repeated for each.
    products = (queries * scale).flatten(1, 2) @ entries.keys[heads].transpose(1, 2)
    logits = products.unflatten(1, queries.shape[1:3]).add_(entries.log_votes[heads, None, None])
    seen = entries.is_live[heads].unsqueeze(1)
    seen = seen & (entries.positions[heads].unsqueeze(1) <= query_positions.unsqueeze(-1))
    # Masked rather than added: what a dead entry's key or votes hold must not matter.
    logits.masked_fill_(~seen.unsqueeze(1), -torch.inf)
    return logits.softmax(dim=-1).masked_fill_(~seen.any(-1)[:, None, :, None], 0.0)


def query_groups(context: CompressionContext, count: int, num_entries: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The newest ``count`` of the context's queries, or as many as there are, and their positions; oldest first.

    In groups ``[H, G, w', d]`` and ``[..., w']``, whose attention to ``num_entries`` entries fits in memory.
    """
    if context.queries is None or context.query_positions is None:
        return
    queries, positions = context.queries[:, :, -count:], context.query_positions[..., -count:]
    # Groups do not depend on how many heads there are, so that what comes out for a head does not either.
    size = max(1, MAX_ATTENTION_BYTES // (queries.shape[1] * num_entries * queries.element_size()))
    yield from zip(queries.split(size, dim=2), positions.split(size, dim=-1), strict=True)
