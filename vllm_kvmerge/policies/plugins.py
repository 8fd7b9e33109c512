"""Parts and presets of other packages, found through their entry points."""

import logging
from functools import cache
from importlib import metadata

from pydantic import ValidationError

from vllm_kvmerge.policies.choice import PartNames
from vllm_kvmerge.policies.registry import PARTS, PRESETS, Preset

logger = logging.getLogger(__name__)

GROUP = "vllm_kvmerge.policies"
"""Entry point group; each entry point names a module that registers parts and presets on import."""


@cache
def load_plugins() -> None:
    """Loads every entry point of the group, once; call it before looking up names in ``PARTS`` or ``PRESETS``.

    A plugin's error is logged and does not keep the others out. Importing the package does not load plugins, because
    they import it themselves.
    """
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        known = set(PRESETS)
        try:
            entry.load()
        except Exception as exception:
            message = f"{type(exception).__name__}: {' '.join(str(exception).split())}"
            logger.error("policy plugin %r (%s) failed: %s", entry.name, entry.value, message)
        for name in [name for name in PRESETS if name not in known]:
            if error := _preset_error(PRESETS[name]):
                del PRESETS[name]
                logger.error("policy %r of plugin %r (%s) is left out: %s", name, entry.name, entry.value, error)


def _preset_error(preset: Preset) -> str | None:
    """Says why no request could use the preset; None if one can."""
    names = PartNames.of(preset)
    for kind, name in names._asdict().items():
        if name not in PARTS[kind]:
            return f"there is no {kind} {name!r}; allowed: {', '.join(sorted(PARTS[kind]))}"
    if misfit := names.misfit():
        return misfit
    parameters: set[str] = set()
    for part in names.classes.values():
        parameters |= set(part.model_fields)
        try:
            part.model_validate({name: preset.defaults[name] for name in part.model_fields if name in preset.defaults})
        except ValidationError as error:
            first = error.errors()[0]
            return f"default of {'.'.join(map(str, first['loc']))}: {first['msg']}"
    unknown = sorted(set(preset.defaults) - parameters)
    return f"its parts have no parameter {', '.join(unknown)}" if unknown else None
