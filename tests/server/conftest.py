"""A real server for the tests of this folder: real processes, real HTTP."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: list[str]

    def post(self, path: str, body: dict) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def complete(self, prompt, **body) -> dict:
        response = self.post("/v1/completions", {"model": "demo", "prompt": prompt, "temperature": 0, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in httpx.get(self.url + "/metrics", timeout=30).text.splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    port = free_port()
    command = [
        sys.executable, "-m", "vllm_kvmerge.server.cli", "serve", "demo", "--port", str(port), "--dtype", "float32",
        "--max-model-len", "4096", "--enforce-eager", "--kv-cache-memory-bytes", str(20 << 20),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: log.extend(iter(process.stdout.readline, "")), daemon=True)
    reader.start()
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        deadline = time.monotonic() + 400
        while not any("ready on" in line for line in log):
            assert process.poll() is None and time.monotonic() < deadline, "".join(log[-40:])
            time.sleep(0.2)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
