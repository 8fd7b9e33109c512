"""Measuring on a GPU, for gpu_operators.py: timing, caches to run on, and the file of results."""

import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vllm_kvmerge.ops import PagedKVCache, ScoreUpdate, SequenceLayers, cell_bytes, reference
from vllm_kvmerge.ops.attention import accumulate_scores
from vllm_kvmerge.ops.types import PLANES
from vllm_kvmerge.policies.entries import Entries

BLOCK_SIZE = 16
DECAY = 0.9
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}

Call = Callable[[int], object]
"""Runs an operator once; the argument counts calls and chooses a copy of the cache."""


@dataclass
class Row:
    """One measurement.

    part: of the benchmark. case: in words. seconds: of one call. bytes: that must move, flops: that
    must be done, or 0. share: of the copy bandwidth, or where there are flops of the matrix product's rate. errors:
    ||out - ref|| / ||ref|| by what was compared; none where nothing was.
    """

    part: str
    operator: str
    implementation: str
    case: str
    dtype: str
    seconds: float
    bytes: int = 0
    flops: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    share: float = 0.0

    @property
    def error(self) -> float:
        """The largest; NaN counts as infinite."""
        return max((math.inf if math.isnan(error) else error for error in self.errors.values()), default=0.0)

    @property
    def is_right(self) -> bool:
        return self.error <= TOLERANCE[self.dtype]


@dataclass(frozen=True)
class Bench:
    """What all cases share. working_set, limit: bytes of all copies of a cache together, and of one at most. seconds:
    of one graph of calls."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_size: int
    working_set: int
    limit: int
    seconds: float
    repeats: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)

    def time(self, call: Call, copies: int, captured: bool = True) -> float:
        """Median seconds of one call. captured: calls are one CUDA graph; else what Python does counts too."""
        for number in range(copies):
            call(number)
        if not self.is_gpu:
            started = perf_counter()
            call(0)
            return perf_counter() - started
        torch.cuda.synchronize()
        started = perf_counter()
        call(0)
        torch.cuda.synchronize()
        calls = copies * max(1, math.ceil(self.seconds / (perf_counter() - started) / copies))

        def run() -> None:
            for number in range(calls):
                call(number)

        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            graph.replay()
        spans = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay() if captured else run()
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end) / 1000 / calls)
        return statistics.median(spans)

    def bandwidth(self) -> float:
        """Bytes read and written per second by a copy on the device."""
        size = max(1 << 20, self.working_set)
        source, destination = (torch.ones(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * size / self.time(lambda number: destination.copy_(source), 1)

    def matrix_rate(self) -> float:
        """Operations per second of a product of two square matrices of random numbers."""
        size = 8192 if self.is_gpu else 256
        a, b = (self.rand(size, size).to(self.dtype) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * size**3 / self.time(lambda number: torch.matmul(a, b, out=out), 1)


class Caches:
    """Copies of a random cache of ``rows`` sequences of ``entries`` live entries each, in shuffled blocks.

    copies: as many as make up the working set, two at least, if not given. ``layers`` are their pages.
    """

    def __init__(self, bench: Bench, rows: int, entries: int, copies: int | None = None) -> None:
        self.bench, self.rows, self.entries = bench, rows, entries
        width = -(-entries // BLOCK_SIZE)
        num_blocks = rows * width + 1
        elements = cell_bytes(bench.head_size, bench.dtype) // bench.dtype.itemsize
        shape = num_blocks, bench.heads, BLOCK_SIZE, elements
        self.copies = copies or max(2, math.ceil(bench.working_set / (math.prod(shape) * bench.dtype.itemsize)))
        self.layers = []
        for _ in range(self.copies):
            cache = torch.empty(shape, dtype=bench.dtype, device=bench.device)
            pages = PagedKVCache.of(cache, bench.head_size, row_major_keys=True)
            pages.keys.normal_()
            pages.values.normal_()
            pages.log_votes.uniform_(0.0, 3.0)
            pages.scores.uniform_()
            pages.aux.fill_(1.0)
            pages.positions.random_(entries)
            self.layers.append(pages)
        blocks = torch.randperm(num_blocks - 1, device=bench.device)[: rows * width] + 1
        self.table = blocks.view(rows, width).int()

    @classmethod
    def bytes(cls, bench: Bench, rows: int, entries: int) -> int:
        return rows * entries * bench.heads * cell_bytes(bench.head_size, bench.dtype)

    @property
    def live_bytes(self) -> int:
        """Of keys and values of one copy."""
        return 2 * self.rows * self.entries * self.bench.heads * self.bench.head_size * self.bench.dtype.itemsize

    def pages(self, number: int) -> PagedKVCache:
        return self.layers[number % self.copies]

    def seq_layers(self, number: int, front: int) -> SequenceLayers:
        """All sequences in one layer; where they are is on the GPU, how many entries they have is known."""
        device = self.bench.device
        segments = torch.tensor([[front, front, self.entries]] * self.rows, device=device)
        layer = torch.zeros(self.rows, dtype=torch.int64, device=device)
        seq_layers = SequenceLayers((self.pages(number),), layer, self.table, segments)
        assert seq_layers.num_entries == self.entries  # read from the GPU once, before a graph is captured
        return seq_layers

    def on_cpu(self) -> "Caches":
        """The first copy, on the CPU."""
        twin = object.__new__(Caches)
        cpu = torch.device("cpu")
        twin.bench = Bench(**{**vars(self.bench), "device": cpu})
        twin.rows, twin.entries, twin.copies = self.rows, self.entries, 1
        twin.layers = [PagedKVCache(*(getattr(self.pages(0), name).to(cpu, copy=True) for name in PLANES))]
        twin.table = self.table.cpu()
        return twin


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference, size = float((actual.double() - expected.double()).norm()), float(expected.double().norm())
    return difference / size if size else difference


def gather_entries(cache: PagedKVCache, blocks: Tensor, front: int, tail: int, seq_len: int) -> Entries:
    """Live entries of one layer of one sequence, float32 copies."""
    seq_layers = SequenceLayers.of(cache, blocks, front, tail, seq_len)
    index = torch.arange(seq_layers.num_entries, device=blocks.device).repeat(seq_layers.num_heads, 1)
    keys, values = (reference.gather_rows(seq_layers, plane, index) for plane in ("keys", "values"))
    return Entries(keys, values, *reference.gather_metadata(seq_layers))


def expected_attention(
    query: Tensor, entries: Entries, scale: float, update: ScoreUpdate | None
) -> tuple[Tensor, Tensor | None]:
    """Attention of the newest tokens' queries in float64, one KV head after the other.

    query: ``[q, H * G, d]``. Returns the output of its shape and, where there is an update, the scores then,
    ``[H, n]``. Scores of the newest tokens start from nothing.
    """
    num_queries, (num_kv_heads, n, _) = len(query), entries.keys.shape
    grouped = query.double().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [H, G, q, d]
    step = max(1, (1 << 26) // (grouped.shape[1] * n))  # queries at a time, so that this stays small
    outputs, scores = [], []
    for head, queries in enumerate(grouped):
        keys, votes, values = (plane[head].double() for plane in (entries.keys, entries.log_votes, entries.values))
        statistics = [plane[head : head + 1].double() for plane in (entries.scores, entries.aux)]
        for plane in statistics:
            plane[:, n - num_queries :] = 0.0
        parts = []
        for start in range(0, num_queries, step):
            some = queries[:, start : start + step]
            seen = torch.ones(some.shape[1], n, dtype=torch.bool, device=query.device).tril(n - num_queries + start)
            logits = scale * some @ keys.T
            weights = (logits + votes).masked_fill(~seen, -torch.inf).softmax(-1)
            parts.append(weights @ values)
            if update is not None:
                statistics = list(accumulate_scores(update, logits[None], weights[None], seen, *statistics))
        outputs.append(torch.cat(parts, 1))
        scores.append(statistics[0])
    output = torch.stack(outputs).permute(2, 0, 1, 3).flatten(1, 2)
    return output, torch.cat(scores) if update is not None else None


class Results:
    """What has been measured, in a file that is written anew after each row, so that a run that is cut off keeps it.

    head: what the file says of machine and arguments. until: ``perf_counter()`` when no further case is begun.
    """

    def __init__(self, path: Path, head: dict[str, Any], rates: dict[str, float], until: float) -> None:
        self.path, self.head, self.rates, self.until = path, head, rates, until
        self.rows: list[Row] = []
        self.absent: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    @property
    def is_late(self) -> bool:
        return perf_counter() > self.until

    def add(self, row: Row) -> None:
        rate = self.rates.get("copy") if row.bytes else self.rates.get(row.dtype)
        row.share = max(row.bytes, row.flops) / row.seconds / rate if rate and row.seconds else 0.0
        self.rows.append(row)
        print(f"{row.operator} {row.implementation} {row.case}: {row.seconds * 1e6:.1f} us, {row.errors}",
              file=sys.stderr, flush=True)  # fmt: skip
        self.save()

    def save(self) -> None:
        found = {"rates": self.rates, "absent": self.absent, "failed": self.failed}
        result = self.head | found | {"rows": [asdict(row) for row in self.rows]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(self.path.name + ".part")
        unfinished.write_text(json.dumps(result, indent=1, default=str) + "\n")
        os.replace(unfinished, self.path)
