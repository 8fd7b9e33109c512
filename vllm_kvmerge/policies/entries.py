"""Cache entries as tensors, as policies read them."""

from abc import abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops import PLAIN_SOFTMAX, Changes, Fusion, PlaneName, Softmax
from vllm_kvmerge.ops.attention import fused_attention
from vllm_kvmerge.ops.similarity import most_similar
from vllm_kvmerge.policies.tiles import compared_in_tiles

PART_ENTRIES = 1024
"""Entries of a head that are read at a time when all of them are read."""

DEAD = -1
"""Position of an entry that holds nothing; its ``log_votes`` is ``-inf``, so attention gives it no weight."""

BLANK = {"log_votes": -torch.inf, "scores": 0.0, "aux": 0.0, "positions": DEAD}
"""Metadata of an entry that holds nothing, by the name of its plane."""


@dataclass
class Entries:
    """Live cache entries, in cache order (front first, then tail).

    keys, values: ``[H, n, d]`` float32.
    log_votes: ``[H, n]`` float32, added to the logit by attention (0 for an ordinary token).
    scores: ``[H, n]`` float32, the tracker's statistic.
    aux: ``[H, n]`` float32, a second statistic, 0 in a new entry. The trackers ``mean`` and ``log_ema`` own it, and
    count the queries that have scored the entry. Otherwise attention leaves it alone, and a
    merger may keep a number of its own there: ``residual`` the tokens of a slot, ``d2o`` its threshold.
    positions: ``[H, n]`` int64, of the newest token merged in; ``DEAD`` where empty.

    If entries lie in KV blocks, each access of ``keys`` or ``values`` reads all of them anew; ``keys_at``,
    ``values_at``, ``most_similar`` and ``fused_attention`` read only what they need.
    """

    keys: Tensor
    values: Tensor
    log_votes: Tensor
    scores: Tensor
    aux: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return self.positions.shape[1]

    @property
    def num_rows(self) -> int:
        """``H``."""
        return self.positions.shape[0]

    @property
    def is_live(self) -> Tensor:
        """``[H, n]`` bool."""
        return self.positions != DEAD

    @property
    def num_live(self) -> Tensor:
        """``[H]`` int64: number of live entries."""
        return ops.num_live(self.positions)

    @property
    def metadata(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The planes of ``BLANK``, in its order."""
        return self.log_votes, self.scores, self.aux, self.positions

    def keys_at(self, index: Tensor) -> Tensor:
        """``[H, m, d]``: the keys of the entries at ``index`` (``[H, m]`` int64), zeros where it is negative."""
        return _rows(self.keys, index)

    def values_at(self, index: Tensor) -> Tensor:
        """The values likewise."""
        return _rows(self.values, index)

    def rows_at(self, plane: PlaneName, index: Tensor) -> Tensor:
        """``keys_at`` or ``values_at``."""
        return self.keys_at(index) if plane == "keys" else self.values_at(index)

    def parts(self) -> Iterator[Tensor]:
        """Indices of all entries for ``keys_at`` and ``values_at``, ``[H, m]`` int64 with ``m <= PART_ENTRIES``."""
        yield from self.all_indices.split(PART_ENTRIES, dim=1)

    @property
    def all_indices(self) -> Tensor:
        """``[H, n]`` int64: the index of each entry."""
        return torch.arange(len(self), device=self.positions.device).expand(self.num_rows, -1)

    def most_similar(self, sources: Tensor, targets: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        """Finds for each source the usable target of largest cosine similarity of keys (KeepKV algorithm 1).

        sources: ``[H, m]``, targets: ``[H, c]`` int64, indices of entries, negative where there is none, and then a
        target is not usable. usable: ``[H, c]`` bool. Returns the similarity, ``[H, m]``, at most 1, -inf where there
        is no source or no target is usable, and the target's index, ``[H, m]``; the first of equally similar ones.
        """
        keys = self.keys_at(targets)

        def compare(part: Tensor) -> tuple[Tensor, Tensor]:
            return most_similar(self.keys_at(part), keys, part, targets, usable)

        return compared_in_tiles(compare, sources, keys.shape[1], keys.shape[2], PART_ENTRIES)

    def mixed(self, plane: PlaneName, sources: Tensor, row: Tensor, shares: Tensor, targets: Tensor | None) -> Tensor:
        """``ops.mix_in`` for the keys or values of the entries at ``sources`` (``[H, m]`` int64) and ``targets`` (``[H,
        r]`` int64; None: zeros), both negative where there is none; such a source has a negative row or no share."""
        own = None if targets is None else self.rows_at(plane, targets)
        return ops.mix_in(self.rows_at(plane, sources), row, shares, own)

    def join_slots(
        self, slots: Tensor, sources: Tensor, source_weights: Tensor, slot_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``ops.join_slots`` for the keys of the entries at ``slots`` (``[H, s]`` int64) and ``sources`` (``[H, m]``
        int64, negative where there is none)."""
        return ops.join_slots(self.keys_at(slots), self.keys_at(sources), source_weights, slot_weights)

    def changed(self, changes: Changes, *metadata: Tensor) -> "Entries":
        """Places for these entries as entries, with ``metadata`` of their own, which are read on demand."""
        return _Places(self, changes, *metadata)

    def fused_attention(
        self,
        queries: Tensor,
        query_positions: Tensor,
        scale: float,
        fusion: Fusion,
        softmax: Softmax = PLAIN_SOFTMAX,
    ) -> Tensor:
        """``[H, n]``: attention to each entry, summed over the G query heads, then ``fusion`` over the ``w`` queries.

        queries: ``[H, G, w, d]`` floating point. query_positions: ``[H, w]`` int64; a query sees live entries up to its
        own position.
        """
        planes = self.keys, self.log_votes, self.positions
        return fused_attention(queries, query_positions, *planes, scale, fusion, softmax)

    def take(self, index: Tensor) -> "Entries":
        """Copies of the entries at ``index`` (``[H, m]`` int64), per head; blank ones where it is negative."""
        metadata = ops.take(index, [*self.metadata], [*BLANK.values()])
        return Entries(self.keys_at(index), self.values_at(index), *metadata)

    def take_live(self, index: Tensor) -> "Entries":
        """The same, blank where the entry is dead: a NaN in its key or value would survive a weight of 0."""
        return self.take(index.masked_fill(~self.is_live.gather(1, index), DEAD))

    def clone(self) -> "Entries":
        return Entries(*(getattr(self, field.name).clone() for field in fields(Entries)))

    def without(self, hidden: Tensor) -> Self:
        """The same entries, sharing storage, with those where ``hidden`` (``[H, n]`` bool) counted as dead."""
        view = copy(self)
        vars(view).pop("is_live", None)
        view.log_votes = self.log_votes.masked_fill(hidden, -torch.inf)
        view.positions = self.positions.masked_fill(hidden, DEAD)
        return view

    def of_rows(self, rows: list[int]) -> "Entries":
        """The entries of some rows."""
        return Entries(*(getattr(self, field.name)[rows] for field in fields(Entries)))

    def kill(self, dead: Tensor) -> None:
        """Empties, in place, the entries where ``dead`` (``[H, n]`` bool) is true.

        Keys too are overwritten, because a NaN left in a dead key would survive ``logit + log_votes``.
        """
        for tensor in (self.keys, self.values):
            tensor.masked_fill_(dead.unsqueeze(-1), 0.0)
        for name, blank in BLANK.items():
            getattr(self, name).masked_fill_(dead, blank)


class LazyEntries(Entries):
    """Entries whose keys and values are read on demand, by a subclass.

    Positions are not changed in place. To change other metadata use ``without`` or ``copy``, not
    ``dataclasses.replace``.
    """

    def __init__(self, log_votes: Tensor, scores: Tensor, aux: Tensor, positions: Tensor) -> None:
        self.log_votes, self.scores, self.aux, self.positions = log_votes, scores, aux, positions

    @cached_property
    def is_live(self) -> Tensor:  # type: ignore[override]
        return self.positions != DEAD

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self.keys_at(self.all_indices)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self.values_at(self.all_indices)

    @abstractmethod
    def keys_at(self, index: Tensor) -> Tensor: ...

    @abstractmethod
    def values_at(self, index: Tensor) -> Tensor: ...


class _Places(LazyEntries):
    """Places for other entries."""

    def __init__(self, entries: Entries, changes: Changes, *metadata: Tensor) -> None:
        super().__init__(*metadata)
        self._entries, self._changes = entries, changes

    def keys_at(self, index: Tensor) -> Tensor:
        return self._changes.read("keys", index, self._entries.keys_at)

    def values_at(self, index: Tensor) -> Tensor:
        return self._changes.read("values", index, self._entries.values_at)


def _rows(plane: Tensor, index: Tensor) -> Tensor:
    head = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
    return plane[head, index.clamp(min=0)].masked_fill_((index < 0).unsqueeze(-1), 0.0)
