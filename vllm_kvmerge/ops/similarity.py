"""Which keys are most alike."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

MAX_SIMILARITY_BYTES = 1 << 18
"""Size of a matrix of similarities above which it is computed in pieces."""


def most_similar(members: Tensor, carriers: Tensor, index: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """For each member the usable carrier whose key has the largest cosine similarity (KeepKV algorithm 1, lines 4-5).

    members: ``[H, m, d]``, carriers: ``[H, c, d]``, keys. index: ``[H, c]`` int64, what the carriers are called.
    usable: ``[H, c]`` bool. Returns the similarity, ``[H, m]``, at most 1, -inf where no carrier is usable, and the
    carrier's index, ``[H, m]``, of equally similar ones the first's.
    """
    members, carriers = normalize(members, dim=-1), normalize(carriers, dim=-1).transpose(1, 2)
    unusable = ~usable.unsqueeze(1)
    any_unusable = bool(unusable.any())
    similarity = members.new_empty(members.shape[:2])
    best = index.new_empty(members.shape[:2])
    # A head's pieces do not depend on how many other heads there are, so that rounding does not either.
    num_rows = max(1, MAX_SIMILARITY_BYTES // max(1, index.shape[1] * members.element_size()))
    num_heads = max(1, num_rows // max(1, members.shape[1]))
    for first in range(0, len(members), num_heads):
        heads = slice(first, first + num_heads)
        for start in range(0, members.shape[1], num_rows):
            part = heads, slice(start, start + num_rows)
            cosine = members[part] @ carriers[heads]
            if any_unusable:
                cosine.masked_fill_(unusable[heads], -torch.inf)
            similarity[part], best[part] = cosine.max(dim=-1)
    # Rounding must not lift a cosine above every threshold.
    return similarity.clamp(max=1.0), index.gather(1, best)
