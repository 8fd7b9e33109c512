"""The operators on a card: ``python benchmarks/gpu_operators.py``. Needs torch, Triton and this package, no vLLM.

Triton's, and beside them CUDA's where csrc/cuda/build.py has built them: attention, loading by threads and by the bulk
copy engine, and merges. The figures decide what belongs in kernels/choice.json.

Each case is first checked, on fresh random inputs and into poisoned outputs, against float64 (attention and scores) or
the reference on the CPU (the others); ``error`` is ||out - ref|| / ||ref||. Then it is timed: calls rotate over copies
of the cache that together are several times the card's L2, several calls are one CUDA graph, and the time is the median
of its replays divided by its calls. ``GB/s`` counts the bytes that must move, each once; ``of copy`` is that over the
bandwidth of a device-to-device copy in the same run. Attention is compared with torch's scaled_dot_product_attention
and, votes as its score_mod, FlexAttention, over keys and values that lie contiguous already.

Without a card it exits with 2; ``--interpret`` runs tiny shapes in Triton's interpreter, whose times mean nothing.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from report import machine
from torch import Tensor

from vllm_kvmerge.kernels import UPDATE_MODES, Pages, ScoreUpdate, Units, cell_bytes, cuda, reference, triton
from vllm_kvmerge.kernels.merge import Sums

BLOCK_SIZE = 16
DECAY = 0.9
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Call = Callable[[int], object]
"""Runs an operator once; the argument counts calls and chooses a copy of the cache."""


@dataclass
class Row:
    """Seconds of one call. bytes: that must move, or 0. errors: by what was compared. peers: their seconds.

    implementation: of the operator.
    """

    operator: str
    case: str
    seconds: float
    bytes: int
    errors: dict[str, float]
    share: float = 0.0
    implementation: str = "triton"
    peers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """What all cases share. working_set, limit: bytes of all copies of a cache together, and of one at most."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_size: int
    working_set: int
    limit: int
    seconds: float
    repeats: int

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)

    def time(self, call: Call, copies: int) -> float:
        """Median seconds of one call."""
        for number in range(copies):
            call(number)
        if self.device.type != "cuda":
            started = perf_counter()
            call(0)
            return perf_counter() - started
        torch.cuda.synchronize()
        started = perf_counter()
        call(0)
        torch.cuda.synchronize()
        calls = copies * max(1, math.ceil(self.seconds / (perf_counter() - started) / copies))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(calls):
                call(number)
        graph.replay()
        spans = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end) / 1000 / calls)
        return statistics.median(spans)

    def bandwidth(self) -> float:
        """Bytes read and written per second by a copy on the device."""
        size = max(1 << 20, self.working_set)
        source, destination = (torch.ones(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * size / self.time(lambda number: destination.copy_(source), 1)


class Caches:
    """Copies of a random cache of ``rows`` sequences of ``entries`` live entries each, in shuffled blocks."""

    def __init__(self, bench: Bench, rows: int, entries: int) -> None:
        self.bench, self.rows, self.entries = bench, rows, entries
        width = -(-entries // BLOCK_SIZE)
        num_blocks = rows * width + 1
        elements = cell_bytes(bench.head_size, bench.dtype) // bench.dtype.itemsize
        shape = num_blocks, bench.heads, BLOCK_SIZE, elements
        self.copies = max(2, math.ceil(bench.working_set / (math.prod(shape) * bench.dtype.itemsize)))
        self.layers = []
        for _ in range(self.copies):
            cache = torch.empty(shape, dtype=bench.dtype, device=bench.device)
            pages = Pages.of(cache, bench.head_size, row_major_keys=True)
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

    def pages(self, number: int) -> Pages:
        return self.layers[number % self.copies]

    def units(self, number: int, front: int) -> Units:
        """All sequences in one layer; where they are is on the card, how many entries they have is known."""
        device = self.bench.device
        segments = torch.tensor([[front, front, self.entries]] * self.rows, device=device)
        layer = torch.zeros(self.rows, dtype=torch.int64, device=device)
        units = Units((self.pages(number),), layer, self.table, segments)
        assert units.num_entries == self.entries  # read from the card once, before a graph is captured
        return units


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference, size = float((actual.double() - expected.double()).norm()), float(expected.double().norm())
    return difference / size if size else difference


def has_cuda(device: torch.device) -> bool:
    """Whether there are CUDA's operators for a device."""
    try:
        return cuda.runs_on(device) is None
    except (OSError, ImportError):
        return False


def attention_calls(device: torch.device) -> dict[str, Callable[..., None]]:
    """Each implementation of attention that there is."""
    calls: dict[str, Callable[..., None]] = {"triton": triton.paged_attention}
    if has_cuda(device):
        calls |= {"cuda": partial(cuda.paged_attention, bulk=False)}
        if cuda.has_bulk_copies(device):
            calls |= {"cuda bulk": partial(cuda.paged_attention, bulk=True)}
    return calls


def attention(
    bench: Bench, caches: Caches, groups: int, front: int, mode: str, peers: bool, name: str, call: Callable[..., None]
) -> Row:
    """One query for each sequence, with one implementation of attention."""
    rows, n, heads = caches.rows, caches.entries, bench.heads
    query = bench.rand(rows, heads * groups, bench.head_size).to(bench.dtype)
    numbers = [torch.arange(rows), *(torch.full((rows,), number) for number in (1, n, front, front))]
    numbers += [torch.full((rows,), UPDATE_MODES.index(mode))]  # type: ignore[arg-type]
    tensors = [number.to(bench.device, torch.int32) for number in numbers]
    decays, scale = torch.full((rows,), DECAY, device=bench.device), bench.head_size**-0.5
    output = torch.full_like(query, torch.nan)

    def run(number: int) -> None:
        call(query, caches.pages(number), caches.table, *tensors, decays, scale, output, num_queries=1)

    checked = min(rows, 2)
    before = [reference.gather_entries(caches.pages(0), caches.table[row], front, front, n) for row in range(checked)]
    run(0)
    errors = {"output": 0.0} | ({"scores": 0.0} if mode != "none" else {})
    for row, entries in enumerate(before):
        q = query[row].double().view(heads, groups, -1)
        logits = scale * q @ entries.keys.double().transpose(1, 2)
        weights = torch.softmax(logits + entries.log_votes.double().unsqueeze(1), -1)
        expected = (weights @ entries.values.double()).flatten(0, 1)
        errors["output"] = max(errors["output"], relative_error(output[row], expected))
        if mode != "none":
            entries.scores[:, -1], entries.aux[:, -1] = 0.0, 0.0
            seen = torch.ones(1, n, dtype=torch.bool, device=bench.device)
            update = ScoreUpdate(mode, DECAY)  # type: ignore[arg-type]
            scores, _ = reference.accumulate_scores(
                update, logits.unsqueeze(2), weights.unsqueeze(2), seen, entries.scores.double(), entries.aux.double()
            )
            after = reference.gather_metadata(Units.of(caches.pages(0), caches.table[row], front, front, n))[1]
            errors["scores"] = max(errors["scores"], relative_error(after, scores))
    size = heads * rows * (n * 2 * bench.head_size * bench.dtype.itemsize + 4 * front)
    size += heads * rows * n * {"none": 0, "sum": 8, "mean": 16, "log_ema": 16}[mode]
    case = f"{rows} x {n}, G {groups}, front {front}, {mode}"
    result = Row("paged_attention", case, 0.0, size, errors, implementation=name)
    result.seconds = bench.time(run, caches.copies)
    if peers:
        result.peers = attention_peers(bench, caches, query, front, scale)
    return result


def attention_peers(bench: Bench, caches: Caches, query: Tensor, front: int, scale: float) -> dict[str, float]:
    rows, n, heads = caches.rows, caches.entries, bench.heads
    copies = []
    for number in range(caches.copies):
        found = reference.gather_entries(caches.pages(number), caches.table.flatten(), 0, 0, caches.table.numel() * 16)
        planes = (plane.to(bench.dtype).unflatten(1, (rows, -1))[:, :, :n] for plane in (found.keys, found.values))
        copies.append([plane.transpose(0, 1).contiguous() for plane in planes])
    votes = caches.units(0, front)
    bias = reference.gather_metadata(votes)[0].view(rows, heads, n)
    rows_of_query = query.unsqueeze(2)
    groups = query.shape[1] // heads
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True, scale=scale)
    seconds = {"SDPA": bench.time(lambda number: sdpa(rows_of_query, *copies[number % len(copies)]), len(copies))}
    if front and bench.device.type == "cuda":
        from torch.nn.attention.flex_attention import flex_attention

        def with_votes(score: Tensor, row: Tensor, head: Tensor, _: Tensor, entry: Tensor) -> Tensor:
            return score + bias[row, head // groups, entry]

        flex = torch.compile(partial(flex_attention, score_mod=with_votes, enable_gqa=True, scale=scale))
        seconds["Flex"] = bench.time(lambda number: flex(rows_of_query, *copies[number % len(copies)]), len(copies))
    return seconds


def columns(bench: Bench, caches: Caches, groups: int, num_queries: int, mode: str) -> Row:
    """The newest queries of a prompt, of a never compressed sequence."""
    n, scale = caches.entries, bench.head_size**-0.5
    query = bench.rand(num_queries, bench.heads * groups, bench.head_size).to(bench.dtype)
    update = ScoreUpdate(mode, DECAY)  # type: ignore[arg-type]
    scores, aux = torch.zeros(2, bench.heads, n, device=bench.device)

    def run(number: int) -> None:
        triton.column_scores(query, caches.pages(number), caches.table[0], n, update, scale, scores, aux)

    run(0)
    keys = reference.gather_entries(caches.pages(0), caches.table[0], 0, 0, n).keys.double()
    q = query.double().unflatten(1, (bench.heads, groups)).permute(1, 2, 0, 3)
    logits = scale * q @ keys.transpose(1, 2).unsqueeze(1)
    seen = torch.ones(num_queries, n, dtype=torch.bool, device=bench.device).tril(n - num_queries)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    nothing = torch.zeros(bench.heads, n, dtype=torch.float64, device=bench.device)
    expected, _ = reference.accumulate_scores(update, logits, weights, seen, nothing, nothing)
    size = bench.heads * n * (bench.head_size * bench.dtype.itemsize + 16)
    name, error = f"{num_queries} x {n}, G {groups}, {mode}", relative_error(scores, expected)
    return Row("column_scores", name, bench.time(run, caches.copies), size, {"scores": error})


Operation = Callable[[Any, int, Caches], Sequence[Tensor]]
"""Runs an operator of a module on a copy of caches and returns what it returns."""


def on_cpu(caches: Caches) -> Caches:
    """A copy of the first cache, on the CPU."""
    twin = object.__new__(Caches)
    cpu = torch.device("cpu")
    twin.bench = Bench(**{**vars(caches.bench), "device": cpu})
    twin.rows, twin.entries, twin.copies = caches.rows, caches.entries, 1
    twin.layers = [Pages(*(getattr(caches.pages(0), one.name).to(cpu, copy=True) for one in fields(Pages)))]
    twin.table = caches.table.cpu()
    return twin


def checked(
    bench: Bench, name: str, case: str, caches: Caches, size: int, operation: Operation, operators: Any = triton
) -> Row:
    """Times an operator after its results, and its changes to the pages, have been compared with the reference's."""
    twin = on_cpu(caches)
    outcomes = []
    for module, where in ((operators, caches), (reference, twin)):
        results = list(operation(module, 0, where))
        planes = [getattr(where.pages(0), one.name) for one in fields(Pages)]
        outcomes.append([tensor.cpu().nan_to_num() for tensor in (*results, *planes)])
    error = max(relative_error(one, other) for one, other in zip(*outcomes, strict=True))
    seconds = bench.time(lambda number: operation(operators, number, caches), caches.copies)
    implementation = operators.__name__.rpartition(".")[2]
    return Row(name, case, seconds, size, {"reference": error}, implementation=implementation)


def merge_cases(bench: Bench, rows: int, entries: int, interval: int) -> Iterator[Row]:
    """One compaction of ``rows`` units (requests, of one layer): an interval's entries leave, half of them merged.

    Those that leave lie anywhere; the newest take their places.
    """
    caches = Caches(bench, rows, entries)
    n, d, item, heads = entries, bench.head_size, bench.dtype.itemsize, rows * bench.heads
    places = n - interval
    order = bench.rand(heads, places).argsort(1)
    gone, carriers = order[:, :interval], order[:, interval : interval + interval // 2]
    kept = torch.arange(places, device=bench.device).repeat(heads, 1)
    kept.scatter_(1, gone, torch.arange(places, n, device=bench.device).expand(heads, -1))
    members = torch.cat([carriers, gone[:, : carriers.shape[1]]], 1)
    row_of = torch.arange(carriers.shape[1], device=bench.device).repeat(heads, 2)
    weights = torch.full(members.shape, 0.5, device=bench.device)
    size = heads * (2 * d * item * (2 * interval + 3 * carriers.shape[1]) + 2 * 16 * places)
    known = [caches.units(number, n // 2) for number in range(caches.copies)]

    def run(module: Any, number: int, where: Caches) -> Sequence[Tensor]:
        units = known[number % caches.copies] if where is caches else where.units(number, n // 2)
        there = [tensor.to(where.bench.device) for tensor in (carriers, members, row_of, weights, weights)]
        module.merge_entries(units, where.table, kept.to(where.bench.device), None, Sums(*there))
        return []

    for operators in (triton, cuda) if has_cuda(bench.device) else (triton,):
        case = f"{rows} units x {n}, {interval} leave"
        yield checked(bench, "merge_entries", case, caches, size, run, operators)


def entry_cases(bench: Bench, rows: int, entries: int, groups: int) -> Iterator[Row]:
    """What compactions call, on ``rows`` units (layers x requests) of ``entries`` entries."""
    caches = Caches(bench, rows, entries)
    n, d, item, all_heads = entries, bench.head_size, bench.dtype.itemsize, rows * bench.heads
    few = max(1, n // 32)
    index = bench.rand(all_heads, n).argsort(1)
    places, some = index[:, :few], bench.rand(all_heads, few, d)
    kept = torch.arange(n - few, device=bench.device).repeat(all_heads, 1)
    newest = torch.arange(n - few, n, device=bench.device).expand(all_heads, -1)
    kept.scatter_(1, places.clamp(max=n - few - 1), newest)
    queries = bench.rand(all_heads, groups, 32, d)
    seen = torch.arange(n - 32, n, device=bench.device).clamp(min=0).repeat(all_heads, 1)
    statistics = bench.rand(3, all_heads, n)
    usable = bench.rand(all_heads, n - few) > -1.5
    products, between = bench.rand(all_heads, few, n), bench.rand(all_heads, few, few)
    weights = bench.rand(all_heads, n).abs()

    def operation(run: Callable[[Any, Units, Caches], Any]) -> Operation:
        def wrapped(module: Any, number: int, where: Caches) -> Sequence[Tensor]:
            found = run(module, units(where, number), where)
            return [] if found is None else [found] if isinstance(found, Tensor) else list(found)

        return wrapped

    known = [caches.units(number, n // 2) for number in range(caches.copies)]

    def units(where: Caches, number: int) -> Units:
        return known[number % caches.copies] if where is caches else where.units(number, n // 2)

    def to(where: Caches, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(where.bench.device) for tensor in tensors]

    name = f"{rows} units x {n}"
    cases: list[tuple[str, int, Callable[[Any, Units, Caches], Any]]] = [
        ("gather_metadata", all_heads * n * (16 + 20), lambda m, u, w: m.gather_metadata(u)),
        ("gather_rows", all_heads * n * d * (item + 4), lambda m, u, w: m.gather_rows(u, "keys", *to(w, index))),
        ("write_metadata", all_heads * n * 36,
         lambda m, u, w: m.write_metadata(u, w.table, *to(w, *statistics, index))),
        ("write_rows", 2 * all_heads * few * d * (item + 4),
         lambda m, u, w: m.write_rows(u, w.table, *to(w, places, some, some))),
        ("move_entries", 4 * all_heads * few * d * item, lambda m, u, w: m.move_entries(u, w.table, *to(w, kept))),
        ("most_similar", all_heads * n * d * item,
         lambda m, u, w: m.most_similar(u, *to(w, index[:, :few], index[:, few:], usable))[:1]),
        ("fused_attention", 2 * all_heads * n * d * item,
         lambda m, u, w: m.fused_attention(u, *to(w, queries, seen, statistics[0], index), d**-0.5, "sum")),
        ("join_slots", products.nbytes,
         lambda m, u, w: m.join_slots(*to(w, products, between, weights[:, :few], weights))[1:]),
    ]  # fmt: skip
    for operator, size, run in cases:
        yield checked(bench, operator, name, caches, size, operation(run))
    slots = torch.randperm(rows * n, device=bench.device)[: min(rows * n, 8192)] + BLOCK_SIZE
    key, value = (bench.rand(len(slots), bench.heads, d).to(bench.dtype) for _ in range(2))

    def write(module: Any, number: int, where: Caches) -> Sequence[Tensor]:
        module.write_tokens(where.pages(number), *to(where, slots, key, value))
        return []

    yield checked(bench, "write_tokens", f"{len(slots)} tokens", caches, 4 * key.nbytes, write)


def cases(bench: Bench, arguments: argparse.Namespace) -> Iterator[Row]:
    for entries in arguments.entries:
        for rows in arguments.batch:
            if Caches.bytes(bench, rows, entries) > bench.limit:
                continue
            caches = Caches(bench, rows, entries)
            for groups in arguments.groups:
                peers = Caches.bytes(bench, rows, entries) <= bench.limit // 4 and not arguments.no_peers
                for name, call in attention_calls(bench.device).items():
                    ours = peers and name == "triton"
                    yield attention(bench, caches, groups, 0, "none", ours, name, call)
                    for mode in UPDATE_MODES:
                        with_peers = ours and mode == "none"
                        yield attention(bench, caches, groups, entries // 2, mode, with_peers, name, call)
    caches = Caches(bench, 1, max(arguments.entries[:2]))
    for mode in ("sum", "mean", "log_ema"):
        yield columns(bench, caches, max(arguments.groups), min(64, caches.entries), mode)
    yield from entry_cases(bench, arguments.units, arguments.entries[0], max(arguments.groups))
    for units in sorted({arguments.units, max(arguments.batch)}):
        yield from merge_cases(bench, units, arguments.entries[0] + arguments.interval, arguments.interval)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("gpu_operators.json"))
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on the CPU; times mean nothing")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 1], help="query heads of a KV head")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--entries", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--units", type=int, default=128, help="layers x requests of a compaction")
    parser.add_argument("--interval", type=int, default=128, help="entries that leave in a merge")
    parser.add_argument("--working-set", type=int, default=512, help="MiB of all copies of a cache, at least")
    parser.add_argument("--limit", type=int, default=8192, help="MiB of one cache; larger cases are left out")
    parser.add_argument("--seconds", type=float, default=2e-3, help="of one graph of calls")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-peers", action="store_true", help="only our operators")
    parsed = parser.parse_args(arguments)
    if parsed.interpret:
        parsed.head_size, parsed.kv_heads, parsed.groups, parsed.batch = 32, 2, [2], [2]
        parsed.entries, parsed.units, parsed.working_set, parsed.interval = [48], 2, 0, 8
    return parsed


def main() -> int:
    arguments = parse(None)
    if not arguments.interpret and not torch.cuda.is_available():
        print("there is no card that torch can use; --interpret runs tiny shapes without one", file=sys.stderr)
        return 2
    device = torch.device("cpu" if arguments.interpret else "cuda")
    bench = Bench(
        device,
        getattr(torch, arguments.dtype),
        arguments.kv_heads,
        arguments.head_size,
        arguments.working_set << 20,
        arguments.limit << 20,
        arguments.seconds,
        arguments.repeats,
    )
    copy = bench.bandwidth()
    rows = []
    for row in cases(bench, arguments):
        row.share = row.bytes / row.seconds / copy
        rows.append(row)
        print(f"{row.operator} {row.case}: {row.seconds * 1e6:.1f} us, {row.errors}", file=sys.stderr, flush=True)
    card = {"card": None} if arguments.interpret else {"card": torch.cuda.get_device_name(device)}
    result = {
        "machine": machine() | card | {"operators": triton.description(device), "copy_bytes_per_second": copy},
        "arguments": vars(arguments),
        "rows": [asdict(row) for row in rows],
    }
    arguments.output.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(f"{triton.description(device)}; copy {copy / 1e9:.0f} GB/s")
    print(f"{'operator':16} {'by':9} {'case':38} {'us':>9} {'GB/s':>6} {'of copy':>7} {'error':>8}  peers: time / ours")
    for row in rows:
        peers = ", ".join(f"{name} {seconds / row.seconds:.2f}" for name, seconds in row.peers.items())
        print(
            f"{row.operator:16} {row.implementation:9} {row.case:38} {row.seconds * 1e6:9.1f} "
            f"{row.bytes / row.seconds / 1e9:6.0f} {row.share:7.2f} {max(row.errors.values()):8.1e}  {peers}"
        )
    wrong = [row for row in rows if not max(row.errors.values()) <= TOLERANCE[bench.dtype]]
    for row in wrong:
        print(f"wrong: {row.operator} {row.case}: {row.errors}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
