"""Every native operator beside its alternatives: ``python benchmarks/operators.py``.

Its PyTorch reference; vLLM's CPU kernels, on their own layout, where they do the same; and torch's
``scaled_dot_product_attention`` over keys and values that lie contiguous already (gathering them is not counted).
Attention to caches of 8 bits (``--dtype float8_e4m3fn float8_e5m2``) also beside ours to the same numbers in bfloat16.

The floor is the time in which one pass over memory, a copy, or a matrix product of the same size takes, measured in the
same run on the same threads: ``share`` is floor / time. Bytes are those that must move, each once. In every round all
sides run one after the other, and ratios are taken within a round. Calls rotate over copies of the cache that are
together far larger than the processor's caches (all but the metadata, which is small). Times are of one call.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter, thread_time
from types import ModuleType

import torch
from report import Spread, plot_bars, save
from rich.progress import track
from torch import Tensor
from vllm import _custom_ops as vllm_ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_kvmerge.evaluation.summary import print_table
from vllm_kvmerge.ops import (
    AttentionBatch,
    PagedKVCache,
    Rows,
    ScoreMode,
    ScoreUpdate,
    SequenceLayers,
    cell_bytes,
    cpu,
    reference,
)
from vllm_kvmerge.ops.types import PLANES, QUANTISED, stored

BLOCK_SIZE = 128
DECAY = 0.9
QUICK = {
    "entries": 512,
    "kv_heads": 2,
    "working_set": 2,
    "seconds": 1e-3,
    "dtype": ["bfloat16", "float8_e4m3fn"],
    "head_size": [64],
}

Side = Callable[[int], Sequence[Tensor]]
"""Runs an operator once and returns what it returns; the argument counts calls and chooses a copy of the cache."""


@dataclass(frozen=True)
class Case:
    """bound: the probe that gives the floor. amount: bytes that must move, or floating point operations."""

    operator: str
    name: str
    bound: str
    amount: float
    sides: dict[str, Side]


@dataclass(frozen=True)
class Row:
    """Seconds of one call by side; floor / native time; time of each peer / native time; errors relative."""

    operator: str
    case: str
    bound: str
    amount: float
    floor: Spread
    seconds: dict[str, Spread]
    share: Spread
    speedups: dict[str, Spread]
    errors: dict[str, float]


class Caches:
    """Copies of one random sequence in shuffled blocks: in our pages, in vLLM's layout, and contiguous."""

    def __init__(self, dtype: torch.dtype, head_size: int, arguments: argparse.Namespace) -> None:
        self.dtype, self.head_size = dtype, head_size
        self.entries, self.heads = arguments.entries, arguments.kv_heads
        num_blocks = self.entries // BLOCK_SIZE
        cell = cell_bytes(head_size, dtype)
        self.copies = max(2, arguments.working_set * 2**20 // (self.entries * self.heads * cell))
        cache = torch.empty(num_blocks, self.heads, BLOCK_SIZE, cell // dtype.itemsize, dtype=dtype)
        pages = PagedKVCache.of(cache, head_size)
        for plane in (pages.keys, pages.values):
            plane.copy_(stored(torch.randn(plane.shape), dtype))
        pages.log_votes.uniform_(0.0, 3.0)
        pages.scores.uniform_()
        pages.aux.fill_(1.0)
        pages.positions.random_(self.entries)
        self.blocks = torch.randperm(num_blocks, dtype=torch.int32)
        self._pages = [PagedKVCache.of(cache.clone(), head_size) for _ in range(self.copies)]
        stock = torch.cat([pages.stock_keys, pages.stock_values], 2)
        self._stock = [stock.clone().chunk(2, 2) for _ in range(self.copies)]
        seq_layers = SequenceLayers.of(pages, self.blocks, 0, 0, self.entries)
        index = torch.arange(self.entries).repeat(self.heads, 1)
        dense = [reference.gather_rows(seq_layers, plane, index).unsqueeze(0) for plane in ("keys", "values")]
        self._dense = [[plane.to(self.query_dtype) for plane in dense] for _ in range(self.copies)]

    @property
    def query_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype in QUANTISED else self.dtype

    @cached_property
    def wide(self) -> list[PagedKVCache]:
        """The same numbers in bfloat16, in as many copies."""
        cell = cell_bytes(self.head_size, torch.bfloat16) // 2
        shape = *self._pages[0].log_votes.shape, cell
        copies = [PagedKVCache.of(torch.empty(shape, dtype=torch.bfloat16), self.head_size) for _ in self._pages]
        for narrow, wide in zip(self._pages, copies, strict=True):
            for name in PLANES:
                getattr(wide, name).copy_(getattr(narrow, name))
        return copies

    @property
    def suits_vllm(self) -> bool:
        """Without AVX-512 vLLM has no caches of 8 bits."""
        return self.dtype not in QUANTISED or torch.cpu._is_avx512_supported()

    @property
    def vllm_format(self) -> dict[str, object]:
        """How vLLM's operators are told what their cache is."""
        names = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
        return {"kv_cache_dtype": names.get(self.dtype, "auto"), "k_scale": 1.0, "v_scale": 1.0}

    def pages(self, call: int) -> PagedKVCache:
        return self._pages[call % self.copies]

    def seq_layers(self, call: int, front: int) -> SequenceLayers:
        """The first ``front`` entries as the front, the others as the tail."""
        return SequenceLayers.of(self.pages(call), self.blocks, front, front, self.entries)

    def stock(self, call: int) -> Sequence[Tensor]:
        """Keys and values ``[B, H, bs, d]`` in vLLM's layout."""
        return self._stock[call % self.copies]

    def dense(self, call: int) -> Sequence[Tensor]:
        """Keys and values ``[1, H, n, d]``."""
        return self._dense[call % self.copies]

    @property
    def isa(self) -> str:
        return str(_get_attn_isa(self.query_dtype, BLOCK_SIZE, self.head_size))

    def some(self, count: int) -> Tensor:
        """``[H, count]`` int64: random entries, ascending."""
        return torch.rand(self.heads, self.entries).argsort(1)[:, :count].sort(1).values

    def bytes(self, per_head: int, cells: float) -> float:
        """Bytes of keys and values together, ``cells`` times those of as many entries."""
        return per_head * self.heads * cells * 2 * self.head_size * self.dtype.itemsize


def both(run: Callable[[ModuleType, int], Sequence[Tensor]]) -> dict[str, Side]:
    return {"native": partial(run, cpu), "reference": partial(run, reference)}


def vllm_attention(caches: Caches, query: Tensor) -> Side:
    num_queries, num_heads, head_size = query.shape
    starts, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, num_queries], [caches.entries]))
    metadata = vllm_ops.cpu_attn_get_scheduler_metadata(
        1, num_heads, caches.heads, head_size, lens, caches.query_dtype, starts, True, -1, caches.isa, True
    )

    def run(call: int) -> Sequence[Tensor]:
        output = torch.empty_like(query)
        vllm_ops.cpu_attention_with_kv_cache(
            query,
            *caches.stock(call),
            output,
            starts,
            lens,
            scale=head_size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=caches.blocks.unsqueeze(0),
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
            **caches.vllm_format,
        )
        return [output]

    return run


def torch_attention(caches: Caches, query: Tensor, front: int) -> Side:
    """The query heads of a KV head, and the queries, as one dimension, so that keys and values are read once."""
    num_queries, num_heads, head_size = query.shape
    rows = query.unflatten(1, (caches.heads, -1)).permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0).contiguous()
    mask = None
    if num_queries > 1:
        visible = torch.ones(num_queries, caches.entries, dtype=torch.bool).tril(caches.entries - num_queries)
        mask = visible.repeat(num_heads // caches.heads, 1)
    if front:
        log_votes = reference.gather_metadata(caches.seq_layers(0, front))[0]
        mask = log_votes.to(caches.query_dtype)[None, :, None]

    def run(call: int) -> Sequence[Tensor]:
        attended = torch.nn.functional.scaled_dot_product_attention(rows, *caches.dense(call), attn_mask=mask)
        return [attended[0].unflatten(1, (-1, num_queries)).permute(2, 0, 1, 3).flatten(1, 2)]

    return run


def attention(caches: Caches, groups: int, num_queries: int, front: int, mode: str) -> Case:
    """Decode where ``num_queries == 1``. front: entries with a vote bias; half of them, or none."""
    query = torch.randn(num_queries, caches.heads * groups, caches.head_size).to(caches.query_dtype)
    update = ScoreUpdate(ScoreMode(mode), DECAY)
    batch = AttentionBatch.single(caches.blocks, num_queries, caches.entries, front, front, update)

    def attend(module: ModuleType, pages: PagedKVCache) -> Sequence[Tensor]:
        output = torch.empty_like(query)
        module.paged_attention(query, pages, batch, caches.head_size**-0.5, output)
        return [output]

    sides = both(lambda module, call: attend(module, caches.pages(call)))
    if caches.dtype in QUANTISED:
        sides["bfloat16"] = lambda call: attend(cpu, caches.wide[call % caches.copies])
    if not front and caches.suits_vllm:
        sides["vLLM"] = vllm_attention(caches, query)
    if mode == "none":
        sides["SDPA"] = torch_attention(caches, query, front)
    name = f"G {groups}, " + (f"front and tail, {mode}" if front else "plain")
    if num_queries > 1:
        flops = 4 * num_queries * caches.entries * caches.heads * groups * caches.head_size
        return Case("paged_attention", f"chunk of {num_queries}, {name}", "gemm", flops, sides)
    statistics = {"none": 0, "sum": 8, "mean": 16, "log_ema": 16}[mode]
    metadata = caches.heads * (4 * front + caches.entries * statistics)
    return Case("paged_attention", f"decode, {name}", "read", caches.bytes(caches.entries, 1) + metadata, sides)


def scores(caches: Caches, groups: int, num_queries: int, update: ScoreUpdate) -> Case:
    query = torch.randn(num_queries, caches.heads * groups, caches.head_size).to(caches.query_dtype)

    def run(module: ModuleType, call: int) -> Sequence[Tensor]:
        statistics = torch.zeros(2, caches.heads, caches.entries)
        scale = caches.head_size**-0.5
        module.score_prompt_queries(query, caches.pages(call), caches.blocks, update, scale, *statistics)
        return list(statistics)

    flops = 2 * num_queries * caches.entries * caches.heads * groups * caches.head_size
    return Case("score_prompt_queries", f"{num_queries} queries, G {groups}, {update.mode}", "gemm", flops, both(run))


def similarities(caches: Caches) -> Case:
    sources, targets = caches.some(caches.entries // 8), caches.some(caches.entries // 8)
    usable = torch.rand(targets.shape) < 0.9

    def run(module: ModuleType, call: int) -> Sequence[Tensor]:
        return list(module.most_similar(caches.seq_layers(call, 0), sources, targets, usable))

    flops = 2 * sources.numel() * targets.shape[1] * caches.head_size
    return Case("most_similar", f"{sources.shape[1]} of {targets.shape[1]}", "gemm", flops, both(run))


def newest_queries(caches: Caches, groups: int, count: int) -> Case:
    queries = torch.randn(caches.heads, groups, count, caches.head_size)
    n = caches.entries
    seen = torch.arange(n - count, n).repeat(caches.heads, 1)
    log_votes, positions = torch.zeros(caches.heads, n), torch.arange(n).repeat(caches.heads, 1)

    def run(module: ModuleType, call: int) -> Sequence[Tensor]:
        scale = caches.head_size**-0.5
        return [module.fused_attention(caches.seq_layers(call, 0), queries, seen, log_votes, positions, scale, "sum")]

    flops = 2 * queries.numel() * n
    return Case("fused_attention", f"{count} queries, G {groups}", "gemm", flops, both(run))


def selections(caches: Caches) -> list[Case]:
    """What is chosen, and where it goes: bytes are those of arguments and results."""
    n, kept = caches.entries, caches.entries // 8
    ranking, index = torch.rand(caches.heads, n), caches.some(kept)
    protected, is_live = ranking > 0.99, torch.rand(ranking.shape) < 0.9
    mask = reference.largest(ranking, kept)
    positions = torch.rand(ranking.shape).argsort(1)
    weights, source_weights = torch.rand(caches.heads, kept), torch.rand(caches.heads, 64)
    slots, joining = (torch.randn(caches.heads, count, caches.head_size) for count in (kept, 64))
    arguments: dict[str, tuple[object, ...]] = {
        "largest": (ranking, kept),
        "top": (ranking, protected, is_live, kept),
        "in_place": (mask, kept),
        "padded_nonzero": (mask, kept),
        "by_position": (positions,),
        "inverse": (index, n),
        "free_places": (index, index, kept),
        "take": (index, [ranking, positions], [0.0, -1]),
        "join_slots": (slots, joining, source_weights, weights),
    }

    def run(name: str, module: ModuleType, call: int) -> Sequence[Tensor]:
        found = getattr(module, name)(*arguments[name])
        return [found] if isinstance(found, Tensor) else list(found)

    cases = []
    for name, given in arguments.items():
        tensors = [one for one in given if isinstance(one, Tensor)] + list(run(name, cpu, 0))
        if name == "take":  # of whose planes it reads as much as it returns
            tensors += run(name, cpu, 0)
        size = sum(tensor.nbytes for tensor in tensors)
        cases.append(Case(name, f"{kept} of {n} entries", "copy", size, both(partial(run, name))))
    return cases


def gathers(caches: Caches) -> list[Case]:
    """Copies to float32."""
    n, half = caches.entries, caches.entries // 2
    index = caches.some(half)
    grown = 1 + 4 / caches.dtype.itemsize  # read in the cache's dtype, written in float32

    def rows(plane: str, module: ModuleType, call: int) -> Sequence[Tensor]:
        return [module.gather_rows(caches.seq_layers(call, 0), plane, index)]

    def metadata(module: ModuleType, call: int) -> Sequence[Tensor]:
        return list(module.gather_metadata(caches.seq_layers(call, half)))

    metadata_bytes = caches.heads * (8 * n + 8 * half + 20 * n)
    name = f"{half} of {n} entries"
    return [
        Case("gather_rows", f"keys, {name}", "copy", caches.bytes(half, grown / 2), both(partial(rows, "keys"))),
        Case("gather_rows", f"values, {name}", "copy", caches.bytes(half, grown / 2), both(partial(rows, "values"))),
        Case("gather_metadata", f"{n} entries", "copy", metadata_bytes, both(metadata)),
    ]


def token_writes(caches: Caches, count: int, name: str, order: Tensor) -> Case:
    """order: all slots, as they are written, ``count`` in each call."""
    slots = (caches.blocks[order // BLOCK_SIZE].long() * BLOCK_SIZE + order % BLOCK_SIZE).view(-1, count)
    key, value = torch.randn(2, count, caches.heads, caches.head_size).to(caches.query_dtype)

    def slots_of(call: int) -> Tensor:
        return slots[call // caches.copies % len(slots)]

    def run(module: ModuleType, call: int) -> Sequence[Tensor]:
        module.write_tokens(caches.pages(call), slots_of(call), key, value)
        return []

    def run_vllm(call: int) -> Sequence[Tensor]:
        where = slots_of(call), caches.isa
        vllm_ops.cpu_attn_reshape_and_cache(key, value, *caches.stock(call), *where, **caches.vllm_format)
        return []

    sides = both(run) | ({"vLLM": run_vllm} if caches.suits_vllm else {})
    return Case("write_tokens", f"{count} {name}", "copy", caches.bytes(count, 2), sides)


def writes(caches: Caches) -> list[Case]:
    n, quarter = caches.entries, caches.entries // 4
    places = caches.some(quarter)
    keys, values = torch.randn(2, caches.heads, quarter, caches.head_size)
    metadata = cpu.gather_metadata(caches.seq_layers(0, n))
    log_votes, statistics, aux, positions = (plane.flip(1) for plane in metadata)
    merged = torch.arange(0, quarter, 4).expand(caches.heads, -1)

    def rows(module: ModuleType, call: int) -> Sequence[Tensor]:
        module.write_rows(caches.seq_layers(call, 0), caches.blocks[None], places, keys, values)
        return []

    def planes(module: ModuleType, call: int) -> Sequence[Tensor]:
        module.write_metadata(caches.seq_layers(call, n), caches.blocks[None], log_votes, statistics, aux, positions)
        return []

    def moves(module: ModuleType, call: int) -> Sequence[Tensor]:
        module.move_entries(caches.seq_layers(call, 0), caches.blocks[None], places)
        return []

    def merges(module: ModuleType, call: int) -> Sequence[Tensor]:
        sums = Rows(merged, keys[:, : merged.shape[1]], values[:, : merged.shape[1]])
        front = [plane[:, :quarter] for plane in (log_votes, statistics, aux, positions)]
        module.merge_entries(caches.seq_layers(call, 0), caches.blocks[None], places, tuple(front), sums)
        return []

    grown = 1 + 4 / caches.dtype.itemsize
    return [
        token_writes(caches, 64, "tokens of as many places", torch.randperm(n)),
        token_writes(caches, 256, "tokens in sequence", torch.arange(n)),
        Case("write_metadata", f"{n} entries", "copy", caches.heads * n * (20 + 16), both(planes)),
        Case("write_rows", f"{quarter} entries", "copy", caches.bytes(quarter, grown), both(rows)),
        Case("move_entries", f"{quarter} of {n} to the front", "copy", caches.bytes(quarter, 2), both(moves)),
        Case(
            "merge_entries",
            f"{quarter} of {n}, {merged.shape[1]} with a new row",
            "copy",
            caches.bytes(quarter, 2) + caches.bytes(merged.shape[1], grown) + caches.heads * quarter * (20 + 16),
            both(merges),
        ),
    ]


def all_cases(caches: Caches) -> list[Case]:
    """Those that change keys and values come last: the peers keep copies of both."""
    half = caches.entries // 2
    cases = []
    for groups in (1, 4):
        cases.append(attention(caches, groups, 1, 0, "none"))
        cases += [attention(caches, groups, 1, half, mode) for mode in list(ScoreMode)]
    cases.append(attention(caches, 4, 64, 0, "none"))
    cases += [scores(caches, 4, 64, ScoreUpdate(mode, DECAY)) for mode in list(ScoreMode) if mode != "none"]
    cases += [similarities(caches), newest_queries(caches, 4, 32), *selections(caches)]
    return [*cases, *gathers(caches), *writes(caches)]


class Runner:
    """Calls a side for about ``seconds``, and goes on with the next copy of the cache when it is called again."""

    def __init__(self, side: Side, arguments: argparse.Namespace) -> None:
        self._clock = thread_time if arguments.processor_time else perf_counter
        self._side, self._calls, self._next = side, 1, 0
        self.time()
        self._calls = math.ceil(arguments.seconds / self.time())

    def time(self) -> float:
        """Seconds of one call."""
        first, self._next = self._next, self._next + self._calls
        started = self._clock()
        for call in range(first, self._next):
            self._side(call)
        return (self._clock() - started) / self._calls


class Probes:
    """What the machine can do, on the same threads: bytes read or copied (read and written), products computed."""

    def __init__(self, dtype: torch.dtype, arguments: argparse.Namespace) -> None:
        numbers = torch.ones(arguments.working_set * 2**18)
        source, destination = numbers.chunk(2)
        # torch multiplies float16 matrices on CPUs hundreds of times more slowly than float32 ones.
        wide = {torch.float16: torch.float32} | dict.fromkeys(QUANTISED, torch.bfloat16)
        matrix = torch.randn(1024, 1024).to(wide.get(dtype, dtype))
        sides: dict[str, tuple[int, Side]] = {
            "read": (numbers.nbytes, lambda call: [numbers.amax()]),
            "copy": (numbers.nbytes, lambda call: [destination.copy_(source)]),
            "gemm": (2 * 1024**3, lambda call: [matrix @ matrix]),
        }
        self._amounts = {name: amount for name, (amount, _) in sides.items()}
        self._runners = {name: Runner(side, arguments) for name, (_, side) in sides.items()}

    def rate(self, name: str) -> float:
        """Bytes or operations per second."""
        return self._amounts[name] / self._runners[name].time()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference, size = float((actual.double() - expected.double()).norm()), float(expected.double().norm())
    return difference / size if size else difference


def errors(case: Case, pages: PagedKVCache) -> dict[str, float]:
    """By side, against the reference: of what it returns, and, if it is the native one, of its changes to the pages."""
    planes = [getattr(pages, name) for name in PLANES]
    before = [plane.clone() for plane in planes]
    outcomes = {}
    for name, side in case.sides.items():
        outcomes[name] = list(side(0))
        if name in ("native", "reference"):
            outcomes[name] += [plane.float() - old.float() for plane, old in zip(planes, before, strict=True)]
            for plane, old in zip(planes, before, strict=True):
                plane.copy_(old)
    expected = outcomes.pop("reference")
    return {
        name: max(relative_error(a, e) for a, e in zip(outcome, expected, strict=False))
        for name, outcome in outcomes.items()
        if outcome
    }


def measure(case: Case, caches: Caches, probes: Probes, arguments: argparse.Namespace) -> Row:
    wrong = errors(case, caches.pages(0))
    runners = {name: Runner(side, arguments) for name, side in case.sides.items()}
    floors: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(arguments.repeats):
        floors.append(case.amount / probes.rate(case.bound))
        for name, runner in runners.items():
            times[name].append(runner.time())

    def over_native(values: list[float]) -> Spread:
        return Spread.of([value / time for value, time in zip(values, times["native"], strict=True)])

    return Row(
        operator=case.operator,
        case=f"{str(caches.dtype).removeprefix('torch.')}, d {caches.head_size}, {case.name}",
        bound=case.bound,
        amount=case.amount,
        floor=Spread.of(floors),
        seconds={name: Spread.of(values) for name, values in times.items()},
        share=over_native(floors),
        speedups={name: over_native(values) for name, values in times.items() if name != "native"},
        errors=wrong,
    )


def show(rows: list[Row]) -> None:
    units = {"read": "MB", "copy": "MB", "gemm": "MFLOP"}
    peers = ("reference", "vLLM", "SDPA", "bfloat16")
    print_table(
        f"Native operators at level {cpu.level()}, {torch.get_num_threads()} threads: median (range)",
        ["at least", "us", "share of floor", *(f"times {peer}" for peer in peers), "relative error"],
        {
            f"{row.operator}, {row.case}": [
                f"{row.amount / 1e6:.4g} {units[row.bound]}",
                f"{row.seconds['native'].median * 1e6:.4g}",
                str(row.share),
                *(str(row.speedups.get(peer, "")) for peer in peers),
                f"{row.errors['native']:.1e}",
            ]
            for row in rows
        },
        first="operator",
    )


def decode_shares(rows: list[Row], dtypes: list[str]) -> dict[str, dict[str, Spread]]:
    """By dtype and case."""
    decode = [row for row in rows if row.operator == "paged_attention" and row.bound == "read"]
    return {
        dtype: {case: row.share for row in decode for name, _, case in [row.case.partition(", ")] if name == dtype}
        for dtype in dtypes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--operators", nargs="+", help="default: all")
    parser.add_argument("--head-size", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--entries", type=int, default=8192, help=f"of the sequence, in blocks of {BLOCK_SIZE}")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--working-set", type=int, default=256, help="MiB of all copies of the cache")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each side in a repeat, at least one call")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--processor-time", action="store_true", help="of one thread, where others keep processors busy"
    )
    parser.add_argument("--quick", action="store_true", help="sizes that show only that everything runs")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/operators.json"))
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    for dtype in arguments.dtype:
        probes = Probes(getattr(torch, dtype), arguments)
        for head_size in arguments.head_size:
            caches = Caches(getattr(torch, dtype), head_size, arguments)
            chosen = [case for case in all_cases(caches) if case.operator in (arguments.operators or [case.operator])]
            cases = track(chosen, f"{dtype}, d {head_size}")
            rows += [measure(case, caches, probes, arguments) for case in cases]
    save(arguments.output, vars(arguments) | {"level": cpu.level()}, rows)
    shares = decode_shares(rows, arguments.dtype)
    plot_bars(arguments.output.with_suffix(".svg"), "Decode attention: share of read bandwidth", shares)
    show(rows)


if __name__ == "__main__":
    main()
