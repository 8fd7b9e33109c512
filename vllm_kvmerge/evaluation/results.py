"""The folder of a run: its configuration, one line of JSON per answered sample, and what resuming it needs."""

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from vllm_kvmerge.errors import CommandError


@dataclass(frozen=True)
class Result:
    """One sample under one policy and budget.

    cell: task, policy and budget in one text. budget: None for ``full``. sample: its number. seed: the run's. Entries
    are per KV head of one layer, bytes over all layers; None where the server does not report them. log_prob_change:
    as in ``Verified``; None: not verified.
    """

    cell: str
    task: str
    policy: str
    budget: int | float | None
    sample: int
    seed: int
    score: float
    prediction: str
    references: list[str]
    prompt_tokens: int
    mean_entries: float | None
    mean_bytes: float | None
    peak_entries: int | None
    peak_bytes: int | None
    seconds: float
    log_prob_change: float | None = None


@dataclass(frozen=True)
class Failure:
    """A sample that brought an error instead of an answer."""

    cell: str
    sample: int
    message: str


class RunFolder:
    """Opens or begins a run; a context manager, because one process at a time may write to the folder.

    Raises:
        CommandError: the folder holds the run of another configuration, is in use, or cannot be read.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lines = (path / "results.jsonl").open("ab")
        except OSError as error:
            raise CommandError(f"--output {path}: {error}") from None
        try:
            fcntl.flock(self._lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lines.close()
            raise CommandError(f"--output {path}: another run is writing there") from None
        try:
            self._check_identity(dict(identity))
            self.results = self._read_results()
            self.state: dict[str, Any] = self._read_state()
        except BaseException:
            self._lines.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._lines.close()

    def _check_identity(self, identity: dict[str, Any]) -> None:
        """Saves the configuration of a run that has no results yet, or asks for more samples; refuses any other."""
        path = self.path / "config.yaml"
        if not self._lines.tell():
            (self.path / "run.json").unlink(missing_ok=True)
            _write(path, _as_yaml(identity))
            return
        if not path.exists():
            raise CommandError(f"--output {self.path}: it holds results, but no config.yaml that says of what")
        try:
            saved = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise CommandError(f"{path}: {error}") from None
        if differences := list(_differences(_with_samples_of(identity, saved), identity, "")):
            raise CommandError(
                f"--output {self.path}: it holds the results of another configuration ({'; '.join(differences)}); "
                "choose another folder, or delete it"
            )
        if saved != identity:
            _write(path, _as_yaml(identity))

    def _read_results(self) -> list[Result]:
        """Samples that have been answered. A last line that a killed run did not finish is cut off."""
        path = self.path / "results.jsonl"
        text = path.read_bytes()
        end = text.rfind(b"\n") + 1
        if end < len(text):
            self._lines.truncate(end)
        results = []
        for number, line in enumerate(text[:end].splitlines(), 1):
            try:
                results.append(Result(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise CommandError(f"{path}, line {number}: {error}") from None
        return results

    def _read_state(self) -> dict[str, Any]:
        path = self.path / "run.json"
        return json.loads(path.read_text()) if path.exists() else {"tasks": {}, "versions": []}

    def check_samples(self, task: str, samples: Sequence[Any]) -> None:
        """Remembers which samples a task drew (as plain values); refuses those that do not begin with the run's."""
        known = self.state["tasks"].get(task)
        if known is not None and known["digest"] != _digest(samples[: known["samples"]]):
            raise CommandError(
                f"--output {self.path}: {task} draws other samples than when this run began ({known['samples']} then, "
                f"{len(samples)} now): its data, the tokenizer or the program changed; choose another folder"
            )
        self.state["tasks"][task] = {"samples": len(samples), "digest": _digest(samples)}

    def save_state(self, versions: Mapping[str, str] | None = None) -> None:
        if versions is not None and dict(versions) not in self.state["versions"]:
            self.state["versions"].append(dict(versions))
        _write(self.path / "run.json", json.dumps(self.state, indent=1) + "\n")

    def add(self, result: Result) -> None:
        """On disk when this returns, as far as a killed process is concerned."""
        self._lines.write(json.dumps(asdict(result)).encode() + b"\n")
        self._lines.flush()
        self.results.append(result)

    def save_failures(self, failures: list[Failure]) -> None:
        lines = [json.dumps(asdict(failure)) + "\n" for failure in failures]
        _write(self.path / "failures.jsonl", "".join(lines))


def _write(path: Path, text: str) -> None:
    """In one go: a run that is killed meanwhile leaves the old file."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def _as_yaml(identity: Mapping[str, Any]) -> str:
    return yaml.safe_dump(identity, sort_keys=False, allow_unicode=True)


def _digest(samples: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest()


def _with_samples_of(identity: dict[str, Any], saved: Any) -> Any:
    """``saved``, with the number of samples of each task of ``identity`` that asks for more."""
    if not isinstance(saved, dict) or not isinstance(saved.get("tasks"), list):
        return saved
    tasks = [
        old | {"samples": new["samples"]} if old["samples"] < new["samples"] else old
        for old, new in zip(saved["tasks"], identity["tasks"], strict=False)
    ]
    return saved | {"tasks": tasks + saved["tasks"][len(tasks) :]}


def _differences(old: Any, new: Any, name: str) -> Iterator[str]:
    """``seed: 1 there, 2 now``"""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, other, f"{name}.{index}")
    elif old != new or type(old) is not type(new):
        yield f"{name}: {json.dumps(old)} there, {json.dumps(new)} now"
