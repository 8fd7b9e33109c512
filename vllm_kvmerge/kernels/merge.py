"""What a compaction writes besides the entries that it moves, and how that is done operator by operator."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vllm_kvmerge.kernels.page import Units

ZipMode = Literal["scale", "votes", "auto"]
ZIP_MODES: tuple[ZipMode, ...] = ("scale", "votes", "auto")

MAX_SCALE = 10.0
"""``scale`` does not stretch a key beyond this factor."""

AUTO_TOLERANCE = 0.1
"""``auto`` scales a key whose length changes by at most this share."""

Metadata = tuple[Tensor, Tensor, Tensor, Tensor]
"""log_votes, scores, aux (``[H, C]`` float32) and positions (``[H, C]`` int64)."""


@dataclass(frozen=True)
class Rows:
    """Keys and values as they are. places: ``[H, r]`` int64, slots that get a new key or value, none twice; negative:
    none. keys, values: ``[H, r, d]`` float32; None: that plane is written as if there were no rows."""

    places: Tensor
    keys: Tensor | None
    values: Tensor | None


@dataclass(frozen=True)
class Sums:
    """Weighted sums of entries, in float32.

    places: as in ``Rows``. members: ``[H, m]`` int64, entries, the one that a place holds already among them if it is
    to count; negative: none. rows: ``[H, m]`` int64, which of the ``r`` places each is summed up in. key_weights,
    value_weights: ``[H, m]`` float32; None: that plane is written as if there were no rows.
    """

    places: Tensor
    members: Tensor
    rows: Tensor
    key_weights: Tensor | None
    value_weights: Tensor | None


@dataclass(frozen=True)
class Zip:
    """KeepKV eq. 20 to 26 (``policies.mergers.zip_merge``), where all that is new follows from importance.

    places, members, rows: as in ``Sums``; each place holds one of its members, its carrier. importance: ``[H, n]``
    float32, ln(p s_hat) of the units' entries, finite for members. protected: ``[H, n]`` bool, entries whose position
    stays when others join them. Votes and positions are those in the pages.
    """

    places: Tensor
    members: Tensor
    rows: Tensor
    importance: Tensor
    protected: Tensor
    mode: ZipMode = "auto"


Merged = Rows | Sums | Zip


def merge_by_parts(
    operators: Any, units: Units, destination: Tensor, kept: Tensor, metadata: Metadata | None, merged: Merged | None
) -> None:
    """``reference.merge_entries`` by the operators of a module, one after the other."""
    if metadata is None or isinstance(merged, Zip):
        found = operators.gather_metadata(units)
        if metadata is None:
            metadata = _taken(found, kept)
        if isinstance(merged, Zip):
            merged, metadata = _weighed(merged, found, kept, metadata)
    if isinstance(merged, Sums):
        merged = _summed(operators, units, merged)
    operators.move_entries(units, destination, kept)
    operators.write_metadata(units, destination, *metadata)
    if merged is not None and (merged.keys is not None or merged.values is not None):
        operators.write_rows(units, destination, merged.places, merged.keys, merged.values)


def _taken(found: Metadata, kept: Tensor) -> Metadata:
    """Metadata of the entries at ``kept``, those of an empty slot where negative."""
    empty = kept < 0
    log_votes, scores, aux, positions = (plane.gather(1, kept.clamp(min=0)) for plane in found)
    return (
        log_votes.masked_fill(empty, -torch.inf),
        scores.masked_fill(empty, 0.0),
        aux.masked_fill(empty, 0.0),
        positions.masked_fill(empty, -1),
    )


def _summed(operators: Any, units: Units, sums: Sums) -> Rows:
    def plane(name: str, weights: Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        given = operators.gather_rows(units, name, sums.members)
        given *= weights.masked_fill(sums.members < 0, 0.0).unsqueeze(-1)
        total = given.new_zeros(*sums.places.shape, given.shape[2])
        index = sums.rows.masked_fill(sums.members < 0, 0)
        return total.scatter_add_(1, index.unsqueeze(-1).expand_as(given), given)

    return Rows(sums.places, plane("keys", sums.key_weights), plane("values", sums.value_weights))


def _weighed(zipped: Zip, found: Metadata, kept: Tensor, metadata: Metadata) -> tuple[Sums, Metadata]:
    joins = zipped.members >= 0
    member, rows = zipped.members.clamp(min=0), zipped.rows.masked_fill(~joins, 0)
    shape = zipped.places.shape
    exists = zipped.places >= 0
    carrier = kept.gather(1, zipped.places.clamp(min=0)).clamp(min=0)
    weights = zipped.importance.gather(1, member).masked_fill(~joins, -torch.inf)
    votes = found[0].gather(1, member).masked_fill(~joins, -torch.inf)

    def log_sum_exp(logits: Tensor) -> Tensor:
        top = logits.new_full(shape, -torch.inf).scatter_reduce(1, rows, logits, "amax")
        safe = torch.where(top == -torch.inf, 0.0, top)
        sums = logits.new_zeros(shape).scatter_add(1, rows, torch.exp(logits - safe.gather(1, rows)))
        return safe + sums.log()

    log_total, log_votes = log_sum_exp(weights), log_sum_exp(votes)
    share = torch.exp(weights - log_total.gather(1, rows)).masked_fill(~joins, 0.0)
    scores = (weights - votes).masked_fill(~joins, 0.0)
    mean = share.new_zeros(shape).scatter_add(1, rows, share * scores)  # L_bar
    level = log_total - log_votes  # L_r
    factor = level / mean
    scales = _scales(zipped.mode, factor)
    log_score = zipped.importance.gather(1, carrier) - found[0].gather(1, carrier)
    own = found[3].gather(1, carrier)
    joining = found[3].gather(1, member).masked_fill(~joins, -1)
    newest = own.scatter_reduce(1, rows, joining, "amax")
    newest = torch.where(zipped.protected.gather(1, carrier), own, newest)
    new_votes, new_scores, aux, positions = (plane.clone() for plane in metadata)
    row = exists.nonzero(as_tuple=True)
    place = row[0], zipped.places[row]
    new_votes[place] = torch.where(scales, log_votes, log_total - mean)[row]
    new_scores[place] += (torch.where(scales, level, mean) - log_score)[row]
    positions[place] = newest[row]
    scaled = share * torch.where(scales, factor, 1.0).gather(1, rows)
    sums = Sums(zipped.places, zipped.members, zipped.rows, scaled, share)
    return sums, (new_votes, new_scores, aux, positions)


def _scales(mode: ZipMode, factor: Tensor) -> Tensor:
    if mode == "votes":
        return torch.zeros_like(factor, dtype=torch.bool)
    if mode == "scale":
        return (factor > 0.0) & (factor <= MAX_SCALE)
    return (factor - 1.0).abs() <= AUTO_TOLERANCE
