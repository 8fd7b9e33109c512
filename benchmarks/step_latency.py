"""How long running requests wait for another one's compaction: ``python benchmarks/step_latency.py``.

Eight requests generate while the prompt of another one ends, which is compressed then. What counts is the part of each
step that compactions take, which is how much longer the eight wait for their next tokens than if the prompt were not
compressed. It is found in the prefix cache if that is allowed, so that little of it is computed for each policy.
Another checkout of the plugin is measured with ``PYTHONPATH``.

``--share`` measures another thing: what share of the time compactions take while the requests generate, each with such
a prompt and compressed anew after every ``--interval`` tokens. Requests come ``--apart`` steps apart; policies take
turns, ``--repeats`` times. Where each one's budget is ``--wider`` entries larger than that of the one before, a policy
has another turn each time, in which every budget is a batch of its own.
"""

import argparse
import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from report import Spread, save, short
from rich.progress import track
from sides import add_shape, shape_of
from vllm_side import CLOCKS, plugin_engine

from vllm_kvmerge.engine import scheduler
from vllm_kvmerge.engine.worker.compactor import Compaction
from vllm_kvmerge.evaluation.summary import print_table

POLICIES = [
    *("snapkv", "keydiff", "adakv", "pyramidkv", "expected_attention", "zsmerge", "weightedkv", "asymkv", "kvmerger"),
    *("d2o", "grkv", "compactor", "keepkv", "criticalkv"),
]
"""All that differ: the others take as long as snapkv. R-KV takes a minute."""


@dataclass(frozen=True)
class Row:
    """waits: milliseconds for compactions, in each step that has some."""

    policy: str
    waits: list[float]

    @property
    def cells(self) -> list[str]:
        parts = [*np.percentile(self.waits, [50, 99]), max(self.waits), sum(self.waits)]
        return [str(len(self.waits)), *map(short, parts)]


class Stopwatch:
    """Measures the compactions of the engine in this process. waits: milliseconds, by step that has some."""

    def __init__(self, llm: Any, clock: Callable[[], float]) -> None:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._compression, self._run_plans = runner.compression, runner.compression.run_plans
        self._clock, self.waits = clock, list[float]()
        self._compression.run_plans = self._timed

    def _timed(self, blocks_of: Callable) -> Any:
        started, step = self._clock(), self._compression.step
        done = self._run_plans(blocks_of)
        if step.plans or getattr(step, "parts", ()):  # earlier versions have none
            self.waits.append(1e3 * (self._clock() - started))
        return done

    def stop(self) -> None:
        self._compression.run_plans = self._run_plans


def measure(
    llm: Any, prompt: list[int], running: list[list[int]], policy: str, budget: int, clock: Callable[[], float]
) -> Row:
    from vllm import SamplingParams

    from vllm_kvmerge import compression

    engine, watch = llm.llm_engine, Stopwatch(llm, clock)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100_000, detokenize=False)
    for index, one in enumerate(running):
        engine.add_request(f"running {index}", {"prompt_token_ids": one}, params)
    for _ in range(2):
        engine.step()
    asked = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=3, detokenize=False, extra_args=compression(policy, budget=budget)
    )
    engine.add_request("long", {"prompt_token_ids": prompt}, asked)
    num_tokens = 0
    while num_tokens < 2:  # the second comes after the compaction
        outputs = {output.request_id: output for output in engine.step()}
        num_tokens = len(outputs["long"].outputs[0].token_ids) if "long" in outputs else num_tokens
    engine.abort_request([*(f"running {index}" for index in range(len(running))), "long"])
    while engine.has_unfinished_requests():
        engine.step()
    watch.stop()
    return Row(policy, watch.waits)


@dataclass(frozen=True)
class Share:
    """percent: of the time of steps in which all requests generate, first compressions done. milliseconds: of a step,
    all that it does."""

    policy: str
    percent: Spread
    milliseconds: Spread


def share(
    llm: Any, prompts: list[list[int]], asked: list[dict[str, Any]], apart: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Milliseconds per step: of compactions, and in all. asked: for each prompt's request."""
    from vllm import SamplingParams

    tokens = 160 + apart * len(prompts)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, detokenize=False)
    engine, watch, num_tokens, num_steps, started = llm.llm_engine, Stopwatch(llm, clock), dict[str, int](), 0, 0.0
    waiting = {str(index): prompt for index, prompt in enumerate(prompts)}
    while max(num_tokens.values(), default=0) < tokens:
        if waiting and (apart == 0 or min(num_tokens.values(), default=apart) >= apart):
            for name in [*waiting][: None if apart == 0 else 1]:
                of_request = params.clone()
                of_request.extra_args = asked[int(name)]
                engine.add_request(name, {"prompt_token_ids": waiting.pop(name)}, of_request)
                num_tokens[name] = 0
        for output in engine.step():
            num_tokens[output.request_id] = len(output.outputs[0].token_ids)
        num_steps += 1
        if waiting or min(num_tokens.values()) < 2:  # the second comes after the first compression
            watch.waits, num_steps, started = [], 0, clock()
    times = sum(watch.waits) / num_steps, 1e3 * (clock() - started) / num_steps
    while engine.has_unfinished_requests():
        engine.step()
    watch.stop()
    return times


def shares(llm: Any, prompts: list[list[int]], arguments: argparse.Namespace) -> list[Share]:
    from vllm_kvmerge import compression

    sides = [(policy, True) for policy in arguments.policies]
    sides += [(policy, False) for policy in arguments.policies if arguments.wider]
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {side: [] for side in sorted(sides)}
    for _ in track(range(arguments.repeats + 1), "turns"):
        for (policy, is_padded), times in found.items():
            budgets = [arguments.budget + index * arguments.wider for index in range(len(prompts))]
            asked = [compression(policy, budget=budget, interval=arguments.interval) for budget in budgets]
            with nullcontext() if is_padded else patch.object(Compaction, "is_even", False):
                times.append(share(llm, prompts, asked, arguments.apart, CLOCKS[arguments.clock]))
    return [
        Share(
            policy if is_padded else f"{policy}, each a batch",
            Spread.of([100 * part / whole for part, whole in times[1:]]),  # the first turn fills the prefix cache
            Spread.of([whole for _, whole in times[1:]]),
        )
        for (policy, is_padded), times in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16_000, help="tokens of the prompt")
    parser.add_argument("--running", type=int, default=8, help="requests that generate")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--share", action="store_true", help="what share of decoding compactions take")
    parser.add_argument("--interval", type=int, default=16, help="of --share")
    parser.add_argument("--apart", type=int, default=0, help="steps between its requests")
    parser.add_argument("--wider", type=int, default=0, help="entries by which each one's budget is larger")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    add_shape(parser, head_size=64)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: beside other work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    longest, block = arguments.length + 1024 + arguments.apart * arguments.running, 32
    shape = shape_of(arguments, longest)
    rng = np.random.default_rng(arguments.seed)
    prompt = rng.integers(1, 32_000, arguments.length).tolist()
    own = arguments.length if arguments.share else 32
    running = rng.integers(1, 32_000, (arguments.running, own)).tolist()
    num_blocks = (2 + arguments.running * arguments.share) * longest // block + 500
    chunk = 2048
    if arguments.share and arguments.apart == 0:
        # Requests are in step if their prompts end in one, those too that a policy wants to be computed anew, and no
        # compression there is left for a later step.
        chunk, scheduler.STEP_SECONDS = max(2048, arguments.running * arguments.length), math.inf
    with tempfile.TemporaryDirectory() as folder:
        slot = shape.bytes_per_token + shape.metadata_bytes_per_token
        llm = plugin_engine(
            shape.write(Path(folder)),
            num_blocks * block * slot,
            longest,
            max_num_batched_tokens=chunk,
            additional_config={"kvmerge": {"max_compaction_seconds": 600, "shared_contexts": False}},
        )
        if arguments.share:
            found = shares(llm, running, arguments)
            print_table(
                f"Share of compactions while {arguments.running} requests generate; median (range)",
                ["percent", "ms a step"],
                {one.policy: [str(one.percent), str(one.milliseconds)] for one in found},
            )
            if arguments.output:
                save(arguments.output, vars(arguments), found)
            return
        from vllm import SamplingParams

        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        rows = [
            measure(llm, prompt, running, policy, arguments.budget, CLOCKS[arguments.clock])
            for policy in track(arguments.policies, "policies")
        ]
    print_table(
        f"What {arguments.running} requests wait for compactions of {arguments.length:,} tokens, ms",
        ["steps", "p50", "p99", "most", "together"],
        {row.policy: row.cells for row in rows},
    )
    if arguments.output:
        save(arguments.output, vars(arguments), rows)


if __name__ == "__main__":
    main()
