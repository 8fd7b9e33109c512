"""Plots of a run's summary, as SVG for embedding in HTML."""

import re
from collections.abc import Iterator
from io import StringIO
from textwrap import fill
from typing import TYPE_CHECKING

from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation.config import EvalConfig
from vllm_kvmerge.evaluation.summary import Budget, CellSummary, TaskSummary, columns_of, number
from vllm_kvmerge.request.spec import FULL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 1 << 20
MARKERS = "osD^vP*Xhd<>p8"


def check_matplotlib() -> None:
    """Raises:
    CommandError: plots cannot be drawn, and how they could.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CommandError("the report needs matplotlib: pip install 'vllm-kvmerge[eval]'") from None


def draw_plots(config: EvalConfig, tasks: list[TaskSummary]) -> dict[str, str]:
    """SVG by name: for each task its score against budget and against memory; a heat map for each budget."""
    plots = {}
    for index, task in enumerate(tasks):
        if not task.cells:
            continue
        plots[f"score-{index}"] = _score_against_budget(config, task)
        if all(cell.mean_bytes is not None for cell in task.cells):
            plots[f"memory-{index}"] = _score_against_memory(config, task)
    for budget in columns_of(config):
        if any(task.cells for task in tasks):
            plots[f"heat-{'full' if budget is None else budget}"] = _heat_map(config, tasks, budget)
    return plots


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: "Figure", salt: str) -> str:
    """The figure as an ``<svg>`` element: no prologue, nothing that names another place."""
    import matplotlib

    # Without the salt, two figures of one page would share the names of what they refer to.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)


def as_file(svg: str) -> str:
    """The element as a file of its own."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return svg.replace("<svg", f"<svg {names}", 1)


def _style(config: EvalConfig, policy: str) -> dict[str, str]:
    import matplotlib

    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    index = [entry.label for entry in config.policies].index(policy)
    # Every second colour first: neighbours in the map are light and dark of the same.
    shade = index % 20
    return {"color": colours[(2 * shade) % 20 + shade // 10], "marker": MARKERS[index % len(MARKERS)]}


def _lines(config: EvalConfig, task: TaskSummary) -> Iterator[tuple[str, list[CellSummary]]]:
    """Each compressing policy's cells, budgets ascending."""
    for policy in config.policies:
        cells = [cell for cell in task.cells if cell.policy == policy.label and cell.budget is not None]
        if cells:
            yield policy.label, cells


def _whiskers(cells: list[CellSummary]) -> list[list[float]]:
    # A percentile interval need not hold the figure itself.
    return [[max(0, cell.score - cell.low) for cell in cells], [max(0, cell.high - cell.score) for cell in cells]]


def _score_against_budget(config: EvalConfig, task: TaskSummary) -> str:
    """One panel for shares of the prompt, one for numbers of entries."""
    kinds = [kind for kind in (float, int) if any(type(budget) is kind for budget in config.budgets)] or [float]
    figure = _figure(4.5 * len(kinds) + 2.5, 4)
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for kind, axis in zip(kinds, panels, strict=True):
        budgets = {budget for budget in config.budgets if type(budget) is kind}
        is_one = len(budgets) == 1  # then policies stand side by side, or they would hide each other
        for place, (label, cells) in enumerate(_lines(config, task)):
            own = sorted((cell for cell in cells if type(cell.budget) is kind), key=lambda cell: cell.budget or 0)
            xs, ys = [place if is_one else cell.budget for cell in own], [cell.score for cell in own]
            axis.errorbar(xs, ys, yerr=_whiskers(own), label=label, capsize=2, **_style(config, label))  # type: ignore[arg-type]
        if full := task.find(FULL, None):
            axis.axhline(full.score, color="black", linestyle="--", label=FULL)
            axis.axhspan(full.low, full.high, color="black", alpha=0.08)
        axis.set_xlabel("budget: share of the prompt" if kind is float else "budget: entries per KV head")
        if is_one:
            axis.set_xticks([])
            axis.set_xlabel(f"{axis.get_xlabel()}, {budgets.pop()}")
    _finish(figure, panels[0], task)
    return _svg(figure, f"score {task.label}")


def _score_against_memory(config: EvalConfig, task: TaskSummary) -> str:
    figure = _figure(7, 4)
    axis = figure.subplots()
    lines = dict(_lines(config, task))
    if full := task.find(FULL, None):
        lines[FULL] = [full]
    for label, cells in lines.items():
        own = sorted(cells, key=lambda cell: cell.mean_bytes or 0)
        xs, ys = [(cell.mean_bytes or 0) / MIB for cell in own], [cell.score for cell in own]
        style = {"color": "black", "marker": "s"} if label == FULL else _style(config, label)
        axis.errorbar(xs, ys, yerr=_whiskers(own), label=label, capsize=2, **style)  # type: ignore[arg-type]
    axis.set_xlim(left=0)
    axis.set_xlabel("measured: KV cache of a request while it generates, MiB")
    _finish(figure, axis, task)
    return _svg(figure, f"memory {task.label}")


def _finish(figure: "Figure", axis: "Axes", task: TaskSummary) -> None:
    figure.suptitle(fill(task.label, 60), fontsize="medium")
    axis.set_ylabel(fill(task.metric + ("" if task.higher_is_better else ", lower is better"), 40))
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")


def _heat_map(config: EvalConfig, tasks: list[TaskSummary], budget: Budget) -> str:
    """Tasks by policies at one budget. Colours compare the policies of a task, from its worst to its best score."""
    policies = [policy.label for policy in config.policies]
    # Inches that the names take, and those of the cells.
    beside, below = (0.09 * max(map(len, names)) for names in ([task.label for task in tasks], policies))
    figure = _figure(0.8 + beside + 0.7 * len(policies), 0.8 + 0.7 * below + 0.45 * len(tasks))
    axis = figure.subplots()
    rows = [[task.find(policy, budget) for policy in policies] for task in tasks]
    colours = [_shades(task, cells) for task, cells in zip(tasks, rows, strict=True)]
    # Not imshow: its image would be a bitmap.
    axis.pcolormesh(colours, cmap="RdYlGn", vmin=-0.4, vmax=1.4, edgecolors="white")
    axis.invert_yaxis()
    for y, cells in enumerate(rows):
        for x, cell in enumerate(cells):
            if cell is not None:
                axis.text(x + 0.5, y + 0.5, number(cell.score), ha="center", va="center", fontsize="small")
    axis.set_xticks([x + 0.5 for x in range(len(policies))], policies, rotation=40, ha="right", rotation_mode="anchor")
    axis.set_yticks([y + 0.5 for y in range(len(tasks))], [task.label for task in tasks])
    axis.set_title("full cache" if budget is None else f"budget {budget}")
    return _svg(figure, f"heat {budget}")


def _shades(task: TaskSummary, cells: list[CellSummary | None]) -> list[float]:
    """0 for the task's worst score in the row, 1 for its best (and where all are equal); nan where there is none."""
    scores = [cell.score for cell in cells if cell is not None]
    if not scores:
        return [float("nan")] * len(cells)
    worst, best = (min(scores), max(scores)) if task.higher_is_better else (max(scores), min(scores))
    span = best - worst
    return [float("nan") if cell is None else (cell.score - worst) / span if span else 1.0 for cell in cells]
