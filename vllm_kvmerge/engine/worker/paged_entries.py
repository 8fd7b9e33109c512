"""Live entries of sequences in a paged cache; keys and values are read on demand."""

from copy import copy
from typing import Literal

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops import Fusion, SequenceLayers
from vllm_kvmerge.policies.entries import BLANK, DEAD, LazyEntries


class PagedEntries(LazyEntries):
    """Live entries of sequence layers, equally many each, concatenated in the first dimension."""

    def __init__(
        self, seq_layers: SequenceLayers, log_votes: Tensor, scores: Tensor, aux: Tensor, positions: Tensor
    ) -> None:
        super().__init__(log_votes, scores, aux, positions)
        self.seq_layers = seq_layers
        self._rows: Tensor | None = None  # indices of these heads among the sequence layers'; None: all

    @classmethod
    def gather(cls, seq_layers: SequenceLayers) -> "PagedEntries":
        """Reads the metadata, with the statistics that attention left in the cache."""
        return cls(seq_layers, *ops.gather_metadata(seq_layers))

    def of_rows(self, rows: list[int]) -> "PagedEntries":
        """Some rows' entries."""
        part = copy(self)
        for name in BLANK:
            setattr(part, name, getattr(self, name)[rows])
        for name in {"is_live", "keys", "values"} & vars(part).keys():  # cached, of all rows
            delattr(part, name)
        chosen = torch.tensor(rows, device=self.positions.device)
        part._rows = chosen if self._rows is None else self._rows[chosen]
        return part

    def keys_at(self, index: Tensor) -> Tensor:
        return self._read("keys", index)

    def values_at(self, index: Tensor) -> Tensor:
        return self._read("values", index)

    def most_similar(self, sources: Tensor, targets: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        # Other heads have no sources and no targets, but their indices must be valid too.
        everywhere = self._everywhere(sources, 0), self._everywhere(targets, 0), self._everywhere(usable, False)
        similarity, best = ops.most_similar(self.seq_layers, *everywhere)
        return self._of_these(similarity), self._of_these(best)

    def fused_attention(self, queries: Tensor, query_positions: Tensor, scale: float, fusion: Fusion) -> Tensor:
        if self._rows is not None:  # cheaper than computing it for all heads
            return super().fused_attention(queries, query_positions, scale, fusion)
        metadata = self.log_votes, self.positions
        return ops.fused_attention(self.seq_layers, queries, query_positions, *metadata, scale, fusion)

    def _read(self, plane: Literal["keys", "values"], index: Tensor) -> Tensor:
        return self._of_these(ops.gather_rows(self.seq_layers, plane, self._everywhere(index, DEAD)))

    def _everywhere(self, tensor: Tensor, fill: float) -> Tensor:
        """``tensor``, ``[H, m]`` of these heads, with rows of ``fill`` for the sequence layers' other heads."""
        if self._rows is None:
            return tensor
        return tensor.new_full((self.seq_layers.num_heads, *tensor.shape[1:]), fill).index_copy_(0, self._rows, tensor)

    def _of_these(self, tensor: Tensor) -> Tensor:
        """These heads' part of a tensor of all the sequence layers' heads."""
        return tensor if self._rows is None else tensor[self._rows]
