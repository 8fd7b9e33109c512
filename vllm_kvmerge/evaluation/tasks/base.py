"""Interface of a task: it draws samples and scores completions."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from vllm_kvmerge.request.proof import Verified


class Tokenizer(Protocol):
    """Part of a Hugging Face tokenizer that tasks use."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True)
class Sample:
    """One thing to ask. The prompt is ``context + question``.

    context: what a question-agnostic run compresses before the rest is read. question: the rest, with what precedes the
    answer. references: the right answers. max_tokens: to generate. continuation: what the model is made to generate
    instead of choosing, where the task reads log-probabilities. data: what else ``score`` needs, as JSON has it.
    answer_prefix: end of the question that the answer begins with; in a chat template it follows the model's turn.
    """

    context: str
    question: str
    references: list[str]
    max_tokens: int
    continuation: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    answer_prefix: str = ""

    @property
    def prompt(self) -> str:
        return self.context + self.question


@dataclass(frozen=True)
class Completion:
    """Answer of a model. logprobs: ln p of each token of the sample's continuation; empty where it has none. verified:
    for tasks that ask for it; None: of the full cache."""

    text: str
    logprobs: list[float] = field(default_factory=list)
    verified: Verified | None = None


class Task(BaseModel):
    """A task; its fields are its options, named as in its source."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    source: ClassVar[str]
    metric: ClassVar[str]
    """Name of ``score``'s quantity, such as ``exact match``."""

    higher_is_better: ClassVar[bool] = True
    needs_logprobs: ClassVar[bool] = False
    """True if samples have a continuation."""

    is_verified: ClassVar[bool] = False
    """True if answers are scored with the full cache, and need no references."""

    @abstractmethod
    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        """``count`` samples, or all there are if fewer; the same for the same seed.

        Raises:
            ValueError: the task's options leave no room, or its data cannot be read; the message names the field.
        """

    @abstractmethod
    def score(self, sample: Sample, completion: Completion) -> float:
        """From 0 to 1 where ``higher_is_better``, larger is better; otherwise what ``metric`` says."""

    def summary(self, scores: Sequence[float]) -> float:
        """One number for the scores of many samples. Default: their mean."""
        return sum(scores) / len(scores)


class Agreement(Task):
    """Scores any task's answers by the share of their tokens that the full cache would have picked."""

    metric = "agreement"
    higher_is_better = True
    is_verified = True
    summary = Task.summary

    def score(self, sample: Sample, completion: Completion) -> float:
        if completion.verified is None:
            return 1.0
        if completion.verified.agreeing is None:
            raise ValueError(f"not verified: {completion.verified.skipped}")
        return completion.verified.agreeing


TASKS: dict[str, type[Task]] = {}
"""Every task, by name."""


def register(task: type[Task]) -> type[Task]:
    """Class decorator: makes a task known by its name."""
    if task.name in TASKS:
        raise ValueError(f"two tasks are called {task.name!r}")
    TASKS[task.name] = task
    return task
