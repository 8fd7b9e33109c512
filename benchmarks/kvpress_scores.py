"""Scores of kvpress and of this package on the same prompts: ``python benchmarks/kvpress_scores.py --kvpress PYTHON``.

PYTHON is that of an environment made from ``requirements-kvpress.txt``. Both sides answer greedily, in the type of the
configuration's engine (default: float32), with the same number of entries per KV head, and each method's parameters are
given to both so that both compute the same; what could not be made equal is said below the table. With ``--own`` both
have their own settings instead, at the same number of entries. ``aware``: the whole prompt is compressed, its question
included. ``agnostic``: the context alone is, and the question is read after that, as kvpress's pipeline does.

A row agrees if the 95% interval of the scores' difference, prompt by prompt, holds 0. Kept alike: entries (layer, KV
head, position) that both sides keep, as a share of what the side keeps that keeps more. Same order: as a share of what
the side keeps in each head that keeps fewer there; 1 where both rank a head's entries alike, however many it may keep.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from report import save

from vllm_kvmerge import demo, ops
from vllm_kvmerge.evaluation.backends import Answer, EngineBackend, Request, load_tokenizer
from vllm_kvmerge.evaluation.config import EngineOptions, EvalConfig, TaskEntry, read_config
from vllm_kvmerge.evaluation.runner import Prompt, draw_prompts
from vllm_kvmerge.evaluation.summary import bootstrap_interval, print_table, wilson_interval
from vllm_kvmerge.evaluation.tasks.base import Completion
from vllm_kvmerge.policies.trackers import REPEAT, RESUME, ReconstructionTracker

CONFIG = Path(__file__).parents[1] / "configs/eval/kvpress-demo.yaml"

WINDOW = 16
"""Queries that vote, and newest entries that stay, where a method has such a window."""

POOLED = 7
"""Neighbours whose scores are pooled, where they are."""

CHUNK = 512
"""Tokens that KVzip has repeated at once."""

THRESHOLD = 0.05
"""Of KVzap's scores, which keeps about an eighth."""

POOLING = (
    f"with pooling ({POOLED} neighbours) kvpress takes the mean of scores, this package their maximum, as SnapKV's "
    "paper; hence methods come without as well"
)


@dataclass(frozen=True)
class Method:
    """One method on both sides.

    ours: ``kv_compression`` but for the budget, unless that is the method's own. theirs: the press for a number of
    entries that stay, of so many tokens. notes: what could not be made equal. aware_only: it is not compared where the
    question is read after compression.
    """

    ours: dict[str, Any]
    theirs: Callable[[int, int], dict[str, Any]] | None
    notes: tuple[str, ...] = ()
    aware_only: bool = False

    @property
    def takes_budget(self) -> bool:
        return self.theirs is not None and "budget" not in self.ours


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


def adaptive(inner: Callable[[int, int], dict[str, Any]]) -> Callable[[int, int], dict[str, Any]]:
    return lambda kept, tokens: {"press": "AdaKVPress", "inner": inner(kept, tokens), "alpha_safeguard": 0.2}


def criticalkv_press(kept: int, tokens: int, kernel_size: int) -> dict[str, Any]:
    # Its first stage counts the window, ours what is left beside it.
    first = (WINDOW + (kept - WINDOW) // 2 + 0.5) / (kept + 0.5)
    inner = snapkv_press(kept, tokens, kernel_size)
    return {"press": "CriticalKVPress", "inner": inner, "epsilon": 0.0, "first_stage_ratio": first}


def kvzip(allocator: str, layerwise: bool, normalized: bool = False, **fields: Any) -> Method:
    """The demo model's chat template begins with one token, which kvpress does not repeat but counts in the softmax."""
    ours = {"policy": "kvzip", "allocator": allocator, "normalized": normalized, "chunk_size": CHUNK}
    prompts = {"repeat_prompt": REPEAT, "resume_prompt": RESUME, "num_prefix_tokens": 1, "recent_window": 0}
    theirs = {"layerwise": layerwise, "kvzip_plus_normalization": normalized, "n_sink": 1, "chunk_size": CHUNK}

    def press(kept: int, tokens: int) -> dict[str, Any]:
        # It takes the integer part of the number of entries of a layer, or of all layers, that leave.
        return {"press": "KVzipPress", "compression_ratio": 1 - (kept - 0.001) / tokens} | theirs

    return Method(ours | prompts | fields, press, (PAGES,))


def dms_press(kept: int, tokens: int) -> dict[str, Any]:
    own = {"press": "DMSPress", "inner": {"press": "KVzapPress"}}
    return own | {"threshold": math.log(THRESHOLD), "sliding_window_size": WINDOW}


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

kvzap_press = scorer("KVzapPress")

EXPECTED = {"policy": "expected_attention", "statistics_window": 4096, "recent_window": 0}
"""With the statistics of all queries of the prompt."""

KVZAP = {"policy": "kvzap", "selector": "top_scores", "recent_window": 0}
"""By its scores alone, without a window."""

ADAPTIVE = {"allocator": "adaptive", "floor_share": 0.2, "max_share": 8.0}

PAGES = (
    "where heads have budgets of their own, kvpress masks what is dropped; this package evicts it, and rounds budgets "
    "to pages of 32 entries, at least one: heads keep more or fewer, in the same order"
)


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
    "expected_attention, adaptive": Method(EXPECTED | ADAPTIVE, adaptive(expected_press), (PAGES,)),
    "compactor": Method(
        {"policy": "compactor"},
        scorer("CompactorPress"),
        (
            "compactor: each chunk's own queries attend in kvpress, the prompt's newest in their place here; scores "
            "are normalised by layer there, by head here; the random sketches differ",
        ),
    ),
    "kvzip": kvzip("global", layerwise=False),
    "kvzip, by layer": kvzip("adaptive", layerwise=True, floor_share=0.0, max_share=8.0),
    "kvzip+": kvzip("global", layerwise=False, normalized=True),
    "kvzap": Method(
        KVZAP | {"allocator": "uniform"},
        kvzap_press,
        ("kvzap: the first layer's scores of equal tokens are equal, and which of them stay is chance",),
    ),
    "kvzap, adaptive": Method(KVZAP | ADAPTIVE, adaptive(kvzap_press), (PAGES,)),
    "kvzap, threshold": Method(
        {"policy": "kvzap", "window_size": WINDOW, "budget": {"threshold": THRESHOLD, "max": 0.9}},
        dms_press,
        (
            f"kvzap, threshold: what is above {THRESHOLD} stays, and the newest {WINDOW} entries; those of them that "
            "are above it count twice here, and one more stays",
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


def over(press: str, inner: Callable[[int, int], dict[str, Any]], **fields: Any) -> Callable[[int, int], Any]:
    return lambda kept, tokens: {"press": press, "inner": inner(kept, tokens)} | fields


def kvzip_press(kept: int, tokens: int) -> dict[str, Any]:
    return {"press": "KVzipPress", "compression_ratio": 1 - (kept - 0.001) / tokens}


OWN = {
    "full": METHODS["full"],
    "streaming_llm": Method({"policy": "streaming_llm"}, scorer("StreamingLLMPress")),
    "knorm": Method({"policy": "knorm"}, scorer("KnormPress")),
    "keydiff": Method({"policy": "keydiff"}, scorer("KeyDiffPress")),
    "tova": Method({"policy": "tova"}, scorer("TOVAPress")),
    "h2o": Method({"policy": "h2o"}, scorer("ObservedAttentionPress")),
    "snapkv": Method({"policy": "snapkv"}, scorer("SnapKVPress")),
    "pyramidkv": Method({"policy": "pyramidkv"}, scorer("PyramidKVPress")),
    "adakv": Method({"policy": "adakv"}, over("AdaKVPress", scorer("SnapKVPress"))),
    "criticalkv": Method({"policy": "criticalkv"}, over("CriticalKVPress", scorer("SnapKVPress"))),
    "chunkkv": Method({"policy": "chunkkv"}, over("ChunkKVPress", scorer("SnapKVPress"))),
    "chunkkv, best of each": Method(
        {"policy": "chunkkv", "allocator": "adaptive", "chunk_length": 16},
        over("EntropyGatedChunkKVPress", scorer("SnapKVPress")),
        ("chunkkv, best of each: heads that share a layer's budget here, EG-ChunkKV there",),
    ),
    "expected_attention": Method({"policy": "expected_attention"}, scorer("ExpectedAttentionPress")),
    "expected_attention, adaptive": Method(
        {"policy": "expected_attention", "allocator": "adaptive"}, over("AdaKVPress", expected_press)
    ),
    "compactor": Method({"policy": "compactor"}, scorer("CompactorPress")),
    "kvzip": Method({"policy": "kvzip"}, kvzip_press),
}
"""The same methods as either side has them."""


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
    """question: aware or agnostic. budget: share of what is compressed. same: share of prompts with the same answer.
    kept, order: means of :func:`kept_alike`."""

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
    kept: float
    order: float


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
        method = METHODS[self.method]
        compression = method.ours
        if method.theirs is not None:
            compression = {"decode": "grow", "budget": self.kept} | compression
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


@dataclass(frozen=True)
class Side:
    """What a side makes of a job. kept: what its first compression leaves, ``[layers * KV heads, tokens]`` bool."""

    text: str
    kept: np.ndarray


def sides_of_kvpress(
    python: str, model: str, dtype: str, kvzap: str | None, jobs: Sequence[Job], tokenizer: Any, processes: int
) -> tuple[list[Side], dict[str, str]]:
    """And versions; each process has a share of the jobs."""
    command = [python, str(Path(__file__).parent / "kvpress_answers.py")]

    def answer(share: Sequence[Job]) -> dict[str, Any]:
        given = json.dumps({"model": model, "dtype": dtype, "kvzap": kvzap, "jobs": [job.theirs() for job in share]})
        try:
            done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            sys.exit(f"--kvpress: {python} cannot be run: {error}")
        if done.returncode != 0:
            sys.exit(f"kvpress's side ended with {done.returncode}")
        return json.loads(done.stdout)

    def side(job: Job, tokens: list[int], kept: str) -> Side:
        bits = np.frombuffer(bytes.fromhex(kept), np.uint8).reshape(-1, -(-job.compressed // 8))
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return Side(text, np.unpackbits(bits, axis=1, count=job.compressed).astype(bool))

    # Every processes-th job, so that each has as many of each method.
    with ThreadPoolExecutor(processes) as pool:
        results = list(pool.map(answer, [jobs[first::processes] for first in range(processes)]))
    sides: list[Any] = [None] * len(jobs)
    for first, result in enumerate(results):
        sides[first::processes] = map(side, jobs[first::processes], result["answers"], result["kept"])
    return sides, results[0]["versions"]


def sides_of_ours(model: str, dtype: str, kvzap: str | None, jobs: Sequence[Job], tokenizer: Any) -> list[Side]:
    # KVzip's repetition lies behind the context, and a prompt that asks for it between them.
    longest = 2 * max(job.prompt.length for job in jobs) + 64
    options = EngineOptions(dtype=dtype, enforce_eager=True, kv_cache_memory_bytes=2 << 30, kvzap=kvzap)
    backend = EngineBackend(model, options)
    backend.start(longest, with_logprobs=False)
    from vllm_kvmerge.engine.worker.compaction import Compaction, Execution
    from vllm_kvmerge.engine.worker.compactor import Compactor

    kept: dict[int, np.ndarray] = {}
    execute = Compactor.execute

    def watched(self: Compactor, compactions: Sequence[Compaction], *begun: Any) -> Execution:
        done = execute(self, compactions, *begun)
        for index, one in enumerate(compactions):
            job, _, _ = one.plan.request_id.partition("-")  # the backend counts its requests, vLLM adds to their ids
            kept.setdefault(int(job), left(self, one, done.pages.get(index)))
        return done

    sides: list[Any] = [None] * len(jobs)
    requests = ((index, in_tokens(job.ours(), tokenizer)) for index, job in enumerate(jobs))
    try:
        with patch.object(Compactor, "execute", watched):
            for index, answer in backend.run(requests):
                if not isinstance(answer, Answer):
                    sys.exit(f"{jobs[index].method}: {answer}")
                sides[index] = Side(answer.text, kept.pop(index, np.ones((1, jobs[index].compressed), bool)))
    finally:
        backend.close()
    return sides


def in_tokens(request: Request, tokenizer: Any) -> Request:
    """With KVzip's prompts as kvpress encodes them: by the tokenizer, words that it lacks included."""
    given = request.compression
    texts = {name: given[name] for name in ReconstructionTracker.token_fields if name in given}
    prompts = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in texts.items()}
    return replace(request, compression=given | prompts)


def left(compactor: Any, compaction: Any, pages: Any) -> np.ndarray:
    """``Side.kept`` of a plan that has been executed; pages: of its heads, if they have their own."""
    count, plan = len(compactor.layers), compaction.plan
    segments = torch.tensor([[plan.new_front] * 3] * count)
    blocks = torch.tensor(plan.blocks) if pages is None else compaction.source_blocks
    front = ops.SequenceLayers(compactor.layers, torch.arange(count), blocks.expand(count, -1), segments, pages)
    *_, positions = ops.gather_metadata(front)
    mask = np.zeros((len(positions), plan.num_tokens + 1), bool)
    np.put_along_axis(mask, positions.numpy(), True, 1)  # empty places, position -1, in the last column
    return mask[:, :-1]


def kept_alike(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Shares of entries that both keep: of as many as the side keeps that keeps more, and of as many in each head as
    the side keeps that keeps fewer there."""
    one, other = np.broadcast_arrays(one, other)
    both = int((one & other).sum())
    return both / max(one.sum(), other.sum()), both / np.minimum(one.sum(1), other.sum(1)).sum()


def interval(scores: Sequence[float]) -> Interval:
    if all(score in (0, 1) for score in scores):
        bounds = wilson_interval(int(sum(scores)), len(scores))
    else:
        bounds = bootstrap_interval(scores)
    return Interval(float(np.mean(scores)), *bounds)


def compare(jobs: Sequence[Job], ours: Sequence[Side], theirs: Sequence[Side]) -> list[Row]:
    cells: dict[tuple[int, str, float | None], list[int]] = {}
    for index, job in enumerate(jobs):
        cells.setdefault((id(job.entry), job.method, job.budget), []).append(index)
    rows = []
    for indices in cells.values():
        job = jobs[indices[0]]

        def scores(sides: Sequence[Side], entry: TaskEntry = job.entry, indices: list[int] = indices) -> list[float]:
            return [float(entry.task.score(jobs[i].prompt.sample, Completion(sides[i].text))) for i in indices]

        one, other = scores(ours), scores(theirs)
        differences = [a - b for a, b in zip(one, other, strict=True)]
        low, high = bootstrap_interval(differences)
        kept, order = np.mean([kept_alike(ours[i].kept, theirs[i].kept) for i in indices], 0).tolist()
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
                same=float(np.mean([ours[i].text.split() == theirs[i].text.split() for i in indices])),
                kept=kept,
                order=order,
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
            budgets: Sequence[float | None] = arguments.budgets if METHODS[name].takes_budget else [None]
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
                f"{row.kept:.4f}",
                f"{row.order:.4f}",
            ]
            for row in rows
            if (row.task, row.question) == (task, question)
        }
        count = next(row.prompts for row in rows if (row.task, row.question) == (task, question))
        columns = ["vllm-kvmerge", "kvpress", "difference", "agree", "same answer", "kept alike", "same order"]
        print_table(f"\n{task}, {question}: {count} prompts", columns, lines, first="method, budget")
    print("\nWhat could not be made equal:")
    for note in dict.fromkeys(note for row in rows for note in METHODS[row.method].notes):
        print(f"- {note}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvpress", metavar="PYTHON", required=True, help="of an environment with kvpress")
    parser.add_argument("--config", type=Path, default=CONFIG, help="of vllm-kvmerge eval: the model and the prompts")
    parser.add_argument("--own", action="store_true", help="both sides' own settings")
    parser.add_argument("--kvzap", help="folder of the model's KVzap model; the demo model has one")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2], help="shares of what is compressed")
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS | OWN), metavar="METHOD", help="default: all")
    parser.add_argument("--samples", type=int, help="default: the configuration's")
    parser.add_argument("--processes", type=int, default=1, help="of kvpress's side, a prompt at a time each")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/kvpress_scores.json"))
    arguments = parser.parse_args()
    if arguments.own:
        METHODS.clear()
        METHODS.update(OWN)
    arguments.methods = arguments.methods or list(METHODS)
    config = read_config(arguments.config, {"samples": arguments.samples})
    tokenizer = load_tokenizer(config.model_path)
    jobs = draw_jobs(arguments, config, tokenizer)
    kvzap = arguments.kvzap or (demo.kvzap_path() if config.model == "demo" else None)
    given = config.model_path, config.engine.dtype or "float32", kvzap, jobs, tokenizer
    theirs, versions = sides_of_kvpress(arguments.kvpress, *given, arguments.processes)
    rows = compare(jobs, sides_of_ours(*given), theirs)
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
