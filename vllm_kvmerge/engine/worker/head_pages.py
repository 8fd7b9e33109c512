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


@dataclass(frozen=True)
class Deal:
    """Pages of one request. pages: one row per layer. grows: ``[layers, H]`` bool, heads that took pages of others.
    within_layers: all of heads of their own layer."""

    pages: HeadPages
    grows: Tensor
    within_layers: bool

    @property
    def crosses_layers(self) -> bool:
        """True if some heads of a layer, but not all, took pages of other layers, so that both rounds have to be of all
        layers at once. With equal budgets within layers that does not come up."""
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
    ) -> "Deal":
        """Deals the pages of ``blocks`` (ids) to heads.

        shares: entries of each head, layer by layer, which fit. num_places: the most that any head can hold. before:
        the pages that heads have now; None: an ordinary front, or none. within_layers: a layer's heads only take pages
        from each other, so that layers can be written one after the other.
        """
        num_layers, num_heads, size = len(layers), layers[0].num_kv_heads, layers[0].block_size
        lanes = np.arange(num_layers * num_heads)
        fronts = np.asarray(shares)
        counts, width = -(-fronts // size), -(-num_places // size)
        new_blocks = np.asarray(blocks, dtype=np.int64)
        own, num_own = _own_pages(new_blocks, lanes, size, before)
        own = np.pad(own, ((0, 0), (0, max(0, width - own.shape[1]))))
        index = np.arange(own.shape[1])
        kept = index < np.minimum(counts, num_own)[:, None]
        wanted = (index < counts[:, None]) & ~kept
        ids = np.where(kept, own, 0)
        for group in lanes.reshape(num_layers, num_heads) if within_layers else lanes[None]:
            # Every page is of some lane; its owner need not be.
            free = (new_blocks[:, None] * len(lanes) + group).flatten()
            free = free[~np.isin(free, own[kept])]
            places = np.zeros_like(wanted)
            places[group] = wanted[group]
            ids[places] = free[: places.sum()]
        shape = num_layers, num_heads
        pages = torch.from_numpy(ids[:, :width]).reshape(*shape, width)
        grows = torch.from_numpy(wanted.any(1)).reshape(shape)
        return cls(HeadPages(layers, pages, torch.from_numpy(fronts).reshape(shape)), grows, within_layers)


def _own_pages(
    blocks: np.ndarray, lanes: np.ndarray, size: int, before: HeadPages | None
) -> tuple[np.ndarray, np.ndarray]:
    """``[lanes, n]``: pages in ``blocks`` that a head may hold entries in, one after the other; and their numbers."""
    if before is None:
        return blocks * len(lanes) + lanes[:, None], np.full(len(lanes), len(blocks))
    ids = before.ids.flatten(0, 1).numpy()
    used = np.arange(ids.shape[1]) < -(-before.fronts.flatten().numpy() // size)[:, None]
    # Blocks that were not of the front hold ordinary tokens, if anything, each head's in its own lane.
    others = blocks[~np.isin(blocks, ids[used] // len(lanes))]
    ids = np.concatenate([ids, others * len(lanes) + lanes[:, None]], axis=1)
    there = np.concatenate([used, np.ones((len(lanes), len(others)), dtype=bool)], axis=1)
    there &= np.isin(ids // len(lanes), blocks)
    order = np.argsort(~there, axis=1, kind="stable")
    return np.take_along_axis(ids, order, 1), there.sum(1)
