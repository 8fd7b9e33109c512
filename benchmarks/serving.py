"""Prefill and decode of stock vLLM, the plugin and kvpress on one machine: ``python benchmarks/serving.py``.

Decode: ``--requests`` requests whose prompts are cached generate ``--tokens`` tokens each; what counts is the time from
when all of them have been compressed. Prefill: one request with an unknown prompt. All sides take turns, ``--repeats``
times; ratios are to stock vLLM in the same turn. Plain is the plugin serving requests without a policy; empty cache is
the same with prompts of a few tokens, which no policy can be faster than. ``--compile`` lets vLLM compile the model, as
it does by default.
"""

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kvpress_side import kvpress_side
from report import Spread, plot_bars, save
from sides import ModelShape, Run
from turns import Case, ratios, spread, take_turns
from vllm_side import vllm_side

from vllm_kvmerge.evaluation.summary import print_table

EMPTY = "empty cache"
FEW_TOKENS = 8
"""Of its prompts."""

POLICIES = ("streaming_llm", "h2o", "snapkv", "keepkv", "zsmerge", "morphkv", "weightedkv", "grkv")


@dataclass(frozen=True)
class Row:
    """One case at one length. Ratios are to stock vLLM; latencies in milliseconds, over all repeats.

    peak_tokens: largest part of the pool in use, in tokens.
    """

    length: int
    case: str
    decode_tokens_per_second: Spread
    decode_ratio: Spread
    latency_p50: float
    latency_p99: float
    peak_tokens: int | None
    first_token_ms: Spread
    first_token_ratio: Spread
    second_token_ms: Spread
    second_token_ratio: Spread
    prefill_tokens_per_second: Spread


def measure(cases: list[Case], length: int, arguments: argparse.Namespace) -> list[Row]:
    rng = np.random.default_rng([arguments.seed, length])

    def draw(count: int) -> list[list[int]]:
        return rng.integers(1, 32_000, (count, length)).tolist()

    prompts = draw(arguments.requests)

    def turn(case: Case) -> tuple[Run, Run]:
        some = FEW_TOKENS if case.name == EMPTY else length
        decode = case.side.run([one[:some] for one in prompts], arguments.tokens, case.compression, cold=False)
        return decode, case.side.run([one[:some] for one in draw(1)], 2, case.compression, cold=False)

    turns = take_turns(cases, arguments.repeats + 1, f"{length} tokens", turn)
    # The first turn fills prefix caches.
    decode = {name: [long for long, _ in runs[1:]] for name, runs in turns.items()}
    prefill = {name: [short for _, short in runs[1:]] for name, runs in turns.items()}
    stock = cases[0].name
    rows = []
    for case in cases:
        long, short = decode[case.name], prefill[case.name]
        latencies = sorted(value for run in long for value in run.intertoken_latencies)
        peaks = [run.peak_usage for run in long if run.peak_usage is not None]
        rows.append(
            Row(
                length,
                case.name,
                spread(long, lambda run: run.decode_throughput),
                ratios(long, decode[stock], lambda run: run.decode_throughput),
                1e3 * statistics.median(latencies),
                1e3 * latencies[int(0.99 * (len(latencies) - 1))],
                round(max(peaks) * pool_tokens(arguments)) if peaks else None,
                spread(short, lambda run: 1e3 * run.time_to_first_token),
                ratios(short, prefill[stock], lambda run: run.time_to_first_token),
                spread(short, lambda run: 1e3 * run.time_to_second_token),
                ratios(short, prefill[stock], lambda run: run.time_to_second_token),
                spread(short, lambda run: length / run.time_to_first_token),
            )
        )
    return rows


def pool_tokens(arguments: argparse.Namespace) -> int:
    """Room for all cached prompts, what is generated, one unknown prompt, and compressed copies."""
    longest = max(arguments.lengths)
    return int(1.3 * arguments.requests * (longest + arguments.tokens)) + 2 * longest


def cells(row: Row) -> list[str]:
    return [
        str(row.decode_tokens_per_second),
        str(row.decode_ratio),
        f"{row.latency_p50:.2f}, {row.latency_p99:.2f}",
        str(row.peak_tokens or ""),
        str(row.first_token_ms),
        str(row.first_token_ratio),
        str(row.second_token_ms),
        str(row.second_token_ratio),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8000, 2000, 500], help="tokens per prompt")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="generated per request")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="no enforce_eager")
    parser.add_argument("--kvpress", metavar="PYTHON", help="of an environment with kvpress; without it, no such side")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/serving.json"))
    arguments = parser.parse_args()
    shape = ModelShape(max_tokens=max(arguments.lengths) + arguments.tokens + 64)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = pool_tokens(arguments)
        mode = {"enforce_eager": not arguments.compile}
        stock = stack.enter_context(vllm_side("stock", folder, shape, pool, plugin=False, **mode))
        ours = stack.enter_context(vllm_side("plugin", folder, shape, pool, plugin=True, **mode))
        cases = [Case("stock vLLM", stock), Case("plain", ours), Case(EMPTY, ours)]
        settings = {"budget": arguments.budget, "interval": arguments.interval}
        cases += [Case(policy, ours, {"policy": policy} | settings) for policy in arguments.policies]
        if arguments.kvpress:
            peer = stack.enter_context(kvpress_side("kvpress", folder, shape, arguments.kvpress))
            cases.append(Case("kvpress SnapKV", peer, {"ratio": 1 - arguments.budget}))
        rows = [row for length in arguments.lengths for row in measure(cases, length, arguments)]
    save(arguments.output, vars(arguments) | {"shape": shape, "kvpress": bool(arguments.kvpress)}, rows)
    for length in arguments.lengths:
        print_table(
            f"{arguments.requests} requests of {length} tokens, budget {arguments.budget}; median (range)",
            [
                "decode tok/s",
                "ratio",
                "latency p50, p99 ms",
                "peak tokens",
                "1st token ms",
                "ratio",
                "2nd token ms",
                "ratio",
            ],
            {row.case: cells(row) for row in rows if row.length == length},
            first="",
        )
    plot_bars(
        arguments.output.with_suffix(".svg"),
        "Decode, tokens per second",
        {
            f"{arguments.requests} x {length}": {
                row.case: row.decode_tokens_per_second for row in rows if row.length == length
            }
            for length in arguments.lengths
        },
    )


if __name__ == "__main__":
    main()
