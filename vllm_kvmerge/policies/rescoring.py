"""Statistics of entries from the newest queries alone, for a cache that has been compressed before."""

import torch
from torch import Tensor

from vllm_kvmerge.ops import PLAIN_SOFTMAX, ScoreUpdate, Softmax
from vllm_kvmerge.ops.attention import accumulate_scores, query_groups
from vllm_kvmerge.policies.context import Queries
from vllm_kvmerge.policies.entries import Entries


def newest_scores(
    entries: Entries, queries: Queries, update: ScoreUpdate, scale: float, softmax: Softmax = PLAIN_SOFTMAX
) -> tuple[Tensor, Tensor]:
    """(scores, aux), ``[H, n]`` float32 each: what attention accumulates when these queries alone are scored.

    A query sees the live entries up to its own position, with their votes.
    """
    keys, votes = entries.keys.transpose(1, 2), entries.log_votes[:, None, None]
    scores, aux = torch.zeros_like(entries.scores), torch.zeros_like(entries.aux)
    for vectors, positions in query_groups(queries.vectors, queries.positions, len(entries)):
        logits = softmax.capped(((vectors * scale).flatten(1, 2) @ keys).unflatten(1, vectors.shape[1:3]))
        visible = entries.is_live.unsqueeze(1) & (entries.positions.unsqueeze(1) <= positions.unsqueeze(2))
        # Masked rather than added: a dead entry's key or votes may hold anything.
        biased = (logits + votes).masked_fill(~visible.unsqueeze(1), -torch.inf)
        probabilities = softmax.probabilities(biased).nan_to_num(0.0)
        scores, aux = accumulate_scores(update, logits, probabilities, visible, scores, aux)
    return scores, aux
