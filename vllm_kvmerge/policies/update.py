"""Changes that a compression makes to a cache."""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_kvmerge import ops
from vllm_kvmerge.ops import ROW_PLANES, Changes, PlaneName
from vllm_kvmerge.policies.entries import BLANK, DEAD, Entries
from vllm_kvmerge.policies.indexing import inverse, select, width_on


@dataclass
class CacheUpdate:
    """``C`` places per head: the entry that each holds, its metadata, and the places with a new key or value.

    Mergers begin with ``of``, the kept entries as they are, and ``write`` the keys and values of places that change.

    kept: ``[H, C]`` int64, index of the entry that a place holds; negative: none, so the place is empty unless it is in
    ``changed``. log_votes, scores, aux: ``[H, C]`` float32, positions: ``[H, C]`` int64, as in ``Entries``.
    changed: ``[H, r]`` int64, places, none twice; negative: none. keys, values: ``[H, r, d]`` float32, new rows of
    these places; None: that plane stays. merged: ``[H]`` int64, number of live entries that went into others.
    """

    kept: Tensor
    log_votes: Tensor
    scores: Tensor
    aux: Tensor
    positions: Tensor
    changed: Tensor
    keys: Tensor | None
    values: Tensor | None
    merged: Tensor

    @classmethod
    def of(cls, entries: Entries, kept: Tensor) -> "CacheUpdate":
        """The entries at ``kept`` (``[H, C]`` int64) as they are; places where that is negative are empty."""
        return cls._as_they_are(kept, *ops.take(kept, [*entries.metadata], [*BLANK.values()]))

    @classmethod
    def unchanged(cls, entries: Entries) -> "CacheUpdate":
        """All entries as they are, with their own metadata, which is not to be changed in place."""
        return cls._as_they_are(entries.all_indices, *entries.metadata)

    @classmethod
    def _as_they_are(cls, kept: Tensor, *metadata: Tensor) -> "CacheUpdate":
        log_votes, scores, aux, positions = metadata
        nothing, none = kept[:, :0], torch.zeros_like(kept[:, 0])
        return cls(kept, log_votes, scores, aux, positions, nothing, None, None, none)

    @property
    def is_live(self) -> Tensor:
        """``[H, C]`` bool."""
        return self.positions != DEAD

    @cached_property
    def num_live(self) -> Tensor:
        """``[H]`` int64."""
        return ops.num_live(self.positions)

    @property
    def num_places(self) -> int:
        """``C``."""
        return self.kept.shape[1]

    @property
    def metadata(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The planes of ``BLANK``, in its order."""
        return self.log_votes, self.scores, self.aux, self.positions

    def write(
        self, changed: Tensor, keys: Tensor | None, values: Tensor | None, merged: Tensor, **metadata: Tensor
    ) -> "CacheUpdate":
        """The same with these places changed, ``merged`` entries merged, and perhaps other ``metadata``."""
        return replace(self, changed=changed, keys=keys, values=values, merged=merged, **metadata)

    def without(self, gone: Tensor) -> "CacheUpdate":
        """The same with the places where ``gone`` (``[H, C]`` bool) empty."""
        return replace(self, kept=self.kept.masked_fill(gone, DEAD), positions=self.positions.masked_fill(gone, DEAD))

    def behind(self, entries: Entries, kept: Tensor) -> "CacheUpdate":
        """Places with the entries at ``kept`` (``[H, C]`` int64) as they are, then these."""
        first = kept.shape[1]
        # All are taken, because that is one pass; these places' metadata is its own.
        both = CacheUpdate.of(entries, torch.cat([kept, self.kept], 1))
        for taken, own in zip(both.metadata, self.metadata, strict=True):
            taken[:, first:] = own
        changed = torch.where(self.changed < 0, DEAD, self.changed + first)
        return both.write(changed, self.keys, self.values, self.merged)

    def view(self, entries: Entries) -> Entries:
        """The places' entries, of which keys and values are read on demand; ``entries``: those that this updates."""
        update = self.emptied()
        origin, row = update.kept.masked_fill(~update.is_live, DEAD), inverse(update.changed, update.num_places)
        return entries.changed(Changes(origin, row, update.keys, update.values), *update.metadata)

    def apply(self, entries: Entries) -> Entries:
        """The places' entries, dense; ``entries``: those that this updates."""
        return self.view(entries).clone()

    def after(self, earlier: "CacheUpdate", entries: Entries) -> "CacheUpdate":
        """This update of ``entries``, the result of ``earlier``, as an update of the entries before that."""
        most = min(self.num_places, earlier.changed.shape[1] + self.changed.shape[1])
        width = width_on(self.kept.device, most)
        places, row = ops.join_changes(self.kept, self.positions, self.changed, earlier.changed, len(entries), width)

        def joined(plane: PlaneName) -> Tensor | None:
            theirs: Tensor | None = getattr(earlier, plane)
            if theirs is None and getattr(self, plane) is None:
                return None
            theirs = entries.rows_at(plane, earlier.changed) if theirs is None else theirs
            return ops.take_rows(row, self._rows(plane, entries), theirs)

        update = replace(self, kept=select(earlier.kept, self.kept))
        return update.write(places, joined("keys"), joined("values"), earlier.merged + self.merged)

    def in_place(self, entries: Entries, num_places: int) -> "CacheUpdate":
        """The same with ``num_places`` places, where entries stay in place if they can.

        A live entry whose index is a place gets that place; the others, in order, get the first free ones. Remaining
        places are empty, preferably where an empty entry lies already.
        """
        place = ops.free_places(self.kept, self.positions, num_places)
        blanks = [DEAD, *BLANK.values()]
        kept, *metadata = ops.take(inverse(place, num_places), [self.kept, *self.metadata], blanks)
        length = min(num_places, len(entries))
        if not kept.is_cpu or int(ops.num_live(kept).min()) < num_places:  # a GPU would be waited for
            empty = (kept[:, :length] < 0) & ~entries.is_live[:, :length]
            kept[:, :length] = torch.where(empty, entries.all_indices[:, :length], kept[:, :length])
        named = dict(zip(BLANK, metadata, strict=True))
        return replace(self, kept=kept, changed=select(place, self.changed), **named)

    def extended(self, num_places: int) -> "CacheUpdate":
        """The same with ``num_places`` places, of which the last are empty."""
        if num_places == self.num_places:
            return self
        missing = (0, num_places - self.num_places)
        metadata = {name: pad(getattr(self, name), missing, value=blank) for name, blank in BLANK.items()}
        return replace(self, kept=pad(self.kept, missing, value=DEAD), **metadata)

    def emptied(self) -> "CacheUpdate":
        """The same with the metadata of empty places overwritten, and nothing moved to them."""
        if self.positions.is_cpu and bool((self.num_live == self.num_places).all()):  # a GPU would be waited for
            return self
        kept, log_votes, scores, aux = ops.empty_places(self.positions, self.kept, *self.metadata[:3])
        return replace(self, kept=kept, log_votes=log_votes, scores=scores, aux=aux)

    def finite(self, entries: Entries, dtype: torch.dtype) -> "tuple[CacheUpdate, Tensor]":
        """The same with entries as they were in places whose new key or value is not finite in ``dtype``.

        entries: those that this updates. A place that held none before is left empty, and what was merged into these
        places is lost. Also returns the number of these places, ``[H]`` int64.
        """
        place = ops.overflowing(self.changed, self.log_votes, self.keys, self.values, dtype)
        overflows = place >= 0
        if place.is_cpu and not overflows.any():  # a GPU would be waited for
            return self, torch.zeros_like(self.merged)
        source = select(self.kept, place)
        before = ops.take(source, [*entries.metadata], [*BLANK.values()])
        metadata = dict(zip(BLANK, ops.put(place, self.metadata, before), strict=True))
        return replace(self, changed=self.changed.masked_fill(overflows, DEAD), **metadata), overflows.sum(1)

    def of_rows(self, rows: list[int]) -> "CacheUpdate":
        """The part of some rows."""
        planes = (getattr(self, field.name) for field in fields(self))
        return CacheUpdate(*(None if plane is None else plane[rows] for plane in planes))  # type: ignore[arg-type]

    @classmethod
    def stack_rows(cls, parts: "list[CacheUpdate]", entries: "list[Entries]") -> "CacheUpdate":
        """The rows of several with equally many places; ``entries``: those that each updates."""
        planes = [name for name in ROW_PLANES if any(getattr(part, name) is not None for part in parts)]
        full = [
            replace(part, **{plane: part._rows(plane, some) for plane in planes})
            for part, some in zip(parts, entries, strict=True)
        ]
        stacked = dict[str, Tensor | None](keys=None, values=None)
        for field in fields(cls):
            several = [getattr(part, field.name) for part in full]
            if several[0] is not None:
                blank = DEAD if field.name == "changed" else 0.0
                stacked[field.name] = torch.cat(several) if field.name == "merged" else _stacked(several, blank)
        return cls(**stacked)  # type: ignore[arg-type]

    def _rows(self, plane: PlaneName, entries: Entries) -> Tensor:
        """``[H, r, d]``: keys or values of all that has changed, even if this plane has not."""
        rows: Tensor | None = getattr(self, plane)
        if rows is not None:
            return rows
        source, positions = ops.take(self.changed, [self.kept, self.positions], [DEAD, DEAD])
        return entries.rows_at(plane, source.masked_fill(positions < 0, DEAD))


def _stacked(parts: list[Tensor], blank: float) -> Tensor:
    """Parts ``[H_i, w_i, ...]`` one after the other, as wide as the widest. Each is copied once."""
    sizes = [len(part) for part in parts]
    stacked = parts[0].new_full((sum(sizes), max(part.shape[1] for part in parts), *parts[0].shape[2:]), blank)
    for rows, part in zip(stacked.split(sizes), parts, strict=True):
        rows[:, : part.shape[1]] = part
    return stacked


@dataclass
class CompressionResult:
    """Result of compressing ``source``, the entries that a policy was given.

    kept: ``[H]`` int64, number of live entries in the result. evicted: ``[H]`` int64, number of live entries that were
    dropped; ``update.merged`` counts the merged ones. as_before: ``[H]`` int64, number of places that ``finite`` has
    left as they were.
    """

    source: Entries
    update: CacheUpdate
    kept: Tensor
    evicted: Tensor
    as_before: Tensor

    @classmethod
    def of(cls, source: Entries, update: CacheUpdate) -> "CompressionResult":
        update = update.emptied()
        kept = update.num_live
        evicted = ops.num_live(source.positions) - kept - update.merged
        return cls(source, update, kept, evicted, torch.zeros_like(kept))

    def finite(self, dtype: torch.dtype) -> "CompressionResult":
        """The same with ``CacheUpdate.finite``."""
        if not self.update.changed.shape[1]:
            return self
        update, as_before = self.update.finite(self.source, dtype)
        if update is self.update:
            return self
        return replace(self, update=update, kept=update.num_live, as_before=as_before)

    @cached_property
    def entries(self) -> Entries:
        """The result, dense: exactly ``capacity`` entries per head."""
        return self.update.apply(self.source)

    @property
    def num_merged(self) -> int:
        return int(self.update.merged.sum())

    @property
    def num_evicted(self) -> int:
        return int(self.evicted.sum())
