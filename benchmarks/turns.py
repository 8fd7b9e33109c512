"""Cases that take turns on their sides, and how they compare turn by turn."""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from report import Spread
from rich.progress import track
from sides import Run, Side

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Case:
    """What one side is asked to do in each turn."""

    name: str
    side: Side
    compression: dict[str, Any] | None = None


def wait(cases: Sequence[Case]) -> None:
    """Until all sides can run something."""
    # Sides are stopped between their turns, and must not be left so where this process is asked to end.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for case in cases:
        case.side.wait()


def take_turns(
    cases: Sequence[Case], repeats: int, description: str, run: Callable[[Case], Measured]
) -> dict[str, list[Measured]]:
    """What each case measured in each of the turns, by name."""
    wait(cases)
    turns: dict[str, list[Measured]] = {case.name: [] for case in cases}
    for number in track(range(repeats * len(cases)), description):
        case = cases[number % len(cases)]
        turns[case.name].append(run(case))
    return turns


def spread(runs: Sequence[Run], value: Callable[[Run], float]) -> Spread:
    return Spread.of([value(run) for run in runs])


def ratios(runs: Sequence[Run], reference: Sequence[Run], value: Callable[[Run], float]) -> Spread:
    """Of the same turn."""
    return Spread.of([value(one) / value(other) for one, other in zip(runs, reference, strict=True)])
