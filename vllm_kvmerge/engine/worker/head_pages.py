"""Which pages of a front's blocks the heads of a request get.

A head keeps the pages that it has, and takes those that others have given up only when it needs more. So heads can be
written in two rounds without one overwriting what another still has to read: first those that keep to their own pages,
then those that take others'.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_kvmerge.ops import HeadPages, PagedKVCache
from vllm_kvmerge.ops.coded import Coding, number_of, slots_of


@dataclass(frozen=True)
class PageAssignment:
    """Pages of one request. pages: one row per layer. grows: ``[layers, H]`` bool, heads that took pages of others.
    within_layers: all of heads of their own layer."""

    pages: HeadPages
    grows: Tensor
    within_layers: bool

    @property
    def needs_passes(self) -> bool:
        """True if some heads of a layer, but not all, took pages of other layers: then the first round is of all layers
        before the second is of any. Elsewhere each layer goes through both, those that only grow last."""
        return not self.within_layers and bool((self.grows.any(1) != self.grows.all(1)).any())

    @classmethod
    def of(
        cls,
        layers: Sequence[PagedKVCache],
        shares: Sequence[int],
        num_places: int,
        blocks: Sequence[int],
        before: HeadPages | None,
        within_layers: bool,
        coding: Coding | None = None,
    ) -> "PageAssignment":
        """Assigns the pages of ``blocks`` (ids) to heads.

        shares: entries of each head, layer by layer, which fit. num_places: the most that any head can hold. before:
        the pages that heads have now; None: an ordinary front, or none. within_layers: a layer's heads only take pages
        from each other. coding: of the pages.
        """
        num_heads, size = layers[0].num_kv_heads, layers[0].block_size * slots_of(coding)
        coded = None if coding is None else torch.full((len(layers),), number_of(coding), dtype=torch.uint8)
        num_lanes = len(layers) * num_heads
        fronts = np.asarray(shares)
        counts, width = -(-fronts // size), -(-num_places // size)
        own, num_own = _own_pages(np.asarray(blocks), num_lanes, size, before)
        own = np.pad(own, ((0, 0), (0, max(0, width - own.shape[1]))))
        index = np.arange(own.shape[1])
        kept = index < np.minimum(counts, num_own)[:, None]
        wanted = (index < counts[:, None]) & ~kept
        ids = np.where(kept, own, 0)
        # Every page is of some lane; its owner need not be.
        pages = np.asarray(blocks)[:, None] * num_lanes + np.arange(num_lanes)
        is_free = np.ones((max(blocks) + 1, num_lanes), dtype=bool)
        is_free.flat[own[kept]] = False
        is_free = is_free[blocks]
        group = num_heads if within_layers else num_lanes
        for start in range(0, num_lanes, group):
            lanes = slice(start, start + group)
            ids[lanes][wanted[lanes]] = pages[:, lanes][is_free[:, lanes]][: wanted[lanes].sum()]
        shape = len(layers), num_heads
        of_heads = torch.from_numpy(ids[:, :width]).reshape(*shape, width)
        grows = torch.from_numpy(wanted.any(1)).reshape(shape)
        assigned = HeadPages(layers, of_heads, torch.from_numpy(fronts).reshape(shape), coded)
        return cls(assigned, grows, within_layers)


def moved(pages: HeadPages, sources: Sequence[int], targets: Sequence[int]) -> HeadPages:
    """The same pages in copies of their blocks; ``sources``, ``targets``: ids of blocks and of their copies."""
    num_lanes = pages.ids.shape[0] * pages.num_kv_heads
    blocks, lanes = pages.ids // num_lanes, pages.ids % num_lanes
    copies = torch.arange(max(int(blocks.max()), *sources) + 1)
    copies[torch.tensor(sources)] = torch.tensor(targets)
    return HeadPages(pages.layers, copies[blocks] * num_lanes + lanes, pages.fronts, pages.coded)


def _own_pages(
    blocks: np.ndarray, num_lanes: int, size: int, before: HeadPages | None
) -> tuple[np.ndarray, np.ndarray]:
    """``[lanes, n]``: pages in ``blocks`` that a head may hold entries in, one after the other; and their numbers."""
    lanes = np.arange(num_lanes)[:, None]
    if before is None:
        return blocks * num_lanes + lanes, np.full(num_lanes, len(blocks))
    ids = before.ids.flatten(0, 1).numpy()
    used = np.arange(ids.shape[1]) < -(-before.fronts.flatten().numpy() // size)[:, None]
    of_blocks = ids // num_lanes
    is_ours, was_front = np.zeros((2, max(blocks.max(), of_blocks.max()) + 1), dtype=bool)
    is_ours[blocks] = True
    was_front[of_blocks[used]] = True
    # Blocks that were not of the front hold ordinary tokens, if anything, each head's in its own lane.
    others = blocks[~was_front[blocks]]
    ids = np.concatenate([ids, others * num_lanes + lanes], axis=1)
    there = np.concatenate([used & is_ours[of_blocks], np.ones((num_lanes, len(others)), dtype=bool)], axis=1)
    order = np.argsort(~there, axis=1, kind="stable")
    return np.take_along_axis(ids, order, 1), there.sum(1)
