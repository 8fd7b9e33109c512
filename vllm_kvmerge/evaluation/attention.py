"""Error of attention's output under compression: ``vllm-kvmerge eval attention``.

Queries, keys and values of a model reading documents go through the paged cache layer by layer, compressed at the end
of the prompt and, where the policy is bounded, again every ``--interval`` tokens, as in serving. Printed is
||o' - o|| / ||o|| over the outputs of all heads, o being full attention's, averaged over the next queries, layers and
documents; and the same where what does not stay is dropped instead of merged.

A second table says how many entries full attention of these queries goes to, layer by layer.

With ``--output DIR`` the error of every layer, head and step, the attention that falls on what is kept, votes and maps
of who was merged into whom are written there, as JSON and plots: see docs/evaluation-attention.md.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_kvmerge import demo
from vllm_kvmerge.evaluation.instrument import (
    END,
    MOST,
    PROMPT_END,
    Findings,
    attention_spread,
    full_probabilities,
    measure,
)
from vllm_kvmerge.evaluation.options import (
    add_document_options,
    add_field_option,
    config_of,
    draw_documents,
    parser_of,
    print_table,
    seed_of,
)
from vllm_kvmerge.evaluation.replay import Schedule, TracedSequence, errors_against, full_outputs, output_errors
from vllm_kvmerge.evaluation.trace import (
    LayerTrace,
    knows_demo_task,
    num_layers_of,
    text_documents,
    trace,
    trace_one_by_one,
)
from vllm_kvmerge.policies import PRESETS, TRACKERS
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.request.parameters import CompressionConfig

__all__ = ["LayerTrace", "TracedSequence", "main", "output_errors", "trace"]

MERGED, DROPPED = "merged", "dropped"

Cell = tuple[str, int | float]
"""A policy and a budget."""


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    arguments = parser.parse_args(argv)
    seed = seed_of(arguments)
    documents = _documents(parser, arguments, seed)
    cells = [(policy, budget) for policy in arguments.policies for budget in arguments.budget]
    variants = {cell: _variants(parser, arguments, cell) for cell in cells}
    looked_at = _layers(parser, arguments)
    dtype = getattr(torch, arguments.dtype)
    schedule = Schedule(arguments.prompt, arguments.queries, arguments.interval, dtype)
    if arguments.output is not None:
        _check_output(parser, arguments)

    errors: dict[Cell, dict[str, list[float]]] = {cell: {} for cell in cells}
    findings: dict[Cell, dict[str, Findings]] = {cell: {} for cell in cells}
    spreads: dict[int, list[tuple[float, float]]] = {layer: [] for layer in looked_at}
    traces = trace_one_by_one(arguments.model, documents)
    with _progress("measuring", len(documents) * sum(map(len, variants.values()))) as advance:
        for layers in traces:
            full = full_outputs(layers, schedule)
            for layer in looked_at:
                spreads[layer].append(_spread(layers[layer], schedule))
            for cell in cells:
                for name, config in variants[cell].items():
                    if arguments.output is None:
                        found = errors_against(full, layers, config, schedule)
                        errors[cell].setdefault(name, []).extend(
                            value for layer, value in _by_layer(found, schedule, len(layers)) if layer in looked_at
                        )
                    else:
                        measurement = measure(full, layers, config, schedule, looked_at)
                        findings[cell].setdefault(name, Findings(looked_at)).add(measurement, layers)
                        errors[cell].setdefault(name, []).extend(measurement.layer_error.flatten().tolist())
                    advance()

    title = (
        f"Error of attention's output, merged / dropped: {len(documents)} documents, {arguments.prompt} tokens "
        f"compressed, next {arguments.queries} queries, {arguments.dtype}, seed {seed}"
    )
    if arguments.set:
        title += ", " + ", ".join(arguments.set)
    columns = [f"budget {budget}" for budget in arguments.budget]
    print_table(title, columns, _rows(cells, {cell: _error_cell(errors[cell]) for cell in cells}))
    print_table(
        f"Spread of full attention over {arguments.prompt} to {schedule.queries.stop} entries, mean over query heads",
        ["entropy (nats)", f"entries that hold {MOST:.0%}"],
        {str(layer): _spread_cells(found) for layer, found in spreads.items()},
        first="layer",
    )
    if arguments.output is not None:
        shares = {cell: _share_cell(findings[cell][MERGED]) for cell in cells}
        print_table("Share of full attention on entries kept / represented", columns, _rows(cells, shares))
        written = _write(arguments, seed, len(documents), variants, findings)
        print(f"{written} files in {arguments.output}: begin with summary.md")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, (0.5, 0.3, 0.2, 0.1, 0.05))
    parser.prog = "vllm-kvmerge eval attention"
    trackers = {name: TRACKERS[preset.tracker] for name, preset in PRESETS.items()}
    replayed = [name for name, one in trackers.items() if not (one.repeats_context or one.predicts_scores)]
    parser.set_defaults(policies=sorted(replayed))
    add_document_options(parser, documents=8, questions=5)
    parser.add_argument("--text", type=Path, metavar="FILE", help="read this text instead of the demo task's documents")
    parser.add_argument("--queries", type=_positive, default=64, help="how many queries after it")
    parser.add_argument("--interval", type=_positive, default=16, help="tokens between compressions")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the cache")
    parser.add_argument("--layers", type=int, nargs="+", metavar="L", help="layers to look at (default: all)")
    add_field_option(parser)
    parser.add_argument("--output", type=Path, metavar="DIR", help="write numbers and plots to this folder")
    parser.add_argument("--format", default="svg", choices=["svg", "png"], help="of plots")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _documents(parser: argparse.ArgumentParser, arguments: argparse.Namespace, seed: int) -> list[list[int]]:
    if arguments.model == "demo":
        arguments.model = demo.model_path()
    if not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"no model in {arguments.model}: name a folder with a config.json")
    for name in ("documents", "prompt"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    length = arguments.prompt + arguments.queries
    try:
        if arguments.text is not None:
            return text_documents(arguments.model, arguments.text, arguments.documents, length)
        if not knows_demo_task(arguments.model):
            parser.error("this model cannot read the demo task's documents: give it a --text FILE")
        return draw_documents(arguments, seed, length)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _layers(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[int]:
    num_layers = num_layers_of(arguments.model)
    if arguments.layers is None:
        return list(range(num_layers))
    for layer in arguments.layers:
        if not 0 <= layer < num_layers:
            parser.error(f"--layers {layer}: the model's are 0 to {num_layers - 1}")
    return sorted(set(arguments.layers))


def _variants(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, cell: Cell
) -> dict[str, CompressionConfig]:
    """The policy as it merges and, where it does, what it would be if it did not."""
    policy, budget = cell
    config = config_of(parser, arguments, {"policy": policy, "budget": budget, "interval": arguments.interval})
    if config.refresh is not None:
        parser.error("--set refresh: measured by vllm-kvmerge eval refresh")
    if config.policy.merger.name == DropMerger.name:
        return {MERGED: config}
    dropping = config.policy.model_copy(update={"merger": DropMerger()})
    return {MERGED: config, DROPPED: config.model_copy(update={"policy": dropping})}


def _check_output(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        parser.error("--output draws plots, which needs matplotlib: pip install 'vllm-kvmerge[eval]'")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: {error}")


def _by_layer(errors: Iterator[float], schedule: Schedule, num_layers: int) -> Iterator[tuple[int, float]]:
    """``errors_against``'s numbers with their layers."""
    for count in schedule.counts:
        for layer in range(num_layers):
            for _ in range(count):
                yield layer, next(errors)
    assert next(errors, None) is None


def _spread(layer: LayerTrace, schedule: Schedule) -> tuple[float, float]:
    """Means over query heads and queries of ``attention_spread``."""
    new = slice(schedule.queries.start, schedule.queries.stop)
    entropy, count = attention_spread(full_probabilities(layer, new, schedule.dtype))
    return entropy.mean().item(), count.double().mean().item()


def _spread_cells(found: list[tuple[float, float]]) -> list[str]:
    entropy, count = np.mean(found, axis=0)
    return [f"{entropy:.2f}", f"{count:.0f}"]


def _rows(cells: list[Cell], texts: dict[Cell, str]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for cell in cells:
        rows.setdefault(cell[0], []).append(texts[cell])
    return rows


def _error_cell(errors: dict[str, list[float]]) -> str:
    return " / ".join(f"{np.mean(values):.3f}" for values in errors.values())


def _share_cell(found: Findings) -> str:
    summary = found.summary
    both = summary["kept"], summary["represented"]
    return " / ".join(f"{value:.3f}" for value in (both if both[0] != both[1] else both[:1]))


def _write(
    arguments: argparse.Namespace,
    seed: int,
    num_documents: int,
    variants: dict[Cell, dict[str, CompressionConfig]],
    findings: dict[Cell, dict[str, Findings]],
) -> int:
    """Writes everything; returns how many files."""
    from vllm_kvmerge.evaluation.instrument_plots import draw_findings, draw_overview

    folder: Path = arguments.output
    run = {
        "model": arguments.model,
        "text": None if arguments.text is None else str(arguments.text),
        "seed": seed,
        "documents": num_documents,
        "prompt": arguments.prompt,
        "queries": arguments.queries,
        "interval": arguments.interval,
        "dtype": arguments.dtype,
        "set": arguments.set,
    }
    files: list[Path] = []
    with _progress("writing", len(findings) + len(arguments.budget)) as advance:
        for (policy, budget), found in findings.items():
            place = folder / f"{policy}-{budget}"
            place.mkdir(exist_ok=True)
            config = variants[policy, budget][MERGED]
            numbers = run | {
                "policy": policy,
                "budget": budget,
                "entries": config.resolve_budget(arguments.prompt),
                "decode": config.decode,
                "parts": {part.name: part.model_dump() for part in config.policy.parts},
                "variants": {name: one.as_json() for name, one in found.items()},
            }
            files.append(place / "numbers.json")
            files[-1].write_text(json.dumps(numbers) + "\n")
            files += _write_weights(place, found[MERGED])
            title = f"{policy}, budget {budget}"
            # A policy that grows is not compressed again.
            interval = arguments.interval if config.decode == "bounded" else arguments.queries
            files += draw_findings(place, arguments.format, title, found, arguments.prompt, interval)
            advance()
        for budget in arguments.budget:
            merged = {policy: found[MERGED] for (policy, other), found in findings.items() if other == budget}
            files += draw_overview(folder, arguments.format, f"budget {budget}", merged, str(budget))
            advance()
    rows = [
        {"policy": policy, "budget": budget, "variant": name, **one.summary, "residual": one.residual}
        for (policy, budget), found in findings.items()
        for name, one in found.items()
    ]
    files += [folder / "summary.json", folder / "summary.md"]
    files[-2].write_text(json.dumps({"run": run, "rows": rows}, indent=1) + "\n")
    files[-1].write_text(_summary(run, rows))
    return len(files)


def _write_weights(place: Path, found: Findings) -> list[Path]:
    """All weights, where JSON lists only each token's largest: arrays named after layer and head."""
    files = []
    for moment in (PROMPT_END, END):
        maps = {
            (layer, head): one
            for layer, of_heads in found.maps.get(moment, {}).items()
            for head, one in enumerate(of_heads)
        }
        if any(one.is_dense for one in maps.values()):
            arrays = {
                f"layer{layer}_head{head}_{name}": value.astype(np.float32) if name == "weights" else value
                for (layer, head), one in maps.items()
                for name, value in (("tokens", one.tokens), ("carriers", one.targets), ("weights", one.weights))
            }
            files.append(place / f"merge-map-{moment.replace(' ', '-')}.npz")
            np.savez_compressed(files[-1], **arrays)  # type: ignore[arg-type]
    return files


def _summary(run: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = ["# Attention under compression", ""]
    lines += [f"- {name}: {value}" for name, value in run.items() if value not in (None, [])]
    lines += [
        "",
        "| policy | budget | | error | error per head | attention kept | represented |",
        "|---|---|---|" + "---|" * 4,
    ]
    for row in rows:
        numbers = (row[name] for name in ("layer_error", "error", "kept", "represented"))
        cells = [row["policy"], row["budget"], row["variant"], *(f"{value:.3f}" for value in numbers)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


@contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    """Yields a function to be called after each of ``total`` things; a bar on stderr where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


if __name__ == "__main__":
    main()
