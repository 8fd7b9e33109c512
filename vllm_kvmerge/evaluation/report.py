"""The reports of a run: summary.md, plots, and a self-contained report.html."""

import html
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import yaml

from vllm_kvmerge import __version__
from vllm_kvmerge.evaluation.comparison import claims_table, comparison_table
from vllm_kvmerge.evaluation.config import EvalConfig
from vllm_kvmerge.evaluation.plots import as_file, draw_plots
from vllm_kvmerge.evaluation.results import RunFolder
from vllm_kvmerge.evaluation.runner import Run
from vllm_kvmerge.evaluation.summary import (
    Table,
    TaskSummary,
    details_table,
    incomplete_cells,
    markdown,
    memory_table,
    score_table,
    summarize,
)

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0 0.3em; font-variant-numeric: tabular-nums; display: block;
        overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: 0.25em 0.6em; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead { background: #f2f2f2; }
p.note { color: #555; margin-top: 0; }
p.warning { background: #fdecea; border-left: 4px solid #c62828; padding: 0.5em 1em; }
svg { max-width: 100%; height: auto; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; }
"""


def write_report(config: EvalConfig, folder: RunFolder, run: Run) -> list[Table]:
    """Writes the files into the run's folder; returns the tables to print."""
    tasks = summarize(config, folder.results, run)
    missing = incomplete_cells(config, folder.results, run)
    makers: list[Callable[[EvalConfig, TaskSummary], Table]] = [score_table, memory_table]
    if config.compare:
        makers.insert(1, partial(comparison_table, folder.results))
    tables = [make(config, task) for task in tasks if task.cells for make in makers]
    if config.compare:
        tables.append(claims_table(folder.results, config, tasks))
    details = details_table(tasks)
    plots = draw_plots(config, tasks)
    (folder.path / "plots").mkdir(exist_ok=True)
    for name, svg in plots.items():
        (folder.path / "plots" / f"{name}.svg").write_text(as_file(svg))
    facts = _facts(config, folder)
    (folder.path / "summary.md").write_text(_markdown(facts, missing, [*tables, details], list(plots)))
    (folder.path / "report.html").write_text(
        _page(facts, missing, tables, details, plots, yaml.safe_dump(dict(config.identity()), sort_keys=False))
    )
    return tables


def _facts(config: EvalConfig, folder: RunFolder) -> dict[str, str]:
    """Model, seed and versions that the figures belong to."""
    facts = {"model": config.model or "demo", "seed": str(config.seed)}
    if config.endpoint is not None:
        facts = {"server": config.endpoint.url, "model": config.model or "the server's", "seed": str(config.seed)}
    for number, versions in enumerate(folder.state["versions"]):
        also = "" if number == 0 else f" (from restart {number} on)"
        facts[f"versions{also}"] = _versions(versions)
    facts["report by"] = f"vllm-kvmerge {__version__}"
    return facts


def _versions(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def _warning(missing: list[str]) -> str:
    return f"Incomplete: {len(missing)} cells lack samples. Run the same command again to go on."


def _markdown(facts: Mapping[str, str], missing: list[str], tables: list[Table], plots: list[str]) -> str:
    lines = ["# Evaluation", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    if missing:
        lines += [f"**{_warning(missing)}**", "", *(f"- {text}" for text in missing), ""]
    lines += [markdown(table) for table in tables]
    lines += [f"![{name}](plots/{name}.svg)" for name in plots]
    return "\n".join(lines) + "\n"


def _page(
    facts: Mapping[str, str],
    missing: list[str],
    tables: list[Table],
    details: Table,
    plots: Mapping[str, str],
    configuration: str,
) -> str:
    text = html.escape
    body = ["<h1>Evaluation of KV cache compression</h1>"]
    if missing:
        cells = "".join(f"<li>{text(cell)}</li>" for cell in missing)
        body.append(f'<p class="warning">{text(_warning(missing))}</p><ul>{cells}</ul>')
    body += [_table(table) for table in tables]
    body += ["<h2>Plots</h2>", *plots.values(), _table(details), "<h2>Run</h2>", "<ul>"]
    body += [f"<li>{text(name)}: {text(value)}</li>" for name, value in facts.items()]
    body += ["</ul>", f"<pre>{text(configuration)}</pre>"]
    head = f'<meta charset="utf-8"><title>Evaluation</title><style>{STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"


def _table(table: Table) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = "".join(row(cells, "td") for cells in table.rows)
    return (
        f"<h2>{html.escape(table.title)}</h2><table><thead>{row(table.header, 'th')}</thead><tbody>{rows}</tbody>"
        f'</table><p class="note">{html.escape(table.notes)}</p>'
    )
