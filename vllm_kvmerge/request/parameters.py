"""A request's compression parameters: the field ``kv_compression``, validated and resolved into parts."""

import json
import math
from collections.abc import Collection, Mapping
from functools import lru_cache, reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from vllm_kvmerge.policies import PARTS, PRESETS, CompressionPolicy, load_plugins
from vllm_kvmerge.policies.allocators import Threshold
from vllm_kvmerge.policies.base import ServedModel
from vllm_kvmerge.policies.choice import PartNames, choose
from vllm_kvmerge.policies.errors import PartError, blamed_on
from vllm_kvmerge.policies.fields import Budget, CommonFields, Prefill, Protect, Refresh, ThresholdBudget
from vllm_kvmerge.request.nesting import MAX_DEPTH, nests_too_deep
from vllm_kvmerge.request.recommended import with_policy

M = TypeVar("M", bound=BaseModel)

EXTRA_ARGS_KEY = "kv_compression"
"""Name of the body field, and of the entry in ``SamplingParams.extra_args`` that carries it."""

FULL = "full"
"""The policy that compresses nothing."""

KEPT_CONTEXT = "context"
"""Field of a server's requests that names a context it keeps. The server puts the context's own fields in its place."""

IN_TOKENS = {"context_messages": "context_tokens", "protect.messages": "tokens"}
"""Fields that name messages of a chat, and those that say the same in tokens."""


PRESSURE_QUERIES = 32
"""How many of the newest queries score the entries of a request that is compressed under pressure, where its tracker
would have scored all."""


PRESSURE_INTERVAL = 4
"""Part of the budget by which a request grows at least before it is compressed again under pressure."""


class CompressionError(ValueError):
    """A request's ``kv_compression`` cannot be honoured.

    param: dotted name of the offending field, such as ``kv_compression.budget``. reason: a short label for metrics.
    status: the HTTP status; 500 if a part is to blame rather than the request.
    """

    def __init__(self, param: str, message: str, reason: str, status: int = 400) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.reason = reason
        self.status = status


def unlocated(field: str, why: str) -> CompressionError:
    """The refusal of messages whose tokens are not known. field: one of ``IN_TOKENS``."""
    return CompressionError(f"{EXTRA_ARGS_KEY}.{field}", f"{why}; allowed: {IN_TOKENS[field]}", "unknown_messages")


OBJECTS: Mapping[str, type[BaseModel]] = {"prefill": Prefill, "refresh": Refresh, "protect": Protect}
"""Common fields that are objects themselves."""

MAX_SHOWN = 80
"""Most characters of a request's value that an error message repeats."""


class RecommendedRequest(CommonFields):
    """No policy: the best that has been measured for the case, with ``context_tokens`` or ``context_messages`` (the
    question comes later) or without, and with ``allocator: uniform`` or without. Fields of that policy may be given
    too."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"not": {"required": ["policy"]}})
    budget: Budget


class FullRequest(BaseModel):
    """No compression."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    policy: Literal["full"]


@lru_cache(maxsize=128)  # of some 0.1 MiB each
def _request_model(policy: str, names: PartNames) -> type[BaseModel]:
    """The pydantic model of ``kv_compression`` for a policy made of these parts: the common fields and the parts'."""
    preset = PRESETS[policy]
    defaults = preset.defaults | {"decode": preset.decode}

    def described(model: type[BaseModel]) -> dict[str, Any]:
        return {
            field: (
                Annotated[info.annotation, *info.metadata, Field(description=info.description, examples=info.examples)],
                defaults.get(field, info.default),
            )
            for field, info in model.model_fields.items()
        }

    fields: dict[str, Any] = {"policy": Literal[policy], **described(CommonFields)}  # type: ignore[valid-type]
    for kind, name in names._asdict().items():
        own = f"The policy's own is {getattr(preset, kind)}"
        if kind == "tracker":
            own += "; where it does not suit the other parts, the first that does is taken"
        fields[kind] = (Literal[*sorted(PARTS[kind])], Field(name, description=f"Part to use as {kind}. {own}."))
    for part in names.classes.values():
        fields |= described(part)
    return create_model(
        "".join(word.capitalize() for word in policy.split("_")) + "Request",
        __config__=ConfigDict(extra="forbid", frozen=True, strict=True),
        __doc__=f"{preset.source}. Another {', '.join(names._fields[:-1])} or {names._fields[-1]} brings its own "
        "parameters, which are then fields of this object too: GET /kvmerge/policies lists them.",
        **fields,
    )


class CompressionConfig(CommonFields):
    """One request's compression, resolved: its common fields and its policy, ``name``, made of parts.

    text: the request's ``kv_compression`` as canonical JSON.
    """

    name: str
    policy: CompressionPolicy
    text: str = ""

    @property
    def names_messages(self) -> bool:
        """True if messages of a chat stand where ``check_prompt`` asks for tokens."""
        return self.context_messages is not None or (self.protect is not None and bool(self.protect.messages))

    @property
    def tracks_decode(self) -> bool:
        """True if scores change, or are added, while the request generates."""
        return self.decode == "bounded" and self.policy.scores_tokens and not self.awaits_pressure

    @property
    def awaits_pressure(self) -> bool:
        """True if nothing is compressed until the pool is short."""
        return self.trigger == "pressure"

    def tracks(self, is_partial: bool) -> bool:
        """True if attention writes scores into the compressed cache. is_partial: while more of the context is computed,
        when trackers of a window score nothing yet."""
        return self.prompt_window == "all" if is_partial else self.tracks_decode

    @property
    def prompt_window(self) -> int | Literal["all"]:
        """Number of the context's last tokens that must be scored as queries; 0 if the policy needs no scores."""
        return self.policy.tracker.prompt_window

    @property
    def query_window(self) -> int:
        """Number of the newest queries to keep, for the policy, for refreshes, and for a context's later chunks."""
        return max(self.policy.query_window, self.refresh_window, self.rescoring_window)

    @property
    def rescoring_window(self) -> int:
        """Number of the newest queries that score a context's entries anew at each compression but the first, or all
        entries at each compression under pressure; 0 if there are none, or attention goes on scoring all queries."""
        if self.awaits_pressure:
            return PRESSURE_QUERIES if self.prompt_window == "all" else self.prompt_window
        return self.prompt_window if self.prefill is not None and isinstance(self.prompt_window, int) else 0

    @property
    def refresh_window(self) -> int:
        """Number of the newest queries that a refresh scores; 0 if there is none, or the policy needs no scores."""
        return self.refresh.queries if self.refresh is not None and self.policy.accumulates_scores else 0

    def for_model(self, model: ServedModel) -> "CompressionConfig":
        """The same with defaults that depend on the model (``Part.model_defaults``) and texts as its tokens, in
        ``text`` as well, so that whoever parses that again need not know the model.

        Raises:
            CompressionError: a text cannot be made tokens.
            PartError: a part cannot say its defaults.
        """
        defaults: dict[str, Any] = {}
        for part in self.policy.parts:
            with blamed_on(part):
                own = part.model_defaults(model)
                defaults |= {name: value for name, value in own.items() if getattr(part, name) is None}
            for name in part.token_fields:
                if isinstance(text := getattr(part, name), str):
                    if (tokens := model.encode(text)) is None:
                        message = f"the model's tokenizer cannot encode {_shown(text)}; allowed: token ids"
                        raise CompressionError(f"{EXTRA_ARGS_KEY}.{name}", message, "invalid_value")
                    defaults[name] = tokens
        if not defaults:
            return self
        config = parse_compression(json.loads(self.text) | defaults)
        assert config is not None
        return config

    @property
    def parameters(self) -> dict[str, Any]:
        """The request's ``kv_compression`` with every default spelled out, as plain values."""
        names = {kind: getattr(self.policy, kind).name for kind in PARTS}
        parts = reduce(or_, (part.model_dump(mode="json") for part in self.policy.parts))
        return {"policy": self.name, **self.model_dump(include=set(CommonFields.model_fields)), **names, **parts}

    @property
    def front_policy(self) -> str:
        """All that a context's front depends on besides its tokens, as canonical JSON text."""
        return _front_policy(self.text)

    def check_tokens_alone(self, is_tokens: bool) -> None:
        """Raises CompressionError if a prompt would have to be repeated that does not consist of tokens alone."""
        if self.policy.tracker.repeats_context and not is_tokens:
            message = f"{self.policy.tracker.name!r} repeats tokens; allowed: prompts of tokens alone"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.tracker", message, "incompatible_prompt")

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Raises CompressionError if the request does not fit a prompt of this length."""
        if self.context_tokens is not None and self.context_tokens > num_prompt_tokens:
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.context_tokens",
                f"{self.context_tokens} tokens are more than the prompt has; allowed: 1 to {num_prompt_tokens}",
                "context_too_long",
            )
        where = "messages are located in requests to /v1/chat/completions alone"
        if self.context_messages is not None:
            raise unlocated("context_messages", f"{self.context_messages} {where}")
        if self.protect is None:
            return
        if self.protect.messages:
            raise unlocated("protect.messages", where)
        end = max((end for _, end in self.protect.tokens), default=0)
        if end > num_prompt_tokens:
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.protect.tokens",
                f"a range ends at {end}, after the prompt; allowed: up to {num_prompt_tokens}",
                "range_too_long",
            )
        self.check_protected(self.resolve_budget(self.resolve_context(num_prompt_tokens)))

    def check_protected(self, budget: int) -> None:
        """Raises CompressionError if the budget has no room for the policy beside the protected tokens."""
        count, least = self.policy.num_protected, self.policy.min_unprotected
        if count and budget < count + least:
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.protect",
                f"{count} tokens are protected, beside which the policy needs {least} entries, but the budget is "
                f"{budget}; allowed: up to {max(0, budget - least)} tokens, or a budget of at least {count + least}",
                "protects_too_much",
            )

    def resolve_context(self, num_prompt_tokens: int) -> int:
        """Number of a prompt's tokens that are compressed first; by default all."""
        return min(self.context_tokens or num_prompt_tokens, num_prompt_tokens)

    def resolve_budget(self, num_context_tokens: int) -> int:
        """Entries per KV head for a prompt, or the context in one, of this length.

        A share smaller than the number of entries that the policy keeps (sinks, recent window) is raised to it.
        ``check_prompt`` refuses one that is smaller than that and what the request protects.
        """
        if isinstance(self.budget, int):
            return self.budget
        # The small term undoes float noise: 0.7 * 10 is 7 entries, not 8.
        return max(math.ceil(self.budget * num_context_tokens - 1e-9), self.policy.min_unprotected)

    def resolve_interval(self, budget: int, block_size: int) -> int:
        """Entries per KV head by which the cache grows from one compression to the next, at least so under pressure."""
        least = budget // PRESSURE_INTERVAL if self.awaits_pressure else 0
        return self.interval or max(block_size, least)

    def never_compresses(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """True if the cache can never hold more entries than the budget, so that plain attention is exact."""
        budget = self.resolve_budget(self.resolve_context(num_prompt_tokens))
        return budget >= num_prompt_tokens + max_tokens

    def is_refreshed(self, num_prompt_tokens: int) -> bool:
        """True if refreshes come: there are some, and something is lost before them."""
        context = self.resolve_context(num_prompt_tokens)
        return self.refresh is not None and (self.decode == "bounded" or context > self.resolve_budget(context))

    def resolve_capacity(self, num_context_tokens: int) -> int | None:
        """Entries per KV head that the cache holds after a compression: room for every layer's and head's budget.
        None: all entries."""
        return self.policy.capacity(self.resolve_budget(num_context_tokens))


@lru_cache(maxsize=512)  # of some 4 KiB each
def _parse_canonical(text: str) -> CompressionConfig | None:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise CompressionError(EXTRA_ARGS_KEY, f"must be an object, got {type(data).__name__}", "wrong_type")
    if KEPT_CONTEXT in data:
        message = "contexts are kept by servers; allowed: in requests to /v1/completions and /v1/chat/completions"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.{KEPT_CONTEXT}", message, "wrong_place")
    if "policy" not in data and "budget" in data:
        data = with_policy(data)
    name = data.get("policy")
    if not isinstance(name, str) or name not in (FULL, *PRESETS):
        allowed = ", ".join(sorted((FULL, *PRESETS)))
        is_given = "policy" in data
        known = set().union(*(one.get("properties", {}) for one in request_schema()["$defs"].values()))
        if not is_given and (unknown := sorted(set(data) - known)):
            param = f"{EXTRA_ARGS_KEY}.{unknown[0][:MAX_SHOWN]}"
            raise CompressionError(param, f"unknown field; allowed: {', '.join(sorted(known))}", "unknown_field")
        what = f"unknown policy {_shown(name)}" if is_given else "no policy and no budget; give either or both"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.policy", f"{what}; allowed: {allowed}", "unknown_policy")
    if name == FULL:
        _validated(FullRequest, data, FULL)
        return None
    if isinstance(data.get("budget"), dict):
        data = _with_threshold(data)
    overrides = _read_overrides(data)
    names = _choose_parts(name, overrides)
    what = name + (" with " + ", ".join(f"{kind} {part}" for kind, part in overrides.items()) if overrides else "")
    request = _validated(_request_model(name, names), data, what)
    parts = {
        kind: _validated(part, {field: getattr(request, field) for field in part.model_fields}, what)
        for kind, part in names.classes.items()
    }
    common = {field: getattr(request, field) for field in CommonFields.model_fields}
    if common["context_messages"] is not None and common["context_tokens"] is not None:
        raise CompressionError(
            f"{EXTRA_ARGS_KEY}.context_messages",
            f"{common['context_messages']} messages are given beside context_tokens; allowed: one of them",
            "given_twice",
        )
    protect: Protect | None = common["protect"]
    policy = CompressionPolicy(**parts, protect=protect.ranges if protect else ())  # type: ignore[arg-type]
    try:
        policy.check_constants()
    except PartError as error:
        raise CompressionError(EXTRA_ARGS_KEY, str(error), "part_failed", status=500) from error
    config = CompressionConfig(name=name, policy=policy, text=text, **common)
    if isinstance(config.budget, int):
        least = policy.min_unprotected
        if config.budget < least:
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.budget",
                f"{config.budget} entries are too few: {what} protects {least - 1} (sinks and recent window); "
                f"allowed: >= {least}",
                "budget_too_small",
            )
        config.check_protected(config.budget)
    if policy.tracker.repeats_context or policy.tracker.predicts_scores:
        _check_scored_once(config)
    if config.prefill is not None and (config.refresh is not None or policy.tracker.repeats_context):
        other = "a refresh" if config.refresh is not None else f"tracker {policy.tracker.name!r}"
        message = f"chunks with {other}, which needs the whole context; allowed: null"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.prefill", message, "incompatible_fields")
    if config.positions == "cache":
        _check_positions(config)
    if config.awaits_pressure:
        _check_pressure(config)
    if config.reuse is not None and config.refresh is not None:
        message = f"{config.reuse!r} with a refresh, whose complete cache ends with the request; allowed: null"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.reuse", message, "incompatible_fields")
    return config


@lru_cache(maxsize=512)
def _front_policy(text: str) -> str:
    config = _parse_canonical(text)
    assert config is not None
    parameters = config.parameters
    # How long the context is, and what becomes of the cache in the end, say nothing of the front.
    for field in ("context_tokens", "context_messages", "reuse"):
        del parameters[field]
    return json.dumps(parameters, sort_keys=True)


def _check_pressure(config: CompressionConfig) -> None:
    """Refuses what needs to know when the request is compressed."""
    for field in ("context_tokens", "context_messages", "prefill", "refresh", "reuse"):
        if getattr(config, field) is not None:
            message = "a request with trigger 'pressure' may be compressed at any time, or never; allowed: null"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.{field}", message, "incompatible_fields")
    tracker = config.policy.tracker
    if tracker.repeats_context or tracker.predicts_scores:
        message = f"trigger 'pressure' with tracker {tracker.name!r}, which has no scores then; allowed: 'budget'"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.trigger", message, "incompatible_parts")


def _check_scored_once(config: CompressionConfig) -> None:
    """Refuses compressions for which a tracker that scores tokens once has no scores."""
    repeats = config.policy.tracker.repeats_context
    what = "the context alone, once" if repeats else "tokens once"
    tracker = f"tracker {config.policy.tracker.name!r} scores {what}"
    if repeats and config.decode != "grow":
        message = f"{tracker}, got {config.decode!r}; allowed: 'grow'"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.decode", message, "incompatible_parts")
    if config.refresh is not None:
        raise CompressionError(f"{EXTRA_ARGS_KEY}.refresh", f"{tracker}; allowed: null", "incompatible_parts")


def _check_positions(config: CompressionConfig) -> None:
    """Refuses positions of the cache where something needs those of the text, or the cache is not bounded."""
    rotating = next((part for part in config.policy.parts if part.needs_rotation), None)
    obstacle = None
    if config.refresh is not None:
        obstacle = "a refresh, whose complete cache has the text's positions"
    elif config.awaits_pressure:
        obstacle = f"trigger {config.trigger!r}, which may keep all entries"
    elif rotating is not None:
        obstacle = f"{rotating.name!r}, which turns queries or keys back by the text's positions"
    elif config.policy.capacity(config.policy.min_budget) is None:
        obstacle = f"allocator {config.policy.allocator.name!r}, some of whose layers keep all entries"
    if obstacle is not None:
        message = f"{config.positions!r} with {obstacle}; allowed: 'text'"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.positions", message, "incompatible_fields")


def _with_threshold(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the allocator that a budget of a threshold stands for. Raises CompressionError."""
    try:
        budget = ThresholdBudget.model_validate(data["budget"])
    except ValidationError as error:
        raise _as_compression_error(error, ThresholdBudget, "with a threshold", "budget.") from None
    decided = {"allocator": Threshold.name, "threshold": budget.threshold}
    for field, value in decided.items():
        if data.get(field, value) != value:
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.{field}",
                f"budget.threshold decides what each head keeps, got {_shown(data[field])}; allowed: {value}",
                "incompatible_parts",
            )
    return {**data, **decided, "budget": budget.max}


def _read_overrides(data: Mapping[str, Any]) -> dict[str, str]:
    """The parts that a request names, by kind."""
    overrides = {kind: data[kind] for kind in PARTS if kind in data}
    for kind, name in overrides.items():
        if not isinstance(name, str) or name not in PARTS[kind]:
            allowed = ", ".join(sorted(PARTS[kind]))
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.{kind}", f"unknown {kind} {_shown(name)}; allowed: {allowed}", "unknown_part"
            )
    return overrides


def _choose_parts(policy: str, overrides: Mapping[str, str]) -> PartNames:
    preset = PRESETS[policy]
    try:
        return choose(preset, overrides)
    except ValueError as error:
        misfit = str(error)
    # Blame a part that could be replaced so that the rest fits.
    for kind in ("merger", "selector", "allocator", "tracker"):
        fitting = [name for name in PARTS[kind] if _fit(policy, {**overrides, kind: name})] if kind in overrides else []
        if fitting:
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.{kind}",
                f"{misfit}; allowed as {kind}: {', '.join(sorted(fitting))}",
                "incompatible_parts",
            )
    raise CompressionError(EXTRA_ARGS_KEY, misfit, "incompatible_parts")


def _fit(policy: str, overrides: Mapping[str, str]) -> bool:
    try:
        choose(PRESETS[policy], overrides)
    except ValueError:
        return False
    return True


def _validated(model: type[M], data: Mapping[str, Any], what: str) -> M:
    """``data`` as a ``model``; ``what`` names the policy for the message."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _as_compression_error(error, model, what) from None


def _as_compression_error(
    error: ValidationError, model: type[BaseModel], what: str, within: str = ""
) -> CompressionError:
    """``within``: the field, with a point, that holds the ``model``."""
    first = error.errors()[0]
    inner = OBJECTS.get(str(first["loc"][0]), Refresh) if first["loc"] else Refresh
    # Within the common fields' own objects, not within the alternatives of a type.
    nested = [part for part in first["loc"][1:] if part in inner.model_fields or first["type"] == "extra_forbidden"]
    field = within + ".".join(str(part)[:MAX_SHOWN] for part in [*first["loc"][:1], *nested])
    param = f"{EXTRA_ARGS_KEY}.{field}" if field else EXTRA_ARGS_KEY
    if first["type"] == "extra_forbidden":
        allowed = ", ".join((inner if nested else model).model_fields)
        return CompressionError(param, f"unknown field for policy {what}; allowed: {allowed}", "unknown_field")
    # A field of several types has one error for each, and together they say what is allowed.
    messages = [e["msg"].removeprefix("Value error, ") for e in error.errors() if e["loc"][:1] == first["loc"][:1]]
    message = " or ".join(dict.fromkeys(messages))
    reason = "wrong_type" if first["type"].endswith("_type") else "invalid_value"
    return CompressionError(param, f"{message}, got {_shown(first['input'])}", reason)


def _shown(value: Any) -> str:
    """The value as shown in an error message, shortened so that a request cannot inflate it."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def parse_compression(value: Any) -> CompressionConfig | None:
    """Resolves a ``kv_compression`` value (object, or its JSON text); None stands for full attention.

    Raises:
        CompressionError: names the field, the value and what is allowed.
    """
    if value is None:
        return None
    load_plugins()
    if isinstance(value, str):
        _check_depth(value)
        try:
            value = json.loads(value)
        except ValueError as error:  # also a number of more digits than Python reads
            raise CompressionError(EXTRA_ARGS_KEY, f"is not valid JSON: {error}", "wrong_type") from None
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CompressionError(EXTRA_ARGS_KEY, f"is not JSON: {error}", "wrong_type") from None
    _check_depth(text)
    return _parse_canonical(text)


def _check_depth(text: str) -> None:
    if nests_too_deep(text.encode("utf-8", "surrogatepass")):
        raise CompressionError(EXTRA_ARGS_KEY, f"nests too deep; allowed: {MAX_DEPTH} levels", "too_deep")


def compression(policy: str | None = None, **parameters: Any) -> dict[str, Any]:
    """``SamplingParams(extra_args=compression("keepkv", budget=0.2))``: checked parameters for offline use.

    policy: its name; None: the best that has been measured for the case, by a budget.

    Raises:
        CompressionError: (a ValueError) as for a request to the server.
    """
    value = parameters if policy is None else {"policy": policy, **parameters}
    parse_compression(value)
    return {EXTRA_ARGS_KEY: json.dumps(value)}


def field_schema(policies: Collection[str] | None = None) -> dict[str, Any]:
    """``request_schema``, or an object without a policy."""
    schema = request_schema(policies)
    own = TypeAdapter(RecommendedRequest).json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs") | own.pop("$defs")
    return {"anyOf": [schema, own], "$defs": definitions}


def request_schema(policies: Collection[str] | None = None) -> dict[str, Any]:
    """JSON schema of the body field ``kv_compression``: one object per policy, told apart by ``policy``.

    policies: those to describe, besides ``full``; None: all.

    An object lists the fields of the policy's own parts. It does not forbid others, because a request may name other
    parts, which bring their own; ``parse_compression`` refuses fields that the parts do not know.
    """
    load_plugins()
    described = [name for name in PRESETS if policies is None or name in policies]
    models = [FullRequest, *(_request_model(name, PartNames.of(PRESETS[name])) for name in described)]
    union: Any = Annotated[reduce(or_, models), Field(discriminator="policy")]
    schema = TypeAdapter(union).json_schema(ref_template="#/components/schemas/{model}")
    for name, reference in schema["discriminator"]["mapping"].items():
        if name != FULL:
            del schema["$defs"][reference.rpartition("/")[2]]["additionalProperties"]
    return schema
