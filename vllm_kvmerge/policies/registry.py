"""The parts and presets that a request can name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import isabstract
from typing import Any, TypeVar

from vllm_kvmerge.policies.base import Allocator, Merger, Part, ScoreMode, Selector, Tracker
from vllm_kvmerge.policies.fields import CommonFields, DecodeMode

P = TypeVar("P", bound=type[Part])

TRACKERS: dict[str, type[Tracker]] = {}
SELECTORS: dict[str, type[Selector]] = {}
MERGERS: dict[str, type[Merger]] = {}
ALLOCATORS: dict[str, type[Allocator]] = {}

_KINDS: tuple[tuple[type[Part], dict[str, Any]], ...] = (
    (Tracker, TRACKERS), (Selector, SELECTORS), (Merger, MERGERS), (Allocator, ALLOCATORS),
)  # fmt: skip

PARTS: Mapping[str, Mapping[str, type[Part]]] = {base.__name__.lower(): parts for base, parts in _KINDS}
"""The registered parts of each kind; a request names them in fields of these names."""


def register(part: P) -> P:
    """Class decorator: registers a part under its ``name``.

    Raises:
        TypeError: the class is not a complete part.
        ValueError: its name is taken, or that of a field.
    """
    for base, parts in _KINDS:
        if issubclass(part, base):
            _check_complete(part)
            if part.name in parts:
                raise ValueError(f"{base.__name__.lower()} {part.name!r} is registered already")
            parts[part.name] = part  # type: ignore[assignment]
            return part
    raise TypeError(f"{part.__name__} is neither a Tracker, a Selector, a Merger nor an Allocator")


def _check_complete(part: type[Part]) -> None:
    """Refuses mistakes that would otherwise surface in somebody's request."""
    missing = {name for name in part.__class_vars__ if not hasattr(part, name)}
    if isabstract(part):
        missing |= set(part.__abstractmethods__)
    if missing:
        raise TypeError(f"{part.__name__} does not define {', '.join(sorted(missing))}")
    for name, info in part.model_fields.items():
        if name == "policy" or name in CommonFields.model_fields or name in PARTS:
            raise ValueError(f"{part.__name__}.{name}: every request has a field of that name")
        if info.is_required():
            raise TypeError(f"{part.__name__}.{name} has no default")
    schema = part.model_json_schema()  # raises for a field that JSON cannot give
    for name, field_schema in schema.get("properties", {}).items():
        if not _is_bounded(field_schema, schema.get("$defs", {})):
            raise TypeError(
                f"{part.__name__}.{name} allows numbers without a finite lower and upper bound; give it both, such as "
                "Field(ge=0, le=1)"
            )
    if issubclass(part, Tracker) and part.mode != ScoreMode.NONE and part().prompt_window == 0:
        raise TypeError(
            f"{part.__name__}.prompt_window is 0, so that nothing of a prompt would be scored; with mode "
            f"'{part.mode}' it must be more, or 'all'"
        )


def _is_bounded(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> bool:
    """True if every number that a JSON schema allows, at any depth, has a lower and an upper bound."""
    if isinstance(schema, list):
        return all(_is_bounded(item, definitions, within) for item in schema)
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if schema.get("type") in ("integer", "number"):
        lower, upper = ([schema[key] for key in keys if key in schema] for keys in (_LOWER, _UPPER))
        return any(map(math.isfinite, lower)) and any(map(math.isfinite, upper))
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name and name not in within and not _is_bounded(definitions[name], definitions, (*within, name)):
        return False
    return all(_is_bounded(value, definitions, within) for key, value in schema.items() if key not in _NOT_SCHEMAS)


_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NOT_SCHEMAS = ("default", "examples")


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
