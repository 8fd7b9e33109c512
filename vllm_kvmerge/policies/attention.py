"""Attention of a request's newest queries to its live entries, as parts evaluate it when they compress."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from vllm_kvmerge.ops import attention as ops_attention

if TYPE_CHECKING:
    from vllm_kvmerge.policies.base import CompressionContext
    from vllm_kvmerge.policies.entries import Entries


def attention(queries: Tensor, query_positions: Tensor, entries: "Entries", scale: float) -> Tensor:
    """``[H, G, w, n]``: softmax over entries of scale * q.k + log_votes, for ``w`` queries.

    queries: ``[H, G, w, d]``. query_positions: ``[w]`` or ``[H, w]`` int64; a query sees live entries up to its own
    position, and gives no weight to any where it sees none.
    """
    return ops_attention.attention_to_keys(
        queries, query_positions, entries.keys, entries.log_votes, entries.positions, scale
    )


def attention_by_parts(
    queries: Tensor, query_positions: Tensor, entries: "Entries", scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """``attention`` of some heads after the other, which are said; each part fits in a processor's caches."""
    query_positions = query_positions.expand(len(queries), -1)
    keys = entries.keys
    for heads in ops_attention.head_parts(queries, len(entries)):
        planes = keys[heads], entries.log_votes[heads], entries.positions[heads]
        yield heads, ops_attention.attention_to_keys(queries[heads], query_positions[heads], *planes, scale)


def query_groups(context: "CompressionContext", count: int, num_entries: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The newest ``count`` of the context's queries, or as many as there are, and their positions; oldest first.

    In groups ``[H, G, w', d]`` and ``[..., w']``, whose attention to ``num_entries`` entries fits in memory.
    """
    if context.queries is None or context.query_positions is None:
        return
    yield from ops_attention.query_groups(
        context.queries[:, :, -count:], context.query_positions[..., -count:], num_entries
    )
