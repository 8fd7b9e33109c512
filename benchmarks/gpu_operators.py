"""The operators on a GPU: ``python benchmarks/gpu_operators.py``. Needs torch, Triton, NumPy and pydantic, no vLLM.

Triton's, and beside its attention CUDA's where csrc/cuda/build.py has built that. Each case is first checked, on fresh
random inputs and into poisoned outputs, against float64 (attention and scores) or the reference on the CPU (the
others); ``error`` is ||out - ref|| / ||ref||. Then it is timed: calls rotate over copies of the cache that together are
several times the GPU's L2, several calls are one CUDA graph, and the time is the median of its replays divided by its
calls. ``share`` is the bytes that must move, each once, over the bandwidth of a device-to-device copy in the same run,
and for prompts the operations over the rate of a matrix product. Peers get the same entries:
scaled_dot_product_attention, and flash_attn where that is installed, gathered keys and values; FlexAttention pages,
with votes by score_mod.

Parts, and about how long they may take (estimates): decode 3 minutes, coded 1, skewed 1, compaction 1, merges 1,
prefill 1, peers 4, scores and entries 1, float32 1. ``--only`` runs some; ``--minutes`` is when no further case begins.
The file is written after every row.

Without a GPU it exits with 2; ``--interpret`` runs tiny shapes in Triton's interpreter, whose times mean nothing.
"""

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "numpy", "pydantic")):
    sys.exit("gpu_operators.py needs torch, triton, numpy and pydantic, of which not all are installed")

import torch
from gpu_bench import Bench, Results, Row
from gpu_cases import PARTS
from report import machine

from vllm_kvmerge import ops
from vllm_kvmerge.ops import triton


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_operators.json"))
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"of {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further case is begun")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on the CPU; times mean nothing")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 1], help="query heads of a KV head")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--entries", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--long", type=int, default=131072, help="entries of one sequence, among ``--others`` others")
    parser.add_argument("--short", type=int, default=1024, help="entries of each of those")
    parser.add_argument("--others", type=int, default=63)
    parser.add_argument("--units", type=int, default=128, help="layers x requests of a compaction")
    parser.add_argument("--interval", type=int, default=128, help="entries that leave in a merge")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of the prompt that is compressed to a tenth")
    parser.add_argument("--prompt-chunk", type=int, default=2048, help="tokens of it that are computed at a time")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--policies", nargs="*", default=["keepkv", "h2o"], help="whose compactions are timed")
    parser.add_argument("--working-set", type=int, default=512, help="MiB of all copies of a cache, at least")
    parser.add_argument("--limit", type=int, default=8192, help="MiB of one cache; larger cases are left out")
    parser.add_argument("--seconds", type=float, default=2e-3, help="of one graph of calls")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-peers", action="store_true", help="only our operators")
    parsed = parser.parse_args(arguments)
    parsed.chunks = [(1, 16384, 2048), (1, 16384, 512), (8, 4096, 512)]
    if parsed.interpret:
        parsed.head_size, parsed.kv_heads, parsed.groups, parsed.batch = 32, 2, [2], [2]
        parsed.long, parsed.short, parsed.others = 200, 16, 3
        parsed.entries, parsed.units, parsed.working_set, parsed.interval = [56], 2, 0, 8
        parsed.chunks, parsed.prompt, parsed.prompt_chunk, parsed.layers = [(2, 56, 20)], 128, 64, 2
    if parsed.no_peers and "peers" in parsed.only:
        parsed.only = [part for part in parsed.only if part != "peers"]
    return parsed


def table(rows: Sequence[Row]) -> None:
    print(f"{'operator':16} {'by':23} {'case':50} {'us':>10} {'GB/s':>6} {'TFLOP/s':>7} {'share':>6} {'error':>8}")
    for row in rows:
        moved = f"{row.bytes / row.seconds / 1e9:6.0f}" if row.bytes else " " * 6
        done = f"{row.flops / row.seconds / 1e12:7.1f}" if row.flops else " " * 7
        share = f"{row.share:6.2f}" if row.share else " " * 6
        error = f"{row.error:8.1e}" if row.errors else "       -"
        name = row.operator + (" f32" if row.part == "float32" else "")
        print(
            f"{name:16} {row.implementation:23} {row.case:50} {row.seconds * 1e6:10.1f} {moved} {done} {share} {error}"
        )


def run_parts(bench: Bench, arguments: argparse.Namespace, results: Results) -> None:
    for name in arguments.only:
        try:
            for row in PARTS[name](bench, arguments, results):
                results.add(row)
                if results.is_late:
                    break
        except Exception as error:  # the others are measured all the same
            results.failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {results.failed[name]}", file=sys.stderr, flush=True)
        if results.is_late:
            left = arguments.only[arguments.only.index(name) :]
            print(f"out of time: not complete: {', '.join(left)}", file=sys.stderr)
            results.failed["time"] = f"not complete: {', '.join(left)}"
            break


def main() -> int:
    arguments = parse(None)
    until = perf_counter() + 60 * arguments.minutes
    if not arguments.interpret and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --interpret runs tiny shapes without one", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cpu" if arguments.interpret else "cuda")
    if arguments.interpret:
        ops.choose("triton")  # whole compactions too
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
    head: dict[str, Any] = {
        "machine": machine() | {"gpu": torch.cuda.get_device_name(device) if bench.is_gpu else None},
        "operators": triton.description(device),
        "arguments": vars(arguments),
    }
    rates = {"copy": bench.bandwidth(), bench.dtype_name: bench.matrix_rate()}
    if "float32" in arguments.only:
        rates["float32"] = Bench(**{**vars(bench), "dtype": torch.float32}).matrix_rate()
    results = Results(arguments.output, head, rates, until)
    run_parts(bench, arguments, results)
    results.save()
    table(results.rows)
    wrong = [row for row in results.rows if not row.is_right]
    for row in wrong:
        print(f"wrong: {row.operator} {row.implementation} {row.case}: {row.errors}", file=sys.stderr)
    for name, reason in results.absent.items():
        print(f"without {name}: {reason}")
    for name, reason in results.failed.items():
        print(f"{name}: {reason}")
    products = ", ".join(f"{name} {rate / 1e12:.1f} TFLOP/s" for name, rate in rates.items() if name != "copy")
    print(f"\n{triton.description(device)}; copy {rates['copy'] / 1e9:.0f} GB/s; matrix products {products}")
    return 1 if wrong or set(results.failed) - {"time"} else 0


if __name__ == "__main__":
    sys.exit(main())
