"""A back end without an engine, and small configurations, for tests of everything around one."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from tests.demo_model import BYTES_PER_BLOCK
from vllm_kvmerge import demo
from vllm_kvmerge.evaluation.backends import Answer, Request, RequestError
from vllm_kvmerge.evaluation.config import EvalConfig, read_config
from vllm_kvmerge.evaluation.results import Result
from vllm_kvmerge.evaluation.tasks.base import Sample
from vllm_kvmerge.evaluation.tasks.demo import DemoRecall

BASE: dict[str, Any] = {
    "policies": ["full", {"policy": "keepkv", "zip_mode": "votes"}],
    "budgets": [0.25, 64],
    "tasks": [{"task": "demo_recall", "length": 128, "facts": 2}],
    "samples": 4,
    "seed": 3,
}


class Refused(DemoRecall):
    """Asks for nothing, which engines refuse."""

    name = "refused"

    def samples(self, count, seed, tokenizer):
        return [Sample("recall", "", [], max_tokens=0) for _ in range(count)]


def write_config(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**BASE, **changes}, sort_keys=False))
    return path


def small_config(folder: Path, **changes: Any) -> EvalConfig:
    return read_config(write_config(folder / "small.yaml", **changes), {})


def result(config: EvalConfig, policy: str, budget: float | None, sample: int, score: float, **changes: Any) -> Result:
    """Of the configuration's first task, or of another ``task``."""
    label = changes.pop("task", config.tasks[0]).label
    values = dict.fromkeys(("mean_entries", "mean_bytes", "peak_entries", "peak_bytes")) | changes
    return Result(
        cell=" | ".join([label, policy, *([] if budget is None else [str(budget)])]), task=label, policy=policy,
        budget=budget, sample=sample, seed=3, score=score, prediction="", references=[], prompt_tokens=128,
        seconds=0.5, **values,
    )  # fmt: skip


class ScriptedBackend:
    """Answers as ``answer`` says; what it raises comes out of ``run``. requests: all that it was asked."""

    def __init__(self, answer: Callable[[int, Request], Answer | RequestError]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
        self.answer = answer
        self.requests: list[Request] = []
        self.started: list[tuple[int, bool]] = []

    def start(self, longest: int, with_logprobs: bool) -> None:
        self.started.append((longest, with_logprobs))

    def run(self, requests: Iterable[tuple[Any, Request]]) -> Iterator[tuple[Any, Answer | RequestError]]:
        for key, request in requests:
            self.requests.append(request)
            yield key, self.answer(len(self.requests) - 1, request)

    def versions(self) -> dict[str, str]:
        return {"script": "1"}

    def close(self) -> None:
        pass


def constant(_: int, request: Request) -> Answer:
    entries = request.compression.get("budget", len(request.token_ids))
    usage = {"mean_entries": entries, "mean_bytes": 1024.0 * entries, "peak_entries": 128, "peak_bytes": 131072}
    return Answer("0 0 0 0", [], usage, 0.5)


def assert_measured(result: dict[str, Any], entries: int, blocks: int) -> None:
    """Sizes of an answer of up to five tokens to a prompt of 128, of which ``entries`` in ``blocks`` blocks are kept.

    Five tokens take five steps, fewer fewer: the prompt's, and up to four with an entry and a block more.
    """
    steps = min(5, len(result["prediction"].split()) + 1)
    assert result["prompt_tokens"] == 128
    assert result["mean_entries"] == entries + (steps - 1) / 2
    assert result["mean_bytes"] == pytest.approx((blocks + 1 - 1 / steps) * BYTES_PER_BLOCK)
    assert result["peak_entries"] == max(128, entries + steps - 1)
