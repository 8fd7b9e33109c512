"""Differences of two policies on the same samples."""

from collections.abc import Sequence

import numpy as np

from vllm_kvmerge.evaluation.config import EvalConfig
from vllm_kvmerge.evaluation.results import Result
from vllm_kvmerge.evaluation.summary import RESAMPLES, Budget, Table, TaskSummary, bootstrap_interval, columns_of


def comparison_table(results: Sequence[Result], config: EvalConfig, task: TaskSummary) -> Table:
    """One row for each pair that the configuration compares, one column for each budget."""
    scores: dict[tuple[str, Budget], dict[int, float]] = {}
    for result in results:
        if result.task == task.label:
            scores.setdefault((result.policy, result.budget), {})[result.sample] = result.score

    def of(policy: str, budget: Budget) -> dict[int, float]:
        """Scores by sample; ``full`` has them without a budget."""
        return scores.get((policy, budget)) or scores.get((policy, None), {})

    rows = [
        [f"{one} less {other}", *(_difference(of(one, budget), of(other, budget)) for budget in columns_of(config))]
        for one, other in config.compare
    ]
    direction = "higher" if task.higher_is_better else "lower"
    notes = (
        "Difference of two policies' scores on the same sample: mean and 95% confidence interval (bootstrap, "
        f"{RESAMPLES} resamples); ~ the interval holds 0. {direction} is better"
    )
    header = ["pair", *("all" if budget is None else f"budget {budget}" for budget in columns_of(config))]
    return Table(f"{task.label}: pairs", header, rows, notes)


def _difference(one: dict[int, float], other: dict[int, float]) -> str:
    both = sorted(one.keys() & other.keys())
    if not both:
        return ""
    differences = [one[sample] - other[sample] for sample in both]
    low, high = bootstrap_interval(differences)
    mark = " ~" if low <= 0 <= high else ""
    return f"{np.mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]{mark}"
