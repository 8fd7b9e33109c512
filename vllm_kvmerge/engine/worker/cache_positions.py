"""Positions in the cache, which RoPE counts in place of those in the text (StreamingLLM, section 3.2).

The entries of a front have the positions up to its end in the order of their tokens, right-aligned where there are
fewer than places, and the tokens of the tail those that follow. So they need not be stored: an entry's is its number
when all entries of its head are put in order, dead ones first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops import PagedKVCache, SequenceLayers
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies.entries import DEAD
from vllm_kvmerge.policies.indexing import inverse
from vllm_kvmerge.policies.rotation import Rotation


def moves(source: Tensor, places: Tensor, front: int) -> tuple[Tensor, Tensor]:
    """Positions in the cache of the keys of a new front: before the compression, and after it, ``[H, C]`` int64 each;
    ``DEAD`` after it where a place is empty.

    source: ``[H, n]`` int64, the positions in the text of the entries before the compression, and places: ``[H, C]``,
    those of the new front's. A merged key moves as the newest token in it does. front: places of the new front.
    """
    in_order, num_places = source.gather(1, ops.by_position(source)), places.shape[1]
    before = torch.searchsorted(in_order, places)
    after = inverse(ops.by_position(places), num_places) + front - num_places
    return before, after.masked_fill(places == DEAD, DEAD)


def turn_blocks(
    caches: Sequence[PagedKVCache], rotation: Rotation, blocks: list[int], num_keys: int, shift: int
) -> None:
    """Turns the first ``num_keys`` keys in ``blocks`` (ids), in each of ``caches``, by ``shift`` positions."""
    device, num_layers = caches[0].device, len(caches)
    ids = sent(torch.tensor([blocks] * num_layers), device)
    segments = torch.tensor([[num_keys] * 3] * num_layers)
    # Relative to one another: their positions themselves may be negative.
    size = num_layers * caches[0].num_kv_heads, num_keys
    before, after = (torch.full(size, max(0, one), device=device) for one in (-shift, shift))
    layers = SequenceLayers(caches, torch.arange(num_layers), ids, segments)
    ops.turn_keys(layers, ids, before, after, rotation.table, rotation.is_neox)
