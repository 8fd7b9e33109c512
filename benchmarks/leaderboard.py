"""Every policy on everything that the demo model can do: ``python benchmarks/leaderboard.py``.

Runs ``configs/eval/leaderboard.yaml`` (goes on where an earlier run stopped), measures the time to the first token with
each policy, and writes docs/leaderboard.md, its plot, and the table that requests without a policy are answered by
(vllm_kvmerge/request/recommended.json). Scores of a budget are means over tasks, with 95% intervals by bootstrap over
samples; held is what requests' caches were measured to hold while they generate, as a share of the full cache.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from context_cost import seconds_to_first_token
from report import machine

from vllm_kvmerge import demo
from vllm_kvmerge.cli import main as command
from vllm_kvmerge.evaluation.config import EvalConfig, read_config
from vllm_kvmerge.evaluation.results import Result, RunFolder
from vllm_kvmerge.evaluation.summary import bootstrap_interval
from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.request.parameters import FULL, CompressionConfig, parse_compression
from vllm_kvmerge.request.recommended import TABLE, Measured

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/eval/leaderboard.yaml"
PAGE, PLOT = ROOT / "docs/leaderboard.md", ROOT / "docs/images/leaderboard.svg"
UNSEEN, SEEN = "unseen", "seen"
TITLES = {UNSEEN: "The question comes later", SEEN: "The question is known"}
DECIDING = 0.25
"""The budget that ranks."""


def needs(config: CompressionConfig) -> str | None:
    """Says what a server has to have for a policy that not all servers have."""
    if config.policy.tracker.predicts_scores:
        return "a KVzap model"
    return "hidden states" if config.policy.tracker.normalizes else None


def rows_of(config: EvalConfig, results: list[Result], first_tokens: dict[str, float], mode: str) -> list[Measured]:
    """Of the questions of one mode, and of text, which has none; best overall first. Only what every task has
    answered."""
    of_mode = [entry for entry in config.tasks if config.is_question_agnostic(entry) == (mode == UNSEEN)]
    tasks = [entry.label for entry in of_mode if entry.task.higher_is_better]
    texts = [entry.label for entry in config.tasks if not entry.task.higher_is_better]
    by_cell: dict[tuple[str, float | None], dict[str, dict[int, Result]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        if result.task in (*tasks, *texts):
            by_cell[result.policy, result.budget][result.task][result.sample] = result
    full = by_cell[FULL, None]
    rows = []
    for policy in config.policies:
        score, held, text = {}, {}, {}
        deciding = str(1.0 if policy.name == FULL else DECIDING)
        for budget in [None] if policy.name == FULL else config.budgets:
            cell = by_cell[policy.label, budget]
            samples = sorted(set.intersection(*(set(cell[task]) & set(full[task]) for task in tasks)))
            if not samples:
                continue
            means = [float(np.mean([cell[task][one].score for task in tasks])) for one in samples]
            score[str(budget or 1.0)] = (float(np.mean(means)), *bootstrap_interval(means))
            shares = [cell[t][i].mean_bytes / full[t][i].mean_bytes for t in tasks for i in samples]  # type: ignore[operator]
            held[str(budget or 1.0)] = float(np.mean(shares))
            changes = [one.score - full[task][index].score for task in texts for index, one in cell[task].items()]
            text[str(budget or 1.0)] = float(np.exp(-np.mean(changes)))
        if deciding in score:
            parsed = parse_compression(policy.compression(DECIDING, None)) if policy.name != FULL else None
            row = Measured(
                label=policy.label,
                parameters={} if parsed is None else policy.parameters,
                uneven=parsed is not None and parsed.policy.allocator.name != Uniform.name,
                needs=None if parsed is None else needs(parsed),
                score=score,
                held=held,
                first_token=first_tokens[policy.label],
                text=text,
                overall=(len(tasks) * score[deciding][0] + text[deciding]) / (len(tasks) + 1),
            )
            rows.append(row)
    return sorted(rows, key=lambda row: -row.overall)


def measure_first_tokens(config: EvalConfig, context: int, repeats: int) -> dict[str, float]:
    """Each policy's time to first token where a context is compressed before its question, over a plain request's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from vllm_kvmerge import kvmerge_engine_args

    llm = LLM(
        **kvmerge_engine_args(
            model=demo.model_path(),
            dtype="float32",
            enforce_eager=True,
            max_model_len=2 * context + 150,
            kv_cache_memory_bytes=1 << 28,
            additional_config={"kvmerge": {"max_compaction_seconds": 600, "kvzap": demo.kvzap_path()}},
        )
    )
    prompt = np.random.default_rng(0).integers(19, 780, context + 20).tolist()
    ratios: dict[str, list[float]] = defaultdict(list)
    for turn in range(repeats + 1):  # the first does not count
        plain: list[float] = []
        for policy in config.policies:
            fields = {"policy": FULL} if policy.name == FULL else policy.parameters | {"budget": DECIDING}
            assert llm.reset_prefix_cache()
            seconds = seconds_to_first_token(llm, prompt, context, fields)
            plain += [seconds] if policy.name == FULL else []
            if turn:
                ratios[policy.label].append(seconds / plain[0])
    llm.llm_engine.engine_core.shutdown()
    return {label: float(np.median(some)) for label, some in ratios.items()}


def write_page(tables: dict[str, list[Measured]], config: EvalConfig, num_samples: int, context: int) -> None:
    texts = [
        "# Leaderboard",
        "",
        "```\n.venv/bin/python benchmarks/leaderboard.py\n```",
        "",
        f"Every policy as it comes, on the [demo model](demo-model.md) in float32: {num_samples} prompts of 1,024 "
        "tokens for each of three tasks (one fact of 16, several facts, chains of variables), in two cases that are "
        "never mixed. Scores are shares of right answers, means over the tasks with 95% intervals. *Text*: perplexity "
        "of 64 tokens of plain text after 768 with the full cache, over that with the policy. *Overall*: the mean of "
        f"the three tasks and text at a budget of {DECIDING}, by which policies are ranked. *Held*: bytes of the cache "
        "while a request generates, as measured, of the full cache's. *First token*: time to it where "
        f"{context:,} tokens are compressed before a question of 20 follows, over that of a plain request. RULER's "
        "texts are English, which this model does not know. A cache of 8 bits, alone and compressed: "
        "[eight bits](quality/eight-bits.md). On this model.",
        "",
        f"![Scores against budgets](images/{PLOT.name})",
        "",
    ]
    for mode, rows in tables.items():
        texts += [f"## {TITLES[mode]}", ""]
        texts += ["| policy | overall | " + " | ".join(map(str, config.budgets)) + " | text | held | first token |"]
        texts += ["|---|" + "---:|" * (len(config.budgets) + 4)]
        for row in rows:
            cells = [row.score.get(str(budget), row.score.get("1.0")) for budget in config.budgets]
            scores = ["" if one is None else "{:.2f} ({:.2f} to {:.2f})".format(*one) for one in cells]
            held = row.held.get(str(DECIDING), 1.0)
            text = row.text.get(str(DECIDING), 1.0)
            last = [f"{text:.2f}", f"{held:.2f}", f"{row.first_token:.2f}"]
            texts.append(f"| {row.label} | {row.overall:.3f} | " + " | ".join([*scores, *last]) + " |")
        texts.append("")
    texts += [
        "## What a request without a policy gets",
        "",
        f'`{{"budget": {DECIDING}}}` alone takes the best of these overall that every server can run, told by '
        "whether the question comes later (`context_tokens`, or `context_messages` of a chat) and whether heads must "
        "have even budgets (`allocator: uniform`). `vllm-kvmerge policies --recommend` prints the table that decides.",
        "",
    ]
    PAGE.write_text("\n".join(texts))


def draw(tables: dict[str, list[Measured]], config: EvalConfig, best: int = 8) -> None:
    """The best policies of each case, and the full cache."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tables), figsize=(12, 4.5), sharey=True, layout="constrained")
    for axis, (mode, rows) in zip(axes, tables.items(), strict=True):
        for row in [row for row in rows if row.label != FULL][:best]:
            budgets = [budget for budget in config.budgets if str(budget) in row.score]
            means, lows, highs = np.array([row.score[str(budget)] for budget in budgets]).T
            error = [np.maximum(means - lows, 0), np.maximum(highs - means, 0)]
            axis.errorbar(budgets, means, yerr=error, label=row.label, marker="o", markersize=3, capsize=2)
        for full in (row.score["1.0"][0] for row in rows if row.label == FULL):
            axis.axhline(full, color="black", linestyle="--", linewidth=1, label=FULL)
        axis.set(xscale="log", title=TITLES[mode], xlabel="budget", xticks=config.budgets, xticklabels=config.budgets)
        axis.minorticks_off()
        axis.legend(fontsize="x-small")
    axes[0].set_ylabel("share of answers that are right")
    matplotlib.rcParams["svg.hashsalt"] = "leaderboard"
    figure.savefig(PLOT, metadata={"Date": None})


def recommended(tables: dict[str, list[Measured]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The best rows of each case, for budgets that may differ between heads and for even ones."""
    for mode, rows in tables.items():
        usable = [row for row in rows if row.parameters and str(DECIDING) in row.score]
        for kind, some in (("uneven", usable), ("even", [row for row in usable if not row.uneven])):
            yield f"{mode}, {kind}", [row.model_dump() for row in some[:6]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, help="default: the configuration's")
    parser.add_argument("--context", type=int, default=4000, help="tokens, for the time to the first token")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("eval-results/leaderboard"), metavar="DIR")
    arguments = parser.parse_args()
    samples = [] if arguments.samples is None else ["--samples", str(arguments.samples)]
    if status := command(["eval", str(CONFIG), "--output", str(arguments.output), *samples]):
        sys.exit(status)
    config = read_config(CONFIG, {"samples": arguments.samples})
    with RunFolder(arguments.output, config.identity()) as folder:
        results = folder.results
    measured = arguments.output / "first_tokens.json"
    if not measured.exists():
        measured.write_text(json.dumps(measure_first_tokens(config, arguments.context, arguments.repeats)))
    first_tokens = json.loads(measured.read_text())
    tables = {mode: rows_of(config, results, first_tokens, mode) for mode in TITLES}
    write_page(tables, config, config.samples, arguments.context)
    draw(tables, config)
    found = {"samples": config.samples, "budget": DECIDING, "cases": dict(recommended(tables)), "machine": machine()}
    TABLE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
