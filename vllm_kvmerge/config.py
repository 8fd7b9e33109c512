"""A request's compression parameters: the field ``kv_compression``, validated and resolved into parts."""

import json
import math
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    TypeAdapter,
    ValidationError,
    create_model,
)

from vllm_kvmerge.policies import ALLOCATORS, MERGERS, PRESETS, SELECTORS, TRACKERS, CompressionPolicy, Preset
from vllm_kvmerge.policies.registry import DecodeMode

EXTRA_ARGS_KEY = "kv_compression"
"""Name of the body field, and of the entry in ``SamplingParams.extra_args`` that carries it."""

FULL = "full"
"""The policy that compresses nothing."""


class CompressionError(ValueError):
    """A request's ``kv_compression`` cannot be honoured.

    param: dotted name of the offending field, such as ``kv_compression.budget``. reason: a short label for metrics.
    """

    def __init__(self, param: str, message: str, reason: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.reason = reason


def _check_budget(budget: int | float) -> int | float:
    if isinstance(budget, int) and budget >= 1:
        return budget
    if isinstance(budget, float) and 0.0 < budget <= 1.0:
        return budget
    raise ValueError(
        "must be an integer >= 1 (entries per KV head) or a float in (0, 1] (share of the prompt's tokens)"
    )


Budget = Annotated[
    StrictInt | StrictFloat,
    AfterValidator(_check_budget),
    Field(description="Integer >= 1: entries per KV head. Float in (0, 1]: that share of the prompt, rounded up."),
]


class FullRequest(BaseModel):
    """No compression."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    policy: Literal["full"]


def _part_classes(preset: Preset) -> dict[str, type[BaseModel]]:
    return {
        "tracker": TRACKERS[preset.tracker],
        "allocator": ALLOCATORS[preset.allocator],
        "selector": SELECTORS[preset.selector],
        "merger": MERGERS[preset.merger],
    }


def _request_model(preset: Preset) -> type[BaseModel]:
    """The pydantic model of ``kv_compression`` for one preset: the common fields and those of its parts."""
    fields: dict[str, Any] = {
        "policy": (Literal[preset.name], ...),  # type: ignore[name-defined]
        "budget": (Budget, 0.2),
        "interval": (
            Annotated[int, Field(strict=True, ge=1)] | None,
            Field(None, description="Live entries above the budget that trigger a compression; default: one block."),
        ),
        "decode": (DecodeMode, preset.decode),
    }
    for part in _part_classes(preset).values():
        for name, info in part.model_fields.items():
            default = preset.defaults.get(name, info.default)
            description = Field(description=info.description)
            fields[name] = (Annotated[info.annotation, *info.metadata, description], default)  # type: ignore[valid-type]
    return create_model(
        "".join(word.capitalize() for word in preset.name.split("_")) + "Request",
        __config__=ConfigDict(extra="forbid", frozen=True, strict=True),
        __doc__=f"{preset.source}.",
        **fields,
    )


REQUEST_MODELS: dict[str, type[BaseModel]] = {FULL: FullRequest} | {
    name: _request_model(preset) for name, preset in PRESETS.items()
}


class CompressionConfig(BaseModel):
    """One request's compression, resolved: what to run, how large, how often."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    name: str
    budget: int | float
    interval: int | None
    decode: DecodeMode
    policy: CompressionPolicy

    @property
    def tracks_decode(self) -> bool:
        """Whether attention must update scores while the request generates."""
        return self.decode == "bounded" and self.policy.needs_scores

    @property
    def prompt_window(self) -> int | Literal["all"]:
        """How many of the last prompt tokens' queries must be scored; 0 where the policy needs no scores."""
        return getattr(self.policy.tracker, "score_window", 0)

    def resolve_budget(self, num_prompt_tokens: int) -> int:
        """Entries per KV head for a prompt of this length.

        A share that comes out smaller than what the policy protects (sinks, recent window) is raised to it.
        """
        if isinstance(self.budget, int):
            return self.budget
        # The small term undoes float noise: 0.7 * 10 is 7 entries, not 8.
        return max(math.ceil(self.budget * num_prompt_tokens - 1e-9), self.policy.min_budget)


@lru_cache(maxsize=4096)
def _parse_canonical(text: str) -> CompressionConfig | None:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise CompressionError(EXTRA_ARGS_KEY, f"must be an object, got {type(data).__name__}", "wrong_type")
    name = data.get("policy")
    if not isinstance(name, str) or name not in REQUEST_MODELS:
        allowed = ", ".join(sorted(REQUEST_MODELS))
        raise CompressionError(
            f"{EXTRA_ARGS_KEY}.policy", f"unknown policy {name!r}; allowed: {allowed}", "unknown_policy"
        )
    model = REQUEST_MODELS[name]
    try:
        request = model.model_validate(data)
    except ValidationError as error:
        raise _as_compression_error(error, model) from None
    if name == FULL:
        return None
    preset, values = PRESETS[name], request.model_dump()
    parts = {
        kind: part.model_validate({field: values[field] for field in part.model_fields})
        for kind, part in _part_classes(preset).items()
    }
    policy = CompressionPolicy(**parts)  # type: ignore[arg-type]
    budget = values["budget"]
    if isinstance(budget, int) and budget < policy.min_budget:
        raise CompressionError(
            f"{EXTRA_ARGS_KEY}.budget",
            f"{budget} entries are too few: {name} protects {policy.min_budget - 1} (sinks and recent window); "
            f"allowed: >= {policy.min_budget}",
            "budget_too_small",
        )
    return CompressionConfig(
        name=name, budget=budget, interval=values["interval"], decode=values["decode"], policy=policy
    )


def _as_compression_error(error: ValidationError, model: type[BaseModel]) -> CompressionError:
    first = error.errors()[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    param = f"{EXTRA_ARGS_KEY}.{field}" if field else EXTRA_ARGS_KEY
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(model.model_fields)
        return CompressionError(
            param, f"unknown field for policy {_policy_name(model)}; allowed: {allowed}", "unknown_field"
        )
    # A field of several types has one error for each: together they say what is allowed.
    messages = [e["msg"].removeprefix("Value error, ") for e in error.errors() if e["loc"][:1] == first["loc"][:1]]
    message = " or ".join(dict.fromkeys(messages))
    reason = "wrong_type" if first["type"].endswith("_type") else "invalid_value"
    return CompressionError(param, f"{message}, got {first['input']!r}", reason)


def _policy_name(model: type[BaseModel]) -> str:
    return next(name for name, candidate in REQUEST_MODELS.items() if candidate is model)


def parse_compression(value: Any) -> CompressionConfig | None:
    """Resolves a ``kv_compression`` value (object, or its JSON text); None stands for full attention.

    Raises:
        CompressionError: names the field, the value and what is allowed.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise CompressionError(EXTRA_ARGS_KEY, f"is not valid JSON: {error}", "wrong_type") from None
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CompressionError(EXTRA_ARGS_KEY, f"is not JSON: {error}", "wrong_type") from None
    return _parse_canonical(text)


def compression(policy: str, **parameters: Any) -> dict[str, Any]:
    """``SamplingParams(extra_args=compression("keepkv", budget=0.2))``: checked parameters for offline use.

    Raises:
        CompressionError: (a ValueError) as for a request to the server.
    """
    value = {"policy": policy, **parameters}
    parse_compression(value)
    return {EXTRA_ARGS_KEY: json.dumps(value)}


def request_schema() -> dict[str, Any]:
    """JSON schema of the body field ``kv_compression``: one object per policy, told apart by ``policy``."""
    models = tuple(REQUEST_MODELS.values())
    union: Any = Annotated[models[0] if len(models) == 1 else _union(models), Field(discriminator="policy")]
    return TypeAdapter(union).json_schema(ref_template="#/components/schemas/{model}")


def _union(models: tuple[type[BaseModel], ...]) -> Any:
    result: Any = models[0]
    for model in models[1:]:
        result = result | model
    return result
