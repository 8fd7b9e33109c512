"""The leaderboard: what becomes of samples, and which policy is recommended."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import leaderboard  # noqa: E402
from leaderboard import ENOUGH, MODEL, Cell, deciding_cells, level_with_best, ranked_for_default, rows_of, table  # noqa: E402


def cell(policy, task, scores):
    budget, parameters = (None, {}) if policy == "full" else (0.25, {"policy": policy})
    return Cell("real", MODEL, task, "known", policy, parameters, budget, dict(enumerate(scores)), 100.0, [])


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
    assert "| **snapkv** | 0.75 (" in text and text.endswith("\n\nBelow 0.3: local 0.25.")


def test_a_run_of_few_prompts_does_not_decide():
    screen = replace(cell("snapkv", "one", [1.0] * 6), run="real-screen")
    for number, decides in ((ENOUGH - 1, screen), (ENOUGH, None)):
        run = replace(cell("snapkv", "one", [1.0] * number), run="real-known")
        others = [replace(run, scores={0: 1.0}, budget=0.5), replace(run, model="another")]
        assert deciding_cells([screen, run, *others], "known") == ([decides] if decides else [run, others[0]])


def test_the_default_reads_the_prompt_once_where_that_is_level_with_the_best():
    _, rows = board(kvzip=1.0, snapkv=0.95, local=0.2)
    assert level_with_best(rows) == {"kvzip", "snapkv"}
    assert [row.policy for row in ranked_for_default(rows, set())] == ["snapkv", "kvzip", "local"]
    _, rows = board(kvzip=1.0, snapkv=0.5)
    assert [row.policy for row in ranked_for_default(rows, set())] == ["kvzip", "snapkv"]
    _, rows = board(kvzip_once=1.0, kvzip=0.99, snapkv=0.5)  # the first computes prompts whole
    assert [row.policy for row in ranked_for_default(rows, set())][0] == "kvzip"


def test_what_calibrated_servers_have_comes_first_where_it_is_level_with_the_best():
    """Otherwise behind the default, by score."""
    for scores, ranked in (
        ({"kvzip": 1.0, "calibrated": 0.95, "h2o": 0.2}, ["calibrated", "kvzip", "h2o"]),
        ({"kvzip": 1.0, "calibrated": 0.4, "h2o": 0.2}, ["kvzip", "calibrated", "h2o"]),
        ({"h2o": 1.0, "calibrated": 0.95, "kvzip": 0.5}, ["calibrated", "h2o", "kvzip"]),
    ):
        assert [row.policy for row in ranked_for_default(board(**scores)[1], set())] == ranked


def test_a_default_stays_until_another_is_better():
    for score, ranked in ((0.55, ["h2o", "snapkv"]), (0.05, ["snapkv", "h2o"])):
        _, rows = board(kvzip=1.0, snapkv=0.6, h2o=score)
        assert [row.policy for row in ranked_for_default(rows, {"h2o"})] == ["kvzip", *ranked]


def test_the_page_has_every_run_with_prompts_enough(tmp_path, monkeypatch):
    """Those of other models and of longer prompts too. Of the page, headings: how figures are rounded may differ."""
    shown = re.findall("^##.*", leaderboard.PAGE.read_text(), re.MULTILINE)
    for name in ("SCORES", "PAGE", "TABLE", "PLOT"):
        path = tmp_path / getattr(leaderboard, name).name
        path.write_bytes(getattr(leaderboard, name).read_bytes())
        monkeypatch.setattr(leaderboard, name, path)
    monkeypatch.setattr(sys, "argv", ["leaderboard.py"])
    leaderboard.main()
    assert re.findall("^##.*", leaderboard.PAGE.read_text(), re.MULTILINE) == shown
    for heading in ("known: gemma3-270m, 8", "later: qwen2.5-coder-1.5b, 12", "later: qwen2.5-coder-0.5b, 8"):
        assert any(f"{heading} prompts" in one for one in shown)


def test_fewer_bits_are_drawn_by_what_they_hold_and_score(tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "PLOT", tmp_path / "fronts.svg")
    full = replace(cell("full", "one", [1.0, 1.0]), run="fronts-later")
    coded = replace(full, policy="kvzip front=int8", parameters={"policy": "kvzip"}, bytes=50.0)
    half = [replace(coded, budget=1.0), replace(coded, budget=0.5, scores={0: 1.0, 1: 0.0}, bytes=30.0)]
    cells = [full, *half, replace(full, run="fronts-fp8", bytes=60.0), cell("full", "one", [1.0])]
    text = "\n".join(leaderboard.fewer_bits(cells))
    assert "| front: int8 | 0.50 | 1.00 | 0.30 | 0.50 |" in text and "nothing). 2 prompts of" in text
    assert "| the whole cache in fp8, nothing evicted | 0.60 | 1.00 |  |  |" in text
    drawn = leaderboard.PLOT.read_text()
    assert drawn.count("<svg") == 1 and leaderboard.fewer_bits(cells) and leaderboard.PLOT.read_text() == drawn
    assert leaderboard.fewer_bits(cells[-1:]) == []


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
