"""How operators on a GPU cut attention into pieces.

How many there are is a function of shapes alone, so that captured graphs hold for any batch. What each of them does is
in lists that a kernel (Triton's ``divide``, CUDA's ``Divide``) makes of the rows' lengths, once for all layers that
share a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kvmerge.ops.types import AttentionBatch, PagedKVCache

Lists = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Division:
    """The shape of one call's division.

    A tile is some queries of a sequence, and a piece is a tile's share of the entries. Tiles are cut into pieces by
    their lengths, which only the GPU knows, such that ``slots`` programs at a time would finish together.

    num_tiles: of all sequences. slots: programs of one KV head that run at a time. most: pieces that a tile may have.
    """

    num_tiles: int
    slots: int
    most: int

    @property
    def num_pieces(self) -> int:
        """Pieces that there may be: ``slots`` of tiles that are split, and one for each other tile."""
        return min(self.num_tiles + self.slots, self.num_tiles * self.most)

    @property
    def num_split(self) -> int:
        """Pieces that there may be of tiles that are split; these come first."""
        return min(self.slots, self.num_tiles * self.most)

    @property
    def split_tiles(self) -> int:
        """Tiles that may be split."""
        return 0 if self.most == 1 else min(self.num_tiles, self.num_split // 2)

    def lists(
        self, batch: AttentionBatch, cache: PagedKVCache, key: tuple[Any, ...], divide: Callable[..., None]
    ) -> Lists:
        """What ``divide`` makes of a batch, in this call or an earlier one for the same rows.

        The layer that was the first to need them makes them anew at each of its calls. So each forward pass has its
        own, and a captured graph contains the launch.

        key: whatever else ``divide`` depends on. It fills int32 tensors, which are returned: each piece's tile,
        ``[num_pieces]``, -1 behind the last one; each tile's first piece, and how many it has, ``[2 * num_tiles]``; and
        ``[num_tiles]`` tiles, longest first, as pieces are.
        """
        layer, places = cache.keys.data_ptr(), tuple(tensor.data_ptr() for tensor in batch.tensors[2:6])
        key = (*places, self.num_tiles, self.slots, self.most, *key)
        maker, found = batch.shared.get(key, (layer, None))
        if found is None or maker == layer:
            sizes = self.num_pieces, 2 * self.num_tiles, self.num_tiles
            found = torch.empty(sum(sizes), dtype=torch.int32, device=cache.device).split(sizes)
            divide(*found)
            batch.shared[key] = layer, found
        return found
