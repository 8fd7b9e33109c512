"""``vllm-kvmerge eval``: which policy, at which budget, for a model and a task.

vllm-kvmerge eval CONFIG.yaml  run a configuration, or go on with it where it stopped
vllm-kvmerge eval list         the tasks, with their options
"""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_kvmerge import demo
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.shipped import shipped

if TYPE_CHECKING:
    from vllm_kvmerge.evaluation.backends import Backend
    from vllm_kvmerge.evaluation.config import EvalConfig
    from vllm_kvmerge.evaluation.results import Failure, RunFolder
    from vllm_kvmerge.evaluation.runner import Run
    from vllm_kvmerge.evaluation.summary import Table

RESULTS = Path("eval-results")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}; see vllm-kvmerge eval --help")


def main(argv: list[str]) -> int:
    """Exit status: 0 all samples of all cells are answered, 1 some are not, 130 or 143 stopped by a signal.

    Raises:
        CommandError: nothing was run.
    """
    parser = _Parser(
        prog="vllm-kvmerge eval",
        description=(__doc__ or "").replace("``", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="configs/eval holds examples")
    parser.add_argument("--list", action="store_true", help="list the tasks and their options")
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"default: {RESULTS}/ and the configuration's name")
    parser.add_argument("--model", help="folder or hub name (the word demo: the one that ships), or the server's name")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of every task")
    parser.add_argument("--seed", type=int)
    server = parser.add_argument_group("a server instead of an engine in this process")
    server.add_argument("--endpoint", metavar="URL", help="one that runs vllm-kvmerge; engine options do not apply")
    server.add_argument("--concurrency", type=int, metavar="N", help="requests at a time")
    server.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    server.add_argument("--tokenizer", metavar="T", help="folder or hub name (default: the server's /tokenize)")
    arguments = parser.parse_args(argv)
    if arguments.list or arguments.config == "list":
        print_tasks()
        return 0
    if arguments.config is None:
        parser.error("name a configuration")
    return evaluate(arguments)


def print_tasks() -> None:
    """A table of the tasks, their options and sources."""
    import json

    from pydantic_core import PydanticUndefined
    from rich.console import Console
    from rich.table import Table

    from vllm_kvmerge.evaluation.tasks import load_tasks

    table = Table("task", "options", "score", "source", show_lines=True)
    for name, task in sorted(load_tasks().items()):
        options = []
        for field, info in task.model_fields.items():
            required = info.default is PydanticUndefined and info.default_factory is None
            default = None if required else info.get_default(call_default_factory=True)
            shown = "" if required else f"={json.dumps(default, default=str)}"
            options.append(f"{field}{shown}: {info.description or ''}".rstrip(": "))
        score = task.metric + ("" if task.higher_is_better else ", lower is better")
        table.add_row(name, "\n".join(options), score, task.source)
    Console(markup=False).print(table)


def evaluate(arguments: argparse.Namespace) -> int:
    from vllm_kvmerge.evaluation.config import read_config
    from vllm_kvmerge.evaluation.plots import check_matplotlib
    from vllm_kvmerge.evaluation.results import RunFolder

    check_matplotlib()
    path = shipped(arguments.config)
    config = read_config(
        path,
        {
            "model": arguments.model,
            "samples": arguments.samples,
            "seed": arguments.seed,
            "endpoint.url": arguments.endpoint,
            "endpoint.concurrency": arguments.concurrency,
            "endpoint.api_key_env": arguments.api_key_env,
            "endpoint.tokenizer": arguments.tokenizer,
        },
        left_out=("engine",) if arguments.endpoint is not None else (),
    )
    output = arguments.output or RESULTS / path.stem
    with _signals_as_exceptions(), RunFolder(output, config.identity()) as folder:
        backend = make_backend(config)
        try:
            return run_and_report(config, folder, backend)
        except _Stopped as stopped:
            return 128 + stopped.number
        finally:
            backend.close()


def make_backend(config: "EvalConfig") -> "Backend":
    from vllm_kvmerge.evaluation.backends import EndpointBackend, EngineBackend

    if config.endpoint is not None:
        return EndpointBackend(config.model, config.endpoint)
    given = config.engine.head_budgets
    budgets = demo.head_budgets_path(given or config.model or "demo") or given
    return EngineBackend(config.model_path, config.engine.model_copy(update={"head_budgets": budgets}))


def run_and_report(config: "EvalConfig", folder: "RunFolder", backend: "Backend") -> int:
    """Runs what is missing and writes the report; returns the exit status."""
    from rich.console import Console

    from vllm_kvmerge.evaluation.report import write_report
    from vllm_kvmerge.evaluation.summary import incomplete_cells

    notes = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    try:
        run = _run_with_progress(config, folder, backend, notes)
    except (KeyboardInterrupt, _Stopped):
        notes.print(f"stopped after {len(folder.results)} samples; the same command goes on from there")
        raise
    tables = write_report(config, folder, run)
    for table in tables:
        _print(table)
    print(f"{folder.path / 'report.html'}, summary.md, results.jsonl")
    missing = incomplete_cells(config, folder.results, run)
    if run.stopped is not None:
        notes.print(f"vllm-kvmerge eval: {run.stopped}")
    for text in missing:
        notes.print(f"incomplete: {text}")
    return 1 if missing else 0


def _run_with_progress(config: "EvalConfig", folder: "RunFolder", backend: "Backend", notes: Any) -> "Run":
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from vllm_kvmerge.evaluation.runner import run

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=notes) as progress:
        bar = progress.add_task("samples", total=None)

        def notify(done: int, total: int, failure: "Failure | None") -> None:
            progress.update(bar, completed=done, total=total)
            if failure is not None:
                progress.console.print(f"failed: {failure.cell}, sample {failure.sample}: {failure.message}")

        return run(config, folder, backend, notify)


def _print(table: "Table") -> None:
    from vllm_kvmerge.evaluation.summary import print_table

    first, *columns = table.header
    print_table(table.title, columns, {row[0]: row[1:] for row in table.rows}, first)
    print(f"{table.notes}\n")


class _Stopped(BaseException):
    """A signal asked the run to stop."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    def stop(number: int, _: Any) -> NoReturn:
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
