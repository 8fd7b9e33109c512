"""Catalogue of policies, parts, and their parameters."""

import inspect
from collections.abc import Collection
from typing import Any

from vllm_kvmerge.policies import PARTS, PRESETS
from vllm_kvmerge.policies.base import Part
from vllm_kvmerge.policies.choice import PartNames
from vllm_kvmerge.request.recommended import with_policy
from vllm_kvmerge.request.schema import FULL, request_schema


def describe_policies(policies: Collection[str] | None = None, is_calibrated: bool = False) -> dict[str, Any]:
    """Everything as JSON: ``presets``, ``parts`` by kind, the ``schema`` of ``kv_compression``, and the policies
    ``recommended`` where the question is ``known``, and where it comes ``later``, which requests get that name none.

    policies: those to describe, besides ``full``; None: all. is_calibrated: whether it is known what the model's heads
    need.

    A preset's ``defaults`` are those of all its parameters, budget and interval included; a part's ``fields`` have the
    defaults that hold unless a preset says otherwise, the ``type`` in words, and the JSON ``schema``.
    """
    schema = request_schema(policies)
    references = schema["discriminator"]["mapping"]
    presets: list[dict[str, Any]] = [
        {"name": FULL, "source": "vLLM: compresses nothing", "parts": {}, "decode": None, "defaults": {}}
    ]
    for preset in (PRESETS[name] for name in PRESETS if policies is None or name in policies):
        parts = PartNames.of(preset)._asdict()
        fields = schema["$defs"][references[preset.name].rpartition("/")[2]]["properties"]
        defaults = {name: fields[name]["default"] for name in fields if name not in ("policy", "decode", *parts)}
        shown = {"name": preset.name, "source": preset.source, "parts": parts, "decode": preset.decode}
        presets.append(shown | {"defaults": defaults})
    cases: dict[str, dict[str, Any]] = {"known": {}, "later": {"context_tokens": 1}}
    return {
        "presets": presets,
        "parts": {kind: [_describe(part) for part in parts.values()] for kind, parts in PARTS.items()},
        "schema": schema,
        "recommended": {case: with_policy(field, is_calibrated)["policy"] for case, field in cases.items()},
    }


def _describe(part: type[Part]) -> dict[str, Any]:
    """summary: the first paragraph of the docstring in one line, or the part's source if it has none."""
    fields = [
        {
            "name": name,
            "type": type_text(field),
            "default": field["default"],
            "description": field.get("description", ""),
            "schema": {key: value for key, value in field.items() if key not in ("title", "default", "description")},
        }
        for name, field in part.model_json_schema().get("properties", {}).items()
    ]
    summary = inspect.cleandoc(part.__doc__ or part.source).partition("\n\n")[0].replace("``", "")
    return {"name": part.name, "source": part.source, "summary": " ".join(summary.split()), "fields": fields}


def type_text(field: dict[str, Any]) -> str:
    """The values that a field's JSON schema allows, in words: ``integer >= 1 or 'all'``."""
    if "anyOf" in field:
        return " or ".join(type_text(choice) for choice in field["anyOf"])
    if "const" in field or "enum" in field:
        return " or ".join(repr(value) for value in field.get("enum", [field.get("const")]))
    if "properties" in field:
        return f"object ({', '.join(field['properties'])})"
    if field.get("type") == "array":
        return f"list of {type_text(field['items'])}"
    bounds = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
    # Whole numbers in full, others as short as they are exact.
    limits = [f"{sign} {field[key]:.8g}" for sign, key in bounds.items() if key in field]
    return " ".join([field.get("type", "object"), ", ".join(limits)]).strip()
