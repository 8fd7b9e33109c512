"""Differences of two policies on the same samples, alone and as a family of claims."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_kvmerge.evaluation.config import EvalConfig
from vllm_kvmerge.evaluation.results import Result
from vllm_kvmerge.evaluation.summary import (
    CONFIDENCE,
    RESAMPLES,
    Budget,
    Table,
    TaskSummary,
    bootstrap_interval,
    columns_of,
)

MIN_RESAMPLES = 20_000
RESAMPLES_PER_CLAIM = 40
"""As many as it takes for a p-value to get below 5% divided by the number of claims."""

DRAWS_AT_A_TIME = 4_000_000


@dataclass(frozen=True)
class Claim:
    """Two policies at one budget in one task. differences: of their scores on each sample that both have answered."""

    task: str
    pair: str
    budget: Budget
    differences: list[float]
    higher_is_better: bool


def claims_of(results: Sequence[Result], config: EvalConfig, task: TaskSummary) -> list[Claim]:
    """For each pair that the configuration compares one for each budget; those without a common sample too."""
    scores: dict[tuple[str, Budget], dict[int, float]] = {}
    for result in results:
        if result.task == task.label:
            scores.setdefault((result.policy, result.budget), {})[result.sample] = result.score

    def of(policy: str, budget: Budget) -> dict[int, float]:
        """Scores by sample; ``full`` has them without a budget."""
        return scores.get((policy, budget)) or scores.get((policy, None), {})

    claims = []
    for one, other in config.compare:
        for budget in columns_of(config):
            first, second = of(one, budget), of(other, budget)
            differences = [first[sample] - second[sample] for sample in sorted(first.keys() & second.keys())]
            claims.append(Claim(task.label, f"{one} less {other}", budget, differences, task.higher_is_better))
    return claims


def comparison_table(results: Sequence[Result], config: EvalConfig, task: TaskSummary) -> Table:
    """One row for each pair that the configuration compares, one column for each budget."""
    cells = [_difference(claim.differences) for claim in claims_of(results, config, task)]
    columns = columns_of(config)
    rows = [
        [f"{one} less {other}", *cells[row * len(columns) : (row + 1) * len(columns)]]
        for row, (one, other) in enumerate(config.compare)
    ]
    direction = "higher" if task.higher_is_better else "lower"
    notes = (
        "Difference of two policies' scores on the same sample: mean and 95% confidence interval (bootstrap, "
        f"{RESAMPLES} resamples); ~ the interval holds 0. {direction} is better"
    )
    header = ["pair", *("all" if budget is None else f"budget {budget}" for budget in columns)]
    return Table(f"{task.label}: pairs", header, rows, notes)


def _difference(differences: list[float]) -> str:
    if not differences:
        return ""
    low, high = bootstrap_interval(differences)
    mark = " ~" if low <= 0 <= high else ""
    return f"{np.mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]{mark}"


def resampled_means(differences: Sequence[float], count: int) -> NDArray[np.float64]:
    """``[count]``, in ascending order: means of resamples with replacement; the same whenever they are asked for."""
    values, rng = np.asarray(differences, dtype=float), np.random.default_rng(0)
    step = max(1, DRAWS_AT_A_TIME // len(values))
    parts = [
        values[rng.integers(0, len(values), (min(step, count - start), len(values)), dtype=np.int32)].mean(1)
        for start in range(0, count, step)
    ]
    return np.sort(np.concatenate(parts))


def bootstrap_p_value(means: NDArray[np.float64]) -> float:
    """Two-sided p-value of a difference of 0, from ``resampled_means``: the least ``alpha`` at which
    ``interval_at`` leaves out 0; 1 at most."""
    tail = min((means <= 0).sum(), (means >= 0).sum())
    return min(1.0, 2 * (int(tail) + 1) / (len(means) + 1))


def least_p_value(num_samples: int) -> float:
    """The chance that so many differences have one sign where either is as likely. No two-sided p-value of
    theirs can be less, although all resamples of a few of one sign have that sign."""
    return min(1.0, 2.0 ** (1 - num_samples))


def interval_at(means: NDArray[np.float64], alpha: float) -> tuple[float, float]:
    """Percentile interval of confidence ``1 - alpha`` from ``resampled_means``, between two of them."""
    # Rounding must not cost a place where the product is a whole number.
    place = max(1, int(alpha / 2 * (len(means) + 1) + 1e-9))
    return float(means[place - 1]), float(means[-place])


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (S. Holm 1979): each claim whose adjusted one is at most ``alpha`` may be
    made, and the chance that any of them is wrong is at most ``alpha``."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for step, place in enumerate(_ascending(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - step) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def holm_levels(p_values: Sequence[float], alpha: float) -> list[float]:
    """The ``alpha`` that Holm's procedure gives each claim: ``alpha`` by the number of claims for the smallest p-value,
    by one less for the next, and so on up to the first that fails; what comes after it gets the same."""
    levels, share = [0.0] * len(p_values), 0.0
    failed = False
    for step, place in enumerate(_ascending(p_values)):
        if not failed:
            share = alpha / (len(p_values) - step)
            failed = p_values[place] > share * (1 + 1e-9)
        levels[place] = share
    return levels


def _ascending(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=values.__getitem__)


def claims_table(results: Sequence[Result], config: EvalConfig, tasks: Iterable[TaskSummary]) -> Table:
    """All pairs at all budgets in all tasks as one family of claims, corrected for their number; one row each."""
    claims = [claim for task in tasks for claim in claims_of(results, config, task) if claim.differences]
    alpha = 1 - CONFIDENCE
    num_resamples = max(MIN_RESAMPLES, RESAMPLES_PER_CLAIM * len(claims))
    means = [resampled_means(claim.differences, num_resamples) for claim in claims]
    p_values = [
        max(bootstrap_p_value(one), least_p_value(len(claim.differences)))
        for claim, one in zip(claims, means, strict=True)
    ]
    rows: list[list[str]] = []
    for claim, resamples, p_value, adjusted, level in zip(
        claims, means, p_values, holm(p_values), holm_levels(p_values, alpha), strict=True
    ):
        low, high = interval_at(resamples, level)
        is_better = (np.mean(claim.differences) > 0) == claim.higher_is_better
        finding = "level" if adjusted > alpha * (1 + 1e-9) else "better" if is_better else "worse"
        rows.append(
            [
                str(len(rows) + 1),
                claim.pair,
                claim.task,
                "all" if claim.budget is None else str(claim.budget),
                str(len(claim.differences)),
                f"{np.mean(claim.differences):+.3f} [{low:+.3f}, {high:+.3f}]",
                f"{p_value:.2g}",
                f"{adjusted:.2g}",
                finding,
            ]
        )
    notes = (
        f"The {len(claims)} differences of all pairs, budgets and tasks as one family: the chance that any of those "
        f"called better or worse is 0 is at most {alpha:.0%}. p: two-sided, of a difference of 0 (bootstrap, "
        f"{num_resamples} resamples, and no less than n samples of one sign have by chance, 2^(1-n)); corrected: by "
        "Holm's procedure (1979). The interval has the confidence of the step that decides on its difference, and "
        "leaves out 0 where that is not level"
    )
    header = ["claim", "pair", "task", "budget", "samples", "difference", "p", "corrected p", "finding"]
    return Table("All pairs, corrected for their number", header, rows, notes)
