"""Summary of a run's results: scores with confidence intervals, measured memory, and tables of both."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_kvmerge.evaluation.config import EvalConfig, TaskEntry
from vllm_kvmerge.evaluation.results import Result
from vllm_kvmerge.evaluation.runner import Run, cells_of
from vllm_kvmerge.evaluation.tasks.base import Task

CONFIDENCE = 0.95
Z = 1.959963984540054
"""97.5% quantile of the normal distribution."""

RESAMPLES = 2000

Budget = int | float | None


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """95% confidence interval of a proportion (E. B. Wilson 1927, without continuity correction)."""
    share = successes / count
    centre = share + Z**2 / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap_interval(
    scores: Sequence[float], statistic: Callable[[Sequence[float]], float] | None = None
) -> tuple[float, float]:
    """95% percentile interval of a statistic (default: the mean) over ``RESAMPLES`` resamples with replacement
    (B. Efron 1979); the same whenever it is asked for."""
    values = np.asarray(scores, dtype=float)
    resamples = values[np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))]
    statistics = resamples.mean(1) if statistic is None else [statistic(resample) for resample in resamples.tolist()]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(statistics, [tail, 100 - tail])
    return float(low), float(high)


@dataclass(frozen=True)
class CellSummary:
    """One cell's figures. low, high: of the score's interval. Entries and bytes are means over requests; None where
    they were not measured. count: answered samples of ``expected``. failed: those that brought errors. change: mean
    difference of a sample's score to ``full``'s on the same sample, with its interval; None where ``full`` has none.
    """

    task: str
    policy: str
    budget: Budget
    count: int
    expected: int
    failed: int
    score: float
    low: float
    high: float
    mean_entries: float | None
    mean_bytes: float | None
    peak_bytes: float | None
    prompt_tokens: float
    seconds: float
    change: tuple[float, float, float] | None


@dataclass(frozen=True)
class TaskSummary:
    """One task's cells, in the configuration's order; those without any answer are left out."""

    label: str
    metric: str
    higher_is_better: bool
    interval: str
    cells: list[CellSummary]

    def find(self, policy: str, budget: Budget) -> CellSummary | None:
        """Its cell; ``full`` has one, whatever the budget."""
        matches = (cell for cell in self.cells if cell.policy == policy and cell.budget in (budget, None))
        return next(matches, None)

    def best(self, budget: Budget) -> float | None:
        """The best score at a budget among policies that compress."""
        scores = [cell.score for cell in self.cells if cell.budget is not None and cell.budget == budget]
        return (max if self.higher_is_better else min)(scores, default=None)


@dataclass(frozen=True)
class Table:
    """title, header and rows of text; ``notes`` below. The first column is names."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: str = ""


def summarize(config: EvalConfig, results: list[Result], run: Run) -> list[TaskSummary]:
    by_cell: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.sample):
        by_cell.setdefault(result.cell, []).append(result)
    failed = Counter(failure.cell for failure in run.failures)
    summaries = []
    for entry in config.tasks:
        keys = [cell.key for cell in cells_of(config) if cell.entry is entry and cell.key in by_cell]
        answered = {key: by_cell[key] for key in keys}
        summaries.append(_summarize_task(entry, answered, run.sizes[entry.label], failed))
    return summaries


def _summarize_task(
    entry: TaskEntry, by_cell: dict[str, list[Result]], expected: int, failed: Mapping[str, int]
) -> TaskSummary:
    """by_cell: results in the order of their samples. expected: samples of each cell."""
    task = entry.task
    every = [result for results in by_cell.values() for result in results]
    full = {result.sample: result.score for result in every if result.budget is None}
    is_mean = type(task).summary is Task.summary
    is_share = is_mean and all(result.score in (0, 1) for result in every)

    def summary_of(results: list[Result]) -> CellSummary:
        scores = [result.score for result in results]
        if is_share:
            low, high = wilson_interval(int(sum(scores)), len(scores))
        else:
            low, high = bootstrap_interval(scores, None if is_mean else task.summary)
        changes = [result.score - full[result.sample] for result in results if result.sample in full]
        first = results[0]
        return CellSummary(
            task=first.task,
            policy=first.policy,
            budget=first.budget,
            count=len(results),
            expected=expected,
            failed=failed[first.cell],
            score=task.summary(scores),
            low=low,
            high=high,
            mean_entries=_mean([result.mean_entries for result in results]),
            mean_bytes=_mean([result.mean_bytes for result in results]),
            peak_bytes=_mean([result.peak_bytes for result in results]),
            prompt_tokens=sum(result.prompt_tokens for result in results) / len(results),
            seconds=sum(result.seconds for result in results) / len(results),
            change=(float(np.mean(changes)), *bootstrap_interval(changes)) if changes and first.budget else None,
        )

    return TaskSummary(
        label=entry.label,
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        interval="Wilson" if is_share else f"bootstrap, {RESAMPLES} resamples",
        cells=[summary_of(results) for results in by_cell.values()],
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def incomplete_cells(config: EvalConfig, results: list[Result], run: Run) -> list[str]:
    """``cell: 3 of 10 samples, 2 failed``, for each that lacks some."""
    counts = Counter(result.cell for result in results)
    failures = Counter(failure.cell for failure in run.failures)
    texts = []
    for cell in cells_of(config):
        expected, count, failed = run.sizes[cell.entry.label], counts[cell.key], failures[cell.key]
        if count < expected:
            texts.append(f"{cell.key}: {count} of {expected} samples" + (f", {failed} failed" if failed else ""))
    return texts


FEW_SAMPLES = 20
"""Below it, the intervals of 0.5 and of 0.9 overlap."""


def score_table(config: EvalConfig, task: TaskSummary) -> Table:
    """Policies by budgets; the best policy of each budget is marked."""
    rows = []
    for policy in config.policies:
        row = [policy.label]
        for budget in columns_of(config):
            cell = task.find(policy.label, budget)
            mark = " *" if cell and cell.budget is not None and cell.score == task.best(budget) else ""
            row.append(f"{number(cell.score)} [{number(cell.low)}, {number(cell.high)}]{mark}" if cell else "")
        rows.append(row)
    direction = "higher" if task.higher_is_better else "lower"
    notes = f"{task.metric}, {direction} is better; 95% confidence interval ({task.interval}); * best at this budget"
    if (fewest := min((cell.count for cell in task.cells), default=FEW_SAMPLES)) < FEW_SAMPLES:
        notes += f", but {fewest} samples are too few to tell policies apart"
    return Table(task.label, ["policy", *_budget_columns(config)], rows, notes)


def memory_table(config: EvalConfig, task: TaskSummary) -> Table:
    rows = []
    for policy in config.policies:
        cells = [task.find(policy.label, budget) for budget in columns_of(config)]
        rows.append([policy.label, *(size(cell.mean_bytes) if cell else "" for cell in cells)])
    notes = "KV cache that a request holds while it generates: measured, mean over its steps and over requests"
    return Table(f"{task.label}: memory", ["policy", *_budget_columns(config)], rows, notes)


def details_table(tasks: list[TaskSummary]) -> Table:
    """One row per cell."""
    header = ["task", "policy", "budget", "samples", "failed", "score", "95% CI", "change", "prompt tokens"]
    header += ["live entries", "live bytes", "peak bytes", "seconds"]
    rows = [
        [
            cell.task,
            cell.policy,
            "" if cell.budget is None else str(cell.budget),
            f"{cell.count}" if cell.count == cell.expected else f"{cell.count} of {cell.expected}",
            str(cell.failed),
            number(cell.score),
            f"{number(cell.low)} to {number(cell.high)}",
            "" if cell.change is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(*cell.change),
            f"{cell.prompt_tokens:.0f}",
            "not measured" if cell.mean_entries is None else f"{cell.mean_entries:.1f}",
            size(cell.mean_bytes),
            size(cell.peak_bytes),
            f"{cell.seconds:.2f}",
        ]
        for task in tasks
        for cell in task.cells
    ]
    notes = (
        "Change: a sample's score less that of full on the same sample, mean and 95% confidence interval (bootstrap, "
        f"{RESAMPLES} resamples). Live entries per KV head of one layer and live bytes over all layers: mean over the "
        "steps from the end of the prompt on. Peak: over all steps, the prompt's included. Seconds: from submission to "
        "the end, waiting included."
    )
    return Table("All cells", header, rows, notes)


def columns_of(config: EvalConfig) -> list[Budget]:
    """The budgets; None where there is nothing but ``full``."""
    return [*config.budgets] or [None]


def _budget_columns(config: EvalConfig) -> list[str]:
    return [f"budget {budget}" for budget in config.budgets] or ["all"]


def number(value: float) -> str:
    """Three decimals; three digits where that is less than it takes."""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "not measured"
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return (
                f"{num_bytes / factor:.3g} {unit}" if num_bytes < 1000 * factor else f"{num_bytes / factor:.0f} {unit}"
            )
    return f"{num_bytes:.0f} B"


def markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join(["---", *["---:"] * (len(table.header) - 1)]) + "|"
    return "\n".join([f"## {table.title}", "", line(table.header), rule, *map(line, table.rows), "", table.notes, ""])


def print_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]], first: str = "policy") -> None:
    """Prints a Markdown table, one row per name, however wide it gets."""
    from rich import box
    from rich import console as rich_console
    from rich import table as rich_table

    table = rich_table.Table(box=box.MARKDOWN)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console = rich_console.Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(f"{title}\n")
    console.print(table, crop=False)
