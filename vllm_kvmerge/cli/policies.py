"""``vllm-kvmerge policies``: lists the presets and the parts that they are made of."""

import json

from vllm_kvmerge.cli.common import CommandParser, table_of


def run(argv: list[str]) -> int:
    """Prints tables, or with ``--json`` the catalogue that servers return at ``/kvmerge/policies``."""
    from rich.console import Console

    parser = CommandParser(prog="vllm-kvmerge policies")
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


CASES = {
    "unseen, uneven": "the question comes later (context_tokens, context_messages)",
    "unseen, even": "the question comes later, heads have even budgets (allocator: uniform)",
    "seen, uneven": "the question is known",
    "seen, even": "the question is known, heads have even budgets (allocator: uniform)",
}


def recommend(as_json: bool) -> int:
    """Prints the table that decides, best policies first."""
    from rich.console import Console

    from vllm_kvmerge.request.recommended import TABLE, recommendations

    if as_json:
        print(TABLE.read_text(), end="")
        return 0
    found = recommendations()
    tables = []
    for case, rows in found.cases.items():
        best, budgets = found.best(case), [budget for budget in rows[0].score if float(budget) < 1]
        table = table_of(f"{CASES[case].capitalize()}: {best.label}", "policy", "overall", *budgets, "text", "held")
        for row in rows:
            scores = ("{:.0f} ({:.0f}-{:.0f})".format(*(100 * x for x in row.score[budget])) for budget in budgets)
            label = f"{row.label}, with {row.needs}" if row.needs else row.label
            at = str(found.budget)
            table.add_row(label, f"{row.overall:.3f}", *scores, f"{row.text[at]:.2f}", f"{row.held[at]:.2f}")
        tables.append(table)
    tables[-1].caption = (
        f"Answers that are right on the demo model, %, with 95% interval, {found.samples} prompts of each task. Text: "
        f"perplexity with the full cache over that with the policy, at {found.budget}. Overall: mean of three tasks "
        f"and text at {found.budget}; the best that every server can run is taken. Held: bytes of the cache, of the "
        "full one's. Measure your own model: docs/leaderboard.md."
    )
    Console(markup=False).print(*tables, sep="\n")
    return 0
