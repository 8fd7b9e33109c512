"""What requests of unlike shapes save by one batch of compactions: ``python benchmarks/padding.py``.

Prompts of random lengths are compressed to half, by the worker's own code, at their ends, and a bounded policy's
fronts again after an interval: all in one batch, however much pads the shorter ones, and each in a batch of its own, in
turns. Times are the thread's, of some layers of random keys, values and scores.
"""

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path
from time import thread_time
from unittest.mock import patch

import torch
from compaction_cost import BLOCK_SIZE, Scene, Sizes
from report import Spread, save, short
from rich.progress import track

from vllm_kvmerge.engine.worker import compactor
from vllm_kvmerge.engine.worker.compactor import Compaction, Compactor
from vllm_kvmerge.evaluation.options import print_table
from vllm_kvmerge.ops import PagedKVCache, cell_bytes


@dataclass(frozen=True)
class Row:
    """padding: dead entries of a request, on average. apart, together: milliseconds. ratio: of the same turn."""

    policy: str
    at_prompt_end: bool
    lengths: list[int]
    padding: float
    apart: Spread
    together: Spread
    ratio: Spread


def in_one_pool(scenes: list[Scene]) -> tuple[Compactor, list[torch.Tensor], list[list[Compaction]]]:
    """A worker whose caches have room for all scenes, their memory, and the scenes' first and second compactions."""
    sizes, offset, steps = scenes[0].sizes, 0, ([], [])
    for scene in scenes:
        for step, one in zip(steps, (scene.first, scene.second), strict=True):
            blocks = [block + offset for block in one.plan.blocks]
            plan = replace(one.plan, blocks=blocks, in_place=one.plan.front > 0)
            step.append(replace(one, plan=plan, source_blocks=one.source_blocks + offset))
        offset += len(scene.compactor.layers[0].scores)
    elements = cell_bytes(sizes.head_size, sizes.dtype) // sizes.dtype.itemsize
    shape = offset, sizes.kv_heads, BLOCK_SIZE, elements
    memory = [torch.randn(shape).to(sizes.dtype) for _ in range(sizes.layers)]
    layers = [PagedKVCache.of(cache, sizes.head_size) for cache in memory]
    for pages in layers:
        pages.scores.uniform_()
        pages.aux.fill_(0.0 if scenes[0].policy.tracker.mode == "sum" else 4.0)
    return replace(scenes[0].compactor, layers=layers), memory, list(steps)


def measure(policy: str, lengths: list[int], sizes: Sizes, repeats: int) -> list[Row]:
    scenes = [Scene(sizes, {"policy": policy}, length, length // 2, interval=16) for length in lengths]
    worker, memory, steps = in_one_pool(scenes)
    rows = []
    for step in steps[: 1 + scenes[0].bounded]:
        before, seconds = [cache.clone() for cache in memory], ([], [])
        for _ in range(1 + repeats):
            for padding, found in zip((0, 1 << 40), seconds, strict=True):
                for cache, content in zip(memory, before, strict=True):
                    cache.copy_(content)
                with patch.multiple(compactor, PROMPT_PADDING=padding, FRONT_PADDING=padding):
                    started = thread_time()
                    done = worker.execute(step)
                    found.append(1e3 * (thread_time() - started))
                assert not done.failures
        counts = [one.num_entries for one in step]
        apart, together = (some[1:] for some in seconds)
        ratios = [both / alone for both, alone in zip(together, apart, strict=True)]
        padding = max(counts) - sum(counts) / len(counts)
        spreads = map(Spread.of, (apart, together, ratios))
        rows.append(Row(policy, step[0].is_of_tokens, lengths, padding, *spreads))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--lengths", nargs="+", default=["80-120", "300-600", "1000-2000", "200-3000", "1000-6000"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    policies = ["local", "snapkv", "h2o", "keepkv", "zsmerge", "morphkv", "weightedkv"]
    parser.add_argument("--policies", nargs="+", default=policies)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/padding.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    sizes, rng, rows = Sizes(arguments.layers, arguments.kv_heads), random.Random(arguments.seed), []
    for span in track(arguments.lengths, "lengths"):
        least, most = map(int, span.split("-"))
        lengths = [rng.randint(least, most) for _ in range(arguments.requests)]
        for policy in arguments.policies:
            rows += measure(policy, lengths, sizes, arguments.repeats)
    save(arguments.output, vars(arguments), rows)
    print_table(
        "Compactions of unlike requests: milliseconds",
        ["padding", "each a batch", "one batch", "ratio"],
        {
            f"{row.policy}, {'prompts' if row.at_prompt_end else 'later'}, {min(row.lengths)} to {max(row.lengths)}": [
                short(row.padding),
                *map(str, (row.apart, row.together, row.ratio)),
            ]
            for row in rows
        },
    )


if __name__ == "__main__":
    main()
