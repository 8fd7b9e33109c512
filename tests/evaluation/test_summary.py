"""Confidence intervals and tables against values worked out elsewhere."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.runs import result, small_config
from vllm_kvmerge.evaluation.results import Failure
from vllm_kvmerge.evaluation.runner import Run, cells_of
from vllm_kvmerge.evaluation.summary import (
    CellSummary,
    TaskSummary,
    bootstrap_interval,
    details_table,
    incomplete_cells,
    markdown,
    memory_table,
    score_table,
    summarize,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # R. G. Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson(successes: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(count - successes, count) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_bootstrap() -> None:
    # Resampled means are B(16, 1/2) / 32, whose 2.5% and 97.5% quantiles are 4 / 32 and 12 / 32.
    assert bootstrap_interval([0.0, 0.5] * 8) == bootstrap_interval([0.0, 0.5] * 8, np.mean) == (0.125, 0.375)
    values = np.random.default_rng(6).random(50).tolist()
    low, high = bootstrap_interval(values)
    assert bootstrap_interval(values, lambda scores: math.exp(np.mean(scores))) == pytest.approx(
        (math.exp(low), math.exp(high)), rel=1e-3
    )


def results(config, scores: dict[tuple[str, float | int | None], list[float]], mean_bytes: float | None = 2048.0):
    return [
        result(config, cell.policy.label, cell.budget, index, score, mean_bytes=mean_bytes)
        for cell in cells_of(config)
        for index, score in enumerate(scores.get((cell.policy.name, cell.budget), []))
    ]


def test_tables(tmp_path: Path) -> None:
    config = small_config(tmp_path, policies=["full", "h2o", "snapkv"])
    scores = {("full", None): [1, 1, 1, 1], ("h2o", 0.25): [0, 0, 1], ("h2o", 64): [1] * 4, ("snapkv", 0.25): [1] * 4}
    run = Run({config.tasks[0].label: 4}, [Failure(f"{config.tasks[0].label} | h2o | 0.25", 3, "no")])
    found = results(config, scores)
    (task,) = summarize(config, found, run)
    assert task.interval == "Wilson"
    table = score_table(config, task)
    assert table.header == ["policy", "budget 0.25", "budget 64"]
    assert table.rows == [
        ["full", "1.000 [0.510, 1.000]", "1.000 [0.510, 1.000]"],
        ["h2o", "0.333 [0.061, 0.792]", "1.000 [0.510, 1.000] *"],
        ["snapkv", "1.000 [0.510, 1.000] *", ""],
    ]
    assert memory_table(config, task).rows[1] == ["h2o", "2 KiB", "2 KiB"]
    assert details_table([task]).rows[1][:6] == [config.tasks[0].label, "h2o", "0.25", "3 of 4", "1", "0.333"]
    assert incomplete_cells(config, found, run) == [
        f"{config.tasks[0].label} | h2o | 0.25: 3 of 4 samples, 1 failed",
        f"{config.tasks[0].label} | snapkv | 64: 0 of 4 samples",
    ]
    assert "| h2o | 0.333 [0.061, 0.792] | 1.000 [0.510, 1.000] * |" in markdown(table)


def test_change_is_that_of_the_same_samples(tmp_path: Path) -> None:
    config = small_config(tmp_path, policies=["full", "h2o"], budgets=[64])
    full = [1, 0, 1, 0, 1, 1, 0, 1]
    run = Run({config.tasks[0].label: 8}, [])
    (task,) = summarize(config, results(config, {("full", None): full, ("h2o", 64): full}), run)
    assert [cell.change for cell in task.cells] == [None, (0.0, 0.0, 0.0)]
    (task,) = summarize(config, results(config, {("full", None): full, ("h2o", 64): [0, *full[1:]]}), run)
    # One of eight fell from 1 to 0: a resample has B(8, 1/8) of it, which is 0 to 3 but for 2.5% at either end.
    assert task.cells[1].change == (-1 / 8, -3 / 8, 0.0)
    assert details_table([task]).rows[1][7] == "-0.125 (-0.375 to +0.000)"
    (task,) = summarize(config, results(config, {("h2o", 64): full}), run)
    assert task.cells[0].change is None


def test_scores_between_are_bootstrapped_in_all_cells_of_a_task(tmp_path: Path) -> None:
    config = small_config(tmp_path, policies=["full", "h2o"], budgets=[64])
    found = results(config, {("full", None): [1, 1], ("h2o", 64): [0.5, 0]}, mean_bytes=None)
    (task,) = summarize(config, found, Run({config.tasks[0].label: 2}, []))
    assert task.interval.startswith("bootstrap")
    assert [(cell.low, cell.high) for cell in task.cells] == [(1, 1), (0, 0.5)]
    assert memory_table(config, task).rows[0] == ["full", "not measured"]


@pytest.mark.parametrize(("higher_is_better", "best"), [(True, 3.0), (False, 2.0)])
def test_the_best_score_of_a_budget(higher_is_better: bool, best: float) -> None:
    """``full`` and other budgets do not count."""
    scores = [("full", None, 1.0), ("h2o", 0.5, 2.0), ("snapkv", 0.5, 3.0), ("h2o", 0.25, 4.0)]
    measured = {"mean_entries": None, "mean_bytes": None, "peak_bytes": None, "change": None}
    cells = [
        CellSummary("", policy, budget, 1, 1, 0, score, score, score, prompt_tokens=9, seconds=1, **measured)
        for policy, budget, score in scores
    ]
    assert TaskSummary("", "", higher_is_better, "", cells).best(0.5) == best
