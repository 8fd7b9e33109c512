"""Generated pages of the documentation: ``python -m tests.reference`` writes docs/reference/ anew, from code."""

import json
from pathlib import Path
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from vllm_kvmerge.engine import metrics
from vllm_kvmerge.policies.fields import CommonFields
from vllm_kvmerge.request.catalogue import describe_policies, type_text

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "This page is written by `python -m tests.reference`, from"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def request_page() -> str:
    """Fields, policies and parts, from the JSON schema that servers check requests by."""
    found = describe_policies()
    common = CommonFields.model_json_schema()
    definitions = common.get("$defs", {})

    def kind_of(field: dict[str, Any]) -> str:
        if "$ref" in field:
            field = {"type": "object", **definitions[field["$ref"].rpartition("/")[2]]}
        if field.get("type") == "object" and "properties" in field:
            return f"object ({', '.join(map(code, field['properties']))})"
        return " or ".join(map(kind_of, field["anyOf"])) if "anyOf" in field else type_text(field)

    def shown(value: Any) -> str:
        return "none" if value is None else code(json.dumps(value))

    text = f"""# Request reference

{NOTE} the JSON schema of `kv_compression`; a server offers it at
`GET /kvmerge/policies`. [The request field](../request-field.md) explains it.

## Fields of every policy

A policy may have other defaults, listed [below](#policies).

"""
    head = ["field", "type", "default", "meaning"]
    properties = common["properties"].items()
    fields = [
        [code(name), kind_of(field), shown(field.get("default")), field.get("description", "")]
        for name, field in properties
    ]
    kinds = list(found["parts"])
    policies = []
    for one in found["presets"]:
        defaults = [f"{name}: {json.dumps(value)}" for name, value in one["defaults"].items() if value is not None]
        parts = [code(one["parts"][kind]) if one["parts"] else "" for kind in kinds]
        decode = code(one["decode"]) if one["decode"] else ""
        policies.append([code(one["name"]), *parts, decode, ", ".join(map(code, defaults))])
    text += table(head, fields)
    text += "\n## Policies\n\n" + table(["policy", *kinds, "decode", "defaults"], policies)
    for kind in kinds:
        text += f"\n## {kind.capitalize()}s\n"
        for part in found["parts"][kind]:
            text += f"\n### {kind} {part['name']}\n\n{part['summary']}\n"
            if part["fields"]:
                rows = [
                    [code(one["name"]), one["type"], shown(one["default"]), one["description"]]
                    for one in part["fields"]
                ]
                text += "\n" + table(head, rows)
    return text


def metrics_page() -> str:
    """The metrics that the engine defines."""
    values = [one for value in vars(metrics).values() for one in (value if isinstance(value, list) else [value])]
    rows = []
    for metric in values:
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            name = family.name + "_total" * (family.type == "counter")
            labels = ", ".join(code(label) for label in metric._labelnames)
            rows.append([code(name), family.type, labels, family.documentation])
    return f"""# Metrics reference

{NOTE} the code that defines the metrics. [Operations](../operations.md#metrics) has
alerts, and `vllm:kvmerge_metrics_write_errors`, which a server has beside these.

{table(["name", "type", "labels", "meaning"], sorted(rows))}"""


PAGES = {"request.md": request_page, "metrics.md": metrics_page}


def main() -> None:
    for name, write in PAGES.items():
        (FOLDER / name).write_text(write())


if __name__ == "__main__":
    main()
