"""Time per token against how many tokens came before: ``python benchmarks/longrun.py``.

One request generates ``--tokens`` tokens after a cached prompt of each length; sides take turns. ``--generate N`` makes
one side after the other generate N tokens in one go after a prompt of ``--prompt`` tokens instead, and reports the
median time per token of every ``--bin`` tokens.
"""

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import Spread, plot_lines, save
from rich.progress import track
from sides import ModelShape, Run
from turns import Case, ratios, spread, take_turns
from vllm_side import vllm_side

from vllm_kvmerge.evaluation.options import print_table


@dataclass(frozen=True)
class Row:
    """Milliseconds per token after ``length`` tokens; ratio: to the same case at the first length."""

    length: int
    case: str
    latency_ms: Spread
    ratio: Spread


def latency(run: Run) -> float:
    return 1e3 * statistics.median(run.intertoken_latencies)


def after_prompts(cases: list[Case], arguments: argparse.Namespace) -> list[Row]:
    rng = np.random.default_rng(arguments.seed)
    prompts = {length: rng.integers(1, 32_000, (1, length)).tolist() for length in arguments.lengths}
    # One case for each length, too: lengths are compared with each other as sides are.
    pairs = {
        (case.name, length): Case(f"{case.name} {length}", case.side, case.compression)
        for case in cases
        for length in arguments.lengths
    }
    lengths = {pair.name: length for (_, length), pair in pairs.items()}
    runs = take_turns(
        list(pairs.values()),
        arguments.repeats + 1,
        "turns",
        lambda case: case.side.run(prompts[lengths[case.name]], arguments.tokens, case.compression, cold=False),
    )
    # The first turn fills prefix caches.
    counted = {key: runs[pair.name][1:] for key, pair in pairs.items()}
    first = arguments.lengths[0]
    return [
        Row(length, name, spread(some, latency), ratios(some, counted[name, first], latency))
        for (name, length), some in counted.items()
    ]


def in_one_go(cases: list[Case], arguments: argparse.Namespace) -> list[Row]:
    prompt = np.random.default_rng(arguments.seed).integers(1, 32_000, (1, arguments.prompt)).tolist()
    for case in cases:
        case.side.wait()
    rows = []
    for case in track(cases, "sides"):
        (times,) = case.side.run(prompt, arguments.generate, case.compression).token_times
        latencies = 1e3 * np.diff(times)
        bins = [latencies[start : start + arguments.bin] for start in range(0, len(latencies), arguments.bin)]
        medians = [float(np.median(one)) for one in bins]
        for index, (one, median) in enumerate(zip(bins, medians, strict=True)):
            low, high = (float(np.quantile(one, share)) for share in (0.05, 0.95))
            spread_of_bin, ratio = Spread(median, low, high), median / medians[0]
            rows.append(
                Row(arguments.prompt + index * arguments.bin, case.name, spread_of_bin, Spread(ratio, ratio, ratio))
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 4000, 8000, 16000, 32000])
    parser.add_argument("--tokens", type=int, default=256, help="generated after each prompt")
    parser.add_argument("--budget", type=int, default=800)
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--policies", nargs="*", default=["streaming_llm", "h2o", "keepkv", "zsmerge", "morphkv"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--generate", type=int, default=0, metavar="N")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--bin", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/longrun.json"))
    arguments = parser.parse_args()
    longest = max(*arguments.lengths, arguments.prompt + arguments.generate) + arguments.tokens + 64
    pool = sum(arguments.lengths) + 2 * longest
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shape = ModelShape(max_tokens=longest)
        stock = stack.enter_context(vllm_side("stock", folder, shape, pool, plugin=False))
        ours = stack.enter_context(vllm_side("plugin", folder, shape, pool, plugin=True))
        settings = {"budget": arguments.budget, "interval": arguments.interval}
        cases = [Case("stock vLLM", stock), Case("plain", ours)]
        cases += [Case(policy, ours, {"policy": policy} | settings) for policy in arguments.policies]
        rows = in_one_go(cases, arguments) if arguments.generate else after_prompts(cases, arguments)
    save(arguments.output, vars(arguments) | {"shape": shape}, rows)
    lengths = sorted({row.length for row in rows})
    by_case = {case.name: [row for row in rows if row.case == case.name] for case in cases}
    print_table(
        f"Milliseconds per token, budget {arguments.budget}; ratio to the first column",
        [f"after {length}" for length in lengths],
        {name: [f"{row.latency_ms}, {row.ratio.median:.2f}" for row in some] for name, some in by_case.items()},
        first="",
    )
    plot_lines(
        arguments.output.with_suffix(".svg"),
        ("tokens before", "milliseconds per token"),
        {
            name: ([row.length for row in some], [row.latency_ms.median for row in some])
            for name, some in by_case.items()
        },
    )


if __name__ == "__main__":
    main()
