"""``vllm-kvmerge policies``: lists the presets and the parts that they are made of."""

import json

from vllm_kvmerge.cli.common import CommandParser, table_of


def run(argv: list[str]) -> int:
    """Prints tables, or with ``--json`` the catalogue that servers return at ``/kvmerge/policies``."""
    from rich.console import Console

    parser = CommandParser(prog="vllm-kvmerge policies")
    parser.add_argument("--json", action="store_true", help="everything as JSON, with the schema of the field")
    as_json = parser.parse_args(argv).json
    from vllm_kvmerge.request.catalogue import describe_policies

    catalogue = describe_policies()
    if as_json:
        print(json.dumps(catalogue, indent=2))
        return 0
    presets = table_of("Policies", "policy", "parts", "parameters", "source")
    presets.caption = "A request may name other parts, and gives the parameters of those that it ends up with."
    for preset in catalogue["presets"]:
        parts = [f"{kind} {name}" for kind, name in preset["parts"].items()]
        values = {"decode": preset["decode"], **preset["defaults"]} if parts else {}
        presets.add_row(
            preset["name"],
            "\n".join(parts),
            "\n".join(f"{name}={json.dumps(value)}" for name, value in values.items()),
            preset["source"],
        )
    tables = [presets]
    for kind, described in catalogue["parts"].items():
        table = table_of(f"{kind.capitalize()}s", kind, "what it does", "parameters", "source")
        for part in described:
            fields = (
                f"{field['name']}={json.dumps(field['default'])} ({field['type']}): {field['description']}"
                for field in part["fields"]
            )
            table.add_row(part["name"], part["summary"], "\n".join(fields), part["source"])
        tables.append(table)
    # Square brackets in texts are not markup.
    Console(markup=False).print(*tables, sep="\n")
    return 0
