"""Positions in the cache, which RoPE counts in place of those in the text (StreamingLLM, section 3.2).

The entries of a front have the positions up to its end in the order of their tokens, right-aligned where there are
fewer than places, and the tokens of the tail those that follow. So they need not be stored: an entry's is its number
when all entries of its head are put in order, dead ones first.
"""

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops import SequenceLayers
from vllm_kvmerge.ops.types import Destination
from vllm_kvmerge.policies.entries import DEAD
from vllm_kvmerge.policies.indexing import inverse
from vllm_kvmerge.policies.rotation import Rotation


def moves(source: Tensor, places: Tensor, front: int) -> tuple[Tensor, Tensor]:
    """Positions in the cache of the keys of a new front: before the compression, and after it, ``[H, C]`` int64 each.

    source: ``[H, n]`` int64, the positions in the text of the entries before the compression, and places: ``[H, C]``,
    those of the new front's. A merged key moves as the newest token in it does. front: places of the new front.
    """
    in_order = source.gather(1, ops.by_position(source))
    before = torch.searchsorted(in_order, places)
    num_places = places.shape[1]
    return before, inverse(ops.by_position(places), num_places) + front - num_places


def move_keys(
    target: SequenceLayers, destination: Destination, rotation: Rotation, places: Tensor, before: Tensor, after: Tensor
) -> None:
    """Turns the keys of a new front from their positions in the cache before the compression to those after it.

    target: the new front as live entries. destination: the same as for ``ops.move_entries``. places: ``[H, C]`` int64,
    positions in the text, ``DEAD`` where a place is empty. before, after: of ``moves``.
    """
    index = torch.arange(places.shape[1], device=places.device).expand_as(places)
    index = index.masked_fill((places == DEAD) | (before == after), DEAD)
    keys = rotation.moved(ops.gather_rows(target, "keys", index), before, after)
    ops.write_rows(target, destination, index, keys, None)
