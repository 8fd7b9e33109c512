"""Runs an evaluation: every sample of every task under every policy and budget, resuming a stopped run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation.backends import (
    Answer,
    Backend,
    BackendError,
    Request,
    RequestError,
    ServerTokenizer,
)
from vllm_kvmerge.evaluation.config import EvalConfig, PolicyEntry, TaskEntry
from vllm_kvmerge.evaluation.results import Failure, Result, RunFolder
from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Tokenizer


@dataclass(frozen=True)
class Cell:
    """One task under one policy and budget."""

    entry: TaskEntry
    policy: PolicyEntry
    budget: int | float | None

    @property
    def key(self) -> str:
        parts = [self.entry.label, self.policy.label, *([] if self.budget is None else [str(self.budget)])]
        return " | ".join(parts)


@dataclass(frozen=True)
class Prompt:
    """A sample in tokens. context_tokens: how many of the first ones are its context's alone; None: nothing is asked of
    a question-agnostic run."""

    sample: Sample
    token_ids: list[int]
    continuation: list[int]
    context_tokens: int | None

    @property
    def length(self) -> int:
        return len(self.token_ids) + (len(self.continuation) or self.sample.max_tokens)

    def request(self, cell: Cell, sampling: dict[str, Any]) -> Request:
        compression = cell.policy.compression(cell.budget, self.context_tokens)
        verify = cell.entry.task.is_verified and cell.budget is not None
        return Request(self.token_ids, compression, self.sample.max_tokens, self.continuation, verify, sampling)


def cells_of(config: EvalConfig) -> list[Cell]:
    return [
        Cell(entry, policy, budget)
        for entry in config.tasks
        for policy in config.policies
        for budget in config.budgets_of(policy)
    ]


def draw_prompts(config: EvalConfig, entry: TaskEntry, tokenizer: Tokenizer) -> list[Prompt]:
    """A task's samples in tokens.

    Raises:
        CommandError: the task cannot draw them, or they do not suit a question-agnostic run.
    """
    try:
        samples = entry.task.samples(config.samples_of(entry), config.seed, tokenizer)
    except ValueError as error:
        raise CommandError(f"task {entry.label}: {error}") from error
    if not samples:
        raise CommandError(f"task {entry.label}: it has no samples")
    agnostic = config.is_question_agnostic(entry)
    frame = chat_frame(tokenizer) if config.in_chat_template(entry) else None
    if frame is not None and any(sample.continuation is not None for sample in samples):
        raise CommandError(f"chat_template: {entry.label} has texts that go on, which no user says; allowed: false")
    prompts = [_tokenize(sample, tokenizer, agnostic, frame) for sample in samples]
    if agnostic and any(not sample.context for sample in samples):
        raise CommandError(
            f"question_agnostic: {entry.label} has samples without a context of their own; allowed: false"
        )
    return prompts


def chat_frame(tokenizer: Tokenizer) -> tuple[str, str]:
    """Texts that the chat template of the tokenizer or server puts before and after what a user says, up to the model's
    turn.

    Raises:
        CommandError: there is no template, or it does not give back what is said.
    """
    from transformers import PreTrainedTokenizerBase

    said, text = "what a user says", ""
    messages = [{"role": "user", "content": said}]
    if isinstance(tokenizer, ServerTokenizer):
        text = tokenizer.chat_text(messages)
    elif isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if text.count(said) == 1:
        before, after = text.split(said)
        return before, after
    raise CommandError(
        "chat_template: needs a tokenizer with a chat template that repeats what a user says; allowed: false, "
        "another model, or with a server its tokenizer in endpoint.tokenizer"
    )


def _tokenize(sample: Sample, tokenizer: Tokenizer, agnostic: bool, frame: tuple[str, str] | None = None) -> Prompt:
    """Tokenises neighbouring texts together, as models read them: a token that two texts share is the second's."""
    context, prompt = sample.context, sample.prompt
    if frame is not None:
        before, after = frame
        context = before + context
        prompt = before + prompt.removesuffix(sample.answer_prefix) + after + sample.answer_prefix
    encode = partial(tokenizer.encode, add_special_tokens=frame is None)  # a template has its own
    token_ids, continuation = encode(prompt), []
    if sample.continuation is not None:
        whole = tokenizer.encode(sample.prompt + sample.continuation)
        shared = _common_prefix(token_ids, whole)
        token_ids, continuation = whole[:shared], whole[shared:]
    context_tokens = None
    if agnostic and sample.question:
        shared = _common_prefix(encode(context), token_ids)
        context_tokens = max(1, min(shared, len(token_ids) - 1))
    return Prompt(sample, token_ids, continuation, context_tokens)


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _as_plain(prompt: Prompt) -> list[Any]:
    return [prompt.token_ids, prompt.continuation, prompt.context_tokens, prompt.sample.references]


@dataclass
class Run:
    """Outcome of a run. sizes: samples that each task has, by label. stopped: why it ended early, if it did."""

    sizes: dict[str, int]
    failures: list[Failure]
    stopped: str | None = None


def run(
    config: EvalConfig, folder: RunFolder, backend: Backend, notify: Callable[[int, int, Failure | None], None]
) -> Run:
    """Answers what ``folder`` does not hold yet, and adds it there.

    First come the first samples of all tasks, each under all policies and budgets: prompts are found in the prefix
    cache, and a run that is stopped early has about as many samples of every cell. notify: is called after each sample
    with the number that are done, that of all, and the failure, if it was one.

    Raises:
        CommandError: nothing can be run like this. Whatever else ends a run early is in the result.
    """
    prompts = {entry.label: draw_prompts(config, entry, backend.tokenizer) for entry in config.tasks}
    for label, drawn in prompts.items():
        folder.check_samples(label, [_as_plain(prompt) for prompt in drawn])
    outcome = Run({label: len(drawn) for label, drawn in prompts.items()}, [])
    cells = cells_of(config)
    answered = {(result.cell, result.sample) for result in folder.results}
    total = sum(outcome.sizes[cell.entry.label] for cell in cells)

    def pending() -> Iterator[tuple[tuple[Cell, int], Request]]:
        for index in range(max(outcome.sizes.values())):
            for cell in cells:
                drawn = prompts[cell.entry.label]
                if index < len(drawn) and (cell.key, index) not in answered:
                    yield (cell, index), drawn[index].request(cell, config.sampling.arguments(index))

    notify(len(answered), total, None)
    if len(answered) < total:
        longest = max(prompt.length for drawn in prompts.values() for prompt in drawn)
        backend.start(longest, any(entry.task.needs_logprobs for entry in config.tasks))
        folder.save_state(backend.versions())
        try:
            for (cell, index), answer in backend.run(pending()):
                prompt = prompts[cell.entry.label][index]
                result = _judge(cell, index, prompt, answer, config.seed)
                if isinstance(result, Failure):
                    outcome.failures.append(result)
                    notify(len(folder.results), total, result)
                else:
                    folder.add(result)
                    notify(len(folder.results), total, None)
        except BackendError as error:
            outcome.stopped = str(error)
    folder.save_failures(outcome.failures)
    return outcome


def _judge(cell: Cell, index: int, prompt: Prompt, answer: Answer | RequestError, seed: int) -> Result | Failure:
    if isinstance(answer, RequestError):
        return Failure(cell.key, index, str(answer))
    sample = prompt.sample
    try:
        score = float(cell.entry.task.score(sample, Completion(answer.text, answer.logprobs, answer.verified)))
    except Exception as error:  # the task's own; the other samples can still be scored
        return Failure(cell.key, index, f"score: {type(error).__name__}: {error}")
    usage = answer.usage or {}
    return Result(
        cell=cell.key,
        task=cell.entry.label,
        policy=cell.policy.label,
        budget=cell.budget,
        sample=index,
        seed=seed,
        score=score,
        prediction="" if sample.continuation is not None else answer.text,
        references=sample.references,
        prompt_tokens=len(prompt.token_ids),
        mean_entries=usage.get("mean_entries"),
        mean_bytes=usage.get("mean_bytes"),
        peak_entries=usage.get("peak_entries"),
        peak_bytes=usage.get("peak_bytes"),
        seconds=answer.seconds,
        log_prob_change=answer.verified.log_prob_change if answer.verified else None,
    )
