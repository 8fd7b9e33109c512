"""Pairs of policies, sample by sample."""

from pathlib import Path

import pytest

from tests.evaluation.runs import small_config
from tests.evaluation.test_runner import constant, go
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation.comparison import comparison_table
from vllm_kvmerge.evaluation.config import EvalConfig
from vllm_kvmerge.evaluation.results import Result
from vllm_kvmerge.evaluation.runner import Run
from vllm_kvmerge.evaluation.summary import summarize

PAIRS = [["keepkv", "h2o"], ["h2o", "full"]]


@pytest.fixture
def config(tmp_path: Path) -> EvalConfig:
    return small_config(tmp_path, policies=["full", "h2o", "keepkv"], compare=PAIRS)


def result(config: EvalConfig, policy: str, budget: int | float | None, sample: int, score: float) -> Result:
    label = config.tasks[0].label
    cell = " | ".join([label, policy, *([] if budget is None else [str(budget)])])
    return Result(
        cell=cell, task=label, policy=policy, budget=budget, sample=sample, seed=3, score=score, prediction="",
        references=[], prompt_tokens=128, mean_entries=None, mean_bytes=None, peak_entries=None, peak_bytes=None,
        seconds=0.0,
    )  # fmt: skip


def test_differences_are_of_the_same_samples(config: EvalConfig) -> None:
    results = [result(config, "full", None, sample, 1.0) for sample in range(4)]
    results += [result(config, "h2o", 64, sample, score) for sample, score in enumerate([1, 0, 1, 0])]
    # The last sample of keepkv is missing: its pair counts three.
    results += [result(config, "keepkv", 64, sample, score) for sample, score in enumerate([1, 1, 1])]
    (task,) = summarize(config, results, Run({config.tasks[0].label: 4}, []))
    table = comparison_table(results, config, task)
    assert table.header == ["pair", "budget 0.25", "budget 64"]
    assert [row[0] for row in table.rows] == ["keepkv less h2o", "h2o less full"]
    assert [row[1] for row in table.rows] == ["", ""]
    assert table.rows[0][2].startswith("+0.333 [+0.000, +1.000] ~")
    assert table.rows[1][2].startswith("-0.500 [-1.000, ")
    assert "higher is better" in table.notes


def test_a_difference_that_is_there(config: EvalConfig) -> None:
    results = [result(config, name, 64, sample, 1.0) for name in ("h2o",) for sample in range(4)]
    results += [result(config, "keepkv", 64, sample, 0.0) for sample in range(4)]
    (task,) = summarize(config, results, Run({config.tasks[0].label: 4}, []))
    assert comparison_table(results, config, task).rows[0][2] == "-1.000 [-1.000, -1.000]"


def test_report_has_pairs_and_they_may_change(tmp_path: Path, config: EvalConfig) -> None:
    assert go(config, tmp_path / "out", constant)[0] == 0
    assert "keepkv less h2o" in (tmp_path / "out" / "summary.md").read_text()
    # What is compared is no part of what answers depend on: the folder still belongs to the configuration.
    other = small_config(tmp_path, policies=["full", "h2o", "keepkv"], compare=[["full", "keepkv"]])
    assert go(other, tmp_path / "out", constant)[0] == 0
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "full less keepkv" in summary and "keepkv less h2o" not in summary


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([["full", "snapkv"]], "compare: 'snapkv' is no policy of this configuration; allowed: full, keepkv"),
        ([["full"]], "compare.0: List should have at least 2 items"),
    ],
)
def test_pairs_that_cannot_be_compared(tmp_path: Path, pairs: list, said: str) -> None:
    with pytest.raises(CommandError) as fault:
        small_config(tmp_path, compare=pairs)
    assert said in str(fault.value)
