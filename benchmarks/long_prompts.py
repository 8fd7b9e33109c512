"""Prompts longer than the KV cache: ``python benchmarks/long_prompts.py``.

Two engines of one model with random weights, 8 layers of 8 KV heads: one with a pool for all tokens of the longest
plain prompt, which is not compressed, and one with a pool of ``--pool`` tokens, whose policies compress it while it is
computed. They take turns with each length; lengths beyond ``--plain`` are computed by the small pool alone.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import Spread, save, short
from rich.progress import track
from sides import add_shape, shape_of
from vllm_side import CLOCKS, plugin_engine

from vllm_kvmerge.evaluation.options import print_table

PLAIN, SMALL = "plain", "small"


@dataclass(frozen=True)
class Row:
    """length: tokens of the prompt. pool: tokens that the engine has slots for. seconds: to the first token. ratio: to
    the plain prompt of the same turn; None: there is none."""

    case: str
    length: int
    pool: int
    seconds: Spread
    ratio: Spread | None


def first_token(llm: Any, prompt: list[int], fields: dict[str, Any] | None, clock: Callable[[], float]) -> float:
    """Seconds to the first token."""
    from vllm import SamplingParams

    from vllm_kvmerge import compression

    assert llm.reset_prefix_cache()
    extra = None if fields is None else compression(**fields)
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=extra)
    llm.llm_engine.add_request("one", {"prompt_token_ids": prompt}, params)
    started = clock()
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
    assert outputs[0].outputs[0].finish_reason == "length"
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_000, 64_000, 100_000])
    parser.add_argument(
        "--plain", type=int, default=64_000, help="the longest that is computed without compression too"
    )
    parser.add_argument("--pool", type=int, default=8192, help="tokens that the small pool has slots for")
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--policies", nargs="+", default=["snapkv", "keydiff"])
    add_shape(parser, head_size=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: beside other work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    clock, longest = CLOCKS[arguments.clock], max(arguments.lengths) + 64
    shape = shape_of(arguments, longest)
    slot = 2 * shape.bytes_per_token + shape.metadata_bytes_per_token  # in float32
    fields = {"budget": arguments.budget, "prefill": {"chunk": arguments.chunk}}
    pools = {PLAIN: arguments.plain + 64, SMALL: arguments.pool}
    times: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, block = shape.write(Path(folder)), 32
        engines = {}
        for name, tokens in pools.items():
            num_bytes = (-(-tokens // block) + 1) * block * slot
            engines[name] = plugin_engine(model, num_bytes, longest, dtype="float32", max_num_batched_tokens=2048)
        rng = np.random.default_rng(arguments.seed)
        prompts = {length: rng.integers(1, 32_000, length).tolist() for length in arguments.lengths}
        turns = [(repeat, length) for repeat in range(arguments.repeats) for length in arguments.lengths]
        for _, length in track(turns, "prompts", disable=len(turns) < 2):
            for case in [PLAIN] * (length <= arguments.plain) + arguments.policies:
                asked = None if case == PLAIN else {"policy": case, **fields}
                engine = engines[PLAIN if case == PLAIN else SMALL]
                times.setdefault((case, length), []).append(first_token(engine, prompts[length], asked, clock))
    rows = [
        Row(
            case,
            length,
            pools[PLAIN if case == PLAIN else SMALL],
            Spread.of(some),
            _ratio(some, times.get((PLAIN, length))),
        )
        for (case, length), some in times.items()
    ]
    table = {
        f"{row.case}, {row.length:,} tokens": [f"{row.pool:,}", short(row.seconds.median), str(row.ratio or "")]
        for row in rows
    }
    print_table("", ["pool", "seconds to first token", "x plain"], table, first="case")
    if arguments.output:
        save(arguments.output, vars(arguments), rows)


def _ratio(some: list[float], plain: list[float] | None) -> Spread | None:
    return None if plain is None else Spread.of([a / b for a, b in zip(some, plain, strict=True)])


if __name__ == "__main__":
    main()
