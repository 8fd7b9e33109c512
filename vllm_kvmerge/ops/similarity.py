"""Search for similar keys."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

MAX_SIMILARITY_BYTES = 1 << 18
"""Size of a matrix of similarities above which it is computed in pieces."""


def most_similar(
    source_keys: Tensor, target_keys: Tensor, source_index: Tensor, index: Tensor, usable: Tensor
) -> tuple[Tensor, Tensor]:
    """Finds for each source the usable target of largest cosine similarity (KeepKV algorithm 1, lines 4-5).

    source_keys: ``[H, m, d]``, target_keys: ``[H, c, d]``. source_index: ``[H, m]``, index: ``[H, c]`` int64, of
    sources, negative where there is none, and of targets. usable: ``[H, c]`` bool. Returns the similarity, ``[H, m]``,
    at most 1, -inf where there is no source or no target is usable, and the target's index, ``[H, m]``; the first of
    equally similar ones.
    """
    sources, targets = normalize(source_keys, dim=-1), normalize(target_keys, dim=-1).transpose(1, 2)
    unusable = ~usable.unsqueeze(1)
    any_unusable = bool(unusable.any())
    similarity = sources.new_empty(sources.shape[:2])
    best = index.new_empty(sources.shape[:2])
    # A head's pieces do not depend on how many other heads there are, so that rounding does not either.
    num_rows = max(1, MAX_SIMILARITY_BYTES // max(1, index.shape[1] * sources.element_size()))
    num_heads = max(1, num_rows // max(1, sources.shape[1]))
    for first in range(0, len(sources), num_heads):
        heads = slice(first, first + num_heads)
        for start in range(0, sources.shape[1], num_rows):
            part = heads, slice(start, start + num_rows)
            cosine = sources[part] @ targets[heads]
            if any_unusable:
                cosine.masked_fill_(unusable[heads], -torch.inf)
            similarity[part], best[part] = cosine.max(dim=-1)
    # Rounding must not lift a cosine above every threshold; a NaN is none.
    similarity = similarity.clamp(max=1.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    similarity = similarity.masked_fill(source_index < 0, -torch.inf)
    return similarity, index.gather(1, best)


def slot_products(keys: Tensor, joining: Tensor) -> tuple[Tensor, Tensor]:
    """``[H, m, s]``, products of sources' keys (``joining``, ``[H, m, d]``) with slots' (``keys``, ``[H, s, d]``), and
    ``[H, m, m]``, with each other's."""
    return joining @ keys.transpose(1, 2), joining @ joining.transpose(1, 2)


def newest_repeats(keys: Tensor, threshold: float, found: Tensor, start: int, stop: int) -> Tensor:
    """See ``reference.newest_repeats``. Compares with all entries, and leaves those before ``start`` as they are."""
    num_heads, n, _ = keys.shape
    similarity = keys.new_zeros(num_heads, stop - start)
    column = torch.arange(n, dtype=torch.int32, device=keys.device)
    num_rows = max(1, MAX_SIMILARITY_BYTES // max(1, n * keys.element_size()))
    for head in range(num_heads):  # whose numbers do not depend on how many others there are
        for first in range(start, stop, num_rows):
            last = min(first + num_rows, stop)
            products = keys[head, first:last] @ keys[head].T
            products.diagonal(first).zero_()
            newest = torch.where(products > threshold, column, -1).amax(dim=1).long()
            repeated = products.gather(1, newest.clamp(min=0).unsqueeze(1)).squeeze(1)
            similarity[head, first - start : last - start] = repeated.masked_fill(newest < 0, 0.0)
            found[head, first:last] = newest
    return similarity
