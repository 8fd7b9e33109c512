"""Policies on real language models: ``python benchmarks/leaderboard.py [RUN ...]``.

Adds runs of ``vllm-kvmerge eval`` (their folders, named like their configurations: eval-results/real-screen; with
``--model`` those of another model than the configuration's) sample by sample to benchmarks/results/real_scores.json,
and writes docs/leaderboard.md, and the table that requests without a policy are answered by
(vllm_kvmerge/request/recommended.json), from all that is there.

A policy's score is the mean over tasks of its share of the full cache's score, where that has 0.6 at least. Intervals
of 95% by bootstrap over each task's samples; differences from the best are paired, and corrected for their number
(Holm). The default of a case is the policy with the highest score at the budget that ranks, unless policies that read
the prompt once are level with it: then the best of those. Of these, the default stays until another is better by more
than chance.
"""

import argparse
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import plot_lines

from vllm_kvmerge.evaluation.comparison import bootstrap_p_value, holm
from vllm_kvmerge.evaluation.config import EvalConfig, TaskEntry, read_config
from vllm_kvmerge.evaluation.results import Result, RunFolder
from vllm_kvmerge.evaluation.runner import cells_of as eval_cells
from vllm_kvmerge.evaluation.tasks.repetition import repetition
from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.request.recommended import TABLE, Case, Measured, Recommendations, recommendations
from vllm_kvmerge.request.spec import FULL, CompressionError, parse_compression

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
SCORES, PAGE, PLOT = RESULTS / "real_scores.json", ROOT / "docs/leaderboard.md", RESULTS / "fronts.svg"
TITLES: dict[Case, str] = {"known": "The question is known", "later": "The question comes later"}
LEAST = 0.6
"""Of the full cache's score, for a task that counts."""
SHOWN = 0.3
"""The score from which on a policy has a row of its own."""
ENOUGH = 12
"""Prompts of each task, for a run to decide instead of the screen."""
FEWEST = 6
"""Prompts of each task, for a run to have a table."""
DECIDING = 0.25
"""The budget that ranks."""
MODEL = "qwen2.5-coder-0.5b"
"""That decides."""
PUBLIC: dict[Case, dict[str, tuple[float, float]]] = {
    "known": {"adakv": (78.4, 82.6), "snapkv": (74.3, 78.8)},
    "later": {
        "kvzip": (95.0, 95.2),
        "expected_attention": (88.3, 75.9),
        "compactor allocator=adaptive": (76.5, 83.1),
        "keydiff": (64.4, 72.9),
        "snapkv": (33.1, 43.4),
    },
}
"""kvpress's public leaderboard, Qwen3 8B and Llama 3.1 8B: RULER of 4,096 tokens, 13 tasks, a quarter kept, 2026-11."""
RESAMPLES = 4000
FP8 = "full in fp8"
FORMATS = {
    "kvzip": "bfloat16",
    "kvzip front=int8": "front: int8",
    "kvzip front=int4": "front: int4",
    FP8: "the whole cache in fp8, nothing evicted",
}
"""Names by policy."""

OTHERS = """## Other models

The same prompts (`--model`), of two tasks; those of Gemma 3, which is compressed in its three layers of full attention,
have no chat template ([configuration](../configs/eval/real-hybrid.yaml)). These models took no part in any choice."""
LONGER = """## Longer prompts

Of 4,096 tokens ([configuration](../configs/eval/real-4096.yaml))."""
HELD_OUT = """## Held out

A task that took no part in any choice. Questions about documents did not either, but do not count, since the full cache
answers a quarter of them."""

INTRODUCTION = f"""# Leaderboard

Policies on a real language model, and what a request without a policy gets. To measure your own model:

```sh
.venv/bin/vllm-kvmerge eval configs/eval/real-screen.yaml --output eval-results/real-screen
.venv/bin/python benchmarks/leaderboard.py eval-results/real-screen
```

Scores are relative to the full cache's: means over the tasks on which it gets at least 0.6, with 95% intervals
(bootstrap over prompts). The question is known when the prompt is compressed, or it comes later, after the context has
been compressed, as where many questions are asked about one document. Further columns are for a budget of {DECIDING}:
correct answers of each task; *held*, the bytes of the cache during generation relative to the full cache's, measured
only where the question comes later (otherwise the whole prompt is held until its end); *loops*, answers in which more
than half of the 4-grams occurred before. **Bold**: not significantly worse than the best (paired, after Holm). Other
models and tasks rank differently. All samples: [real_scores.json](../benchmarks/results/real_scores.json).
"""


@dataclass(frozen=True)
class Cell:
    """scores: by sample. loops: samples in whose answers more than half of the 4-grams have occurred before."""

    run: str
    model: str
    task: str
    case: Case
    policy: str
    parameters: dict[str, Any]
    budget: float | None
    scores: dict[int, float]
    bytes: float
    loops: list[int]

    @property
    def key(self) -> tuple[object, ...]:
        return self.run, self.model, self.task, self.case, self.policy, self.budget

    def with_more(self, other: "Cell") -> "Cell":
        """And those samples of ``other`` that are not here."""
        new = other.scores.keys() - self.scores.keys()
        mean = (len(self.scores) * self.bytes + len(new) * other.bytes) / (len(self.scores) + len(new))
        loops = [*self.loops, *(sample for sample in other.loops if sample in new)]
        return replace(self, scores=other.scores | self.scores, bytes=round(mean), loops=loops)


def task_of(entry: TaskEntry) -> str:
    if path := getattr(entry.task, "path", None):
        return Path(path).stem
    return f"{entry.task.name.removeprefix('ruler_')} {getattr(entry.task, 'length', '')}".rstrip()


def case_of(config: EvalConfig, entry: TaskEntry) -> Case:
    return "later" if config.is_question_agnostic(entry) else "known"


def config_of(run: Path, model: str | None) -> EvalConfig:
    return read_config(ROOT / f"configs/eval/{run.name}.yaml", {"model": model})


def cells_of(path: Path, model: str | None) -> Iterator[Cell]:
    """What a run has measured."""
    config = config_of(path, model)
    with RunFolder(path, config.identity()) as folder:
        results = folder.results
    for entry in config.tasks:
        for policy in config.policies:
            for budget in config.budgets_of(policy):
                found = [r for r in results if (r.task, r.policy, r.budget) == (entry.label, policy.label, budget)]
                if found:
                    yield Cell(
                        run=path.name,
                        model=Path(config.model).name,
                        task=task_of(entry),
                        case=case_of(config, entry),
                        policy=policy.label,
                        parameters={} if policy.name == FULL else policy.parameters,
                        budget=budget,
                        scores={r.sample: round(r.score, 4) for r in sorted(found, key=lambda r: r.sample)},
                        bytes=round(float(np.mean([r.mean_bytes for r in found if r.mean_bytes is not None] or [0.0]))),
                        loops=[r.sample for r in found if repetition(r.prediction, 4) > 0.5],
                    )


def load() -> list[Cell]:
    if not SCORES.exists():
        return []
    rows = json.loads(SCORES.read_text())
    return [Cell(**{**row, "scores": {int(key): value for key, value in row["scores"].items()}}) for row in rows]


def unpack(cells: Iterable[Cell], path: Path, model: str | None) -> None:
    """What a run needs to go on: which samples have been answered."""
    config = config_of(path, model)
    own = [cell for cell in cells if (cell.run, cell.model) == (path.name, Path(config.model).name)]
    known = {(cell.task, cell.case, cell.policy, cell.budget): cell for cell in own}
    with RunFolder(path, config.identity()) as folder:
        for cell in eval_cells(config):
            found = known.get((task_of(cell.entry), case_of(config, cell.entry), cell.policy.label, cell.budget))
            for sample, score in found.scores.items() if found else ():
                folder.add(
                    Result(
                        cell=cell.key,
                        task=cell.entry.label,
                        policy=cell.policy.label,
                        budget=cell.budget,
                        sample=sample,
                        seed=config.seed,
                        score=score,
                        prediction="",
                        references=[],
                        prompt_tokens=0,
                        mean_entries=None,
                        mean_bytes=None,
                        peak_entries=None,
                        peak_bytes=None,
                        seconds=0.0,
                    )
                )


def save(cells: Iterable[Cell]) -> None:
    SCORES.write_text("[\n" + ",\n".join(json.dumps(vars(cell)) for cell in cells) + "\n]\n")


@dataclass(frozen=True)
class Row:
    """A policy in one case of one run. draws: resampled scores by budget, the same samples for all policies."""

    policy: str
    parameters: dict[str, Any]
    by_task: dict[tuple[float | None, str], float]
    score: dict[float | None, float]
    draws: dict[float | None, NDArray[np.float64]]
    held: dict[float | None, float]
    loops: dict[float | None, float]

    def interval(self, budget: float | None) -> tuple[float, float, float]:
        low, high = np.quantile(self.draws[budget], (0.025, 0.975))
        return self.score[budget], float(low), float(high)

    @property
    def reads_twice(self) -> bool:
        return bool(self.parameters) and self._parsed.policy.tracker.repeats_context

    @property
    def takes_cached(self) -> bool:
        """False if prompts are computed whole, whatever the prefix cache has of them."""
        return not self.parameters or self._parsed.policy.tracker.prompt_window != "all"

    @property
    def calibrated(self) -> bool:
        """True if servers need to know the budgets of their model's heads."""
        return bool(self.parameters) and self._parsed.policy.allocator.needs_head_budgets

    @property
    def for_turns(self) -> bool:
        """True if it suits chats that go on from what their last turn has left."""
        try:
            parse_compression(self.parameters | {"budget": DECIDING, "decode": "grow", "reuse": "turns"})
        except CompressionError:
            return False
        return not self.reads_twice

    @property
    def uneven(self) -> bool:
        return bool(self.parameters) and self._parsed.policy.allocator.name != Uniform.name

    @property
    def _parsed(self) -> Any:
        return parse_compression(self.parameters | {"budget": DECIDING})


def common_samples(cells: Iterable[Cell]) -> dict[tuple[str, float | None], set[int]]:
    """The prompts, by task and budget, that all policies have answered, the full cache included."""
    common: dict[tuple[str, float | None], set[int]] = {}
    for cell in cells:
        place = cell.task, cell.budget
        common[place] = common.get(place, set(cell.scores)) & cell.scores.keys()
    full = {task: samples for (task, budget), samples in common.items() if budget is None}
    return {(task, budget): samples & full.get(task, samples) for (task, budget), samples in common.items()}


def rows_of(cells: Iterable[Cell]) -> tuple[list[str], list[Row]]:
    """The tasks that count, and the policies that all of them have, best first, by prompts that all have answered."""
    by_policy: dict[str, dict[tuple[str, float | None], Cell]] = defaultdict(dict)
    for cell in cells:
        by_policy[cell.policy][cell.task, cell.budget] = cell
    full = {task: cell for (task, _), cell in by_policy.get(FULL, {}).items()}
    common = common_samples(cell for found in by_policy.values() for cell in found.values())
    tasks = [task for task, cell in full.items() if np.mean(list(cell.scores.values())) >= LEAST]
    rows = []
    for policy, found in by_policy.items():
        budgets = sorted({budget for _, budget in found}, key=lambda one: -(one or 1.0))
        row = Row(policy, next(iter(found.values())).parameters, {}, {}, {}, {}, {})
        for budget in budgets:
            if any((task, budget) not in found for task in tasks):
                continue
            means, draws, held = [], [], []
            for task in tasks:
                cell = found[task, budget]
                samples = sorted(common[task, budget])
                scores = np.array([cell.scores[one] for one in samples])
                whole = np.mean([full[task].scores[one] for one in samples])
                drawn = np.random.default_rng(zlib.crc32(task.encode())).integers(
                    0, len(samples), (RESAMPLES, len(samples))
                )
                row.by_task[budget, task] = float(scores.mean())
                means.append(scores.mean() / whole)
                draws.append(scores[drawn].mean(1) / whole)
                held.append(cell.bytes / full[task].bytes)
            row.score[budget], row.draws[budget] = float(np.mean(means)), np.mean(draws, 0)
            row.held[budget] = float(np.mean(held))
            cells_at = [found[task, budget] for task in tasks]
            row.loops[budget] = float(np.mean([len(cell.loops) / len(cell.scores) for cell in cells_at]))
        if row.score:
            rows.append(row)
    return tasks, sorted(rows, key=lambda row: -max(row.score.get(DECIDING, 0.0), row.score.get(None, 0.0)))


def level_with_best(rows: list[Row]) -> set[str]:
    """Policies whose difference from the best, which is among them, is not told from 0."""
    ranked = [row for row in rows if DECIDING in row.score]
    others = [bootstrap_p_value(np.sort(ranked[0].draws[DECIDING] - row.draws[DECIDING])) for row in ranked[1:]]
    return {ranked[0].policy} | {row.policy for row, p in zip(ranked[1:], holm(others), strict=True) if p > 0.05}


def ranked_for_default(rows: list[Row], current: set[str]) -> list[Row]:
    """By score, behind the default, and behind those of ``current`` that are level with the best of their kind. Before
    all comes the default of calibrated servers: the best of what they alone have, if it is level with the best."""
    level, ranked = level_with_best(rows), [row for row in rows if DECIDING in row.score]
    candidates = [row for row in ranked if row.takes_cached and not row.calibrated]
    chosen = next((row for row in candidates if row.policy in level and not row.reads_twice), candidates[0])
    turns = [row for row in candidates if row.for_turns]
    kinds = [kind for kind in (turns, [row for row in turns if not row.uneven]) if kind]
    stays = current & {policy for kind in kinds for policy in level_with_best(kind)}
    first = next((row for row in ranked if row.calibrated and row.policy in level), chosen)
    return sorted(
        ranked, key=lambda row: (row is not first, row is not chosen, row.policy not in stays)
    )  # then by score


def table(tasks: list[str], rows: list[Row], has_held: bool) -> list[str]:
    level = level_with_best(rows)
    budgets = sorted({budget for row in rows for budget in row.score if budget}, reverse=True)
    names = [task.split()[0] for task in tasks]
    columns = ["policy", *map(str, budgets), *names, *["held"] * has_held, "loops"]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    low = []
    for row in rows:
        at = None if row.policy == FULL else DECIDING
        if at not in row.score:
            continue
        if row.score[at] < SHOWN:
            low.append(f"{row.policy} {row.score[at]:.2f}")
            continue
        scores = [
            "1.00" if at is None else "{:.2f} ({:.2f} to {:.2f})".format(*row.interval(b)) if b in row.score else ""
            for b in budgets
        ]
        parts = [f"{row.by_task[at, task]:.2f}" for task in tasks]
        parts += [f"{row.held[at]:.2f}"] * has_held + [f"{row.loops[at]:.2f}"]
        name = f"**{row.policy}**" if row.policy in level else row.policy
        lines.append(f"| {name} | " + " | ".join([*scores, *parts]) + " |")
    return [*lines, "", f"Below {SHOWN}: {', '.join(low)}."] if low else lines


def deciding_cells(cells: Iterable[Cell], case: Case) -> list[Cell]:
    """The run of the case; until it has prompts enough, the screen, of whose tasks it has others."""
    of_case = [cell for cell in cells if (cell.case, cell.model) == (case, MODEL)]
    own = [cell for cell in of_case if cell.run == f"real-{case}"]
    if own and min(len(cell.scores) for cell in own if cell.budget in (None, DECIDING)) >= ENOUGH:
        return own
    return [cell for cell in of_case if cell.run == "real-screen"]


def recommended(
    tables: dict[Case, tuple[list[str], list[Row]]], cells: list[Cell], all_cells: list[Cell]
) -> Recommendations:
    """``cells``: those of the tables. What policies of the one case hold is measured in the other, or by other runs."""
    cases: dict[Case, list[Measured]] = {}
    before = recommendations()
    runs = [
        rows_of(cell for cell in all_cells if (cell.run, cell.model, cell.case) == (run, MODEL, "later"))[1]
        for run in ("real-held-out", "real-screen")
    ]
    held = {row.policy: row.held.get(DECIDING, 1.0) for rows in (*runs, tables["later"][1]) for row in rows}
    for case, (_, rows) in tables.items():
        current = {before.best(case, even, for_turns=True).label for even in (False, True)}
        ranked = ranked_for_default(rows, current)
        even = [row for row in ranked if not row.uneven]
        cases[case] = [
            Measured(
                label=row.policy,
                parameters=row.parameters,
                uneven=row.uneven,
                calibrated=row.calibrated,
                for_turns=row.for_turns,
                score={str(b): tuple(round(x, 3) for x in row.interval(b)) for b in row.score if b},  # type: ignore[misc]
                held=round(held[row.policy], 3),
            )
            for row in ranked
            if row in ranked[:6] or row in even[:3]  # of each kind that is asked for
        ]
    tasks = [task.split()[0] for task in tables["known"][0]]
    samples = min(len(cell.scores) for cell in cells if cell.budget in (None, DECIDING))
    return Recommendations(model=cells[0].model, tasks=tasks, samples=samples, budget=DECIDING, cases=cases)


def page(cells: list[Cell], found: Recommendations) -> str:
    by_run: dict[tuple[str, str, Case], list[Cell]] = defaultdict(list)
    for cell in cells:
        by_run[cell.run, cell.model, cell.case].append(cell)

    def section(mark: str, run: str, model: str, case: Case) -> list[str]:
        if not (some := by_run[run, model, case]):
            return []
        tasks, rows = rows_of(some)
        counts = {len(common) for (task, _), common in common_samples(some).items() if task in tasks}
        if min(counts, default=0) < FEWEST:
            return []
        number = " to ".join(map(str, sorted({min(counts), max(counts)})))
        lines = [f"{mark} {TITLES[case]}: {model}, {number} prompts", "", *table(tasks, rows, case == "later"), ""]
        if (run, model) == (f"real-{case}", MODEL):
            lines += [*screened(by_run["real-screen", model, case], {row.policy for row in rows}), ""]
        return lines

    lines = [INTRODUCTION, *defaults(found)]
    for case in TITLES:
        lines += section("##", f"real-{case}", MODEL, case)
    others = sorted({cell.model for cell in cells} - {MODEL})
    for heading, places in (
        (
            OTHERS,
            [(run, model, case) for model in others for case in TITLES for run in (f"real-{case}", "real-hybrid")],
        ),
        (LONGER, [("real-4096", MODEL, case) for case in TITLES]),
        (HELD_OUT, [("real-held-out", MODEL, case) for case in TITLES]),
    ):
        if sections := [line for place in places for line in section("###", *place)]:
            lines += [heading, "", *sections]
    return "\n".join([*lines, *fewer_bits(cells), *order(cells)])


def screened(cells: list[Cell], shown: set[str]) -> list[str]:
    """The policies that the screen left out."""
    rest = [row for row in rows_of(cells)[1] if row.policy not in shown]
    scores = ", ".join(f"{row.policy} {row.score[DECIDING]:.2f}" for row in rest)
    screen = "[the screen](../configs/eval/real-screen.yaml), which decided what is measured above"
    return [f"Others, on the six prompts of {screen}: {scores}."]


def defaults(found: Recommendations) -> list[str]:
    """What a request without a policy gets."""
    asked: list[tuple[str, Case, bool]] = [
        ('`{"budget": 0.25}`', "known", False),
        ("with `context_tokens` or `context_messages`", "later", False),
        ('with `"reuse": "turns"` (of policies that take it, and read the prompt once)', "later", True),
    ]
    lines = [
        "## What a request without a policy gets",
        "",
        "| request | policy | [calibrated](operations.md#calibration) | with `allocator: uniform` |",
        "|---|---|---|---|",
    ]
    for request, case, for_turns in asked:
        best, even = (found.best(case, even, for_turns).label for even in (False, True))
        calibrated = found.best(case, for_turns=for_turns, is_calibrated=True).label
        lines.append(f"| {request} | `{best}` | `{calibrated}` | `{even}` |")
    return [
        *lines,
        "",
        "The best policy for the case, unless policies that read the prompt once match it: then the best of those. Of",
        "these, a default stays until another is significantly better. Policies that compute prompts whole, whatever",
        "the prefix cache has of them (`kvzip_once`, `kvzap`), are no defaults. A calibrated server takes the best of",
        "what it alone has, if that is level with the best.",
        "",
    ]


def by_format(cells: Iterable[Cell]) -> tuple[int, dict[str, Row]]:
    """``kvzip`` by how its fronts are stored, and the full cache in 8 bits, as if that were a budget; and the number of
    prompts."""
    run = [cell for cell in cells if (cell.run, cell.model) == ("fronts-later", MODEL)]
    run += [replace(cell, policy=FP8, budget=1.0) for cell in cells if (cell.run, cell.model) == ("fronts-fp8", MODEL)]
    tasks, rows = rows_of(run)
    by_policy = {row.policy: row for row in rows}
    samples = sum(len(common) for (task, budget), common in common_samples(run).items() if task in tasks and not budget)
    return samples, {name: by_policy[policy] for policy, name in FORMATS.items() if policy in by_policy}


def fewer_bits(cells: list[Cell]) -> list[str]:
    """A section about fronts in fewer bits, with a plot and its numbers."""
    samples, rows = by_format(cells)
    if not rows:
        return []
    labels = "bytes held, as a share of the full bfloat16 cache's", "score, as a share of the full cache's"
    points = {name: [(row.held[budget], row.score[budget]) for budget in row.score] for name, row in rows.items()}
    plot_lines(PLOT, labels, points)
    budgets = sorted({budget for row in rows.values() for budget in row.score if budget}, reverse=True)
    lines = [
        "## Fewer entries, or fewer bits",
        "",
        "![score against bytes](../benchmarks/results/fronts.svg)",
        "",
        f"`kvzip`, {MODEL}, the question later: what [fronts in 8 or 4",
        "bits](request-field.md#fronts-in-8-or-4-bits) hold and score beside those in bfloat16, by budget (1.0 evicts",
        f"nothing). {samples} prompts of [these tasks](../configs/eval/fronts-later.yaml), too few to tell small",
        "differences.",
        "",
        "| stored as | " + " | ".join(f"{budget}: bytes | score" for budget in budgets) + " |",
        "|---|" + "---:|---:|" * len(budgets),
    ]
    for name, row in rows.items():
        parts = [f"{row.held[b]:.2f} | {row.score[b]:.2f}" if b in row.score else " | " for b in budgets]
        lines.append(f"| {name} | " + " | ".join(parts) + " |")
    return [*lines, ""]


def order(cells: list[Cell]) -> list[str]:
    """The same policies on the public leaderboard of kvpress, whose models and tasks are others."""
    lines = [
        "## Beside the public leaderboard",
        "",
        "kvpress's leaderboard has RULER of 4,096 tokens, all 13 tasks, a quarter kept, Qwen3 8B and Llama 3.1 8B, in",
        "percent; *here* is the score above, in percent of the full cache's. Models, tasks and settings differ:",
        "compare only the order. Policies without a place in the tables of more prompts have that of the screen.",
        "",
        "| policy | case | Qwen3 8B | Llama 3.1 8B | here |",
        "|---|---|---:|---:|---:|",
    ]
    for case, theirs in PUBLIC.items():
        ours: dict[str, float | None] = {}
        for run in ("real-screen", f"real-{case}"):  # the latter's are of more prompts
            of_run = [cell for cell in cells if (cell.run, cell.model, cell.case) == (run, MODEL, case)]
            ours |= {row.policy: row.score.get(DECIDING) for row in rows_of(of_run)[1]}
        for policy, (qwen, llama) in theirs.items():
            found = ours.get(policy)
            here = "" if found is None else f"{100 * found:.0f}"
            lines.append(f"| {policy} | {TITLES[case].lower()} | {qwen} | {llama} | {here} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--model", help="of the runs; default: their configuration's")
    parser.add_argument(
        "--unpack",
        action="store_true",
        help="write what is there of a run into its folder, which has to be a new one, "
        "so that vllm-kvmerge eval goes on with it",
    )
    arguments = parser.parse_args()
    cells = load()
    if arguments.unpack:
        return unpack(cells, *arguments.runs, arguments.model)
    by_key = {cell.key: cell for cell in cells}
    for path in arguments.runs:
        for cell in cells_of(path, arguments.model):
            by_key[cell.key] = by_key[cell.key].with_more(cell) if cell.key in by_key else cell
    cells = list(by_key.values())
    save(cells)
    deciding = [cell for case in TITLES for cell in deciding_cells(cells, case)]
    tables = {case: rows_of(cell for cell in deciding if cell.case == case) for case in TITLES}
    found = recommended(tables, deciding, cells)
    PAGE.write_text(page(cells, found))
    TABLE.write_text(found.model_dump_json(indent=1) + "\n")


if __name__ == "__main__":
    main()
