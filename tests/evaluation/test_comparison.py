"""Pairs of policies, sample by sample."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.runs import result, small_config
from tests.evaluation.test_runner import go
from tests.examples import examples
from vllm_kvmerge.evaluation.comparison import (
    bootstrap_p_value,
    claims_table,
    comparison_table,
    holm,
    holm_levels,
    interval_at,
    resampled_means,
)
from vllm_kvmerge.evaluation.config import EvalConfig
from vllm_kvmerge.evaluation.results import Result
from vllm_kvmerge.evaluation.runner import Run
from vllm_kvmerge.evaluation.summary import TaskSummary, summarize

PAIRS = [["keepkv", "h2o"], ["h2o", "full"]]


@pytest.fixture
def config(tmp_path: Path) -> EvalConfig:
    return small_config(tmp_path, policies=["full", "h2o", "keepkv"], compare=PAIRS)


def summaries(config: EvalConfig, results: list[Result], count: int) -> list[TaskSummary]:
    return summarize(config, results, Run({task.label: count for task in config.tasks}, []))


def test_differences_are_of_the_same_samples(config):
    results = [result(config, "full", None, sample, 1.0) for sample in range(4)]
    results += [result(config, "h2o", 64, sample, score) for sample, score in enumerate([1, 0, 1, 0])]
    # The last sample of keepkv is missing: its pair counts three.
    results += [result(config, "keepkv", 64, sample, score) for sample, score in enumerate([1, 1, 1])]
    table = comparison_table(results, config, *summaries(config, results, 4))
    assert table.header == ["pair", "budget 0.25", "budget 64"]
    assert [row[:2] for row in table.rows] == [["keepkv less h2o", ""], ["h2o less full", ""]]
    assert table.rows[0][2].startswith("+0.333 [+0.000, +1.000] ~")
    assert table.rows[1][2].startswith("-0.500 [-1.000, ")
    assert "higher is better" in table.notes


def test_pairs_may_change(tmp_path, config):
    assert go(config, tmp_path / "out")[0] == 0
    assert "keepkv less h2o" in (tmp_path / "out" / "summary.md").read_text()
    # What is compared is no part of what answers depend on: the folder still belongs to the configuration.
    other = small_config(tmp_path, policies=["full", "h2o", "keepkv"], compare=[["full", "keepkv"]])
    assert go(other, tmp_path / "out")[0] == 0
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "## All pairs, corrected for their number" in summary
    assert "full less keepkv" in summary and "keepkv less h2o" not in summary


def test_holm_against_values_worked_by_hand() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04: times 4, 3, 2, 1 is 0.02, 0.03, 0.06, 0.04, and none is below the one before.
    p_values = [0.01, 0.04, 0.03, 0.005]
    assert holm(p_values) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    # 0.005 <= 0.05 / 4 and 0.01 <= 0.05 / 3, but 0.03 > 0.05 / 2, at which it stops.
    assert holm_levels(p_values, 0.05) == pytest.approx([0.05 / 3, 0.05 / 2, 0.05 / 2, 0.05 / 4])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == holm_levels([], 0.05) == []


def test_p_values_and_intervals_of_known_resamples() -> None:
    # 1 of 99 is at or below 0: 2 * (1 + 1) / (99 + 1).
    means = np.array([-1.0, *range(1, 99)])
    assert bootstrap_p_value(means) == bootstrap_p_value(-means[::-1]) == 0.04
    assert interval_at(means, 0.04) == (1.0, 97.0)
    assert interval_at(means, 0.03) == (-1.0, 98.0)
    assert bootstrap_p_value(np.zeros(9)) == 1.0
    chosen = resampled_means([0.0, 1.0, 5.0], 4000)
    assert chosen.mean() == pytest.approx(2.0, abs=0.1)
    assert (chosen == 0).mean() == pytest.approx(1 / 27, abs=0.01)


@examples(50)
@given(st.lists(st.lists(st.integers(-3, 5), min_size=3, max_size=8), min_size=1, max_size=6))
def test_intervals_leave_out_0_where_holm_rejects(families: list[list[int]]) -> None:
    means = [resampled_means(differences, 999) for differences in families]
    p_values = [bootstrap_p_value(one) for one in means]
    for one, adjusted, level in zip(means, holm(p_values), holm_levels(p_values, 0.05), strict=True):
        low, high = interval_at(one, level)
        assert (not low <= 0 <= high) == (adjusted <= 0.05 + 1e-9)


def test_a_few_samples_of_one_sign_are_no_finding(config: EvalConfig) -> None:
    for count, least, finding in ((3, "0.25", "level"), (7, "0.016", "worse")):
        results = [result(config, "h2o", 64, sample, 1.0) for sample in range(count)]
        results += [result(config, "keepkv", 64, sample, 0.1 * (sample % 2)) for sample in range(count)]
        (row,) = claims_table(results, config, summaries(config, results, count)).rows
        assert (row[6], row[-1]) == (least, finding)


def test_the_family_is_all_pairs_budgets_and_tasks(tmp_path: Path) -> None:
    tasks = [{"task": "demo_recall", "length": 128}, {"task": "demo_text", "length": 64, "continuation": 4}]
    config = small_config(tmp_path, policies=["full", "h2o", "keepkv"], compare=PAIRS, tasks=tasks)
    rng, results = np.random.default_rng(0), []
    for task in config.tasks:
        for sample in range(40):
            for policy, budget in (("full", None), ("h2o", 64), ("keepkv", 64)):
                # KeepKV is less by 5; H2O differs from full by chance alone.
                score = rng.normal() - (policy == "keepkv") * 5
                results.append(result(config, policy, budget, sample, score, task=task))
    table = claims_table(results, config, summaries(config, results, 40))
    assert [(row[1], row[3], row[4], row[-1]) for row in table.rows] == [
        ("keepkv less h2o", "64", "40", "worse"),
        ("h2o less full", "64", "40", "level"),
        ("keepkv less h2o", "64", "40", "better"),
        ("h2o less full", "64", "40", "level"),
    ]
    # The smallest p-value that 20,000 resamples give, 2 / 20,001, by 4 claims.
    assert [row[6:8] for row in table.rows[::2]] == [["0.0001", "0.0004"]] * 2
