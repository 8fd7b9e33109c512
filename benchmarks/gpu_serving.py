"""Serving on a GPU, the plugin beside stock vLLM: ``python benchmarks/gpu_serving.py``.

Both sides are engines with the same random-weight model, stay up and take turns; figures are medians and ranges, ratios
are to stock vLLM's full cache in the same turn. ``plain`` is the plugin serving requests without a policy.

Parts: ``latency``, and ``throughput`` of as many requests as the same bytes of KV cache hold. What a part has measured
is saved after each turn, beside what the file holds of the other part. A case or a side that fails stops no other, nor
does a part. Sizes are as large as the GPU allows, at most those that are asked for.

``--device cpu`` runs every part with tiny models and lengths, to see that it runs: its figures mean nothing.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from report import Spread, machine
from rich.progress import track
from sides import ModelShape, Run, Side
from turns import Case, ratios, spread, wait
from vllm_side import BLOCK_SIZE, vllm_side

from vllm_kvmerge.evaluation.summary import print_table
from vllm_kvmerge.policies import PRESETS

SHAPES = {
    "8b": ModelShape(32, 4096, 32, 8, 128, intermediate=14_336),  # Llama 3 8B
    "1b": ModelShape(16, 2048, 32, 8, 64, intermediate=8_192),  # Llama 3.2 1B
    "tiny": ModelShape(2, 64, 4, 2, 32),
}
SHRINK = 16
"""Of lengths, on the CPU."""
USABLE, BESIDE = 0.95, 3 << 30
"""Share of the GPU that two sides may take, and bytes of each beside weights and pool (an estimate)."""
STOCK, PLAIN = "stock vLLM", "plain"


@dataclass(frozen=True)
class Row:
    """One case of a part. Ratios are to ``stock vLLM`` in the same turn, None where there is none or it failed.

    requests: at the same time. length, generated: tokens of each. turns: how many are counted. decode: tokens per
    second while all generate, mean over that time, so compactions are in it. intertoken: mean milliseconds between a
    request's tokens in that time (tokens of several steps may arrive together, so their median says less);
    intertoken_p99: of all turns. total: generated tokens per second from the first request's start to the last's end.
    first_token: milliseconds until it, one request with an unknown prompt. peak_usage: share of the pool.
    """

    case: str
    length: int
    generated: int
    requests: int
    turns: int
    decode: Spread
    decode_ratio: Spread | None
    intertoken: Spread
    intertoken_ratio: Spread | None
    intertoken_p99: float
    total: Spread
    total_ratio: Spread | None
    peak_usage: float
    preemptions: int
    first_token: Spread | None = None
    first_token_ratio: Spread | None = None


@dataclass(frozen=True)
class Job:
    """What a case is asked to do in a turn: ``requests`` prompts at once."""

    case: Case
    requests: int


def intertoken(run: Run) -> float:
    return 1e3 * statistics.fmean(run.intertoken_latencies)


class OutOfTimeError(Exception):
    """The minutes that were given are over."""


@dataclass
class Bench:
    """What parts share. scale: what lengths are divided by. until: when no turn begins any more, of perf_counter.
    memory: bytes of the GPU. failed: errors of the part's cases."""

    arguments: argparse.Namespace
    scale: int
    until: float
    memory: int = sys.maxsize
    failed: dict[str, str] = field(default_factory=dict)

    def size(self, tokens: int) -> int:
        """A length, as the device allows it; whole blocks."""
        return max(64, tokens // self.scale // BLOCK_SIZE * BLOCK_SIZE) if self.scale > 1 else tokens

    def shape(self, name: str, longest: int) -> ModelShape:
        return replace(SHAPES["tiny" if self.scale > 1 else name], max_tokens=longest)

    def room(self, shape: ModelShape) -> float:
        """Tokens for which both sides can have a pool."""
        room = USABLE * self.memory - 2 * (shape.weight_bytes + BESIDE)
        return room / (2 * shape.bytes_per_token + shape.metadata_bytes_per_token)

    @contextmanager
    def sides(
        self, name: str, longest: int, pool_tokens: int, equal_bytes: bool = False
    ) -> Iterator[tuple[Side, Side]]:
        """Stock vLLM and the plugin with a model of a shape; equal_bytes: metadata count in the pool.

        Raises RuntimeError if the GPU is too small for them.
        """
        shape = self.shape(name, longest)
        pool_tokens = max(pool_tokens, longest)
        if pool_tokens > (room := self.room(shape)):
            raise RuntimeError(f"pools of {pool_tokens} tokens are too large for this GPU, which holds {room:.0f}")
        options: dict[str, Any] = {"max_num_seqs": self.arguments.max_requests}
        if self.arguments.device == "cuda":
            # The share of the GPU that vLLM wants to find free; how much it takes is said by the pool.
            options |= {"enforce_eager": False, "gpu_memory_utilization": 0.3}
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(self.arguments.runner == "v2"))
        if equal_bytes:
            # The plugin's cells are larger: it gets fewer of them, and must still hold the longest request.
            cell = shape.bytes_per_token + shape.metadata_bytes_per_token
            options["kv_cache_memory_bytes"] = max(pool_tokens * shape.bytes_per_token, (longest + 64) * cell)
        backend, logs = self.arguments.stock_backend, self.arguments.logs
        for_stock = {"attention_backend": backend} if backend else {}
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

            def side(side_name: str, plugin: bool, more: dict[str, Any]) -> Side:
                log = logs / f"{side_name}.log" if logs is not None else None
                return stack.enter_context(vllm_side(side_name, folder, shape, pool_tokens, plugin, log, **more))

            yield side("stock", False, options | for_stock), side("plugin", True, options)

    def measure(
        self, jobs: Sequence[Job], length: int, generated: int, cached: bool, with_first_token: bool = False
    ) -> Iterator[list[Row]]:
        """Rows of the jobs after each turn that counts; the first is what others are compared with. A job that fails is
        noted in ``failed``, and has no further turns.

        cached: prompts are known from a turn that does not count; otherwise each turn computes them anew, after a short
        one in which kernels that have not run yet are compiled.

        Raises:
            OutOfTimeError: before a turn, if there is no time left.
            RuntimeError: all jobs have failed.
        """
        rng = np.random.default_rng([self.arguments.seed, length])

        def draw(count: int) -> list[list[int]]:
            return rng.integers(1, 32_000, (count, length)).tolist()

        prompts = draw(max(job.requests for job in jobs))
        runs: dict[str, list[Run]] = {job.case.name: [] for job in jobs}
        firsts: dict[str, list[Run]] = {job.case.name: [] for job in jobs}
        left = list(jobs)

        def warm_up(job: Job) -> None:
            # The second prompt is computed while the first request generates and is compressed again.
            tokens = min(generated, 2 * self.arguments.interval + 8)
            job.case.side.run(prompts[: min(2, job.requests)], tokens, job.case.compression, cold=True)

        def turn(job: Job) -> tuple[Run, list[Run]]:
            case = job.case
            run = case.side.run(prompts[: job.requests], generated, case.compression, cold=not cached)
            if min(times[-1] for times in run.token_times) <= run.time_to_second_token:
                raise RuntimeError("a request ended before all had begun; generate more tokens")
            return run, [case.side.run(draw(1), 2, case.compression, cold=False)] if with_first_token else []

        def counted(job: Job) -> None:
            run, first = turn(job)
            runs[job.case.name].append(run)
            firsts[job.case.name] += first

        def attempt(job: Job, run: Callable[[Job], object]) -> None:
            try:
                run(job)
            except RuntimeError as error:
                left.remove(job)
                self.failed[f"{job.case.name}, {length} tokens"] = str(error)
                print(f"{job.case.name} failed: {error}", file=sys.stderr, flush=True)
                with suppress(RuntimeError):
                    job.case.side.revive()

        for job in jobs:
            attempt(job, lambda job: wait([job.case]))
        for number in range(1 + self.arguments.repeats):
            if perf_counter() > self.until:
                raise OutOfTimeError
            for job in track(list(left), f"{length} tokens, turn {number} of {self.arguments.repeats}"):
                attempt(job, counted if number > 0 else turn if cached else warm_up)
            if not left:
                raise RuntimeError("all cases have failed")
            if number > 0:
                yield [self._row(job, length, generated, runs, firsts, jobs[0].case.name) for job in left]

    @staticmethod
    def _row(
        job: Job, length: int, generated: int, runs: dict[str, list[Run]], firsts: dict[str, list[Run]], base: str
    ) -> Row:
        own, first = runs[job.case.name], firsts[job.case.name]

        def compared(some: list[Run], others: list[Run], value: Callable[[Run], float]) -> Spread | None:
            # Stock vLLM may have failed in a later turn.
            return ratios(some[: len(others)], others, value) if some and others else None

        latencies = sorted(value for run in own for value in run.intertoken_latencies)

        def decode(run: Run) -> float:
            return run.decode_throughput

        def total(run: Run) -> float:
            return sum(map(len, run.token_times)) / run.duration

        def first_token(run: Run) -> float:
            return 1e3 * run.time_to_first_token

        return Row(
            job.case.name,
            length,
            generated,
            job.requests,
            len(own),
            spread(own, decode),
            compared(own, runs[base], decode),
            spread(own, intertoken),
            compared(own, runs[base], intertoken),
            1e3 * latencies[int(0.99 * (len(latencies) - 1))],
            spread(own, total),
            compared(own, runs[base], total),
            max(run.peak_usage or 0.0 for run in own),
            max(run.preemptions for run in own),
            spread(first, first_token) if first else None,
            compared(first, firsts[base], first_token),
        )

    def compression(self, policy: str, budget: float | int, **parameters: Any) -> dict[str, Any]:
        return {"policy": policy, "budget": budget, "interval": self.arguments.interval} | parameters


def latency(bench: Bench) -> Iterator[list[Row]]:
    """Decode and first token at each length: full cache, plain, and policies with budgets."""
    given = bench.arguments
    lengths, generated = [bench.size(length) for length in given.lengths], given.tokens
    room, together = bench.room(SHAPES[given.shape]), bench.size(given.together)
    # Room for one request of each case at least, and for one that is computed meanwhile.
    lengths = [length for length in lengths if 2.35 * (length + generated + 64) <= room] or [min(lengths)]
    longest = max(lengths) + generated + 64
    at_once = int((room - 1.2 * longest) / 1.15)
    counts = {
        length: max(1, min(together // length, at_once // (length + generated), given.max_requests))
        for length in lengths
    }
    pool = max(int(1.15 * count * (length + generated)) for length, count in counts.items()) + int(1.2 * longest)
    with bench.sides(given.shape, longest, pool) as (stock, ours):
        cases = [Case(STOCK, stock), Case(PLAIN, ours)]
        for policy in given.policies:
            for budget in given.budgets:
                cases.append(Case(f"{policy} {budget:g}", ours, bench.compression(policy, budget)))
        for length in lengths:
            jobs = [Job(case, counts[length]) for case in cases]
            yield from bench.measure(jobs, length, generated, cached=True, with_first_token=True)


def throughput(bench: Bench) -> Iterator[list[Row]]:
    """As many requests at once as the same bytes hold: ``--fit`` of stock vLLM's, more of those with a budget.

    Prompts are unknown and all different. While later prompts are computed earlier requests generate already, so
    ``total`` has the prompts in it, and ``decode`` is of the time in which all generate.
    """
    given = bench.arguments
    for length in map(bench.size, given.throughput_lengths):
        generated = given.throughput_tokens if bench.scale == 1 else 96
        longest = length + generated + 64
        pool = given.fit * longest
        with bench.sides(given.shape, longest, pool, equal_bytes=True) as (stock, ours):
            jobs = [Job(Case(STOCK, stock), given.fit)]
            for policy in given.policies:
                for budget in given.budgets:
                    # What a request holds at most while it generates; one prompt is whole at a time.
                    grown = generated if PRESETS[policy].decode == "grow" else given.interval
                    count = max(1, int((0.95 * pool - longest) / (int(budget * length) + grown + 2 * BLOCK_SIZE)))
                    case = Case(f"{policy} {budget:g}", ours, bench.compression(policy, budget))
                    jobs.append(Job(case, min(count, given.max_requests)))
            yield from bench.measure(jobs, length, generated, cached=False)


PARTS: dict[str, Callable[[Bench], Iterator[list[Row]]]] = {"latency": latency, "throughput": throughput}


@dataclass(frozen=True)
class Aim:
    """A ratio that a part's rows are to reach at a length and budget."""

    part: str
    what: str
    field: str
    at_most: float | None = None
    at_least: float | None = None

    def verdict(self, row: Row) -> str:
        value = getattr(row, self.field).median
        is_reached = value <= self.at_most if self.at_most is not None else value >= (self.at_least or 0.0)
        return f"{value:.2f}, {'reached' if is_reached else 'missed'}"


AIM_LENGTH, AIM_BUDGET = 65_536, "0.1"
AIMS = [
    Aim("latency", "time between tokens at most 0.5 x full cache", "intertoken_ratio", at_most=0.5),
    Aim("throughput", "throughput at equal KV memory at least 4 x full cache", "decode_ratio", at_least=4.0),
    Aim("latency", "time to the first token at most 1.05 x full cache", "first_token_ratio", at_most=1.05),
]


def verdicts(found: dict[str, list[Row]], length: int) -> list[str]:
    """A line for each aim: each policy at the aims' length and budget, or that it was not measured."""
    lines = []
    for aim in AIMS:
        rows = [r for r in found.get(aim.part, []) if r.length == length and r.case.endswith(" " + AIM_BUDGET)]
        rows = [row for row in rows if getattr(row, aim.field) is not None]
        told = "; ".join(f"{row.case.split()[0]} {aim.verdict(row)}" for row in rows)
        lines.append(f"{aim.what}: {told or 'not measured'}")
    return lines


def show(part: str, rows: list[Row]) -> None:
    def cells(row: Row) -> list[str]:
        return [
            str(row.requests),
            str(row.decode),
            str(row.decode_ratio or ""),
            str(row.intertoken),
            str(row.intertoken_ratio or ""),
            f"{row.intertoken_p99:.2f}",
            str(row.total_ratio or ""),
            str(row.first_token or ""),
            str(row.first_token_ratio or ""),
            f"{row.peak_usage:.2f}, {row.preemptions}",
        ]

    heads = ["requests", "decode tok/s", "ratio", "between tokens ms", "ratio", "p99 ms", "total tok/s ratio"]
    heads += ["1st token ms", "ratio", "pool, preempted"]
    title = f"{part}: {rows[0].length} + {rows[0].generated} tokens; median (range) of {rows[0].turns}"
    print_table(title, heads, {row.case: cells(row) for row in rows}, first="")


def save(
    path: Path, part: str, arguments: argparse.Namespace, gpu: str | None, rows: list[Row], failed: dict[str, str]
) -> None:
    """Puts a part into the file, in the place of what was there of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = json.loads(path.read_text()) if path.exists() else {}
    shape = SHAPES["tiny" if arguments.device == "cpu" else arguments.shape]
    parts[part] = {
        "machine": machine() | {"gpu": gpu},
        "arguments": vars(arguments) | {"shape_of_parts": asdict(shape)},
        "rows": [asdict(row) for row in rows],
        "failed": failed,
    }
    path.write_text(json.dumps(parts, indent=1, default=str) + "\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--runner", choices=["v1", "v2"], default="v2", help="vLLM's model runner, of both sides")
    parser.add_argument("--stock-backend", metavar="NAME", help="stock vLLM's attention; default: what it chooses")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65_536, 16_384, 4096], help="of latency")
    parser.add_argument("--together", type=int, default=4 * 65_536, help="most tokens of all prompts, in latency")
    parser.add_argument("--throughput-lengths", type=int, nargs="+", default=[65_536])
    parser.add_argument("--throughput-tokens", type=int, default=512, help="generated per request, in throughput")
    parser.add_argument("--fit", type=int, default=2, help="whole requests that the pool holds, in throughput")
    parser.add_argument("--tokens", type=int, default=128, help="generated per request, in latency")
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.2, 0.1, 0.05])
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--policies", nargs="+", default=["snapkv", "keepkv", "streaming_llm"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="after which no further turn is begun")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where to keep what the engines print")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu_serving.json"))
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --device cpu runs tiny shapes without one", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    scale = SHRINK if arguments.device == "cpu" else 1
    until = math.inf if arguments.minutes is None else perf_counter() + 60 * arguments.minutes
    memory = sys.maxsize if gpu is None else torch.cuda.get_device_properties(0).total_memory
    bench = Bench(arguments, scale, until, memory)
    found: dict[str, list[Row]] = {}
    failed = []
    for part in arguments.parts:
        measured: dict[tuple[str, int, int], Row] = {}
        bench.failed = {}
        try:
            for rows in PARTS[part](bench):
                # A turn's rows take the place of those of fewer turns.
                measured |= {(row.case, row.length, row.requests): row for row in rows}
                found[part] = list(measured.values())
                save(arguments.output, part, arguments, gpu, found[part], bench.failed)
                show(part, rows)
        except OutOfTimeError:
            print(f"{part}: {arguments.minutes:g} minutes are over; not all of it was measured", flush=True)
            break
        except Exception:
            traceback.print_exc()
            failed.append(part)
        finally:
            failed += [f"{part}: {case}" for case in bench.failed]
    print(f"At {bench.size(AIM_LENGTH)} tokens and budget {AIM_BUDGET}:")
    print("\n".join(verdicts(found, bench.size(AIM_LENGTH))))
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
