"""``vllm-kvmerge policies``: lists the presets and the parts that they are made of."""

import json
from typing import TYPE_CHECKING, Any

from vllm_kvmerge.cli.common import CommandParser, table_of
from vllm_kvmerge.errors import CommandError

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_kvmerge.request.recommended import Case


def run(argv: list[str]) -> int:
    """Prints a table of the presets, or all about those presets and parts that are named, or with ``--json`` the
    catalogue that servers return at ``/kvmerge/policies``."""
    from rich.console import Console

    parser = CommandParser(prog="vllm-kvmerge policies")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a policy or a part: its parameters; default: a table")
    parser.add_argument(
        "--recommend", action="store_true", help="what a request that names no policy gets, and the figures that decide"
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON, with the schema of the field")
    arguments = parser.parse_args(argv)
    as_json = arguments.json
    if arguments.recommend:
        return recommend(as_json)
    from vllm_kvmerge.request.catalogue import describe_policies

    catalogue = describe_policies()
    if as_json:
        print(json.dumps(catalogue, indent=2))
        return 0
    tables = [table for name in arguments.names for table in _about(name, catalogue)] or [_overview(catalogue)]
    # Square brackets in texts are not markup.
    Console(markup=False).print(*tables, sep="\n")
    return 0


def _overview(catalogue: dict[str, Any]) -> "Table":
    """One line for each preset, in a terminal of 80 columns."""
    table = table_of("Policies", "policy", "source", lines=False)
    for preset in catalogue["presets"]:
        table.add_row(preset["name"], preset["source"])
    parts = "\n".join(
        f"{kind}: {', '.join(part['name'] for part in catalogue['parts'][kind])}" for kind in catalogue["parts"]
    )
    known, later = (catalogue["recommended"][case] for case in ("known", "later"))
    table.caption = (
        f"A request that names no policy gets {known}, or {later} where its question comes later (policies "
        "--recommend). A policy is made of four parts, and a request may name others. vllm-kvmerge policies NAME, of a "
        f"policy or a part, prints its parameters.\n{parts}"
    )
    table.caption_justify = "left"
    return table


def _about(name: str, catalogue: dict[str, Any]) -> "list[Table]":
    """The preset and the parts of that name. Raises CommandError if there are none."""
    tables = []
    for preset in catalogue["presets"]:
        if preset["name"] == name:
            title = f"Policy {name}: {preset['source']}"
            tables.append(table := table_of(title, "parameter", "value", lines=False))
            for field, value in (preset["parts"] | {"decode": preset["decode"], **preset["defaults"]}).items():
                table.add_row(field, json.dumps(value))
    for kind, parts in catalogue["parts"].items():
        for part in parts:
            if part["name"] == name:
                titles = "parameter", "default", "type", "what it does"
                tables.append(table := table_of(f"{kind.capitalize()} {name}: {part['source']}", *titles))
                table.caption = part["summary"]
                for field in part["fields"]:
                    table.add_row(field["name"], json.dumps(field["default"]), field["type"], field["description"])
    if not tables:
        known = {one["name"] for ones in (catalogue["presets"], *catalogue["parts"].values()) for one in ones}
        raise CommandError(f"no policy or part {name!r}; allowed: {', '.join(sorted(known))}")
    return tables


WIDTH_OF_INTERVALS = 110
"""Columns of a terminal from which the table shows intervals, too."""

CASES: "dict[Case, str]" = {
    "known": "The question is known",
    "later": "The question comes later (context_tokens, context_messages)",
}


def recommend(as_json: bool) -> int:
    """Prints the table that decides, best policies first."""
    from rich.console import Console

    from vllm_kvmerge.request.recommended import TABLE, recommendations

    if as_json:
        print(TABLE.read_text(), end="")
        return 0
    found, console = recommendations(), Console(markup=False)
    # In a narrow terminal figures would be broken into pieces.
    form = "{:.0f} ({:.0f}-{:.0f})" if console.width >= WIDTH_OF_INTERVALS else "{:.0f}"
    tables = []
    for case, title in CASES.items():
        rows = found.cases[case]
        best, even = found.best(case), found.best(case, even=True)
        title += f": {best.label}" + (f"; with allocator uniform {even.label}" if best != even else "")
        budgets = sorted(rows[0].score, key=float, reverse=True)
        table = table_of(title, "policy", *budgets, "held")
        table.columns[0].no_wrap = False
        for column in table.columns[1:]:
            column.no_wrap = True
        for row in rows:
            scores = (
                form.format(*(100 * x for x in row.score[budget])) if budget in row.score else "" for budget in budgets
            )
            table.add_row(row.label, *scores, f"{row.held:.2f}")
        tables.append(table)
    tables[-1].caption = (
        f"Scores of {found.model}, % of the full cache's, by budget, with 95% intervals where there is room: means of "
        f"{', '.join(found.tasks)}, {found.samples} prompts each. Held: bytes of the cache at {found.budget}, of the "
        "full one's. Other models rank otherwise: docs/leaderboard.md says how to measure yours."
    )
    console.print(*tables, sep="\n")
    return 0
