"""Live entries of sequences in pages, of which keys and values are read as far as they are asked for."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm_kvmerge import kernels
from vllm_kvmerge.kernels.page import Pages
from vllm_kvmerge.policies.base import DEAD
from vllm_kvmerge.policies.entries import LazyEntries


@dataclass(frozen=True)
class PagedSequence:
    """One layer of a sequence; its live entries are slots ``[0, front)`` and ``[tail, seq_len)`` of ``blocks``."""

    pages: Pages
    blocks: Tensor
    front: int
    tail: int
    seq_len: int


class PagedEntries(LazyEntries):
    """The live entries of several sequences' layers, equally many each, one after the other in the first dimension."""

    def __init__(
        self, sequences: list[PagedSequence], log_votes: Tensor, scores: Tensor, aux: Tensor, positions: Tensor
    ) -> None:
        super().__init__(log_votes, scores, aux, positions)
        self.sequences = sequences
        self._rows: Tensor | None = None  # which of the sequences' heads these are; None: all

    @classmethod
    def gather(cls, sequences: list[PagedSequence]) -> "PagedEntries":
        """Reads the metadata; statistics are as attention left them in the pages."""
        metadata = [kernels.gather_metadata(s.pages, s.blocks, s.front, s.tail, s.seq_len) for s in sequences]
        log_votes, scores, aux, positions = (torch.cat(planes) for planes in zip(*metadata, strict=True))
        return cls(sequences, log_votes, scores, aux, positions)

    def heads(self, heads: list[int]) -> "PagedEntries":
        """Some heads' entries."""
        part = copy(self)
        for name in ("log_votes", "scores", "aux", "positions"):
            setattr(part, name, getattr(self, name)[heads])
        for name in {"is_live", "keys", "values"} & vars(part).keys():  # kept from before, of all heads
            delattr(part, name)
        rows = torch.tensor(heads)
        part._rows = rows if self._rows is None else self._rows[rows]
        return part

    def keys_at(self, index: Tensor) -> Tensor:
        return self._read("keys", index)

    def values_at(self, index: Tensor) -> Tensor:
        return self._read("values", index)

    def most_similar(self, members: Tensor, carriers: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        def find(s: PagedSequence, *index: Tensor) -> tuple[Tensor, ...]:
            return kernels.most_similar(s.pages, s.blocks, s.front, s.tail, *index)

        # Heads that are not asked for have no member and no carrier; a place in the cache must be named all the same.
        everywhere = self._everywhere(members, 0), self._everywhere(carriers, 0), self._everywhere(usable, False)
        similarity, best = self._each(find, *everywhere)
        return similarity, best

    def _read(self, plane: Literal["keys", "values"], index: Tensor) -> Tensor:
        def read(s: PagedSequence, part: Tensor) -> tuple[Tensor, ...]:
            return (kernels.gather_rows(s.pages, plane, s.blocks, s.front, s.tail, part),)

        (rows,) = self._each(read, self._everywhere(index, DEAD))
        return rows

    def _everywhere(self, tensor: Tensor, fill: float) -> Tensor:
        """``tensor`` (``[H, m]``, of these heads) with rows of ``fill`` for the sequences' other heads."""
        if self._rows is None:
            return tensor
        num_heads = sum(s.pages.num_kv_heads for s in self.sequences)
        return tensor.new_full((num_heads, *tensor.shape[1:]), fill).index_copy_(0, self._rows, tensor)

    def _each(self, operator: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        """What an operator gives for each sequence's part of the tensors, together, for these heads."""
        sizes = [s.pages.num_kv_heads for s in self.sequences]
        parts = zip(self.sequences, *(tensor.split(sizes) for tensor in tensors), strict=True)
        results = zip(*(operator(*part) for part in parts), strict=True)
        whole = (torch.cat(result) for result in results)
        return tuple(whole if self._rows is None else (tensor[self._rows] for tensor in whole))
