"""Attention of queries to keys, in groups that fit in the processor's caches, and its statistics."""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from vllm_kvmerge.ops.types import PLAIN_SOFTMAX, ScoreUpdate, Softmax

Fusion = Literal["sum", "max"]

MAX_ATTENTION_BYTES = 1 << 18
"""Size of one head's matrix of probabilities above which queries are taken in groups."""

PART_BYTES = 1 << 20
"""Size of a matrix of probabilities above which heads are taken in parts, which fit in the processor's caches."""


def log_bias_correction(counts: Tensor, decay: float) -> Tensor:
    """ln(1 - a^t) of moving averages of ``counts`` (t) queries (KeepKV eq. 8); -inf where t is 0. decay: a."""
    return torch.log(-torch.expm1(counts * math.log(decay)))


def attention_to_keys(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    log_votes: Tensor,
    positions: Tensor,
    scale: float,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """``[H, G, w, n]``: probabilities; the arguments are those of ``fused_attention``."""
    # The query heads' rows one after the other: a head's keys are not repeated for each.
    products = (queries * scale).flatten(1, 2) @ keys.transpose(1, 2)
    logits = softmax.capped(products.unflatten(1, queries.shape[1:3])).add_(log_votes[:, None, None])
    positions = positions.unsqueeze(1)
    seen = (positions >= 0) & (positions <= query_positions.unsqueeze(-1))  # a dead entry's is negative
    # Masked rather than added: a dead entry's key or votes may hold anything. Most entries are seen by all queries, and
    # masking takes more time than anything but the products.
    hidden = (~seen.all(1)).any(0).nonzero().squeeze(1)
    if len(hidden) > 0:
        masked = logits[..., hidden].masked_fill_(~seen[..., hidden].unsqueeze(1), -torch.inf)
        logits[..., hidden] = masked
    probabilities = softmax.probabilities(logits)
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
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """``[H, n]``: attention to each entry, summed over the G query heads, then ``fusion`` over the ``w`` queries
    (MorphKV eq. 3-4).

    queries: ``[H, G, w, d]`` floating point. query_positions: ``[w]`` or ``[H, w]`` int64; a query sees live entries up
    to its own position. keys: ``[H, n, d]``, log_votes: ``[H, n]``, positions: ``[H, n]`` int64, negative where dead.
    """
    fused, queries = torch.zeros_like(log_votes), queries.to(keys.dtype)
    query_positions = query_positions.expand(len(queries), -1)
    for some, some_positions in query_groups(queries, query_positions, keys.shape[1]):
        for heads in head_parts(some, keys.shape[1]):
            arguments = some[heads], some_positions[heads], keys[heads], log_votes[heads], positions[heads]
            per_query = attention_to_keys(*arguments, scale, softmax.of_heads(heads)).sum(1)
            if fusion == "sum":
                fused[heads] += per_query.sum(1)
            else:
                fused[heads] = fused[heads].maximum(per_query.amax(1))
    return fused


def head_parts(queries: Tensor, num_entries: int) -> Iterator[slice]:
    num_heads, num_groups, window, _ = queries.shape
    size = max(1, PART_BYTES // (num_groups * window * num_entries * queries.element_size()))
    for start in range(0, num_heads, size):
        yield slice(start, start + size)


def query_groups(queries: Tensor, positions: Tensor, num_entries: int) -> Iterator[tuple[Tensor, Tensor]]:
    # Groups do not depend on the number of heads, so that a head's result does not either.
    size = max(1, MAX_ATTENTION_BYTES // (queries.shape[1] * num_entries * queries.element_size()))
    yield from zip(queries.split(size, dim=2), positions.split(size, dim=-1), strict=True)


def accumulate_scores(
    update: ScoreUpdate, logits: Tensor, probabilities: Tensor, visible: Tensor, scores: Tensor, aux: Tensor
) -> tuple[Tensor, Tensor]:
    """Accumulates the statistics of ``q`` more queries.

    logits, probabilities: ``[H, G, q, n]``, capped logits without vote bias. visible: ``[q, n]`` bool, or
    ``[H, q, n]``. scores, aux: ``[H, n]`` float32. Returns the new (scores, aux).
    """
    num_queries = logits.shape[2]
    age = torch.arange(num_queries - 1, -1, -1, dtype=torch.float32, device=logits.device)
    counted = visible.sum(-2).to(aux.dtype)
    if update.mode in ("sum", "mean"):
        weights = update.decay**age
        added = (probabilities.sum(1) * weights[:, None]).sum(1)
        return scores * update.decay**num_queries + added, aux + counted if update.mode == "mean" else aux
    log_decay, log_share = math.log(update.decay), math.log1p(-update.decay)
    level = torch.logsumexp(logits, 1) - math.log(logits.shape[1])
    weighted = (level + log_share + (age * log_decay)[:, None]).masked_fill(~visible, -torch.inf)
    previous = torch.where(aux > 0, scores + num_queries * log_decay, -torch.inf)
    total = torch.logsumexp(torch.cat([previous.unsqueeze(1), weighted], 1), 1)
    # An entry that no query has seen keeps a finite score, without meaning as aux == 0.
    return torch.where(aux + counted > 0, total, 0.0), aux + counted
