"""What verifying a share of all answers costs: ``python benchmarks/verification.py``.

A server of the demo model for each share. All take turns at answering the same requests, compressed and plain ones,
``--clients`` at a time. Ratios are to the server without verification in the same turn.
"""

import argparse
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from time import perf_counter, sleep
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from report import Spread

from vllm_kvmerge.evaluation.summary import print_table

VERIFIED = ("vllm:kvmerge_log_prob_drop_count", "vllm:kvmerge_not_verified_answers_total")


class Server:
    """A server with ``--verify-share``."""

    def __init__(self, share: float, stack: ExitStack) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url, self._client = f"http://127.0.0.1:{port}", httpx.Client(timeout=600)
        command = [sys.executable, "-m", "vllm_kvmerge.cli", "serve", "demo", "--port", str(port), "--enforce-eager"]
        command += ["--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20), "--verify-share", str(share)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait, 120)
        stack.callback(process.terminate)

    def wait(self) -> None:
        while True:
            try:
                if self._client.get(self._url + "/health").status_code == 200:
                    return
            except httpx.TransportError:
                sleep(0.5)

    def ask(self, body: dict[str, Any]) -> None:
        self._client.post(self._url + "/v1/completions", json=body).raise_for_status()

    def counts(self) -> list[int]:
        """Answers that were verified, and skipped."""
        families = text_string_to_metric_families(self._client.get(self._url + "/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return [round(sum(one.value for one in samples if one.name == name)) for name in VERIFIED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.1, 1.0])
    parser.add_argument("--requests", type=int, default=100, help="in each turn")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--length", type=int, default=1000, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="generated per request")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    shares = [0.0, *arguments.shares]
    seconds: dict[float, list[float]] = {share: [] for share in shares}
    with ExitStack() as stack:
        servers = {share: Server(share, stack) for share in shares}
        pool = stack.enter_context(ThreadPoolExecutor(arguments.clients))
        for server in servers.values():
            server.wait()
        for turn in range(arguments.repeats + 1):
            bodies = [
                {
                    "model": "demo",
                    "prompt": rng.integers(19, 780, arguments.length).tolist(),
                    "max_tokens": arguments.tokens,
                    "ignore_eos": True,
                    "temperature": 0,
                    "kv_compression": {"policy": "snapkv", "budget": 0.25} if index % 2 else {"policy": "full"},
                }
                for index in range(arguments.requests)
            ]
            for share, server in servers.items():
                started = perf_counter()
                list(pool.map(server.ask, bodies))
                if turn:  # the first one warms up
                    seconds[share].append(perf_counter() - started)
        rows = {}
        for share, server in servers.items():
            ratio = Spread.of([base / own for base, own in zip(seconds[0.0], seconds[share], strict=True)])
            rate = Spread.of([arguments.requests / one for one in seconds[share]])
            rows[str(share)] = [str(rate), str(ratio), *map(str, server.counts())]
    print_table("Requests by share", ["requests/s", "ratio", "verified", "skipped"], rows, "share")


if __name__ == "__main__":
    main()
