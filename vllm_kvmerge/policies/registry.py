"""The parts and presets that a request can name."""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vllm_kvmerge.policies.base import Allocator, Merger, Part, Selector, Tracker

DecodeMode = Literal["bounded", "grow"]
P = TypeVar("P", bound=type[Part])

TRACKERS: dict[str, type[Tracker]] = {}
SELECTORS: dict[str, type[Selector]] = {}
MERGERS: dict[str, type[Merger]] = {}
ALLOCATORS: dict[str, type[Allocator]] = {}

_KINDS: tuple[tuple[type[Part], dict[str, Any]], ...] = (
    (Tracker, TRACKERS),
    (Selector, SELECTORS),
    (Merger, MERGERS),
    (Allocator, ALLOCATORS),
)


def register(part: P) -> P:
    """Class decorator: makes a part known under its ``name``."""
    for base, parts in _KINDS:
        if issubclass(part, base):
            if part.name in parts:
                raise ValueError(f"{base.__name__.lower()} {part.name!r} is registered already")
            parts[part.name] = part  # type: ignore[assignment]
            return part
    raise TypeError(f"{part.__name__} is neither a Tracker, a Selector, a Merger nor an Allocator")


@dataclass(frozen=True)
class Preset:
    """A paper's method as a combination of parts, each by its registered name.

    decode: ``bounded`` compresses again whenever the live entries exceed the budget by the interval; ``grow``
    compresses once, at the end of the prompt, and keeps every generated token.
    defaults: hyper-parameters that differ from the parts' own defaults.
    """

    name: str
    source: str
    tracker: str
    selector: str
    merger: str
    allocator: str = "uniform"
    decode: DecodeMode = "bounded"
    defaults: dict[str, Any] = field(default_factory=dict)


PRESETS: dict[str, Preset] = {}


def register_preset(preset: Preset) -> Preset:
    if preset.name in PRESETS or preset.name == "full":
        raise ValueError(f"policy {preset.name!r} is registered already")
    PRESETS[preset.name] = preset
    return preset
