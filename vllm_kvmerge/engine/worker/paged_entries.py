"""Live entries of sequences in pages, of which keys and values are read as far as they are asked for."""

from copy import copy
from typing import Literal

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops import Fusion, SequenceLayers
from vllm_kvmerge.policies.base import DEAD
from vllm_kvmerge.policies.entries import LazyEntries


class PagedEntries(LazyEntries):
    """The live entries of several sequences' layers, equally many each, one after the other in the first dimension."""

    def __init__(
        self, units: SequenceLayers, log_votes: Tensor, scores: Tensor, aux: Tensor, positions: Tensor
    ) -> None:
        super().__init__(log_votes, scores, aux, positions)
        self.units = units
        self._rows: Tensor | None = None  # which of the units' heads these are; None: all

    @classmethod
    def gather(cls, units: SequenceLayers) -> "PagedEntries":
        """Reads the metadata; statistics are as attention left them in the pages."""
        return cls(units, *ops.gather_metadata(units))

    def heads(self, heads: list[int]) -> "PagedEntries":
        """Some heads' entries."""
        part = copy(self)
        for name in ("log_votes", "scores", "aux", "positions"):
            setattr(part, name, getattr(self, name)[heads])
        for name in {"is_live", "keys", "values"} & vars(part).keys():  # kept from before, of all heads
            delattr(part, name)
        rows = torch.tensor(heads, device=self.positions.device)
        part._rows = rows if self._rows is None else self._rows[rows]
        return part

    def keys_at(self, index: Tensor) -> Tensor:
        return self._read("keys", index)

    def values_at(self, index: Tensor) -> Tensor:
        return self._read("values", index)

    def most_similar(self, members: Tensor, carriers: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        # Heads that are not asked for have no member and no carrier; a place in the cache must be named all the same.
        everywhere = self._everywhere(members, 0), self._everywhere(carriers, 0), self._everywhere(usable, False)
        similarity, best = ops.most_similar(self.units, *everywhere)
        return self._of_these(similarity), self._of_these(best)

    def fused_attention(self, queries: Tensor, query_positions: Tensor, scale: float, fusion: Fusion) -> Tensor:
        if self._rows is not None:  # of all heads it would cost more than reading these heads' keys
            return super().fused_attention(queries, query_positions, scale, fusion)
        query_positions = query_positions.expand(len(queries), -1)
        metadata = self.log_votes, self.positions
        return ops.fused_attention(self.units, queries, query_positions, *metadata, scale, fusion)

    def _read(self, plane: Literal["keys", "values"], index: Tensor) -> Tensor:
        return self._of_these(ops.gather_rows(self.units, plane, self._everywhere(index, DEAD)))

    def _everywhere(self, tensor: Tensor, fill: float) -> Tensor:
        """``tensor`` (``[H, m]``, of these heads) with rows of ``fill`` for the units' other heads."""
        if self._rows is None:
            return tensor
        return tensor.new_full((self.units.num_heads, *tensor.shape[1:]), fill).index_copy_(0, self._rows, tensor)

    def _of_these(self, tensor: Tensor) -> Tensor:
        """These heads' part of a tensor of all the units' heads."""
        return tensor if self._rows is None else tensor[self._rows]
