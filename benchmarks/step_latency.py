"""How long running requests wait for another one's compaction: ``python benchmarks/step_latency.py``.

Eight requests generate while the prompt of another one ends, which is compressed then. What counts is the part of each
step that compactions take, which is how much longer the eight wait for their next tokens than if the prompt were not
compressed. It is found in the prefix cache if that is allowed, so that little of it is computed for each policy.

``--harmful`` asks for the worst that is known, one and sixteen at a time, and measures the throughput of the eight
beside it for ``--seconds``, in turns with as many plain requests in its place.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from report import Spread, save, short
from rich.progress import track
from sides import add_shape, shape_of
from vllm_side import CLOCKS, plugin_engine

from vllm_kvmerge.evaluation.summary import print_table
from vllm_kvmerge.policies import CacheUpdate, Entries, register
from vllm_kvmerge.policies.mergers import DropMerger

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
        if step.compress or step.parts:
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


class Sleeping(DropMerger):
    """Another package's part, which takes half a second for each KV head."""

    name: ClassVar[str] = "sleeping"
    source: ClassVar[str] = "benchmarks/step_latency.py"

    def merge(self, entries: Entries, *arguments: Any) -> CacheUpdate:
        time.sleep(0.5 * entries.num_rows)
        return super().merge(entries, *arguments)


HARMFUL = {
    "grkv, 500 queries": (4_000, {"policy": "grkv", "regression_window": 500, "budget": 0.25}),
    "rkv": (4_000, {"policy": "rkv", "budget": 0.25}),
    "rkv, after every token": (4_000, {"policy": "rkv", "budget": 3_700, "interval": 1, "decode": "bounded"}),
    "cam, 4,096 receivers": (7_600, {"policy": "cam", "num_receivers": 4096, "budget": 0.6, "merge_prompt": True}),
    "zsmerge, behind 100 tokens": (7_600, {"policy": "zsmerge", "context_tokens": 100, "budget": 40}),
    "a part that sleeps": (4_000, {"policy": "snapkv", "merger": "sleeping", "budget": 0.25}),
}
"""Tokens of a prompt, and what its request asks for."""


@dataclass(frozen=True)
class Harm:
    """What requests do to others beside them. ratio: of the others' throughput to what it is beside as many plain
    requests with these prompts, in turns. longest: of the others' waits for a token, ms. memory: growth of the
    process, MiB. ended: of the requests with an error."""

    case: str
    count: int
    ratio: Spread
    longest: float
    memory: float
    ended: int


def beside(
    llm: Any, running: list[list[int]], prompts: list[list[int]], asked: dict[str, Any] | None, seconds: float
) -> tuple[float, float, int]:
    """Tokens per second of the running requests after others have come, the longest step, and errors of these."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100_000, detokenize=False)
    for index, one in enumerate(running):
        engine.add_request(f"running {index}", {"prompt_token_ids": one}, params)
    for _ in range(3):
        engine.step()
    others = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3_000, detokenize=False, extra_args=asked)
    for index, one in enumerate(prompts):
        engine.add_request(f"other {index}", {"prompt_token_ids": one}, others)
    begun = now = time.monotonic()
    num_steps, longest, ended = 0, 0.0, 0
    while now < begun + seconds:
        outputs, before = engine.step(), now
        now = time.monotonic()
        longest, num_steps = max(longest, now - before), num_steps + 1
        ended += sum(one.outputs[0].finish_reason == "error" for one in outputs)
    names = [f"running {index}" for index in range(len(running))] + [f"other {index}" for index in range(len(prompts))]
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return len(running) * num_steps / (now - begun), longest, ended


def harm(llm: Any, running: list[list[int]], arguments: argparse.Namespace) -> list[Harm]:
    from vllm import SamplingParams

    found, core = [], llm.llm_engine.engine_core.engine_core
    # Found in the prefix cache, by all of them.
    longest = max(length for length, _ in HARMFUL.values())
    texts = np.random.default_rng(arguments.seed).integers(1, 32_000, (arguments.together, longest)).tolist()
    cached = [{"prompt_token_ids": one} for one in texts]
    llm.generate(cached, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    cases = [(case, *HARMFUL[case], count) for case in arguments.cases for count in (1, arguments.together)]
    for case, length, fields, count in track(cases, "requests"):
        prompts, asked = [one[:length] for one in texts[:count]], {"kv_compression": json.dumps(fields)}
        ratios, longest_wait, memory, ended = [], 0.0, 0.0, 0
        for turn in range(arguments.repeats):
            # What comes behind a compressed context is computed anew, and so it is for plain ones.
            plain = [[turn + 1, *one[1:]] for one in prompts] if "context_tokens" in fields else prompts
            alone, *_ = beside(llm, running, plain, None, arguments.seconds)
            Path("/proc/self/clear_refs").write_text("5")  # the highest is that of now
            before = peak_memory()
            rate, *one = beside(llm, running, prompts, asked, arguments.seconds)
            ratios.append(rate / alone)
            longest_wait, ended = max(longest_wait, one[0]), ended + one[1]
            memory = max(memory, peak_memory() - before)
            # What a server refuses from the second time on.
            core.scheduler._admission.refused.clear()
            core.model_executor.driver_worker.worker.model_runner.compression.compactor.exceeded.clear()
        found.append(Harm(case, count, Spread.of(ratios), 1e3 * longest_wait, memory, ended))
    return found


def peak_memory() -> float:
    """Of this process, MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16_000, help="tokens of the prompt")
    parser.add_argument("--running", type=int, default=8, help="requests that generate")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--harmful", action="store_true", help="the worst requests, and others' throughput")
    parser.add_argument("--seconds", type=float, default=20.0, help="of --harmful, for each")
    parser.add_argument("--cases", nargs="+", choices=HARMFUL, default=list(HARMFUL), help="of --harmful")
    parser.add_argument("--together", type=int, default=16, help="of --harmful, at a time, after one")
    parser.add_argument("--repeats", type=int, default=3, help="turns of --harmful")
    add_shape(parser, head_size=64)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: beside other work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    longest, block = max(arguments.length, 16_000) + 1024, 32
    shape = shape_of(arguments, longest)
    rng = np.random.default_rng(arguments.seed)
    prompt = rng.integers(1, 32_000, arguments.length).tolist()
    running = rng.integers(1, 32_000, (arguments.running, 32)).tolist()
    num_blocks = (12 if arguments.harmful else 2) * longest // block + 500
    with tempfile.TemporaryDirectory() as folder:
        slot = shape.bytes_per_token + shape.metadata_bytes_per_token
        llm = plugin_engine(
            shape.write(Path(folder)),
            num_blocks * block * slot,
            longest,
            max_num_batched_tokens=2048,
            additional_config={"kvmerge": {"shared_contexts": False}},
        )
        if arguments.harmful:
            register(Sleeping)
            found = harm(llm, running, arguments)
            print_table(
                f"{arguments.running} requests beside others",
                ["throughput, of that beside plain ones", "longest wait, ms", "memory, MiB", "errors"],
                {
                    f"{one.count} x {one.case}": [str(one.ratio), short(one.longest), short(one.memory), str(one.ended)]
                    for one in found
                },
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
