"""Choice of a policy's parts: a preset's, or those that a request names instead."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from pydantic import ValidationError

from vllm_kvmerge.policies.base import Part
from vllm_kvmerge.policies.composition import CompressionPolicy
from vllm_kvmerge.policies.registry import PARTS, TRACKERS, Preset


class PartNames(NamedTuple):
    """One part of each kind."""

    tracker: str
    selector: str
    merger: str
    allocator: str

    @classmethod
    def of(cls, preset: Preset) -> Self:
        return cls(preset.tracker, preset.selector, preset.merger, preset.allocator)

    @property
    def classes(self) -> dict[str, type[Part]]:
        """The parts by kind."""
        return {kind: PARTS[kind][name] for kind, name in self._asdict().items()}

    def misfit(self) -> str | None:
        """Says why these parts cannot work together; None if they can."""
        try:
            # Fitting is a matter of classes alone: no hyper-parameter is needed.
            CompressionPolicy(**{kind: part.model_construct() for kind, part in self.classes.items()})  # type: ignore[arg-type]
        except ValidationError as error:
            return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        return _ambiguous_field(self.classes)


def choose(preset: Preset, overrides: Mapping[str, str]) -> PartNames:
    """The preset's parts, with ``overrides`` (kind to name) in their place.

    If these name no tracker and the preset's does not suit the other parts, takes the first registered one that does.

    Raises:
        ValueError: the parts cannot work together; the message says why.
    """
    asked = PartNames.of(preset)._replace(**overrides)
    trackers: Iterable[str] = [asked.tracker] if "tracker" in overrides else dict.fromkeys([asked.tracker, *TRACKERS])
    misfits = []
    for tracker in trackers:
        names = asked._replace(tracker=tracker)
        if (misfit := names.misfit()) is None:
            return names
        misfits.append(misfit)
    # The misfit of most trackers says more than that of one.
    raise ValueError(max(misfits, key=misfits.count))


def replaceable(preset: Preset, overrides: Mapping[str, str]) -> tuple[str, str]:
    """A kind that ``overrides`` name and the parts, in words, with which the rest would fit; empty: there is none."""

    def fits(kind: str, name: str) -> bool:
        try:
            choose(preset, {**overrides, kind: name})
        except ValueError:
            return False
        return True

    for kind in ("merger", "selector", "allocator", "tracker"):
        fitting = [name for name in PARTS[kind] if kind in overrides and fits(kind, name)]
        if fitting:
            return kind, ", ".join(sorted(fitting))
    return "", ""


def _ambiguous_field(parts: Mapping[str, type[Part]]) -> str | None:
    """Says which field means different things to two parts; they may share one, such as a number of sinks."""
    owners: dict[str, str] = {}
    for kind, part in parts.items():
        for field, info in part.model_fields.items():
            owner = owners.setdefault(field, kind)
            if repr(info) != repr(parts[owner].model_fields[field]):
                return (
                    f"{owner} {parts[owner].name!r} and {kind} {part.name!r} both have a parameter {field!r}, "
                    "which means something else to each"
                )
    return None
