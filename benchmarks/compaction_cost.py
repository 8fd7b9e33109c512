"""What compactions cost and what policies say they cost: ``python benchmarks/compaction_cost.py``.

The cache of one request, some layers of random keys, values and scores, is compressed by the worker's own code, at the
end of a prompt and, for bounded policies, again after an interval. Seconds are those of the thread, the least of
``--repeats``. Bytes are the most that was allocated at once, by PyTorch's account of every allocation; what a cpu
operator allocates for a batch is allocated from PyTorch in its stead while it runs. Both are for one head of one layer.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from report import save, short
from rich.progress import track
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.plan import CompressionPlan
from vllm_kvmerge.engine.worker.compactor import Compaction, Compactor
from vllm_kvmerge.evaluation.summary import print_table
from vllm_kvmerge.ops import PagedKVCache, cell_bytes, cpu
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.policies.cost import Cost, CostShape, Rates, measure_rates
from vllm_kvmerge.policies.rotation import Rotation
from vllm_kvmerge.request.parameters import parse_compression

BLOCK_SIZE = 16

EXPENSIVE: tuple[dict[str, Any], ...] = (
    {"policy": "grkv", "regression_window": 128},
    {"policy": "grkv", "regression_window": 500},
    {"policy": "grkv", "steps": 4},
    {"policy": "zsmerge", "residual_share": 0.5},
    {"policy": "cam", "merge_prompt": True, "num_receivers": 4096},
    {"policy": "morphkv", "recent_window": 100},
    {"policy": "keepkv", "merge_threshold": -1.0},
)


@dataclass(frozen=True)
class Sizes:
    """A model's, as far as it matters here."""

    layers: int = 1
    kv_heads: int = 8
    group_size: int = 4
    head_size: int = 64
    hidden_size: int = 2048
    dtype: torch.dtype = torch.bfloat16

    def cost_shape(self, num_entries: int, budget: int, at_prompt_end: bool) -> CostShape:
        return CostShape(num_entries, budget, self.head_size, self.group_size, self.hidden_size, at_prompt_end)


class Scene:
    """A request in the cache of a worker; ``first`` is its compression at the prompt's end, ``second`` after it.

    parameters: the request's ``kv_compression``, without budget. interval: tokens that have come since the first.
    """

    def __init__(self, sizes: Sizes, parameters: dict[str, Any], num_entries: int, budget: int, interval: int) -> None:
        self.sizes, self.budget, self.num_entries = sizes, budget, num_entries
        self.text = json.dumps(parameters | {"budget": budget})
        config = parse_compression(self.text)
        assert config is not None
        self.policy, self.bounded = config.policy, config.decode == "bounded"
        capacity = self.policy.capacity(budget)
        self.capacity = num_entries if capacity is None else min(capacity, num_entries)
        self.num_second = self.capacity + interval
        num_tokens = num_entries + interval
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        elements = cell_bytes(sizes.head_size, sizes.dtype) // sizes.dtype.itemsize
        shape = num_blocks + 1, sizes.kv_heads, BLOCK_SIZE, elements
        caches = [torch.randn(shape).to(sizes.dtype) for _ in range(sizes.layers)]
        layers = [PagedKVCache.of(cache, sizes.head_size) for cache in caches]
        for pages in layers:
            pages.scores.uniform_()
            pages.aux.fill_(0.0 if self.policy.tracker.mode == "sum" else 4.0)
        weights = torch.randn(sizes.kv_heads, sizes.group_size, sizes.hidden_size, sizes.head_size).to(sizes.dtype)
        scale = sizes.head_size**-0.5
        angles = torch.rand(num_tokens, sizes.head_size // 2)
        rotation = Rotation(torch.cat([angles.cos(), angles.sin()], dim=1).to(sizes.dtype))
        heads = list(range(sizes.kv_heads))
        self.compactor = Compactor(layers, scale, heads, output_weights=lambda layer: weights, rotation=rotation)
        scores = PromptScores.empty(sizes.layers, sizes.kv_heads, num_entries)
        scores.scores.uniform_()
        if self.policy.tracker.mode != "sum":
            scores.aux.fill_(4.0)
        blocks = list(range(1, num_blocks + 1))
        self.first = self._compaction(0, 0, num_entries, blocks, scores)
        self.second = self._compaction(self.capacity, num_entries, num_tokens, blocks, None)

    def _compaction(
        self, front: int, tail: int, num_tokens: int, blocks: list[int], scores: PromptScores | None
    ) -> Compaction:
        sizes, window, ring = self.sizes, self.policy.query_window, None
        if window:
            heads = sizes.kv_heads * sizes.group_size
            ring = QueryRing.empty(sizes.layers, window, heads, sizes.head_size, sizes.dtype)
            for layer in range(sizes.layers):
                ring.write(layer, torch.randn(window, heads, sizes.head_size).to(sizes.dtype), num_tokens)
        destination = blocks[: -(-self.capacity // BLOCK_SIZE)]
        plan = CompressionPlan("request", self.text, front, tail, num_tokens, self.budget, self.capacity, destination)
        return Compaction(plan, self.policy, torch.tensor(blocks), scores, ring)

    def run(self, compaction: Compaction) -> None:
        self.compactor.run([compaction])

    def cost(self, compaction: Compaction) -> Cost:
        """As the policy states it, for one head of one layer."""
        at_prompt_end = compaction.plan.front == 0
        return self.policy.cost(self.sizes.cost_shape(compaction.num_entries, self.budget, at_prompt_end))


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at once while ``run`` ran, beyond those before."""
    with native_allocations_counted(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    events = (event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]")
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _similar_bytes(seq_layers: Any, sources: Tensor, targets: Tensor, *_: Any) -> int:
    # find_most_similar of csrc/cpu/entries.cpp: usable targets in tiles of 32, their lengths and names.
    tiles = -(-targets.shape[1] // 32)
    return len(targets) * tiles * 32 * 4 * (seq_layers.layers[0].head_size + 2)


NATIVE = {"most_similar": _similar_bytes}
"""The native operators that allocate for a batch, and how many bytes. What others allocate a thread keeps for all its
calls: at most 2 c d numbers (``move_entries``) or 35 n (``fused_attention``)."""


@contextmanager
def native_allocations_counted() -> Iterator[None]:
    """Has PyTorch allocate, while a native operator runs, as much as that allocates by itself."""
    originals = {name: getattr(cpu, name) for name in NATIVE}

    def counted(name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            buffer = torch.empty(NATIVE[name](*arguments), dtype=torch.uint8)
            result = originals[name](*arguments)
            del buffer
            return result

        return run

    try:
        for name in NATIVE:
            setattr(cpu, name, counted(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(cpu, name, original)


@dataclass(frozen=True)
class Row:
    """Stated and measured, for one KV head of one layer. num_entries: before the compression."""

    parameters: dict[str, Any]
    at_prompt_end: bool
    num_entries: int
    stated_bytes: int
    bytes: float
    stated_seconds: float
    seconds: float


def measure(scene: Scene, parameters: dict[str, Any], rates: Rates, repeats: int) -> Iterator[Row]:
    num_heads = scene.sizes.layers * scene.sizes.kv_heads
    for compaction in (scene.first, scene.second)[: 1 + scene.bounded]:
        peak = peak_bytes(lambda: scene.run(compaction))  # noqa: B023
        seconds = []
        for _ in range(repeats):
            started = thread_time()
            scene.run(compaction)
            seconds.append(thread_time() - started)
        cost = scene.cost(compaction)
        yield Row(
            parameters,
            compaction.plan.front == 0,
            compaction.num_entries,
            4 * cost.numbers,
            peak / num_heads,
            cost.seconds(rates),
            min(seconds) / num_heads,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[1024, 4096, 8192], help="tokens of the prompt")
    parser.add_argument("--share", type=float, default=0.1, help="budget, as a share of the prompt")
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policies", nargs="+", help="default: all, and some with parameters that cost much")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/compaction_cost.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = Sizes(
        arguments.layers,
        arguments.kv_heads,
        arguments.groups,
        arguments.head_size,
        arguments.hidden_size,
        getattr(torch, arguments.dtype),
    )
    rates = measure_rates(dtype=sizes.dtype)
    cases = [{"policy": policy} for policy in arguments.policies or sorted(PRESETS)]
    if not arguments.policies:
        cases += EXPENSIVE
    rows = []
    for parameters in track(cases, "policies"):
        for entries in arguments.entries:
            scene = Scene(sizes, parameters, entries, int(arguments.share * entries), arguments.interval)
            rows += measure(scene, parameters, rates, arguments.repeats)
    save(arguments.output, vars(arguments) | {"rates": asdict(rates)}, rows)
    print_table(
        "Cost of a compaction for one KV head of one layer: stated, measured, and their ratio",
        ["KiB stated", "measured", "ratio", "us stated", "measured", "ratio"],
        {
            f"{' '.join(map(str, row.parameters.values()))}, {'prompt' if row.at_prompt_end else 'later'}, "
            f"{row.num_entries}": [
                *(short(value / 1024) for value in (row.stated_bytes, row.bytes)),
                short(row.stated_bytes / row.bytes),
                *(short(1e6 * value) for value in (row.stated_seconds, row.seconds)),
                short(row.stated_seconds / row.seconds),
            ]
            for row in rows
        },
    )


if __name__ == "__main__":
    main()
