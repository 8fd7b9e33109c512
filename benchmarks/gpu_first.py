"""What to try first on a machine with a GPU: ``python benchmarks/gpu_first.py``.

Each step is a process with a time limit and gives one line; one that fails or hangs stops no other. All results are in
one JSON file, which is written after each step; what the file holds of other steps stays. Engines serve the demo
model, in this order: stock vLLM, the plugin without graphs on each model runner, with full graphs alone, and as a
server starts without being told anything: torch.compile, graphs, and a KV cache as large as vLLM finds room for.

``--only`` names steps, so that several commands make up one file. ``--device cpu`` tries the program itself: engines on
the CPU, and tiny benchmarks.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from report import machine

from vllm_kvmerge.demo import model_path

FOLDER = Path(__file__).parent
STOCK = "stock"
NUM_TOKENS = 48
KEEPKV = {"policy": "keepkv", "budget": 64, "interval": 16}
ENVIRONMENT = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_GPU_SYNC_CHECK": "warn", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
GPU = """
import torch, triton
gpu, (free, _) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()
print(f"{gpu.name}, {free >> 20} of {gpu.total_memory >> 20} MiB free, torch {torch.__version__}, "
      f"CUDA {torch.version.cuda}, Triton {triton.__version__}")
"""
EXTENSIONS = """
import vllm._C_stable_libtorch
from vllm.vllm_flash_attn import _vllm_fa3_C
print("loaded")
"""


@dataclass(frozen=True)
class Step:
    """seconds: limit. requests: of an engine, whose answers come on stdout, a line each, after a line ``ready``."""

    name: str
    command: list[str]
    seconds: float
    requests: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def script(name: str, *words: str) -> list[str]:
    return [sys.executable, str(FOLDER / name), *words]


def tests(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *words]


def engine(name: str, runner: str, seconds: float, on_gpu: bool, **options: Any) -> Step:
    """The demo model on vLLM's model runner: a plain request, and one that is compressed where there is the plugin."""
    is_stock = name == STOCK
    arguments: dict[str, Any] = {
        "model": model_path(),
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "disable_log_stats": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20,
    }
    if is_stock and on_gpu:
        arguments["attention_backend"] = "TRITON_ATTN"
    if not is_stock:  # of few policies, so that few kernels are compiled
        arguments["additional_config"] = {"kvmerge": {"allowed_policies": [KEEPKV["policy"]]}}
    side = {"plugin": not is_stock, "engine": arguments | options, "clock": "wall"}
    request = {"prompts": [[10 + n * n % 97 for n in range(300)]], "max_tokens": NUM_TOKENS, "cold": True}
    requests = [request | {"compression": one} for one in ([None] if is_stock else [None, KEEPKV])]
    environment = {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))}
    return Step(name, script("vllm_side.py", json.dumps(side)), seconds, requests, environment)


def steps(on_gpu: bool, folder: Path) -> list[Step]:
    """folder: for the benchmarks' own files."""
    full_graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    as_it_comes = {"enforce_eager": False, "kv_cache_memory_bytes": None}
    timed = ["--only", "decode", "coded", "skewed", "prefill", "--groups", "4", "--batch", "1", "16", "64"]
    timed += ["--entries", "4096", "16384", "65536", "--minutes", "4", "--output", str(folder / "gpu_operators.json")]
    latency = ["--parts", "latency", "--lengths", "65536", "16384", "--policies", "snapkv", "keepkv"]
    latency += ["--budgets", "0.2", "0.1", "--repeats", "2", "--minutes", "7.5"]
    latency += ["--output", str(folder / "gpu_serving.json"), "--logs", str(folder)]
    return [
        Step("gpu", [sys.executable, "-c", GPU], 60),
        Step("operators", tests("tests/ops", "-k", "triton-gpu or cuda-gpu or on-gpu"), 240),
        Step("operators-timed", script("gpu_operators.py", *timed, *([] if on_gpu else ["--interpret"])), 280),
        Step("extensions", [sys.executable, "-c", EXTENSIONS], 60),
        engine(STOCK, "v1", 90, on_gpu),
        engine("v1-eager", "v1", 150, on_gpu),  # the first to compile our kernels
        engine("v2-eager", "v2", 90, on_gpu),
        engine("v2-full-graphs", "v2", 90, on_gpu, enforce_eager=False, compilation_config=full_graphs),
        engine("v2-default", "v2", 180, on_gpu, **as_it_comes),
        Step("short-tests", tests("tests/gpu", "-k", "short"), 240),
        Step("serving", script("gpu_serving.py", *latency, *([] if on_gpu else ["--device", "cpu"])), 570),
    ]


def run(step: Step, seconds: float, stock: list[int] | None) -> dict[str, Any]:
    """What became of a step. stock: the plain answer of stock vLLM."""
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.writelines(json.dumps(request) + "\n" for request in step.requests)
        given.seek(0)
        began = perf_counter()
        process = subprocess.Popen(
            step.command, stdin=given, stdout=out, stderr=err, cwd=FOLDER.parent, start_new_session=True,
            env=os.environ | ENVIRONMENT | step.environment,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
            status = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            status = f"over {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        result: dict[str, Any] = {"status": status, "seconds": perf_counter() - began}
        for name, file in (("out", out), ("err", err)):
            file.seek(0)
            result[name] = file.read()
    lines = (result["out"] if status == "ok" else result["out"] + result["err"]).split("\n")
    result["said"] = next((line for line in reversed(lines) if line.strip()), "")
    if step.requests and status == "ok":
        answers = [json.loads(line)["answers"][0] for line in result["out"].splitlines()[1:]]
        result |= {"answers": answers, "said": f"{len(answers)} of {len(step.requests)} answered"}
        if stock is not None:
            equal = next(
                (n for n, pair in enumerate(zip(answers[0], stock, strict=True)) if len({*pair}) > 1), NUM_TOKENS
            )
            result["said"] += f"; plain: {equal} of {NUM_TOKENS} tokens as stock vLLM's until one differs"
    return result | {name: result[name][-20_000:] for name in ("out", "err")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STEP", help="default: all")
    parser.add_argument("--minutes", type=float, default=60, help="after which no step is begun, or goes on")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu_first.json"))
    given = parser.parse_args(arguments)
    until = perf_counter() + 60 * given.minutes
    folder = given.output.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    every = {step.name: step for step in steps(given.device == "cuda", folder)}
    if unknown := set(given.only or ()) - set(every):
        parser.error(f"no step: {', '.join(unknown)}; there are: {', '.join(every)}")
    found = json.loads(given.output.read_text()) if given.output.exists() else {"steps": {}}
    found["machine"] = machine()
    names = given.only or list(every)
    for name in names:
        seconds = min(every[name].seconds, until - perf_counter())
        if seconds <= 0:
            print(f"{name:16} not begun", flush=True)
            continue
        stock = found["steps"].get(STOCK, {}).get("answers", [None])[0] if name != STOCK else None
        result = found["steps"][name] = run(every[name], seconds, stock)
        given.output.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name:16} {result['status']:10} {result['seconds']:6.1f} s  {result['said'][:160]}", flush=True)
    return int(any(found["steps"].get(name, {}).get("status") != "ok" for name in names))


if __name__ == "__main__":
    sys.exit(main())
