"""Tile sizes for a GPU, for ``gpu_operators.py --tune``, and which implementation is faster on it, for ``--choose``.

Settings of a kernel are changed one after the other, from what the table has; a value stays if all cases are right with
it and their times' geometric mean is at least 1% better. What has come out better by 2% in all becomes a rule for this
GPU, its head size and, where the kernel asks for it, its group size. Every value that was tried is in the output file.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import triton as triton_package
from gpu_bench import Bench, Caches, Row
from gpu_cases import Attention, attention, checked
from torch import Tensor

from vllm_kvmerge.ops import PagedKVCache, SequenceLayers, choice, triton
from vllm_kvmerge.ops.triton import tuning
from vllm_kvmerge.ops.triton.plan import device_name, power_of_two, settings_for

GAIN = 0.99
"""Times at least this much shorter let a value stay."""

GAIN_OF_RULE = 0.98
"""Times at least this much shorter than the table's make a rule."""

Measure = Callable[[], list[Row]]
"""Runs a kernel's cases with the settings as they are."""


@dataclass(frozen=True)
class Kernel:
    """values: what is tried, by setting, in this order. prepare: makes the cases of a group size. by_group: whether the
    table is asked with the group size."""

    values: dict[str, list[int]]
    prepare: Callable[[Bench, int], Measure]
    by_group: bool = False


def _sizes(bench: Bench, sizes: list[tuple[int, int]]) -> list[Caches]:
    return [Caches(bench, *size) for size in (sizes if bench.is_gpu else [(2, 200)])]


def _attention(bench: Bench, groups: int, sizes: list[tuple[int, int]], modes: Sequence[str], queries: int) -> Measure:
    cases = _sizes(bench, sizes)

    def measure() -> list[Row]:
        return [
            attention(bench, caches, Attention(groups, caches.entries // 2, mode, queries), "tune", "triton",
                      triton.paged_attention)
            for caches in cases
            for mode in modes
        ]  # fmt: skip

    return measure


DECODE = [(64, 4096), (1, 16384)]
"""Sequences and entries: much to read, and little that is to be cut into splits."""


def _decode(bench: Bench, groups: int) -> Measure:
    return _attention(bench, groups, DECODE, ["sum"], 1)


def _finish(bench: Bench, groups: int) -> Measure:
    return _attention(bench, groups, DECODE, ["sum"], 1)


def _prefill(bench: Bench, groups: int) -> Measure:
    return _attention(bench, groups, [(1, 16384), (8, 2048)], ["none"], 512 if bench.is_gpu else 24)


def _columns(bench: Bench, groups: int) -> Measure:
    return _attention(bench, groups, [(1, 16384), (8, 2048)], ["sum"], 512 if bench.is_gpu else 24)


def _entries(
    name: str,
    run: Callable[[SequenceLayers, Caches, Callable[[Tensor], Tensor], Any], Any],
    size: tuple[int, int] = (16, 1024),
) -> Callable[[Bench, int], Measure]:
    """Cases of an operator on sequence layers; ``run`` gets them, their caches, a copier of tensors, and a module."""

    def prepare(bench: Bench, groups: int) -> Measure:
        (caches,) = _sizes(bench, [size])
        known = [caches.seq_layers(number, caches.entries // 2) for number in range(caches.copies)]

        def operation(module: Any, number: int, where: Caches) -> Sequence[Tensor]:
            seq_layers = (
                known[number % caches.copies] if where is caches else where.seq_layers(number, caches.entries // 2)
            )
            found = run(seq_layers, where, lambda tensor: tensor.to(where.bench.device), module)
            return [] if found is None else list(found) if isinstance(found, tuple | list) else [found]

        return lambda: [checked(bench, "tune", name, f"{caches.rows} x {caches.entries}", caches, 0, operation)]

    return prepare


def _given(heads: int, count: int, most: int) -> Tensor:
    """``[heads, count]`` int64: numbers below ``most``, none twice; the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(heads, most, generator=generator).argsort(1)[:, :count]


def _metadata(seq_layers: SequenceLayers, where: Caches, there: Callable[[Tensor], Tensor], module: Any) -> Any:
    return module.gather_metadata(seq_layers)


def _rows(seq_layers: SequenceLayers, where: Caches, there: Callable[[Tensor], Tensor], module: Any) -> Any:
    n = where.entries
    kept = there(_cached(_given, seq_layers.num_heads, n // 2, n))
    module.move_entries(seq_layers, where.table, kept)
    return module.gather_rows(seq_layers, "keys", kept)


def _similar(seq_layers: SequenceLayers, where: Caches, there: Callable[[Tensor], Tensor], module: Any) -> Any:
    n = where.entries
    index = there(_cached(_given, seq_layers.num_heads, n, n))
    usable = torch.ones(seq_layers.num_heads, n - n // 8, dtype=torch.bool, device=index.device)
    return module.most_similar(seq_layers, index[:, : n // 8], index[:, n // 8 :], usable)[0]


def _newest(
    groups: int, seq_layers: SequenceLayers, where: Caches, there: Callable[[Tensor], Tensor], module: Any
) -> Any:
    n, d = where.entries, where.bench.head_size
    queries = there(_cached(_normal, seq_layers.num_heads, groups, 32, d))
    seen = there(_cached(_newest_positions, seq_layers.num_heads, n))
    votes = there(_cached(_normal, seq_layers.num_heads, n))
    positions = there(_cached(_given, seq_layers.num_heads, n, n))
    return module.fused_attention(seq_layers, queries, seen, votes, positions, d**-0.5, "sum")


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _newest_positions(heads: int, n: int) -> Tensor:
    return torch.arange(n - 32, n).clamp(min=0).repeat(heads, 1)


_kept: dict[tuple[Any, ...], Tensor] = {}


def _cached(make: Callable[..., Tensor], *shape: int) -> Tensor:
    """What ``make`` gives, on whatever GPU there is: it must not be made or sent anew while calls are timed."""
    key = make.__name__, *shape
    if key not in _kept:
        _kept[key] = make(*shape).to("cuda" if torch.cuda.is_available() else "cpu")
    return _kept[key]


def _write(seq_layers: SequenceLayers, where: Caches, there: Callable[[Tensor], Tensor], module: Any) -> Any:
    slots = there(_cached(_given, 1, 8 * where.rows, where.rows * where.entries))[0] + 16
    rows = there(_cached(_normal, len(slots), where.bench.heads, where.bench.head_size)).to(where.bench.dtype)
    module.write_tokens(seq_layers.layers[0], slots, rows, rows)


KERNELS = {
    "decode": Kernel(
        {
            "block_n": [16, 32, 64, 128],
            "warps": [2, 4, 8],
            "stages": [2, 3, 4, 5, 6],
            "programs": [2, 4, 8],
            "least": [128, 256, 512],
        },
        _decode,
        True,
    ),
    "finish": Kernel({"block_n": [64, 128, 256], "warps": [2, 4, 8], "programs": [2, 4, 8]}, _finish, True),
    "prefill": Kernel(
        {
            "block_m": [32, 64, 128],
            "block_n": [32, 64, 128],
            "warps": [4, 8],
            "stages": [2, 3, 4, 5],
            "programs": [1, 2, 4],
        },
        _prefill,
        True,
    ),
    "columns": Kernel({"block_n": [32, 64, 128], "warps": [4, 8], "stages": [2, 3, 4]}, _columns, True),
    "write": Kernel({"block_n": [1, 2, 4, 8], "warps": [1, 2, 4]}, _entries("write_tokens", _write, (256, 64))),
    "metadata": Kernel({"block_n": [128, 256, 512, 1024], "warps": [2, 4, 8]}, _entries("gather_metadata", _metadata)),
    "rows": Kernel({"block_n": [8, 16, 32, 64], "warps": [2, 4, 8]}, _entries("move and gather rows", _rows)),
    "similar": Kernel(
        {"block_m": [16, 32, 64], "block_n": [32, 64, 128], "warps": [4, 8], "stages": [2, 3, 4, 5]},
        _entries("most_similar", _similar),
    ),
    "newest": Kernel(
        {"block_m": [16, 32], "block_n": [16, 32, 64], "warps": [4, 8]},
        lambda bench, groups: _entries("fused_attention", lambda *given: _newest(groups, *given))(bench, groups),
        True,
    ),
}


SPLITTING = ("decode", "prefill")
"""Kernels that cut entries into splits, of whole tiles; the others have no use for ``least``."""


@dataclass
class Try:
    """One set of settings. log_seconds: mean logarithm of the cases' times; None: reason says why there is none."""

    kernel: str
    groups: int
    settings: dict[str, int]
    log_seconds: float | None
    reason: str = ""


def attempt(kernel: str, groups: int, conditions: dict[str, Any], settings: dict[str, int], measure: Measure) -> Try:
    """The time of a kernel's cases with these settings."""
    found = Try(kernel, groups, settings, None)
    if kernel in SPLITTING and settings["least"] % settings["block_n"]:
        found.reason = "splits would not be whole tiles"
        return found
    with tuning.trial(conditions | settings):
        try:
            rows = measure()
        except Exception as error:  # too much shared memory, say
            if "CUDA error" in str(error):  # nothing after that works
                raise
            found.reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return found
    wrong = [row for row in rows if not row.is_right]
    if wrong:
        found.reason = f"wrong: {wrong[0].case}: {wrong[0].errors}"
    else:
        found.log_seconds = sum(math.log(row.seconds) for row in rows) / len(rows)
    return found


def search(
    kernel: str, groups: int, conditions: dict[str, Any], first: dict[str, int], values: dict[str, list[int]],
    measure: Measure, until: float,
) -> list[Try]:  # fmt: skip
    """All that was tried: the settings that there are, ``first``, then others; the best one last, once more."""
    tried = [attempt(kernel, groups, conditions, first, measure)]
    best = tried[0]
    for _ in range(2):
        before = best
        for name, candidates in values.items():
            for value in candidates:
                settings = best.settings | {name: value}
                if any(one.settings == settings for one in tried) or perf_counter() > until:
                    continue
                tried.append(attempt(kernel, groups, conditions, settings, measure))
                if is_faster(tried[-1], best, GAIN):
                    best = tried[-1]
        if best is before:
            break
    return [*tried, best]


def is_faster(one: Try, other: Try, share: float) -> bool:
    """Whether ``one`` works and takes at most ``share`` of the other's time, or the other does not work."""
    if one.log_seconds is None:
        return False
    return other.log_seconds is None or one.log_seconds < other.log_seconds + math.log(share)


def tune(
    bench: Bench, names: Sequence[str], all_groups: Sequence[int], folder: Path, output: Path, until: float
) -> int:
    """Writes rules for this GPU into ``tuning.json`` in a folder, after each kernel, and all that was tried."""
    gpu, head_size = device_name(bench.device), power_of_two(bench.head_size)
    row_bytes = head_size * bench.dtype.itemsize
    pages = PagedKVCache.planned(1, bench.heads, 16, bench.head_size, bench.dtype, bench.device)
    report: list[Try] = []
    for name in names:
        kernel = KERNELS[name]
        for groups in all_groups if kernel.by_group else [1]:
            if perf_counter() > until:
                print(f"out of time: not tuned: {', '.join(names[names.index(name) :])}", file=sys.stderr)
                return 0
            conditions = {"kernel": name, "device": gpu, "head_size": [head_size], "row_bytes": [row_bytes]}
            conditions |= {"groups": [groups]} if kernel.by_group else {}
            first = asdict(settings_for(name, pages, groups))
            values = kernel.values if bench.is_gpu else _some(kernel.values, first)
            tried = search(name, groups, conditions, first, values, kernel.prepare(bench, groups), until)
            report += tried
            best = tried[-1]
            gain = 1 - math.exp(best.log_seconds - tried[0].log_seconds) if _both(best, tried[0]) else None
            told = "the table's do not work" if gain is None else f"{100 * gain:.1f}% less time than before"
            changed = {key: value for key, value in best.settings.items() if value != first[key]}
            print(f"{name}, G {groups}: {changed or 'as it is'}, {told}", flush=True)
            if changed and is_faster(best, tried[0], GAIN_OF_RULE):
                rule = conditions | changed | {"measured": f"{told}; {_versions()}"}
                write_rules(folder, tuning.RULES, [rule], tuning.CONDITIONS)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps([asdict(one) for one in report], indent=1) + "\n")
    return 0


def _both(one: Try, other: Try) -> bool:
    return one.log_seconds is not None and other.log_seconds is not None


def _some(values: dict[str, list[int]], first: dict[str, int]) -> dict[str, list[int]]:
    """One other value of the first setting."""
    name = next(iter(values))
    return {name: [value for value in values[name] if value != first[name]][:1]}


def _versions() -> str:
    return f"torch {torch.__version__}, Triton {triton_package.__version__}, {date.today().isoformat()}"


def write_rules(folder: Path, table: Path, new: Sequence[dict[str, Any]], conditions: Sequence[str]) -> Path:
    """Adds rules to a table's file in ``folder``, in the place of those for the same conditions; returns its path.

    table: what is taken where there is no such file yet. A rule is one line.
    """
    path = folder / table.name
    lines = (path if path.exists() else table).read_text().strip().splitlines()[1:-1]
    rules = [line.strip().rstrip(",") for line in lines]

    def of(rule: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in rule.items() if name in conditions}

    replaced = [of(rule) for rule in new]
    kept = [text for text in rules if not text or of(json.loads(text)) not in replaced]
    texts = [*kept, *(json.dumps(rule) for rule in new)]
    last = max(index for index, text in enumerate(texts) if text)
    body = (f"  {text}{',' if index < last else ''}" if text else "" for index, text in enumerate(texts[: last + 1]))
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["[", *body, "]"]) + "\n")
    return path


def choose(rows: Sequence[Row], bench: Bench, folder: Path) -> list[dict[str, Any]]:
    """Writes a rule for this GPU into ``choice.json``: which implementation of attention took less time."""
    rules = chosen(rows, choice.device_name(bench.device), bench.head_size)
    for rule in rules:
        print(f"{rule['operator']}: {rule['implementation']}, {rule['measured']}")
    if rules:
        write_rules(folder, choice.RULES, rules, ("operator", "device", "head_sizes"))
    else:
        print("no choice: CUDA's operators were not measured beside Triton's")
    return rules


def chosen(rows: Sequence[Row], gpu: str, head_size: int) -> list[dict[str, Any]]:
    """A rule if both implementations of decoding were measured and right, by the mean of their times' logarithms."""
    found = [row for row in rows if row.operator == "paged_attention" and row.part == "decode"]
    names = {"triton", "cuda"} & {row.implementation for row in found}
    names -= {row.implementation for row in found if not row.is_right}
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for row in found:
        cases.setdefault((row.case, row.dtype), {})[row.implementation] = row.seconds
    of_both = [times for times in cases.values() if names <= times.keys()]
    if len(names) < 2 or not of_both:
        return []
    means = {name: math.exp(sum(math.log(times[name]) for times in of_both) / len(of_both)) for name in names}
    best, other = sorted(names, key=lambda name: (means[name], name))
    measured = f"{100 * means[best] / means[other]:.0f}% of {other}'s time in {len(of_both)} cases; {_versions()}"
    rule = {"operator": "paged_attention", "device": gpu, "head_sizes": [head_size], "implementation": best}
    return [rule | {"measured": measured}]
