"""The leaderboard: what becomes of samples, and which policy is recommended."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import leaderboard  # noqa: E402
from leaderboard import Cell, cells_of, level_with_best, ranked_for_default, rows_of, table, unpack  # noqa: E402

from vllm_kvmerge.evaluation.results import RunFolder  # noqa: E402
from vllm_kvmerge.evaluation.runner import cells_of as eval_cells  # noqa: E402


def cell(policy, task, scores, budget=0.25, case="known", loops=(), **parameters):
    budget = None if policy == "full" else budget
    parameters = {} if policy == "full" else {"policy": policy.split()[0], **parameters}
    counted = dict(enumerate(scores))
    return Cell("real", "model", task, case, policy, parameters, budget, counted, 100.0, list(loops))


def board(**scores):
    """Two tasks that count, and one that the full cache cannot do."""
    cells = [cell("full", task, [1.0] * 20) for task in ("one 2048", "two 2048")] + [cell("full", "three", [0.1] * 20)]
    for policy, share in scores.items():
        right = [1.0] * round(20 * share) + [0.0] * (20 - round(20 * share))
        cells += [cell(policy, task, right) for task in ("one 2048", "two 2048", "three")]
    return rows_of(cells)


def test_scores_are_shares_of_the_full_cache_where_it_can_do_the_task():
    tasks, rows = board(snapkv=0.75, local=0.25)
    assert tasks == ["one 2048", "two 2048"] and [row.policy for row in rows] == ["full", "snapkv", "local"]
    mean, low, high = rows[1].interval(0.25)
    assert mean == 0.75 and 0.5 < low < mean < high < 0.95
    text = "\n".join(table(tasks, rows, True))
    assert "| policy | 0.25 | one | two | held | loops |" in text
    assert "| **snapkv** | 0.75 (" in text and "| local | 0.25 (" in text


def test_the_default_reads_the_prompt_once_where_that_is_level_with_the_best():
    _, rows = board(kvzip=1.0, snapkv=0.95, local=0.2)
    assert level_with_best(rows) == {"kvzip", "snapkv"}
    assert [row.policy for row in ranked_for_default(rows)] == ["snapkv", "kvzip", "local"]
    _, rows = board(kvzip=1.0, snapkv=0.5)
    assert [row.policy for row in ranked_for_default(rows)] == ["kvzip", "snapkv"]


def test_samples_of_several_runs_add_up():
    one = cell("snapkv", "one", [1.0, 0.0], loops=[1])
    other = Cell(**{**vars(one), "scores": {1: 1.0, 2: 0.5}, "bytes": 130.0, "loops": [1, 2]})
    more = one.with_more(other)
    assert more.scores == {0: 1.0, 1: 0.0, 2: 0.5} and more.loops == [1, 2] and more.bytes == 110


@pytest.fixture
def run_config(tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "ROOT", tmp_path)
    path = tmp_path / "configs/eval/real.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "{model: demo, policies: [full, snapkv], budgets: [0.25], samples: 3, tasks: "
        "[{task: demo_recall, length: 64}, {task: demo_recall, length: 64, question_agnostic: true}]}"
    )
    return path


def test_a_run_goes_on_from_what_is_there(run_config, tmp_path):
    from vllm_kvmerge.evaluation.config import read_config

    config, folder = read_config(run_config, {}), tmp_path / "eval-results/real"
    known = [
        Cell("real", "demo", "demo_recall 64", "later", policy, {}, budget, {0: 1.0, 2: 0.0}, 50.0, [])
        for policy, budget in (("full", None), ("snapkv", 0.25))
    ]
    unpack(known, folder)
    with RunFolder(folder, config.identity()) as opened:
        found = {(result.cell, result.sample): result.score for result in opened.results}
    agnostic = [one for one in eval_cells(config) if config.is_question_agnostic(one.entry)]
    assert found == {(one.key, sample): score for one in agnostic for sample, score in ((0, 1.0), (2, 0.0))}
    # What was not measured here does not count as measured.
    again = {one.key: one for one in cells_of(folder)}
    assert all(again[one.key].scores == one.scores for one in known)
    assert all(one.with_more(again[one.key]) == one for one in known)
    assert np.mean([one.bytes for one in again.values()]) == 0


def test_the_papers_table_is_what_the_command_prints():
    printed = subprocess.run(
        [sys.executable, FOLDER / "papers_scores.py"], capture_output=True, text=True, check=True
    ).stdout
    page = (FOLDER.parent / "docs/quality.md").read_text()
    for policy, row in (
        ("snapkv", "| SnapKV's (last 32 queries, pooled) | none | {} | {} |"),
        ("keepkv", "the preset `keepkv` | {} | {} |"),
        ("keepkv merger=drop", "dropped instead of merged | {} | {} |"),
        ("snapkv merger=residual", "ZSMerge's | {} | {} |"),
    ):
        share, loss = re.search(rf"^\| {re.escape(policy)} +\| +(\S+) +\| +(\S+) +\|$", printed, re.MULTILINE).groups()
        assert row.format(share, loss) in page
