"""Many long requests and a small pool of KV cache: ``python benchmarks/memory_pressure.py``.

All requests are sent at once; the pool holds ``--fit`` prompts. What counts is how many requests are completed per
minute, and how often one had to be preempted or compressed. "under pressure": policies with ``trigger: pressure``.
Sides take turns; ratios are to stock vLLM in the same turn.
A turn of stock vLLM takes four minutes on two cores, where many requests of this length wait for a pool of two.
"""

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import Spread, plot_bars, save
from sides import ModelShape, Run
from turns import Case, ratios, spread, take_turns
from vllm_side import CLOCKS, vllm_side

from vllm_kvmerge.evaluation.summary import print_table


@dataclass(frozen=True)
class Row:
    """One case. most_preemptions: of any turn; peak_usage: largest share of the pool."""

    case: str
    requests_per_minute: Spread
    ratio: Spread
    most_preemptions: int
    peak_usage: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--length", type=int, default=4000, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="generated per request")
    parser.add_argument("--fit", type=int, default=2, help="prompts that the pool holds")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--policies", nargs="*", default=["h2o", "keepkv"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: for a machine that is shared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/memory_pressure.json"))
    arguments = parser.parse_args()
    shape = ModelShape(max_tokens=arguments.length + arguments.tokens + 64)
    rng = np.random.default_rng(arguments.seed)
    prompts = rng.integers(1, 32_000, (arguments.requests, arguments.length)).tolist()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = arguments.fit * arguments.length
        stock = stack.enter_context(vllm_side("stock", folder, shape, pool, plugin=False, clock=arguments.clock))
        ours = stack.enter_context(vllm_side("plugin", folder, shape, pool, plugin=True, clock=arguments.clock))
        cases = [Case("stock vLLM", stock)]
        for policy in arguments.policies:
            compression = {"policy": policy, "budget": arguments.budget}
            cases.append(Case(policy, ours, compression))
            cases.append(Case(f"{policy} under pressure", ours, compression | {"trigger": "pressure"}))
        runs = take_turns(
            cases,
            arguments.repeats,
            "turns",
            lambda case: case.side.run(prompts, arguments.tokens, case.compression),
        )

    def rate(run: Run) -> float:
        return 60 * arguments.requests / run.duration

    rows = [
        Row(
            case.name,
            spread(runs[case.name], rate),
            ratios(runs[case.name], runs[cases[0].name], rate),
            max(run.preemptions for run in runs[case.name]),
            max(run.peak_usage or 0.0 for run in runs[case.name]),
        )
        for case in cases
    ]
    save(arguments.output, vars(arguments) | {"shape": shape}, rows)
    print_table(
        f"{arguments.requests} requests of {arguments.length} + {arguments.tokens} tokens in a pool of {pool} tokens, "
        f"budget {arguments.budget}; median (range)",
        ["requests per minute", "ratio", "preemptions", "peak use of the pool"],
        {
            row.case: [str(row.requests_per_minute), str(row.ratio), str(row.most_preemptions), f"{row.peak_usage:.2f}"]
            for row in rows
        },
        first="",
    )
    plot_bars(
        arguments.output.with_suffix(".svg"),
        "Completed requests per minute",
        {f"pool of {pool} tokens": {row.case: row.requests_per_minute for row in rows}},
    )


if __name__ == "__main__":
    main()
