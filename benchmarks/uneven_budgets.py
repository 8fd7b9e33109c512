"""Memory and decode time of budgets that differ by layer and head: ``python benchmarks/uneven_budgets.py``.

Beside the same policy with even budgets at the same average, which for ``adakv`` and ``pyramidkv`` is ``snapkv``, in
one engine that takes both in turn: bytes that a request's cache holds while it generates, as its report says; the time
of steps that decode ``--requests`` requests; and the time of compressions, as the metrics say, at the prompt's end and,
of a bounded cache, later. The layers of ``skip_layers`` cost what they cost, and the even side gets that average.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from prometheus_client import REGISTRY
from report import Spread, save
from sides import ModelShape
from vllm_side import plugin_engine

from vllm_kvmerge.evaluation.options import print_table

BLOCK_SIZE = 32
CASES: dict[str, dict[str, Any]] = {
    "adakv": {"policy": "adakv"},
    "pyramidkv": {"policy": "pyramidkv"},
    "pyramidinfer": {"policy": "pyramidinfer"},
    "d2o": {"policy": "d2o"},
    "criticalkv, adaptive": {"policy": "criticalkv", "allocator": "adaptive"},
    "snapkv, two layers whole": {"policy": "snapkv", "skip_layers": 2},
}


@dataclass(frozen=True)
class Row:
    """One case at one budget: bytes held; ratios to even budgets of the same average of these, of decode steps, and of
    compressions at the prompt's end and later."""

    case: str
    budget: float
    mebibytes: float
    bytes_ratio: float
    step_ratio: Spread
    first_ratio: Spread
    later_ratio: Spread


@dataclass(frozen=True)
class Times:
    """Seconds: median of steps that decode all requests, means of compressions at the prompt's end and later."""

    step: float
    first: float
    later: float


def compactions(policy: str) -> tuple[float, float]:
    """Seconds and number of those so far."""
    values = (
        REGISTRY.get_sample_value(f"vllm:kvmerge_compaction_seconds_{kind}", {"policy": policy, "engine": "0"})
        for kind in ("sum", "count")
    )
    seconds, count = (value or 0.0 for value in values)
    return seconds, count


def run(
    llm: Any, prompts: list[list[int]], fields: dict[str, Any], num_tokens: int, decode: str = "grow"
) -> tuple[float, Times]:
    """Bytes that a request holds while it generates, and times."""
    from vllm import SamplingParams

    from vllm_kvmerge import compression

    extra = compression(**fields, decode=decode) | {"kvmerge_usage": True}
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, extra_args=extra)
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    counts: dict[str, int] = {}
    seconds, held, policy = [], 0.0, fields["policy"]
    before = first = compactions(policy)
    while llm.llm_engine.has_unfinished_requests():
        started = perf_counter()
        outputs = llm.llm_engine.step()
        elapsed = perf_counter() - started
        for output in outputs:
            counts[output.request_id] = len(output.outputs[0].token_ids)
            if counts[output.request_id] == 1:
                first = compactions(policy)
            if output.finished:
                held = output.kv_transfer_params["kvmerge"]["mean_bytes"]
        if len(counts) == len(prompts) and min(counts.values()) > 2:
            seconds.append(elapsed)
    last = compactions(policy)
    means = [(b[0] - a[0]) / max(1.0, b[1] - a[1]) for a, b in ((before, first), (first, last))]
    return held, Times(float(np.median(seconds)), *means)


def measure(llm: Any, arguments: argparse.Namespace) -> list[Row]:
    rng, length = np.random.default_rng(arguments.seed), arguments.prompt
    prompts = rng.integers(1, 32_000, (arguments.requests, length)).tolist()
    rows = []
    for budget in arguments.budget:
        for name, fields in CASES.items():
            skipped = fields.get("skip_layers", 0)
            average = (skipped * length + (arguments.layers - skipped) * round(budget * length)) // arguments.layers
            even_fields = fields | {"allocator": "uniform", "budget": average, "skip_layers": 0}
            both = even_fields, fields | {"budget": budget}
            # One request alone: of several, some wait for their compression, uncompressed.
            even, held = (run(llm, prompts[:1], one, arguments.tokens)[0] for one in both)
            ratios = []
            for _ in range(arguments.repeats):
                even_times, times = (run(llm, prompts, one, arguments.tokens)[1] for one in both)
                bounded = (run(llm, prompts[:1], one, 4 * BLOCK_SIZE, "bounded")[1] for one in both)
                even_later, later = (one.later for one in bounded)
                ratios.append((times.step / even_times.step, times.first / even_times.first, later / even_later))
            spreads = [Spread.of(list(some)) for some in zip(*ratios, strict=True)]
            rows.append(Row(name, budget, held / 2**20, held / even, *spreads))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--budget", type=float, nargs="+", default=[0.5, 0.2, 0.1])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    heads, size = arguments.kv_heads, arguments.head_size
    shape = ModelShape(arguments.layers, 256, 2 * heads, heads, size, 2 * arguments.prompt)
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = 2 * arguments.requests * arguments.prompt * 2 * shape.bytes_per_token
        # Prompts come again, and each time their compactions are timed.
        options = {"kvmerge": {"max_compaction_seconds": 600, "shared_contexts": False}}
        llm = plugin_engine(shape.write(Path(folder)), num_bytes, 2 * arguments.prompt, additional_config=options)
        rows = measure(llm, arguments)
    table = {
        f"{row.case}, {row.budget:g}": [
            f"{row.mebibytes:.1f}",
            *(f"{row.bytes_ratio:.3f}", str(row.step_ratio), str(row.first_ratio), str(row.later_ratio)),
        ]
        for row in rows
    }
    columns = ["MiB held", "bytes / even", "decode step", "first compression", "later ones"]
    print_table("", columns, table, first="case, budget")
    if arguments.output:
        save(arguments.output, vars(arguments), rows)


if __name__ == "__main__":
    main()
