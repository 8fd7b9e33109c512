"""What one compaction costs, beside one decode step: ``python benchmarks/compaction.py``.

One layer with random queries, keys and values is compressed to ``--budget`` at the end of a prompt (scores and queries
included), and again each time ``--interval`` tokens have been added (bounded policies). A decode step is attention of
one token to all entries, on the same operators. Times are per layer.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from report import Spread, save, time_of
from rich.progress import track
from torch import Tensor

from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.worker.compaction import Compaction
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.engine.worker.rows import score_update
from vllm_kvmerge.evaluation.summary import print_table
from vllm_kvmerge.ops import (
    NO_UPDATE,
    AttentionBatch,
    PagedKVCache,
    cell_bytes,
    paged_attention,
    score_prompt_queries,
    write_tokens,
)
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.policies.rotation import Rotation
from vllm_kvmerge.request.spec import CompressionSpec, parse_compression

BLOCK_SIZE = 32


@dataclass(frozen=True)
class LayerTrace:
    """Inputs of an attention layer: queries ``[T, H * G, d]``, keys and values ``[T, H, d]``; output_weights:
    ``[H, G, hidden, d]``."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    output_weights: Tensor
    scale: float
    rotation: Rotation


class TracedSequence:
    """One document's keys and values in a cache of its own, computed token by token as a server would."""

    def __init__(self, layers: list[LayerTrace], dtype: torch.dtype) -> None:
        self.layers, self.dtype = layers, dtype
        num_tokens, num_kv_heads, head_size = layers[0].keys.shape
        shape = (-(-num_tokens // BLOCK_SIZE), num_kv_heads, BLOCK_SIZE, cell_bytes(head_size, dtype) // dtype.itemsize)
        self.caches = [PagedKVCache.of(torch.zeros(shape, dtype=dtype), head_size) for _ in layers]
        self.blocks = torch.arange(shape[0], dtype=torch.int32)
        self.num_tokens = self.front = self.tail = 0
        self.compactor = Compactor(
            self.caches,
            layers[0].scale,
            list(range(num_kv_heads)),
            output_weights=lambda i: layers[i].output_weights,
            rotation=layers[0].rotation,
        )

    def write(self, count: int) -> slice:
        """Stores the keys and values of the next ``count`` tokens; returns which they are."""
        new = slice(self.num_tokens, self.num_tokens + count)
        slots = torch.arange(new.start, new.stop)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            write_tokens(cache, slots, layer.keys[new].to(self.dtype), layer.values[new].to(self.dtype))
        self.num_tokens = new.stop
        return new

    def attend(self, new: slice, config: CompressionSpec | None = None) -> list[Tensor]:
        """Each layer's attention output for these newest tokens, ``[q, H * G, d]``; scores as the policy keeps them."""
        tracked = config is not None and config.tracks_decode and self.front > 0
        update = score_update(config) if tracked and config is not None else NO_UPDATE
        count = new.stop - new.start
        batch = AttentionBatch.single(self.blocks, count, self.num_tokens, self.front, self.tail, update)
        outputs = []
        for layer, cache in zip(self.layers, self.caches, strict=True):
            query = layer.queries[new].to(self.dtype)
            outputs.append(torch.empty_like(query))
            paged_attention(query, cache, batch, layer.scale, outputs[-1])
        return outputs

    def compress(self, config: CompressionSpec, budget: int) -> None:
        """Compresses the cache to ``budget`` entries, in the blocks where it lies."""
        covered = self.num_tokens if config.decode == "bounded" or self.front == 0 else self.tail
        capacity = config.policy.capacity(budget)
        num_entries = self.front + covered - self.tail
        new_front = num_entries if capacity is None else min(num_entries, capacity)
        blocks = self.blocks[: -(-new_front // BLOCK_SIZE)].tolist()
        plan = Compress("", "", "growth", covered, self.num_tokens, budget, new_front, blocks)
        ring, scores = self._ring(config.policy.query_window), self._prompt_scores(config)
        segments = {"front": self.front, "tail": self.tail}
        compaction = Compaction(plan, config.policy, self.blocks, scores, ring, **segments)
        self.compactor.run([compaction])
        self.front, self.tail = new_front, covered

    def _prompt_scores(self, config: CompressionSpec) -> PromptScores | None:
        if self.front > 0 or not config.prompt_window:
            return None
        window = self.num_tokens if config.prompt_window == "all" else min(config.prompt_window, self.num_tokens)
        scores = PromptScores.empty(len(self.layers), self.layers[0].keys.shape[1], self.num_tokens)
        for index, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            query = layer.queries[self.num_tokens - window : self.num_tokens].to(self.dtype)
            statistics = scores.scores[index], scores.aux[index]
            score_prompt_queries(query, cache, self.blocks, score_update(config), layer.scale, *statistics)
        return scores

    def _ring(self, window: int) -> QueryRing | None:
        if window == 0:
            return None
        num_heads, head_size = self.layers[0].queries.shape[1:]
        ring = QueryRing.empty(len(self.layers), window, num_heads, head_size, self.dtype)
        for index, layer in enumerate(self.layers):
            newest = layer.queries[max(0, self.num_tokens - window) : self.num_tokens]
            ring.write(index, newest.to(self.dtype), self.num_tokens)
        return ring


@dataclass(frozen=True)
class Row:
    """Milliseconds per layer: of the compaction when the prompt ends, and of one while generating, if there is any."""

    policy: str
    prompt_end: Spread
    decoding: Spread | None


def milliseconds(seconds: list[float]) -> Spread:
    return Spread.of([1e3 * value for value in seconds])


def random_layer(arguments: argparse.Namespace) -> LayerTrace:
    num_tokens = arguments.entries + arguments.interval * (arguments.repeats + 1)
    heads, groups, size = arguments.kv_heads, arguments.groups, arguments.head_size
    angles = torch.rand(num_tokens, size // 2)
    weights = torch.randn(heads, groups, heads * groups * size, size) / size**0.5
    return LayerTrace(
        queries=torch.randn(num_tokens, heads * groups, size),
        keys=torch.randn(num_tokens, heads, size),
        values=torch.randn(num_tokens, heads, size),
        output_weights=weights.to(getattr(torch, arguments.dtype)),
        scale=size**-0.5,
        rotation=Rotation(torch.cat([angles.cos(), angles.sin()], dim=1)),
    )


def measure(policy: str, layer: LayerTrace, arguments: argparse.Namespace) -> Row:
    dtype = getattr(torch, arguments.dtype)
    config = parse_compression({"policy": policy, "budget": arguments.budget, "interval": arguments.interval})
    assert config is not None
    prompt_end, decoding = [], []
    for _ in range(arguments.repeats):
        sequence = TracedSequence([layer], dtype)
        sequence.write(arguments.entries)
        started = perf_counter()
        sequence.compress(config, arguments.budget)
        prompt_end.append(perf_counter() - started)
    if config.decode == "bounded":
        for _ in range(arguments.repeats):
            sequence.attend(sequence.write(arguments.interval), config)
            started = perf_counter()
            sequence.compress(config, arguments.budget)
            decoding.append(perf_counter() - started)
    return Row(policy, milliseconds(prompt_end), milliseconds(decoding) if decoding else None)


def decode_step(layer: LayerTrace, num_entries: int, arguments: argparse.Namespace) -> Spread:
    sequence = TracedSequence([layer], getattr(torch, arguments.dtype))
    sequence.write(num_entries - 1)
    newest = sequence.write(1)
    seconds = time_of(lambda: sequence.attend(newest), 10 * arguments.repeats)
    return Spread(1e3 * seconds.median, 1e3 * seconds.least, 1e3 * seconds.most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--budget", type=int, default=410)
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policies", nargs="+", default=sorted(PRESETS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/compaction.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    layer = random_layer(arguments)
    steps = {n: decode_step(layer, n, arguments) for n in (arguments.entries, arguments.budget)}
    rows = [measure(policy, layer, arguments) for policy in track(arguments.policies, "policies")]
    save(
        arguments.output, vars(arguments) | {"decode_step_ms": json.dumps({n: str(s) for n, s in steps.items()})}, rows
    )
    print_table(
        f"Compaction of {arguments.entries} entries to {arguments.budget}, ms per layer: median (range); "
        "a decode step: " + ", ".join(f"{spread} over {n} entries" for n, spread in steps.items()),
        ["when the prompt ends", f"every {arguments.interval} tokens"],
        {row.policy: [str(row.prompt_end), str(row.decoding or "")] for row in rows},
    )


if __name__ == "__main__":
    main()
