"""The papers' claims on a real language model, for docs/quality.md: ``python benchmarks/papers_scores.py [RUN]``.

RUN: folder of a run of the configuration (configs/eval/papers.yaml unless told), whose samples are added to
benchmarks/results, to the file with its name.
Prints each policy's share of the full cache's score over the RULER tasks, and its loss; then the differences of the
pairs that the configuration compares, over all prompts of these tasks together, and of loss, each as one family after
Holm.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from vllm_kvmerge.evaluation.comparison import bootstrap_p_value, holm, interval_at, least_p_value, resampled_means
from vllm_kvmerge.evaluation.config import read_config
from vllm_kvmerge.evaluation.summary import print_table

ROOT = Path(__file__).parents[1]
RESAMPLES = 20_000

Scores = dict[str, dict[str, list[float]]]
"""By task and policy, one for each prompt."""


def add(run: Path, scores: Scores) -> None:
    rows = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    for row in sorted(rows, key=lambda row: row["sample"]):
        known = scores.setdefault(row["task"], {}).setdefault(row["policy"], [])
        if row["sample"] == len(known):
            known.append(round(row["score"], 4))


def write(path: Path, scores: Scores) -> None:
    tasks = []
    for task, policies in scores.items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in policies.items())
        tasks.append(f" {json.dumps(task)}: {{\n{rows}\n }}")
    path.write_text("{\n" + ",\n".join(tasks) + "\n}\n")


def pairs(title: str, scores: list[dict[str, list[float]]], compare: list[tuple[str, str]]) -> None:
    """scores: of each task."""
    known = [pair for pair in compare if all(name in task for task in scores for name in pair)]
    means, differences = [], []
    for one, other in known:
        found = [a - b for task in scores for a, b in zip(task[one], task[other], strict=False)]
        differences.append(found)
        means.append(resampled_means(found, RESAMPLES))
    p_values = [
        max(bootstrap_p_value(mean), least_p_value(np.count_nonzero(found)) if any(found) else 1.0)
        for mean, found in zip(means, differences, strict=True)
    ]
    rows = {}
    for (one, other), mean, found, p in zip(known, means, differences, holm(p_values), strict=True):
        low, high = interval_at(mean, 0.05)
        rows[f"{one} less {other}"] = [f"{np.mean(found):+.3f}", f"{low:+.3f} to {high:+.3f}", f"{p:.2g}"]
    print_table(title, ["difference", "95% interval, alone", "p after Holm"], rows, "pair")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/eval/papers.yaml")
    arguments = parser.parse_args()
    path = ROOT / f"benchmarks/results/{arguments.config.stem}_scores.json"
    scores: Scores = json.loads(path.read_text()) if path.exists() else {}
    if arguments.run is not None:
        add(arguments.run, scores)
        write(path, scores)
    recall = [policies for task, policies in scores.items() if task.startswith("ruler")]
    (loss,) = (policies for task, policies in scores.items() if task.startswith("perplexity"))
    full = sum(np.mean(task["full"]) for task in recall)
    rows = {
        name: [
            f"{sum(np.mean(task[name]) for task in recall) / full:.2f}",
            f"{np.mean(loss[name]):.2f}" if name in loss else "",
        ]
        for name in recall[0]
    }
    print_table("Share of the full cache's score, and loss", ["share", "loss"], rows)
    compare = [(one, other) for one, other in read_config(arguments.config, {}).compare]
    pairs("Right answers, all RULER tasks together", recall, compare)
    pairs("Loss (less is better)", [loss], compare)


if __name__ == "__main__":
    main()
