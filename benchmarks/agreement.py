"""Agreement with the full cache beside the score of the task: ``python benchmarks/agreement.py RUN``.

RUN: folder of a run of a configuration (configs/eval/agreement.yaml unless told) whose tasks have ``metric: agreement``
and are scored by their references otherwise. Prints the mean score, agreement and change of log p of each policy and
budget, and Spearman's rank correlation of the score with either, over all pairs: does what an operator sees of answers
without references rank policies and budgets as their scores do?
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import save

from vllm_kvmerge.evaluation.config import read_config
from vllm_kvmerge.evaluation.summary import print_table
from vllm_kvmerge.evaluation.tasks.base import TASKS, Completion, Sample

CONFIG = Path(__file__).parents[1] / "configs/eval/agreement.yaml"
RESAMPLES = 2000


@dataclass(frozen=True)
class Pair:
    """score, agreeing, change: by prompt; the last two as in ``Verified``."""

    policy: str
    budget: float | int | None
    score: list[float]
    agreeing: list[float]
    change: list[float]


def ranks(values: np.ndarray) -> np.ndarray:
    """Equal values share the mean of their ranks."""
    return np.array([(np.sum(values < one) + np.sum(values <= one) - 1) / 2 for one in values])


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's, of means over samples. first, second: ``[pairs, samples]``."""
    return float(np.corrcoef(ranks(first.mean(1)), ranks(second.mean(1)))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--output", type=Path, default=Path("build/agreement.json"))
    arguments = parser.parse_args()
    config = read_config(arguments.config, {})
    tasks = {entry.label: entry.task for entry in config.tasks}
    rows = [json.loads(line) for line in (arguments.run / "results.jsonl").read_text().splitlines()]
    found: dict[tuple[str, float | int | None], list[tuple[float, float, float]]] = {
        (policy.label, budget): [] for policy in config.policies for budget in config.budgets_of(policy)
    }
    for row in sorted(rows, key=lambda row: (row["task"], row["sample"])):
        task, sample = tasks[row["task"]], Sample("", "", row["references"], 0)
        score = TASKS[task.name].score(task, sample, Completion(row["prediction"]))
        found[row["policy"], row["budget"]].append((score, row["score"], row["log_prob_change"]))
    scores, agreeing, change = np.array(list(found.values())).transpose(2, 0, 1)
    count = scores.shape[1]
    shown = {
        f"{policy} {budget}": [f"{scores[i].mean():.2f}", f"{agreeing[i].mean():.3f}", f"{change[i].mean():+.3f}"]
        for i, (policy, budget) in enumerate(found)
    }
    print_table(f"{count} prompts", ["score", "agreement", "change of log p"], shown, "policy")
    rng = np.random.default_rng(0)
    drawn = [rng.integers(count, size=count) for _ in range(RESAMPLES)]
    said = {}
    for name, values in (("agreement", agreeing), ("change of log p", -change)):
        low, high = np.quantile([correlation(scores[:, one], values[:, one]) for one in drawn], (0.025, 0.975))
        said[name] = [f"{correlation(scores, values):.2f}", f"{low:.2f} to {high:.2f}"]
    print_table("Rank correlation with the score", ["over pairs", "95%, bootstrap over prompts"], said, "of")
    results = [
        Pair(*pair, *(list(values) for values in zip(*by_prompt, strict=True))) for pair, by_prompt in found.items()
    ]
    save(arguments.output, config.identity(), results)


if __name__ == "__main__":
    main()
