"""Sides of a comparison: engines in processes of their own, which all stay up and take turns.

A side's process gets one command a line (JSON) and answers with a line. While a side waits its processes are stopped:
vLLM's workers spin when they have nothing to do. Needs the standard library and psutil only, so that a peer's
environment can import it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

import psutil

GUARD = """
import psutil, sys
sys.stdin.read()
side = psutil.Process(int(sys.argv[1]))
for process in (*side.children(recursive=True), side):
    process.kill()
"""
"""Kills a side whose benchmark has ended without doing so: processes that are stopped notice nothing."""


VOCABULARY = 32_000


@dataclass(frozen=True)
class ModelShape:
    """A Llama with random weights: attention is to matter, not what it says. intermediate: 4 x width if not given."""

    layers: int = 4
    width: int = 256
    query_heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    max_tokens: int = 40_000
    intermediate: int | None = None

    def write(self, folder: Path) -> str:
        """Writes its configuration; sides make up weights and need no tokenizer."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "intermediate_size": self.intermediate or 4 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": self.max_tokens,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    @property
    def bytes_per_token(self) -> int:
        """Of KV cache in bfloat16, without our metadata."""
        return self.layers * self.kv_heads * self.head_size * 2 * 2

    @property
    def weight_bytes(self) -> int:
        """Of the weights in bfloat16, but for the norms'."""
        heads = 2 * (self.query_heads + self.kv_heads) * self.head_size
        layer = self.width * (heads + 3 * (self.intermediate or 4 * self.width))
        return 2 * (VOCABULARY * self.width + self.layers * layer)

    @property
    def metadata_bytes_per_token(self) -> int:
        """Of our metadata: 16 bytes per layer and KV head."""
        return 16 * self.layers * self.kv_heads


def add_shape(parser: argparse.ArgumentParser, head_size: int) -> None:
    """Options for ``shape_of``. head_size: unless another is asked for."""
    for option, default in (("layers", 8), ("kv-heads", 8), ("heads", 16), ("width", 512), ("head-size", head_size)):
        parser.add_argument(f"--{option}", type=int, default=default)


def shape_of(arguments: argparse.Namespace, max_tokens: int) -> ModelShape:
    heads = arguments.heads, arguments.kv_heads, arguments.head_size
    return ModelShape(arguments.layers, arguments.width, *heads, max_tokens)


@dataclass(frozen=True)
class Run:
    """When each request's tokens came, in seconds after the first requests were sent.

    peak_usage: largest share of the KV cache pool in use, None where there is no pool. preemptions: how many. sent:
    when each request was, in the same seconds; empty: all at once. answers: ids of the tokens of each. cached_tokens:
    of each prompt, found in the prefix cache. metrics: the plugin's, after the run, if its engine is in the side's
    first process.
    """

    token_times: list[list[float]]
    peak_usage: float | None = None
    preemptions: int = 0
    sent: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def times_to_first_token(self) -> list[float]:
        """Of each request, since it was sent."""
        return [times[0] - sent for times, sent in zip(self.token_times, self.sent, strict=True)]

    @property
    def time_to_first_token(self) -> float:
        """Of the slowest request."""
        return max(times[0] for times in self.token_times)

    @property
    def time_to_second_token(self) -> float:
        """Of the slowest request: the first compression comes between its first and second token."""
        return max(times[1] for times in self.token_times)

    @property
    def duration(self) -> float:
        return max(times[-1] for times in self.token_times)

    @property
    def _decoding(self) -> tuple[float, float]:
        """The time during which all requests generate, first compressions done."""
        return self.time_to_second_token, min(times[-1] for times in self.token_times)

    @property
    def decode_throughput(self) -> float:
        """Tokens per second while all requests generate."""
        start, stop = self._decoding
        return sum(start < time <= stop for times in self.token_times for time in times) / (stop - start)

    @property
    def intertoken_latencies(self) -> list[float]:
        """Seconds between a request's tokens, while all requests generate."""
        start, stop = self._decoding
        return [
            later - earlier
            for times in self.token_times
            for earlier, later in zip(times[:-1], times[1:], strict=True)
            if start <= earlier and later <= stop
        ]


SECONDS_TO_END = 60
LOG_END = 10_000
"""Characters of a side's log that tell why it ended."""


class Side:
    """A handle on one engine, whose process is ``script``, run by ``python`` with ``arguments`` as JSON.

    log: a file to which what it prints is added; default: one that is not kept.
    """

    def __init__(
        self,
        name: str,
        script: str,
        arguments: dict[str, Any],
        python: str = sys.executable,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self._log = log.open("a+") if log is not None else tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._command = [python, str(Path(__file__).parent / script), json.dumps(arguments)]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, str(self._process.pid)], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._is_ready = self._has_ended = False

    def revive(self) -> None:
        """Starts it again, and waits for it, if it has ended after it was ready. Raises as ``wait``."""
        if self._is_ready and self._has_ended:
            self._end()
            self._start()
            self.wait()

    def wait(self) -> None:
        """Until it can run something; sides start at the same time."""
        if not self._is_ready:
            self._receive()
            self._is_ready = True
            self._signal(signal.SIGSTOP)

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        compression: dict[str, Any] | None = None,
        cold: bool = True,
        **options: Any,
    ) -> Run:
        """Sends all prompts (token ids) at once and waits for the last token. cold: forget cached prompts before.
        options: further arguments of its engine's ``run``."""
        self.wait()
        self._signal(signal.SIGCONT)
        command = {"prompts": prompts, "max_tokens": max_tokens, "compression": compression, "cold": cold} | options
        assert self._process.stdin is not None
        # Where it has ended, its log says more than that a pipe is broken.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        answer = self._receive()
        self._signal(signal.SIGSTOP)
        return Run(**answer)

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._has_ended = True
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended: {self._log.read()[-LOG_END:]}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        process = psutil.Process(self._process.pid)
        for one in (process, *process.children(recursive=True)):
            # Compilers are among its children, and end when they are done.
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def close(self) -> None:
        """Asks it to end, and ends it where it does not."""
        self._end()
        self._log.close()

    def _end(self) -> None:
        self._guard.kill()
        self._guard.communicate()
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answers() -> TextIO:
    """In a side's process, before anything prints: where answers go. What is printed goes where errors do."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def serve(run: Callable[..., Run], stream: TextIO) -> None:
    """In a side's process: carries out commands until there are no more."""
    print(json.dumps("ready"), file=stream, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(run(**json.loads(line)))), file=stream, flush=True)
