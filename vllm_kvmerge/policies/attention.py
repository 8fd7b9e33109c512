"""Attention of a request's newest queries to its live entries, as parts evaluate it when they compress."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries

MAX_ATTENTION_BYTES = 8 << 20
"""Size of one head's matrix of probabilities above which queries are taken in groups."""


def attention(queries: Tensor, query_positions: Tensor, entries: Entries, scale: float) -> Tensor:
    """``[H, G, w, n]``: softmax over entries of scale * q.k + log_votes, for ``w`` queries.

    queries: ``[H, G, w, d]``. query_positions: ``[w]`` or ``[H, w]`` int64; a query sees live entries up
    to its own position, and gives no weight to any where it sees none.
    """
    logits = (queries * scale) @ entries.keys.transpose(1, 2).unsqueeze(1)
    seen = entries.is_live.unsqueeze(1) & (entries.positions.unsqueeze(1) <= query_positions.unsqueeze(-1))
    # Masked rather than added: what a dead entry's key or votes hold must not matter.
    logits = (logits + entries.log_votes[:, None, None]).masked_fill(~seen.unsqueeze(1), -torch.inf)
    return logits.softmax(dim=-1).masked_fill(~seen.any(-1)[:, None, :, None], 0.0)


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
