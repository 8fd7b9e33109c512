"""Scores of kvpress and of this package on the same prompts: ``python benchmarks/kvpress_scores.py --kvpress PYTHON``.

PYTHON is that of an environment made from ``requirements-kvpress.txt``. Both sides answer greedily in float32, with the
same number of entries per KV head, and each method's parameters are given to both so that both compute the same; what
could not be made equal is said below the table. ``aware``: the whole prompt is compressed, its question included.
``agnostic``: the context alone is, and the question is read after that, as kvpress's pipeline does.

A row agrees if the 95% interval of the scores' difference, prompt by prompt, holds 0.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import save

from vllm_kvmerge.evaluation.backends import Answer, EngineBackend, Request, load_tokenizer
from vllm_kvmerge.evaluation.config import EngineOptions, EvalConfig, TaskEntry
from vllm_kvmerge.evaluation.options import print_table
from vllm_kvmerge.evaluation.runner import Prompt, draw_prompts
from vllm_kvmerge.evaluation.summary import bootstrap_interval, wilson_interval
from vllm_kvmerge.evaluation.tasks.base import Completion

WINDOW = 16
"""Queries that vote, and newest entries that stay, where a method has such a window."""

POOLED = 7
"""Neighbours whose scores are pooled, where they are."""

POOLING = (
    f"with pooling ({POOLED} neighbours) kvpress takes the mean of scores, this package their maximum, as SnapKV's "
    "paper; hence methods come without as well"
)


@dataclass(frozen=True)
class Method:
    """One method on both sides.

    ours: ``kv_compression`` but for the budget. theirs: the press for a number of entries that stay, of so many tokens.
    notes: what could not be made equal. aware_only: it is not compared where the question is read after compression.
    """

    ours: dict[str, Any]
    theirs: Callable[[int, int], dict[str, Any]] | None
    notes: tuple[str, ...] = ()
    aware_only: bool = False


def dropped(kept: int, tokens: int) -> float:
    """The compression ratio at which kvpress keeps so many entries: it takes the integer part of tokens * (1 - ratio),
    hence the half."""
    return 1 - (kept + 0.5) / tokens


def snapkv_press(kept: int, tokens: int, kernel_size: int) -> dict[str, Any]:
    ratio = dropped(kept, tokens)
    return {"press": "SnapKVPress", "compression_ratio": ratio, "window_size": WINDOW, "kernel_size": kernel_size}


def pyramidkv_press(kept: int, tokens: int, kernel_size: int) -> dict[str, Any]:
    # This one rounds, and falls back to equal layers where the last one has less than the window: beta is 2, not 20.
    own = {"press": "PyramidKVPress", "compression_ratio": 1 - kept / tokens, "beta": 2}
    return own | {"window_size": WINDOW, "kernel_size": kernel_size}


def adakv_press(kept: int, tokens: int, kernel_size: int) -> dict[str, Any]:
    return {"press": "AdaKVPress", "inner": snapkv_press(kept, tokens, kernel_size), "alpha_safeguard": 0.2}


def adaptive_expected_press(kept: int, tokens: int) -> dict[str, Any]:
    return {"press": "AdaKVPress", "inner": expected_press(kept, tokens), "alpha_safeguard": 0.2}


def criticalkv_press(kept: int, tokens: int, kernel_size: int) -> dict[str, Any]:
    # Its first stage counts the window, ours what is left beside it.
    first = (WINDOW + (kept - WINDOW) // 2 + 0.5) / (kept + 0.5)
    inner = snapkv_press(kept, tokens, kernel_size)
    return {"press": "CriticalKVPress", "inner": inner, "epsilon": 0.0, "first_stage_ratio": first}


def cam_press(kept: int, tokens: int) -> dict[str, Any]:
    decoding = {"press": "CAMPress", "base_press": {"press": "TOVAPress"}, "compression_interval": 1}
    return {
        "press": "PrefillDecodingPress",
        "prefilling_press": {"press": "TOVAPress", "compression_ratio": dropped(kept, tokens)},
        "decoding_press": decoding | {"target_size": kept, "merge_budget": 32},
    }


def scorer(name: str, **fields: Any) -> Callable[[int, int], dict[str, Any]]:
    return lambda kept, tokens: {"press": name, "compression_ratio": dropped(kept, tokens)} | fields


expected_press = scorer("ExpectedAttentionPress", epsilon=0.02)

EXPECTED = {"policy": "expected_attention", "statistics_window": 4096, "recent_window": 0}
"""With the statistics of all queries of the prompt."""


def windowed(ours: dict[str, Any], theirs: Callable[[int, int, int], dict[str, Any]], *notes: str) -> dict[str, Method]:
    """A method whose scores are those of a window of queries: without pooling of neighbours, and with."""

    def method(kernel_size: int, notes: tuple[str, ...]) -> Method:
        own = ours | {"score_window": WINDOW, "window_size": WINDOW, "kernel_size": kernel_size}
        return Method(own, lambda kept, tokens: theirs(kept, tokens, kernel_size), notes)

    return {ours["policy"]: method(1, notes), f"{ours['policy']}, pooled": method(POOLED, (*notes, POOLING))}


METHODS = {
    "full": Method({"policy": "full"}, None),
    "streaming_llm": Method({"policy": "streaming_llm", "num_sink_tokens": 4}, scorer("StreamingLLMPress", n_sink=4)),
    "knorm": Method({"policy": "knorm", "recent_window": 0}, scorer("KnormPress")),
    "tova": Method({"policy": "tova"}, scorer("TOVAPress")),
    "h2o": Method(
        {"policy": "h2o", "tracker": "mean", "score_window": "all", "num_sink_tokens": 0, "recent_window": 0},
        scorer("ObservedAttentionPress"),
        (
            "h2o is ObservedAttentionPress: attention of all queries, its mean over those that saw an entry, no recent "
            "window, which is not H2O's own sum and window",
        ),
    ),
    **windowed({"policy": "snapkv"}, snapkv_press),
    **windowed({"policy": "pyramidkv", "ratio": 3.0}, pyramidkv_press),
    **windowed(
        {"policy": "adakv", "floor_share": 0.2},
        adakv_press,
        "adakv: to divide the budget between heads, kvpress puts every head's window first, this package ranks its "
        "entries by their attention like all others; what is dropped is masked there, evicted here",
    ),
    **windowed({"policy": "criticalkv", "first_stage_share": 0.5}, criticalkv_press),
    "expected_attention": Method(EXPECTED, expected_press),
    "expected_attention, adaptive": Method(
        EXPECTED | {"allocator": "adaptive", "floor_share": 0.2, "max_share": 8.0},
        adaptive_expected_press,
        ("expected_attention, adaptive: what is dropped is masked in kvpress, evicted here",),
    ),
    "compactor": Method(
        {"policy": "compactor"},
        scorer("CompactorPress"),
        (
            "compactor: each chunk's own queries attend in kvpress, the prompt's newest in their place here; scores "
            "are normalised by layer there, by head here; the random sketches differ",
        ),
    ),
    "cam": Method(
        {"policy": "tova", "merger": "cam", "num_receivers": 32, "interval": 1, "decode": "bounded"},
        cam_press,
        (
            "cam (over TOVA's selection, after every token): whether an entry merges is drawn at random on both sides; "
            "kvpress compares attention summed since the prompt's end, this package the newest query's, which is all "
            "that TOVA's tracker keeps. It is compared with the question in the prompt only",
        ),
        aware_only=True,
    ),
}
"""Those that kvpress 0.5.5 has, but for its variants of these, and none that is not here."""


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Row:
    """question: aware or agnostic. budget: share of what is compressed. same: share of prompts with the same answer."""

    task: str
    question: str
    method: str
    budget: float | None
    prompts: int
    ours: Interval
    kvpress: Interval
    difference: Interval
    agrees: bool
    same: float


@dataclass(frozen=True)
class Job:
    """One prompt under one method: what both sides are asked."""

    entry: TaskEntry
    prompt: Prompt
    method: str
    budget: float | None

    @property
    def compressed(self) -> int:
        """How many tokens are."""
        return self.prompt.context_tokens or len(self.prompt.token_ids)

    @property
    def kept(self) -> int:
        """Entries per KV head; an even number, whose half is not rounded one way here and another way there."""
        return 2 * math.ceil(self.budget * self.compressed / 2) if self.budget else self.compressed

    def ours(self) -> Request:
        compression = METHODS[self.method].ours
        if self.budget is not None:
            compression = {"decode": "grow"} | compression | {"budget": self.kept}
            if self.prompt.context_tokens is not None:
                compression |= {"context_tokens": self.prompt.context_tokens}
        return Request(self.prompt.token_ids, compression, self.prompt.sample.max_tokens, [])

    def theirs(self) -> dict[str, Any]:
        make = METHODS[self.method].theirs
        return {
            "prompt": self.prompt.token_ids,
            "compressed": self.compressed,
            "max_tokens": self.prompt.sample.max_tokens,
            "press": None if make is None else make(self.kept, self.compressed),
        }


def answers_of_kvpress(
    python: str, model: str, jobs: Sequence[Job], processes: int
) -> tuple[list[list[int]], dict[str, str]]:
    """Answers in token ids, and versions; each process has a share of the jobs."""
    command = [python, str(Path(__file__).parent / "kvpress_answers.py")]

    def answer(share: Sequence[Job]) -> dict[str, Any]:
        given = json.dumps({"model": model, "jobs": [job.theirs() for job in share]})
        try:
            done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            sys.exit(f"--kvpress: {python} cannot be run: {error}")
        if done.returncode != 0:
            sys.exit(f"kvpress's side ended with {done.returncode}")
        return json.loads(done.stdout)

    # Every processes-th job, so that each has as many of each method.
    with ThreadPoolExecutor(processes) as pool:
        results = list(pool.map(answer, [jobs[first::processes] for first in range(processes)]))
    answers: list[list[int]] = [[]] * len(jobs)
    for first, result in enumerate(results):
        answers[first::processes] = result["answers"]
    return answers, results[0]["versions"]


def answers_of_ours(model: str, jobs: Sequence[Job]) -> list[str]:
    longest = max(job.prompt.length for job in jobs)
    options = EngineOptions(dtype="float32", enforce_eager=True, kv_cache_memory_bytes=256 << 20, max_model_len=longest)
    backend = EngineBackend(model, options)
    backend.start(longest, with_logprobs=False)
    texts = [""] * len(jobs)
    try:
        for index, answer in backend.run((index, job.ours()) for index, job in enumerate(jobs)):
            if not isinstance(answer, Answer):
                sys.exit(f"{jobs[index].method}: {answer}")
            texts[index] = answer.text
    finally:
        backend.close()
    return texts


def interval(scores: Sequence[float]) -> Interval:
    if all(score in (0, 1) for score in scores):
        bounds = wilson_interval(int(sum(scores)), len(scores))
    else:
        bounds = bootstrap_interval(scores)
    return Interval(float(np.mean(scores)), *bounds)


def compare(jobs: Sequence[Job], ours: Sequence[str], theirs: Sequence[str]) -> list[Row]:
    cells: dict[tuple[int, str, float | None], list[int]] = {}
    for index, job in enumerate(jobs):
        cells.setdefault((id(job.entry), job.method, job.budget), []).append(index)
    rows = []
    for indices in cells.values():
        job = jobs[indices[0]]

        def scores(texts: Sequence[str], entry: TaskEntry = job.entry, indices: list[int] = indices) -> list[float]:
            return [float(entry.task.score(jobs[i].prompt.sample, Completion(texts[i]))) for i in indices]

        one, other = scores(ours), scores(theirs)
        differences = [a - b for a, b in zip(one, other, strict=True)]
        low, high = bootstrap_interval(differences)
        rows.append(
            Row(
                task=job.entry.task.name,
                question="agnostic" if job.entry.question_agnostic else "aware",
                method=job.method,
                budget=job.budget,
                prompts=len(indices),
                ours=interval(one),
                kvpress=interval(other),
                difference=Interval(float(np.mean(differences)), low, high),
                agrees=low <= 0 <= high,
                same=float(np.mean([ours[i].split() == theirs[i].split() for i in indices])),
            )
        )
    return rows


def draw_jobs(arguments: argparse.Namespace, config: EvalConfig, tokenizer: Any) -> list[Job]:
    jobs = []
    for entry in config.tasks:
        prompts = draw_prompts(config, entry, tokenizer)
        for name in arguments.methods:
            if entry.question_agnostic and METHODS[name].aware_only:
                continue
            budgets: Sequence[float | None] = [None] if name == "full" else arguments.budgets
            jobs += [Job(entry, prompt, name, budget) for budget in budgets for prompt in prompts]
    return jobs


def show(rows: Sequence[Row]) -> None:
    for task, question in dict.fromkeys((row.task, row.question) for row in rows):
        lines = {
            row.method + ("" if row.budget is None else f" {row.budget}"): [
                str(row.ours),
                str(row.kvpress),
                f"{row.difference.mean:+.3f} [{row.difference.low:+.3f}, {row.difference.high:+.3f}]",
                "yes" if row.agrees else "no",
                f"{row.same:.3f}",
            ]
            for row in rows
            if (row.task, row.question) == (task, question)
        }
        count = next(row.prompts for row in rows if (row.task, row.question) == (task, question))
        columns = ["vllm-kvmerge", "kvpress", "difference", "agree", "same answer"]
        print_table(f"\n{task}, {question}: {count} prompts", columns, lines, first="method, budget")
    print("\nWhat could not be made equal:")
    for note in dict.fromkeys(note for row in rows for note in METHODS[row.method].notes):
        print(f"- {note}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvpress", metavar="PYTHON", required=True, help="of an environment with kvpress")
    parser.add_argument("--model", default="demo", help="folder of a model that kvpress knows, such as a Llama")
    parser.add_argument("--tasks", nargs="+", default=["demo_recall", "demo_multikey"], help="of vllm-kvmerge eval")
    parser.add_argument("--length", type=int, default=1024, help="of each task")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2], help="shares of what is compressed")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="of kvpress's side, a prompt at a time each")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/kvpress_scores.json"))
    arguments = parser.parse_args()
    config = EvalConfig.model_validate(
        {
            "model": arguments.model,
            "policies": ["full"],
            "tasks": [
                {"task": task, "length": arguments.length, "question_agnostic": agnostic}
                for task in arguments.tasks
                for agnostic in (False, True)
            ],
            "samples": arguments.samples,
            "seed": arguments.seed,
        }
    )
    tokenizer = load_tokenizer(config.model_path)
    jobs = draw_jobs(arguments, config, tokenizer)
    token_ids, versions = answers_of_kvpress(arguments.kvpress, config.model_path, jobs, arguments.processes)
    theirs = [tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]
    rows = compare(jobs, answers_of_ours(config.model_path, jobs), theirs)
    compared = {
        name: {
            "ours": METHODS[name].ours,
            "kvpress, 100 of 1,000 tokens": None if make is None else make(100, 1000),
            "not equal": METHODS[name].notes,
        }
        for name in arguments.methods
        for make in [METHODS[name].theirs]
    }
    settings = vars(arguments) | {"kvpress": versions, "methods": compared}
    save(arguments.output, settings, rows)
    show(rows)


if __name__ == "__main__":
    main()
