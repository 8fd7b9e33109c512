"""Time to first token where a context is compressed before its question: ``python benchmarks/context_cost.py``.

Each policy beside a plain request with the same prompt, in one engine that takes all in turn, with nothing in the
prefix cache; "reused": with what another request with the same context has left there. The model has random weights
and, by default, a layer of the shapes of Llama 3.2 1B: what attention takes of a layer's time depends on its width.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from report import Spread, save, short
from sides import ModelShape
from vllm_side import plugin_engine

from vllm_kvmerge.evaluation.options import print_table

PLAIN = "plain"
CASES: dict[str, dict[str, Any]] = {
    PLAIN: {"policy": "full"},
    "snapkv": {"policy": "snapkv", "budget": 0.25},
    "keydiff": {"policy": "keydiff", "budget": 0.25, "decode": "grow"},
    "compactor": {"policy": "compactor", "budget": 0.25},
    "expected_attention": {"policy": "expected_attention", "budget": 0.25, "decode": "grow"},
    "kvzip": {"policy": "kvzip", "budget": 0.25},
    "kvzip normalized": {"policy": "kvzip", "budget": 0.25, "normalized": True},
}
REUSED = " reused"
"""End of the name of a case whose context another request has left in the prefix cache."""


@dataclass(frozen=True)
class Row:
    """seconds: to the first token. ratio: to the plain request of the same turn."""

    case: str
    seconds: Spread
    ratio: Spread


def measure(llm: Any, prompt: list[int], context: int, case: str) -> float:
    """Seconds to the case's first token."""
    assert llm.reset_prefix_cache()
    if case.endswith(REUSED):
        another = [token ^ 1 for token in prompt[context:]]
        seconds_to_first_token(llm, prompt[:context] + another, context, CASES[case.removesuffix(REUSED)])
    return seconds_to_first_token(llm, prompt, context, CASES[case.removesuffix(REUSED)])


def seconds_to_first_token(llm: Any, prompt: list[int], context: int, fields: dict[str, Any]) -> float:
    from vllm import SamplingParams

    from vllm_kvmerge import compression

    own = {} if fields["policy"] == "full" else {"context_tokens": context}
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False, extra_args=compression(**fields, **own))
    started, first = perf_counter(), 0.0
    llm.llm_engine.add_request("one", {"prompt_token_ids": prompt}, params)
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        if outputs and not first:
            first = perf_counter() - started
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--question", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    cases = [*list(CASES)[1:], *(case + REUSED for case in CASES)]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, metavar="CASE")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    length = arguments.context + arguments.question
    heads = arguments.heads, arguments.kv_heads, 64
    shape = ModelShape(arguments.layers, arguments.width, *heads, 4 * length, arguments.intermediate)
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = 16 * length * shape.bytes_per_token
        llm = plugin_engine(shape.write(Path(folder)), num_bytes, 4 * length, dtype=arguments.dtype)
        prompt = np.random.default_rng(arguments.seed).integers(1, 32_000, length).tolist()
        # The short one is not counted: what is made at first use is made then.
        measure(llm, prompt[:500], 450, "kvzip normalized")
        times: dict[str, list[float]] = {case: [] for case in [PLAIN, *arguments.cases]}
        for _ in range(arguments.repeats):
            for case, seconds in times.items():
                seconds.append(measure(llm, prompt, arguments.context, case))
    rows = [
        Row(case, Spread.of(some), Spread.of([a / b for a, b in zip(some, times[PLAIN], strict=True)]))
        for case, some in times.items()
    ]
    table = {row.case: [short(row.seconds.median), str(row.ratio)] for row in rows}
    print_table("", ["seconds to first token", "x plain"], table, first="case")
    if arguments.output:
        save(arguments.output, vars(arguments), rows)


if __name__ == "__main__":
    main()
