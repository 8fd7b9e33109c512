"""The generated page of the documentation: ``python -m tests.reference`` writes docs/reference.md anew, from code."""

import json
from pathlib import Path
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from vllm_kvmerge.engine import metrics
from vllm_kvmerge.policies import PARTS
from vllm_kvmerge.policies.base import MAX_TOKENS
from vllm_kvmerge.policies.fields import CommonFields
from vllm_kvmerge.request.catalogue import describe_policies, type_text

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

NOTE = f"""# Reference

Generated from the code by `python -m tests.reference`; [the request field](request-field.md) explains the fields.
Integers without an upper bound are limited to {MAX_TOKENS}.
"""

METRICS = """## Metrics

Labels are `policy` and `engine` unless listed. A server adds `vllm:kvmerge_metrics_write_errors`, values that could not
be written to disk. [Which to watch](operations.md#metrics).
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def kind_of(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """The values that a field's JSON schema allows, without the largest number of tokens."""
    if "$ref" in field:
        field = {"type": "object", **definitions[field["$ref"].rpartition("/")[2]]}
    if field.get("type") == "object" and "properties" in field:
        return f"object ({', '.join(map(code, field['properties']))})"
    if "anyOf" in field:
        return " or ".join(kind_of(one, definitions) for one in field["anyOf"])
    return type_text({key: value for key, value in field.items() if (key, value) != ("maximum", MAX_TOKENS)})


def shown(value: Any) -> str:
    return "none" if value is None else code(json.dumps(value))


def common_fields() -> str:
    schema = CommonFields.model_json_schema()
    rows = [
        [code(name), kind_of(field, schema.get("$defs", {})), shown(field.get("default")), field.get("description", "")]
        for name, field in schema["properties"].items()
    ]
    return "## Fields of every policy\n\n" + table(["field", "type", "default", "meaning"], rows)


def policies(found: dict[str, Any]) -> str:
    """Each with its parts, and the defaults in which it differs from these and from other policies."""
    common = CommonFields.model_json_schema()["properties"]
    rows = []
    for one in found["presets"]:
        usual = {name: field["default"] for name, field in common.items() if "default" in field}
        for kind, part in one["parts"].items():
            usual |= {name: field.default for name, field in PARTS[kind][part].model_fields.items()}
        own = {name: value for name, value in one["defaults"].items() if value != usual[name]}
        parts = [code(one["parts"][kind]) if one["parts"] else "" for kind in found["parts"]]
        decode = code(one["decode"]) if one["decode"] else ""
        defaults = ", ".join(code(f"{name}: {json.dumps(value)}") for name, value in own.items())
        rows.append([code(one["name"]), *parts, decode, defaults])
    return "## Policies\n\n" + table(["policy", *found["parts"], "decode", "own defaults"], rows)


def parts(kind: str, described: list[dict[str, Any]]) -> str:
    text = f"## {kind.capitalize()}s\n"
    for part in described:
        text += f"\n### {kind} {part['name']}\n\n{part['summary']}\n" + "\n" * bool(part["fields"])
        for one in part["fields"]:
            values = kind_of(one["schema"], one["schema"].get("$defs", {}))
            text += f"- {code(one['name'])} = {shown(one['default'])}, {values}. {one['description']}\n"
    return text


def all_metrics() -> str:
    """Those that the engine defines, in the order of the code."""
    values = [one for value in vars(metrics).values() for one in (value if isinstance(value, list) else [value])]
    rows = []
    for metric in values:
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            name = family.name + "_total" * (family.type == "counter")
            labels = [] if list(metric._labelnames) == metrics.LABELS else metric._labelnames
            rows.append([code(name), family.type, ", ".join(map(code, labels)), family.documentation])
    return METRICS + "\n" + table(["name", "type", "labels", "meaning"], rows)


def page() -> str:
    found = describe_policies()
    by_kind = [parts(kind, described) for kind, described in found["parts"].items()]
    return "\n".join([NOTE, common_fields(), policies(found), *by_kind, all_metrics()])


if __name__ == "__main__":
    PAGE.write_text(page())
