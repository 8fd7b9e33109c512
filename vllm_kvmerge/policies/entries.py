"""Cache entries as tensors: what policies read."""

from abc import abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from vllm_kvmerge.ops import Fusion
from vllm_kvmerge.ops.attention import fused_attention
from vllm_kvmerge.ops.similarity import most_similar

PART_ENTRIES = 1024
"""Entries of a head that are read at a time where all of them are, one part after the other."""

DEAD = -1
"""Position of an entry that holds nothing; its ``log_votes`` is ``-inf``, so attention gives it no weight."""

BLANK = {"log_votes": -torch.inf, "scores": 0.0, "aux": 0.0, "positions": DEAD}
"""Metadata of an entry that holds nothing, by the name of its plane."""


@dataclass
class Entries:
    """Live cache entries, in cache order (front first, then tail).

    keys, values: ``[H, n, d]`` float32.
    log_votes: ``[H, n]`` float32, what attention adds to the logit (0 for an ordinary token).
    scores: ``[H, n]`` float32, the tracker's statistic.
    aux: ``[H, n]`` float32, a second statistic, 0 in a new entry. The tracker owns it where it counts there the queries
    that have scored the entry (``mean`` and ``log_ema``: ``query_counts``). Otherwise attention leaves it alone, and a
    merger may keep a number of its own there: ``residual`` that of the tokens in a slot, ``d2o`` its threshold.
    positions: ``[H, n]`` int64, of the newest token merged in; ``DEAD`` where empty.

    Where entries lie in KV blocks, ``keys`` and ``values`` are read anew at each access, all of them: ``keys_at``,
    ``values_at``, ``most_similar`` and ``fused_attention`` read what they need.
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
        return len(self.positions)

    @property
    def is_live(self) -> Tensor:
        """``[H, n]`` bool."""
        return self.positions != DEAD

    @property
    def query_counts(self) -> Tensor:
        """``[H, n]`` float32: queries that have scored each entry, where the tracker counts them in ``aux``."""
        return self.aux

    @property
    def metadata(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The planes of ``BLANK``, in its order."""
        return self.log_votes, self.scores, self.aux, self.positions

    def keys_at(self, index: Tensor) -> Tensor:
        """``[H, m, d]``: the keys of the entries at ``index`` (``[H, m]`` int64), zeros where it is negative."""
        return _rows(self.keys, index)

    def values_at(self, index: Tensor) -> Tensor:
        """``[H, m, d]``: the values of the entries at ``index`` (``[H, m]`` int64), zeros where it is negative."""
        return _rows(self.values, index)

    def parts(self) -> Iterator[Tensor]:
        """Indices of all entries for ``keys_at`` and ``values_at``, ``[H, m]`` int64 with ``m <= PART_ENTRIES``."""
        yield from self.all_indices.split(PART_ENTRIES, dim=1)

    @property
    def all_indices(self) -> Tensor:
        """``[H, n]`` int64: the index of each entry."""
        return torch.arange(len(self), device=self.positions.device).expand(self.num_rows, -1)

    def most_similar(self, sources: Tensor, targets: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        """For each source the usable target whose key has the largest cosine similarity (KeepKV algorithm 1).

        sources: ``[H, m]``, targets: ``[H, c]`` int64, indices of entries. usable: ``[H, c]`` bool. Returns the
        similarity, ``[H, m]``, at most 1, -inf where no target is usable, and the target's index, ``[H, m]``, of
        equally similar ones the first's.
        """
        keys = self.keys_at(targets)
        parts = [most_similar(self.keys_at(part), keys, targets, usable) for part in sources.split(PART_ENTRIES, dim=1)]
        similarity, best = (torch.cat(planes, dim=1) for planes in zip(*parts, strict=True))
        return similarity, best

    def fused_attention(self, queries: Tensor, query_positions: Tensor, scale: float, fusion: Fusion) -> Tensor:
        """``[H, n]``: attention to each entry, summed over the G query heads, then ``fusion`` over the ``w`` queries.

        queries: ``[H, G, w, d]``. query_positions: ``[H, w]`` int64; a query sees live entries up to its own position.
        scale: of the logits.
        """
        return fused_attention(queries, query_positions, self.keys, self.log_votes, self.positions, scale, fusion)

    def take(self, index: Tensor) -> "Entries":
        """Entries at ``index`` (``[H, m]`` int64), per head; copies."""
        return Entries(self.keys_at(index), self.values_at(index), *(plane.gather(1, index) for plane in self.metadata))

    def clone(self) -> "Entries":
        return Entries(*(getattr(self, field.name).clone() for field in fields(Entries)))

    def without(self, hidden: Tensor) -> "Entries":
        """The same entries, sharing storage, except that those where ``hidden`` (``[H, n]`` bool) count as dead."""
        view = copy(self)
        vars(view).pop("is_live", None)
        view.log_votes = self.log_votes.masked_fill(hidden, -torch.inf)
        view.positions = self.positions.masked_fill(hidden, DEAD)
        return view

    def of_rows(self, rows: list[int]) -> "Entries":
        """Some rows' entries."""
        return Entries(*(getattr(self, field.name)[rows] for field in fields(Entries)))

    def kill(self, dead: Tensor) -> None:
        """Empties, in place, the entries where ``dead`` (``[H, n]`` bool) is true.

        Everything is overwritten: a NaN left in a dead key would survive ``logit + log_votes``.
        """
        for tensor in (self.keys, self.values):
            tensor.masked_fill_(dead.unsqueeze(-1), 0.0)
        for name, blank in BLANK.items():
            getattr(self, name).masked_fill_(dead, blank)


class LazyEntries(Entries):
    """Entries whose keys and values are read when they are asked for; a subclass says from where.

    Positions are not changed in place. Use ``without`` or ``copy`` for the same with other metadata, not
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


def _rows(plane: Tensor, index: Tensor) -> Tensor:
    head = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
    return plane[head, index.clamp(min=0)].masked_fill_((index < 0).unsqueeze(-1), 0.0)
