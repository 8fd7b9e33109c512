"""Configuration of an evaluation: policies, budgets and tasks, read from YAML and checked before anything runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from vllm_kvmerge import demo
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation.tasks import load_tasks
from vllm_kvmerge.evaluation.tasks.base import Agreement, Task
from vllm_kvmerge.policies.fields import Budget
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, FULL, CompressionError, parse_compression

DEMO = "demo"
CONTEXT_TOKENS = "context_tokens"
"""Request field: how many of the first prompt tokens are compressed before the rest is read."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EngineOptions(_Model):
    """Engine arguments of the engine in this process, named as in vLLM; what is None is left to vLLM.

    max_num_seqs: default on CPU: 8, so that samples end one after the other. max_model_len: default: what the longest
    sample takes. kvzap, head_budgets: the plugin's own; default for the model demo: the KVzap model that ships, if the
    model is not compiled, and for models that commands know by name the budgets that ship.
    """

    dtype: str | None = None
    max_model_len: PositiveInt | None = None
    kv_cache_dtype: str | None = None
    kv_cache_memory_bytes: PositiveInt | None = None
    gpu_memory_utilization: PositiveFloat | None = None
    enforce_eager: bool | None = None
    max_num_seqs: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    block_size: PositiveInt | None = None
    enable_prefix_caching: bool | None = None
    tensor_parallel_size: PositiveInt | None = None
    trust_remote_code: bool | None = None
    revision: str | None = None
    kvzap: str | None = None
    head_budgets: str | None = None

    def arguments(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class EndpointOptions(_Model):
    """A server that runs vllm-kvmerge.

    url: with or without /v1. concurrency: requests at a time. timeout: seconds per request. api_key_env: environment
    variable that holds the key. tokenizer: folder or hub name; default: the server's /tokenize.
    """

    url: Annotated[str, Field(pattern=r"^https?://")]
    concurrency: PositiveInt = 8
    timeout: PositiveFloat = 600.0
    api_key_env: str | None = None
    tokenizer: str | None = None


class Sampling(_Model):
    """How answers are drawn, named as in vLLM; by default, they are the most probable tokens. The seed of the draw is
    the sample's number."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0

    def arguments(self, sample: int) -> dict[str, Any]:
        """Of a request, by vLLM's names."""
        return {**self.model_dump(), "seed": sample}


class PolicyEntry(_Model):
    """A policy and its parameters, all but the budget."""

    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        return self.parameters["policy"]

    @property
    def label(self) -> str:
        return _label(self.name, {key: value for key, value in self.parameters.items() if key != "policy"})

    def compression(self, budget: int | float | None, context_tokens: int | None = None) -> dict[str, Any]:
        """A request's ``kv_compression``; budget is None for ``full``."""
        if budget is None:
            return self.parameters
        more = {} if context_tokens is None else {CONTEXT_TOKENS: context_tokens}
        return {**self.parameters, "budget": budget, **more}


class TaskEntry(_Model):
    """A task with its options. given: those that the configuration names. What is None is the configuration's own, or
    the task's."""

    task: SerializeAsAny[Task]
    given: dict[str, Any]
    samples: PositiveInt | None = None
    question_agnostic: bool | None = None
    chat_template: bool | None = None
    metric: Literal["agreement"] | None = None

    @property
    def label(self) -> str:
        ways = self.model_dump(include={"question_agnostic", "chat_template", "metric"})
        return _label(self.task.name, {**self.given, **{name: way for name, way in ways.items() if way is not None}})


def _label(name: str, values: Mapping[str, Any]) -> str:
    """``keepkv zip_mode=votes``"""
    return " ".join([name, *(f"{key}={_plain(value)}" for key, value in values.items())])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read_policy(value: Any) -> Any:
    if isinstance(value, PolicyEntry):
        return value
    if isinstance(value, str):
        value = {"policy": value}
    if not isinstance(value, dict):
        raise ValueError("must be a policy's name or an object with the field policy")
    places = {"budget": "budgets", CONTEXT_TOKENS: "question_agnostic", "context_messages": "question_agnostic"}
    for field, place in places.items():
        if field in value:
            raise ValueError(f"{field}: is not set here but by {place}")
    _parse(value)
    return {"parameters": value}


def _read_task(value: Any) -> Any:
    if isinstance(value, TaskEntry):
        return value
    if isinstance(value, str):
        value = {"task": value}
    if not isinstance(value, dict) or "task" not in value:
        raise ValueError("must be a task's name or an object with the field task")
    tasks = load_tasks()
    options = dict(value)
    name = options.pop("task")
    if not isinstance(name, str) or name not in tasks:
        raise ValueError(f"task: unknown task {name!r}; allowed: {', '.join(sorted(tasks))}")
    ways = ("samples", "question_agnostic", "chat_template", "metric")
    entry = {field: options.pop(field) for field in ways if field in options}
    task_type = tasks[name]
    if entry.get("metric") is not None:
        if task_type.needs_logprobs:
            raise ValueError(f"metric: {name} gives the model its answers; allowed: the task's own")
        task_type = type(task_type.__name__, (Agreement, task_type), {})
    try:
        # As JSON, so that a list may stand for a tuple although tasks are strict.
        task = task_type.model_validate_json(json.dumps(options))
    except ValidationError as error:
        raise ValueError(_describe(error, task_type)) from None
    except TypeError as error:
        raise ValueError(f"options of {name}: {error}") from None
    return {"task": task, "given": options, **entry}


def _parse(value: dict[str, Any]) -> None:
    try:
        parse_compression(value)
    except CompressionError as error:
        raise ValueError(str(error).removeprefix(f"{EXTRA_ARGS_KEY}.")) from None


def _not_twice(entries: list[Any]) -> list[Any]:
    labels = [getattr(entry, "label", None) or repr(entry) for entry in entries]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"{label} is listed twice")
    return entries


class EvalConfig(_Model):
    """An evaluation: every policy at every budget (``full`` once) on the same samples of every task.

    question_agnostic: the context is compressed before the question is read. chat_template: prompts are what a user
    says in the template of the model's tokenizer. compare: pairs of policies, by label; the report has the difference
    of the first to the second, sample by sample.
    """

    model: str | None = None
    policies: Annotated[
        list[Annotated[PolicyEntry, BeforeValidator(_read_policy)]], Field(min_length=1), AfterValidator(_not_twice)
    ]
    budgets: Annotated[list[Budget], AfterValidator(_not_twice)] = []
    tasks: Annotated[
        list[Annotated[TaskEntry, BeforeValidator(_read_task)]], Field(min_length=1), AfterValidator(_not_twice)
    ]
    compare: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = []
    samples: PositiveInt = 100
    seed: Annotated[int, Field(ge=0)] = 0
    question_agnostic: bool = False
    chat_template: bool = False
    sampling: Sampling = Sampling()
    engine: EngineOptions = EngineOptions()
    endpoint: EndpointOptions | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        agnostic = any(self.is_question_agnostic(entry) for entry in self.tasks)
        for policy in self.policies:
            if policy.name != FULL and not self.budgets:
                raise ValueError(f"budgets: {policy.label} needs at least one")
            for budget in self.budgets_of(policy):
                try:
                    _parse(policy.compression(budget, 1 if agnostic and budget is not None else None))
                except ValueError as error:
                    raise ValueError(f"policies: {policy.label} with budget {budget}: {error}") from None
        labels = [policy.label for policy in self.policies]
        for name in (name for pair in self.compare for name in pair):
            if name not in labels:
                raise ValueError(f"compare: {name!r} is no policy of this configuration; allowed: {', '.join(labels)}")
        for entry in self.tasks:
            if entry.task.is_verified and self.sampling.temperature:
                raise ValueError(f"sampling.temperature: {entry.label} compares most probable tokens; allowed: 0")
        if self.endpoint is not None:
            for entry in self.tasks:
                if entry.task.needs_logprobs:
                    raise ValueError(
                        f"tasks: {entry.label} reads log-probabilities of a given continuation, which a server does "
                        "not give; allowed: the engine in this process (no endpoint)"
                    )
            if self.engine != EngineOptions():
                raise ValueError("engine: its options are for the engine in this process; leave them or endpoint out")
        return self

    @property
    def model_path(self) -> str:
        """Folder or hub name of the model in this process."""
        return demo.named(DEMO if self.model is None else self.model)

    def budgets_of(self, policy: PolicyEntry) -> list[int | float] | list[None]:
        return [None] if policy.name == FULL else self.budgets

    def is_question_agnostic(self, entry: TaskEntry) -> bool:
        return self.question_agnostic if entry.question_agnostic is None else entry.question_agnostic

    def in_chat_template(self, entry: TaskEntry) -> bool:
        return self.chat_template if entry.chat_template is None else entry.chat_template

    def samples_of(self, entry: TaskEntry) -> int:
        return entry.samples or self.samples

    def identity(self) -> dict[str, Any]:
        """Everything that results depend on, tasks with all their options, as plain values. Not what is compared."""
        endpoint = None if self.endpoint is None else {"url": self.endpoint.url, "tokenizer": self.endpoint.tokenizer}
        drawn = {} if self.sampling == Sampling() else {"sampling": self.sampling.model_dump()}
        return {
            "model": self.model or (DEMO if endpoint is None else None),
            "policies": [policy.parameters for policy in self.policies],
            "budgets": self.budgets,
            "tasks": [
                {
                    "task": entry.task.name,
                    **entry.task.model_dump(mode="json"),
                    "samples": self.samples_of(entry),
                    "question_agnostic": self.is_question_agnostic(entry),
                    "chat_template": self.in_chat_template(entry),
                    "metric": entry.metric,
                }
                for entry in self.tasks
            ],
            "seed": self.seed,
            "engine": self.engine.arguments(),
            "endpoint": endpoint,
            **drawn,
        }


def read_config(path: Path, overrides: Mapping[str, Any], left_out: Sequence[str] = ()) -> EvalConfig:
    """The configuration in a YAML file, with what the command line says instead.

    overrides: values by dotted name; None: as the file has it. left_out: fields of the file that do not apply.

    Raises:
        CommandError: names the field, the value and what is allowed.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise CommandError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CommandError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise CommandError(f"{path}: must be an object, got {type(data).__name__}")
    for name in left_out:
        data.pop(name, None)
    for name, value in overrides.items():
        if value is not None:
            *outer, last = name.split(".")
            holder = data
            for key in outer:
                holder[key] = dict(holder[key]) if isinstance(holder.get(key), dict) else {}
                holder = holder[key]
            holder[last] = value
    try:
        return EvalConfig.model_validate(data)
    except ValidationError as error:
        raise CommandError(f"{path}: {_describe(error, EvalConfig)}") from None


def _describe(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing that is wrong: field, value, what is allowed."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(_fields_at(model, first["loc"][:-1]))
        return f"{'.'.join(place)}: unknown field; allowed: {allowed}"
    # A field of several types has one error for each: together they say what is allowed.
    depth = next((i for i, part in enumerate(place) if part in ("int", "float", "str", "bool")), len(place))
    place = place[:depth]
    alike = [e for e in error.errors() if [str(part) for part in e["loc"]][:depth] == place]
    message = " or ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in alike))
    field = ".".join(place)
    value = repr(first["input"])
    shown = f", got {value}" if isinstance(first["input"], str | int | float | None) and value not in message else ""
    return f"{field}: {message}{shown}" if field else message


def _fields_at(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """Fields of the object in this place of a configuration or task."""
    inner: dict[Any, type[BaseModel]] = {
        ("engine",): EngineOptions,
        ("endpoint",): EndpointOptions,
        ("sampling",): Sampling,
    }
    return list(inner.get(place, model).model_fields)
