"""A real server for the tests of this folder: real processes, real HTTP."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests import preloaded
from tests.processes import end_with_tests


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: list[str]
    reader: threading.Thread
    """Fills the log, and ends when nobody can write to it any more."""

    def post(self, path: str, body: dict, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300, **more)

    def ask(self, prompt, **body) -> httpx.Response:
        return self.post("/v1/completions", {"model": "demo", "prompt": prompt, "temperature": 0, **body})

    def complete(self, prompt, **body) -> dict:
        response = self.ask(prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def samples(self) -> list[Sample]:
        text = httpx.get(self.url + "/metrics", timeout=120).text
        return [one for family in text_string_to_metric_families(text) for one in family.samples]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        samples = (one for one in self.samples() if one.name == name)
        return sum(one.value for one in samples if labels.items() <= one.labels.items())


def random_prompt(seed: int, length: int) -> list[int]:
    return [2, *np.random.default_rng(seed).integers(19, 780, length - 1).tolist()]


def events(response: httpx.Response) -> list[dict]:
    """The JSON objects of a stream."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def check_refused(response: httpx.Response, param: str | None, said: str = "", status: int = 400) -> str:
    """Checks an error in the OpenAI API's format; returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, status) and said in error["message"], error
    if status == 400:
        assert error["type"] == "BadRequestError", error
    return error["message"]


def send(app: Any, method: str, path: str, **request: Any) -> httpx.Response:
    """The answer of an application without a server; content in pieces reaches it so."""

    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, **request)

    return asyncio.run(answer())


def free_port() -> int:
    """A port that nobody listens on, nor is given meanwhile: the system hands out those above 32767 to whoever asks.

    Workers of pytest-xdist are forks with one state of ``random``, and two servers of vLLM may listen on one port.
    """
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


OPTIONS = (
    "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--kv-cache-memory-bytes", str(20 << 20),
)  # fmt: skip
"""Those of all servers here: small in memory, and exact enough to be compared by tokens."""

ONE_PROCESS_PER_ENGINE = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""The worker in its engine's process, as vLLM has it on a GPU. Without it, a worker on the CPU has its own."""

OURS = ("-m", "vllm_kvmerge.cli", "serve", "demo")

VLLM = Path(__file__).parents[2] / "benchmarks" / "vllm_command.py"
"""The program of vLLM's own command, whose CPU build has another name than it asks for."""


def running(
    *options: str,
    command: Sequence[str] = OURS,
    interpreter: str | Path = sys.executable,
    first: Callable[[], None] = end_with_tests,
    from_scratch: bool = False,
    **variables: str,
) -> AbstractContextManager[tuple[subprocess.Popen, list[str], threading.Thread]]:
    """``vllm-kvmerge serve demo`` with these options, and its log as it grows; stopped at the end if need be.

    command: words after the interpreter's name. interpreter: of another environment; then from_scratch. first: what it
    does before anything else. from_scratch: whether its processes import vLLM themselves, as a user's do. variables:
    more of its environment.
    """
    words = [str(interpreter), *command, *OPTIONS, *options]
    return logged(words, subprocess.Popen if from_scratch else preloaded.Popen, first, **variables)


@contextmanager
def logged(
    words: list[str], start: Any = subprocess.Popen, first: Callable[[], None] = end_with_tests, **variables: str
) -> Iterator[tuple[subprocess.Popen, list[str], threading.Thread]]:
    """A process with its log, as of ``running``. start: what makes it, as ``subprocess.Popen`` does."""
    # Several of them share this machine's cores.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | os.environ
    # What an engine inside this process, or a command tried in it, has left: servers would count in one folder.
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "PROMETHEUS_MULTIPROC_DIR"):
        environment.pop(name, None)
    environment |= variables
    process = start(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, preexec_fn=first
    )
    log: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: log.extend(iter(process.stdout.readline, "")), daemon=True)
    reader.start()
    try:
        yield process, log, reader
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(300)


@contextmanager
def serving(*options: str, ready: str = "ready on", **more: Any) -> Iterator[Server]:
    """A server that is ready, which its log says in these words; ``more`` as for ``running``."""
    port, scheme = free_port(), "https" if "--ssl-certfile" in options else "http"
    with running("--port", str(port), *options, **more) as (process, log, reader):
        wait_until(lambda: process.poll() is not None or any(ready in line for line in log), 400)
        assert process.poll() is None, "".join(log[-40:])
        yield Server(f"{scheme}://127.0.0.1:{port}", process, log, reader)


@pytest.fixture(scope="session")
def contexts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server saves the contexts that it keeps."""
    return tmp_path_factory.mktemp("contexts")


@pytest.fixture(scope="session")
def server(contexts_dir: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server of most files: the command that users run, each of its processes started from scratch but in the fast
    layer, where README's own command is."""
    options = "--enable-prompt-tokens-details", "--kvmerge-contexts", str(contexts_dir)
    is_whole, variables = request.config.getoption("all"), {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with serving(*options, from_scratch=is_whole, **variables) as ready:
        yield ready


@pytest.fixture(scope="session")
def may_mount() -> None:
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
