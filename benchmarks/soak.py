"""A server under steady, mixed traffic for a long time: ``make soak MINUTES=60``.

Starts ``vllm-kvmerge serve demo`` with a pool that is too small for its requests, sends them at a fixed rate in bursts
(``traffic.py``), and samples memory, descriptors and threads of each of its processes, the folder of its metrics, its
shared memory, and how long requests take. At the end no block may be in use and no request may have had another answer
than it should: the exit status is 1 otherwise.

The slope of memory is Theil and Sen's (the median of the slopes between any two samples) over the second half. Its 95%
interval is a bootstrap's of the residuals in blocks of five minutes, because neighbouring samples are alike.
"""

import argparse
import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from report import save
from sides import GUARD
from traffic import Outcome, Traffic

from vllm_kvmerge.evaluation.summary import print_table

MIB = 1 << 20
VLLM_COMMAND = Path(__file__).with_name("vllm_command.py")
MOST_AT_ONCE = 48
"""Requests that wait for an answer; more are sent later, on a machine that is too busy for the rate."""
BLOCK_MINUTES = 5
ROLES = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "worker", "resource_tracker": "resource tracker"}


@dataclass(frozen=True)
class Sample:
    """Of one process. unique, resident: MiB; seconds: of the processor, since it began."""

    minute: float
    unique: float
    resident: float
    descriptors: int
    threads: int
    seconds: float


@dataclass(frozen=True)
class Slope:
    """MiB per hour, and its 95% interval."""

    slope: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.slope:+.1f} ({self.low:+.1f}..{self.high:+.1f})"


@dataclass(frozen=True)
class Row:
    """One process. cores: share of one that it took; unique, resident: of the second half; samples: medians of each
    minute."""

    process: str
    cores: float
    unique: Slope
    resident: Slope
    samples: dict[str, list[float]]


def theil_sen(minutes: np.ndarray, values: np.ndarray) -> float:
    """Per minute."""
    first, second = np.triu_indices(len(minutes), 1)
    return float(np.median((values[second] - values[first]) / (minutes[second] - minutes[first])))


def slope_of(minutes: np.ndarray, values: np.ndarray, repeats: int = 1000) -> Slope:
    """Of values in MiB."""
    slope = theil_sen(minutes, values)
    residuals = values - slope * minutes
    length = max(1, round(BLOCK_MINUTES * len(minutes) / max(float(np.ptp(minutes)), BLOCK_MINUTES)))
    rng = np.random.default_rng(0)
    # Blocks wrap around the end, so that all residuals are drawn equally often.
    starts = rng.integers(0, len(minutes), (repeats, -(-len(minutes) // length)))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(repeats, -1)[:, : len(minutes)] % len(minutes)
    slopes = [theil_sen(minutes, slope * minutes + residuals[one]) for one in drawn]
    low, high = np.quantile(slopes, [0.025, 0.975])
    return Slope(60 * slope, 60 * float(low), 60 * float(high))


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process
    folder: Path
    """Its ``TMPDIR``."""
    popen: subprocess.Popen[bytes]

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self.popen.poll()

    def processes(self) -> dict[str, psutil.Process]:
        """By what they are; without compilers, which come and go."""
        found = {"API server": self.process}
        for child in self.process.children(recursive=True):
            with suppress(psutil.Error):
                words = " ".join(child.cmdline())
                found |= {role: child for word, role in ROLES.items() if word in words}
        return found

    def metrics_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.folder.glob("vllm-kvmerge-metrics-*/*"))

    def shared_bytes(self) -> int:
        """Of the files in /dev/shm that its processes map."""
        paths = set()
        for process in self.processes().values():
            with suppress(OSError):
                paths |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
        return sum(os.stat(path).st_blocks * 512 for path in paths if os.path.exists(path))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(blocks: int, log: Path, stock: bool = False, step_tokens: int | None = None) -> Iterator[Server]:
    """The demo model's server in float32, with blocks of 32 tokens, until it has been told to stop.

    stock: vLLM's own server, without the plugin, and with as many blocks. step_tokens: most tokens of a step.
    """
    from transformers import AutoConfig

    from vllm_kvmerge.demo import model_path

    model = AutoConfig.from_pretrained(model_path())
    metadata = 0 if stock else 16
    block_bytes = model.num_hidden_layers * model.num_key_value_heads * 32 * (2 * model.head_dim * 4 + metadata)
    port = free_port()
    options = f"--port {port} --dtype float32 --max-model-len 2048 --enforce-eager --block-size 32"
    if step_tokens:
        options += f" --max-num-batched-tokens {step_tokens} --max-num-seqs {step_tokens}"
    ours = ["-m", "vllm_kvmerge.cli", "serve", "demo"]
    vllm = [str(VLLM_COMMAND), "serve", model_path(), "--served-model-name", "demo"]
    command = [sys.executable, *(vllm if stock else ours), *options.split()]
    command += ["--kv-cache-memory-bytes", str(blocks * block_bytes)]
    with tempfile.TemporaryDirectory() as folder, log.open("w") as out:
        environment = os.environ | {"TMPDIR": folder} | ({"VLLM_PLUGINS": ""} if stock else {})
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        guard = subprocess.Popen([sys.executable, "-c", GUARD, str(process.pid)], stdin=subprocess.PIPE)
        try:
            while not re.search("ready on|Application startup complete", log.read_text()):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended: {log.read_text()[-4000:]}")
                time.sleep(0.5)
            yield Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid), Path(folder), process)
        finally:
            guard.kill()
            guard.wait()
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def metric(text: str, name: str) -> float:
    """Sum of a metric's samples."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M))


class Soak:
    """One run: traffic and samples."""

    def __init__(self, server: Server, client: httpx.AsyncClient, arguments: argparse.Namespace) -> None:
        self.server = server
        self.client = client
        self.arguments = arguments
        self.traffic = Traffic(client, arguments.seed, arguments.stock)
        self.samples: dict[str, list[Sample]] = {}
        self.sizes: list[tuple[float, float, float]] = []  # minute, MiB of metrics, MiB of shared memory
        self.start = time.monotonic()
        self.end = self.start + 60 * arguments.minutes

    async def run(self) -> str:
        """What /metrics says at the end."""
        sampling = asyncio.create_task(self._sample())
        await self._send()
        await sampling
        # Gauges are set at the end of a step.
        last = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 2}
        (await self.client.post("/v1/completions", json=last)).raise_for_status()
        await asyncio.sleep(2)
        return (await self.client.get("/metrics")).text

    async def _send(self) -> None:
        rng = np.random.default_rng(self.arguments.seed)
        slots = asyncio.Semaphore(MOST_AT_ONCE)
        index, due = 0, self.start

        async def one(number: int) -> None:
            async with slots:
                await self.traffic.send(number)

        async with asyncio.TaskGroup() as group:
            while due < self.end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                burst = int(rng.integers(1, 2 * self.arguments.burst))
                for _ in range(burst):
                    await slots.acquire()
                    slots.release()
                    group.create_task(one(index))
                    index += 1
                due += burst / self.arguments.rate

    async def _sample(self) -> None:
        due = self.start
        while due < self.end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += self.arguments.every
            minute = (time.monotonic() - self.start) / 60
            for name, process in self.server.processes().items():
                with suppress(psutil.Error):
                    memory = process.memory_full_info()
                    counts = process.num_fds(), process.num_threads(), sum(process.cpu_times()[:2])
                    sample = Sample(minute, memory.uss / MIB, memory.rss / MIB, *counts)
                    self.samples.setdefault(name, []).append(sample)
            self.sizes.append((minute, self.server.metrics_bytes() / MIB, self.server.shared_bytes() / MIB))
            with suppress(httpx.HTTPError):
                await self.client.get("/metrics")  # as Prometheus does

    def row(self, name: str) -> Row:
        samples = self.samples[name]
        table = np.array([astuple(one) for one in samples])
        cores = (table[-1, -1] - table[0, -1]) / (60 * (table[-1, 0] - table[0, 0]))
        half = table[table[:, 0] >= self.arguments.minutes / 2]
        minutes = table[:, 0].astype(int)
        medians = [np.median(table[minutes == minute], axis=0).round(2).tolist() for minute in np.unique(minutes)]
        columns = dict(zip(Sample.__annotations__, map(list, zip(*medians, strict=True)), strict=True))
        return Row(name, float(cores), slope_of(half[:, 0], half[:, 1]), slope_of(half[:, 0], half[:, 2]), columns)

    def latency(self) -> list[dict[str, float]]:
        """Seconds that answered requests took, by the minute in which they were sent."""
        rows = []
        for minute in range(int(self.arguments.minutes) + 1):
            seconds = [
                one.seconds
                for one in self.traffic.outcomes
                if one.status == 200 and int((one.started - self.start) / 60) == minute and one.kind != "aborted"
            ]
            if seconds:
                p50, p95, p99 = np.quantile(seconds, [0.5, 0.95, 0.99]).round(3).tolist()
                rows.append({"minute": minute, "requests": len(seconds), "p50": p50, "p95": p95, "p99": p99})
        return rows


def totals(outcomes: list[Outcome], metrics: str) -> dict[str, Any]:
    blocks = int(re.search(r'num_gpu_blocks="(\d+)"', metrics)[1])  # type: ignore[index]
    names = ("num_preemptions_total", "kvmerge_compressions_total", "kvmerge_context_hits_total")
    return {
        "requests": dict(Counter(one.kind for one in outcomes)),
        "statuses": dict(sorted(Counter(one.status for one in outcomes).items())),
        "mismatches": sum(one.kind == "mismatch" for one in outcomes),
        "faults": [f"{one.kind}: {one.status} {one.fault}" for one in outcomes if one.fault],
        "leaked_blocks": round(metric(metrics, "vllm:kv_cache_usage_perc") * (blocks - 1)),
        "live_entries": metric(metrics, "vllm:kvmerge_live_entries"),
        "blocks": blocks,
        "generated_tokens": metric(metrics, "vllm:generation_tokens_total"),
    } | {name: metric(metrics, f"vllm:{name}") for name in names}


def is_faulty(summary: dict[str, Any]) -> bool:
    return any(summary[name] for name in ("leaked_blocks", "live_entries", "mismatches", "faults", "exit_status"))


def plot(path: Path, rows: list[Row], latency: list[dict[str, float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    memory, times, descriptors, threads = figure.subplots(2, 2, sharex=True).flat
    for row in rows:
        minutes = row.samples["minute"]
        memory.plot(minutes, np.subtract(row.samples["unique"], row.samples["unique"][0]), label=row.process)
        descriptors.plot(minutes, row.samples["descriptors"], label=row.process)
        threads.plot(minutes, row.samples["threads"], label=row.process)
    for name in ("p50", "p95", "p99"):
        times.plot([one["minute"] for one in latency], [one[name] for one in latency], label=name)
    memory.set(title="memory of each process, since the first minute (MiB)")
    times.set(title="seconds per request", ylim=(0, None))
    descriptors.set(title="descriptors", xlabel="minutes", ylim=(0, None))
    threads.set(title="threads", xlabel="minutes", ylim=(0, None))
    memory.legend()
    times.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


async def soak(server: Server, arguments: argparse.Namespace) -> tuple[Soak, str]:
    # The server closes connections after five seconds without a request; one that is sent at that moment is lost.
    limits = httpx.Limits(max_connections=2 * MOST_AT_ONCE, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        run = Soak(server, client, arguments)
        return run, await run.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second, on average")
    parser.add_argument("--burst", type=int, default=12, help="requests sent at once, on average")
    parser.add_argument("--blocks", type=int, default=81, help="of 32 tokens, in the pool; a request may take 64")
    parser.add_argument("--every", type=float, default=10, metavar="SECONDS", help="between samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stock", action="store_true", help="vLLM without the plugin, and the requests without the field"
    )
    parser.add_argument(
        "--step-tokens", type=int, help="most tokens of a step: fewer shapes of matrix products, which oneDNN keeps"
    )
    parser.add_argument("--log", type=Path, default=Path("build/soak.log"), help="what the server prints")
    parser.add_argument("--plot", type=Path, default=Path("docs/images/soak.svg"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/soak.json"))
    arguments = parser.parse_args()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    with serving(arguments.blocks, arguments.log, arguments.stock, arguments.step_tokens) as server:
        run, metrics = asyncio.run(soak(server, arguments))
    rows = [run.row(name) for name in run.samples]
    latency, summary = run.latency(), totals(run.traffic.outcomes, metrics)
    sizes = [dict(zip(("minute", "metrics", "shared"), map(float, one), strict=True)) for one in run.sizes]
    summary["exit_status"] = server.exit_status
    summary |= {f"{name}_mib": [round(one[name], 2) for one in (sizes[0], sizes[-1])] for name in ("metrics", "shared")}
    save(arguments.output, vars(arguments), rows, totals=summary, latency=latency)
    plot(arguments.plot, rows, latency)
    print_table(
        f"Second half of {arguments.minutes:g} minutes, MiB per hour (95% interval)",
        ["unique", "resident", "cores", "descriptors", "threads"],
        {
            row.process: [
                str(row.unique),
                str(row.resident),
                f"{row.cores:.2f}",
                *(f"{row.samples[name][0]:g} .. {row.samples[name][-1]:g}" for name in ("descriptors", "threads")),
            ]
            for row in rows
        },
        first="",
    )
    for name, value in summary.items():
        print(f"{name}: {value}")
    sys.exit(is_faulty(summary))


if __name__ == "__main__":
    main()
