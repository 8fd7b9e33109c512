"""What a compression makes of entries, said as what changes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.policies.entries import DEAD, Entries, LazyEntries
from vllm_kvmerge.policies.indexing import inverse, padded_nonzero, select

METADATA = ("log_votes", "scores", "aux", "positions")


@dataclass
class CacheUpdate:
    """``C`` places per head: which entry each holds, its metadata, and the places with a new key or value.

    kept: ``[H, C]`` int64, index of the entry that a place holds; negative: none, so what is not in ``changed`` is
    empty. log_votes, scores, aux: ``[H, C]`` float32, positions: ``[H, C]`` int64, ``DEAD`` where a place is empty.
    changed: ``[H, r]`` int64, places, none twice; negative: none. keys, values: ``[H, r, d]`` float32, what these
    places hold instead; None: that plane stays. merged: ``[H]`` int64, how many live entries went into others.
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
        """The entries at ``kept`` (``[H, C]`` int64) as they are."""
        return cls._as_they_are(kept, *ops.take(kept, [getattr(entries, name) for name in METADATA]))

    @classmethod
    def unchanged(cls, entries: Entries) -> "CacheUpdate":
        """All entries as they are."""
        place = torch.arange(len(entries), device=entries.positions.device).repeat(len(entries.positions), 1)
        return cls._as_they_are(place, *(getattr(entries, name).clone() for name in METADATA))

    @classmethod
    def _as_they_are(cls, kept: Tensor, *metadata: Tensor) -> "CacheUpdate":
        log_votes, scores, aux, positions = metadata
        nothing, none = kept[:, :0], torch.zeros_like(kept[:, 0])
        return cls(kept, log_votes, scores, aux, positions, nothing, None, None, none)

    @property
    def is_live(self) -> Tensor:
        """``[H, C]`` bool."""
        return self.positions != DEAD

    def view(self, entries: Entries) -> Entries:
        """The places' entries; ``entries`` are those that this is an outcome of. Keys and values are read on demand."""
        return _Places(self.emptied(), entries)

    def apply(self, entries: Entries) -> Entries:
        """The places' entries, dense; ``entries`` are those that this is an outcome of."""
        return self.view(entries).clone()

    def after(self, earlier: "CacheUpdate", entries: Entries) -> "CacheUpdate":
        """This outcome of ``entries``, which are what ``earlier`` made of others, as an outcome of those others."""
        num_places = self.kept.shape[1]
        changed_before = inverse(earlier.changed, len(entries)) >= 0
        changed = inverse(self.changed, num_places) >= 0
        changed |= changed_before.gather(1, self.kept.clamp(min=0)) & (self.kept >= 0)
        places = padded_nonzero(changed)
        view = self.view(entries)
        return replace(
            self,
            kept=select(earlier.kept, self.kept),
            changed=places,
            keys=view.keys_at(places),
            values=view.values_at(places),
            merged=earlier.merged + self.merged,
        )

    def in_place(self, entries: Entries, num_places: int) -> "CacheUpdate":
        """The same with ``num_places`` places, in which entries stay where they are if they can.

        An entry whose index is a place gets that place; the others, in order, those that are free. What remains is
        empty, preferably where an empty entry lies already.
        """
        place = ops.free_places(self.kept, num_places)

        planes = [self.kept, *(getattr(self, name) for name in METADATA)]
        if self.kept.shape[1] == num_places:  # none is empty
            planes = ops.take(inverse(place, num_places), planes)
        else:
            blank = (DEAD, -torch.inf, 0.0, 0.0, DEAD)
            planes = [
                plane.new_full((len(place), num_places), empty).scatter_(1, place, plane)
                for plane, empty in zip(planes, blank, strict=True)
            ]
        kept, log_votes, scores, aux, positions = planes
        length = min(num_places, len(entries))
        if not kept.is_cpu or (kept[:, :length] < 0).any():  # a GPU would be waited for
            own = torch.arange(length, device=kept.device).expand(len(kept), -1)
            empty = (kept[:, :length] < 0) & ~entries.is_live[:, :length]
            kept[:, :length] = torch.where(empty, own, kept[:, :length])
        return replace(
            self,
            kept=kept,
            log_votes=log_votes,
            scores=scores,
            aux=aux,
            positions=positions,
            changed=select(place, self.changed),
        )

    def emptied(self) -> "CacheUpdate":
        """The same with the metadata of empty places overwritten, and nothing moved to them."""
        dead = ~self.is_live
        if dead.is_cpu and not dead.any():  # a GPU would be waited for
            return self
        own = torch.arange(dead.shape[1], device=dead.device)
        return replace(
            self,
            kept=self.kept.masked_fill(dead & (self.kept != own), DEAD),
            log_votes=self.log_votes.masked_fill(dead, -torch.inf),
            scores=self.scores.masked_fill(dead, 0.0),
            aux=self.aux.masked_fill(dead, 0.0),
        )

    def finite(self, entries: Entries, dtype: torch.dtype) -> "tuple[CacheUpdate, Tensor]":
        """The same with entries as they were in places whose new key or value is not finite in ``dtype``.

        entries: those that this is an outcome of. A place that held none before is left empty. Also returns how many
        places those are, ``[H]`` int64. What was merged into them is lost.
        """
        overflows = torch.zeros_like(self.changed, dtype=torch.bool)
        for rows in (self.keys, self.values):
            if rows is not None:
                overflows |= ~rows.to(dtype).isfinite().all(-1)
        if self.changed.shape[1]:
            overflows |= ~(self.log_votes.gather(1, self.changed.clamp(min=0)) < torch.inf)  # NaN too
        overflows &= self.changed >= 0
        count = overflows.sum(1)
        if count.is_cpu and not count.any():  # a GPU would be waited for
            return self, count
        # Everything else goes to a place behind the last, which is cut off again.
        place = self.changed.masked_fill(~overflows, self.kept.shape[1])
        source = select(self.kept, self.changed.masked_fill(~overflows, DEAD))
        planes = {name: getattr(self, name) for name in METADATA}
        blank = {"log_votes": -torch.inf, "scores": 0.0, "aux": 0.0, "positions": DEAD}
        for name, plane in planes.items():
            before = getattr(entries, name).gather(1, source.clamp(min=0)).masked_fill(source < 0, blank[name])
            planes[name] = torch.nn.functional.pad(plane, (0, 1)).scatter_(1, place, before)[:, :-1]
        return replace(self, changed=self.changed.masked_fill(overflows, DEAD), **planes), count

    def heads(self, heads: list[int]) -> "CacheUpdate":
        """Some heads' part."""
        return CacheUpdate(*(None if plane is None else plane[heads] for plane in vars(self).values()))  # type: ignore[arg-type]

    @classmethod
    def stack_heads(cls, parts: "list[CacheUpdate]", entries: "list[Entries]") -> "CacheUpdate":
        """The heads of several, each with equally many places; ``entries`` are those that each is an outcome of."""
        width = max(part.changed.shape[1] for part in parts)
        full = [part._widened(some, width, parts) for part, some in zip(parts, entries, strict=True)]
        planes = zip(*(vars(part).values() for part in full), strict=True)
        return cls(*(None if plane[0] is None else torch.cat(plane) for plane in planes))

    def _widened(self, entries: Entries, width: int, others: "list[CacheUpdate]") -> "CacheUpdate":
        """With ``width`` rows in ``changed``, and both planes where one of the others has them."""
        missing = (0, width - self.changed.shape[1])
        changed = torch.nn.functional.pad(self.changed, missing, value=DEAD)
        source = select(self.kept, self.changed)

        def plane(name: str) -> Tensor | None:
            if all(getattr(other, name) is None for other in others):
                return None
            rows = getattr(self, name)
            if rows is None:
                rows = entries.keys_at(source) if name == "keys" else entries.values_at(source)
            return torch.nn.functional.pad(rows, (0, 0, *missing))

        return replace(self, changed=changed, keys=plane("keys"), values=plane("values"))


class _Places(LazyEntries):
    """An outcome's places as entries."""

    def __init__(self, outcome: CacheUpdate, entries: Entries) -> None:
        super().__init__(*(getattr(outcome, name) for name in METADATA))
        self._outcome, self._entries = outcome, entries
        self._source = outcome.kept.masked_fill(~outcome.is_live, DEAD)
        self._row = inverse(outcome.changed, outcome.kept.shape[1])

    def keys_at(self, index: Tensor) -> Tensor:
        return self._read(index, self._entries.keys_at, self._outcome.keys)

    def values_at(self, index: Tensor) -> Tensor:
        return self._read(index, self._entries.values_at, self._outcome.values)

    def most_similar(self, members: Tensor, carriers: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        # Most keys are the cache's own: those are compared where they lie, and new ones, of which there are few, apart.
        is_new = select(self._row, carriers) >= 0
        where = self._source.gather(1, carriers)
        old = usable & ~is_new & (where >= 0)
        similarity, best = self._entries.most_similar(
            self._source.gather(1, members).clamp(min=0), where.clamp(min=0), old
        )
        # Which of the carriers it is, so that of equally similar ones the first can be told.
        best = inverse(where.masked_fill(~old, DEAD), len(self._entries)).gather(1, best).clamp(min=0)
        new = padded_nonzero(usable & is_new)
        if new.shape[1]:
            chosen = super().most_similar(members, select(carriers, new), new >= 0)
            number = inverse(carriers, len(self)).gather(1, chosen[1].clamp(min=0))
            better = (chosen[0] > similarity) | ((chosen[0] == similarity) & (number < best))
            better &= chosen[0] > -torch.inf
            similarity, best = torch.where(better, chosen[0], similarity), torch.where(better, number, best)
        best = carriers.gather(1, best)
        changed = padded_nonzero((select(self._row, members) >= 0) | (self._source.gather(1, members) < 0))
        if changed.shape[1]:
            apart = super().most_similar(select(members, changed), carriers, usable)
            place = changed.masked_fill(changed < 0, members.shape[1])
            similarity, best = (
                torch.nn.functional.pad(whole, (0, 1)).scatter_(1, place, part)[:, :-1]
                for whole, part in zip((similarity, best), apart, strict=True)
            )
        return similarity, best

    def _read(self, index: Tensor, unchanged: Callable[[Tensor], Tensor], changed: Tensor | None) -> Tensor:
        rows = unchanged(select(self._source, index))
        if changed is not None:
            row = select(self._row, index)
            here = row >= 0
            head = torch.arange(len(row), device=row.device).unsqueeze(1).expand_as(row)
            rows[here] = changed[head[here], row[here]]
        return rows
