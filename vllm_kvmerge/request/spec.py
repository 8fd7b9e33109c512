"""A request's compression, ``CompressionSpec``: the field ``kv_compression``, checked and resolved into a policy."""

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import cached_property, reduce
from operator import or_
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from vllm_kvmerge.ops.coded import Coding
from vllm_kvmerge.policies import PARTS, PRESETS, CompressionPolicy, load_plugins
from vllm_kvmerge.policies.allocators import Threshold
from vllm_kvmerge.policies.base import ServedModel
from vllm_kvmerge.policies.choice import choose, replaceable
from vllm_kvmerge.policies.errors import PartError, blamed_on
from vllm_kvmerge.policies.fields import CommonFields, ThresholdBudget
from vllm_kvmerge.policies.selectors.fused import Member
from vllm_kvmerge.request.nesting import MAX_DEPTH, nests_too_deep
from vllm_kvmerge.request.recommended import with_policy
from vllm_kvmerge.request.schema import FULL as FULL
from vllm_kvmerge.request.schema import FullRequest, request_model, request_schema

M = TypeVar("M", bound=BaseModel)

EXTRA_ARGS_KEY = "kv_compression"
"""Name of the body field, and of the entry in ``SamplingParams.extra_args`` that carries its text."""

KEPT_CONTEXT = "context"
"""Field of a server's requests that names a context it keeps. The server puts the context's own fields in its place."""

AUTO = "auto"
"""Budget of a context that a server is to choose, and a policy that it is to choose with it."""

IN_TOKENS = {"context_messages": "context_tokens", "protect.messages": "tokens"}
"""Fields that name messages of a chat, and those that say the same in tokens."""

PRESSURE_QUERIES = 32
"""Newest queries that score entries under pressure, where the tracker would have scored all."""

PRESSURE_INTERVAL = 4
"""Part of the budget by which a request grows at least before it is compressed again under pressure."""

MAX_SHOWN = 80
"""Most characters of a request's value that an error message repeats."""

MAX_SPECS = 512
"""Specs that a process keeps, of some 4 KiB each."""


class CompressionError(ValueError):
    """A request's ``kv_compression`` cannot be honoured.

    param: dotted name of the offending field, such as ``kv_compression.budget``. reason: a short label for metrics.
    status: the HTTP status; 500 if a part is to blame rather than the request.
    """

    def __init__(self, param: str, message: str, reason: str, status: int = 400) -> None:
        super().__init__(f"{param}: {message}")
        self.param, self.reason, self.status = param, reason, status


def refusal(field: str, reason: str, what: str, allowed: str) -> CompressionError:
    """The refusal of a field within ``kv_compression``; no name: of the whole."""
    param = f"{EXTRA_ARGS_KEY}.{field}" if field else EXTRA_ARGS_KEY
    return CompressionError(param, f"{what}; allowed: {allowed}", reason)


Obstacle = tuple[object, str, str, str, str]
"""Whether it is there, and then the arguments of ``refusal``."""


def refuse_first(obstacles: Iterable[Obstacle]) -> None:
    """Raises CompressionError for the first obstacle that is there."""
    for is_there, field, reason, what, allowed in obstacles:
        if is_there:
            raise refusal(field, reason, what, allowed)


def unlocated(field: str, why: str) -> CompressionError:
    """The refusal of messages whose tokens are not known. field: one of ``IN_TOKENS``."""
    return refusal(field, "unknown_messages", why, IN_TOKENS[field])


class CompressionSpec(CommonFields):
    """One request's compression: its common fields, and its policy, called ``name``, made of parts.

    text: the request's ``kv_compression`` as canonical JSON, which travels between processes.
    """

    name: str
    policy: CompressionPolicy
    text: str = ""

    @classmethod
    def of(cls, text: str) -> "CompressionSpec":
        """The spec of the ``text`` of one: a look-up, in a process that has seen it before."""
        spec = parse_compression(text)
        assert spec is not None
        return spec

    @property
    def names_messages(self) -> bool:
        """True if messages of a chat stand where ``check_prompt`` asks for tokens."""
        return self.context_messages is not None or (self.protect is not None and bool(self.protect.messages))

    @property
    def is_verified(self) -> bool:
        """True if the answer's tokens are to be compared with what the full cache picks."""
        return self.verify or self.min_agreement is not None

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

    def for_model(self, model: ServedModel) -> "CompressionSpec":
        """The same with defaults that depend on the model (``Part.model_defaults``) and texts as its tokens, in
        ``text`` as well, so that whoever parses that again need not know the model.

        Raises:
            CompressionError: a text cannot be made tokens.
            PartError: a part cannot say its defaults.
        """
        return _kept((self.text, model), lambda: self._resolved(model)) or self

    def _resolved(self, model: ServedModel) -> "CompressionSpec | None":
        """``for_model``; None: nothing depends on the model."""
        value, defaults = json.loads(self.text), dict[str, Any]()
        if model.is_calibrated and "policy" not in value:
            named = CompressionSpec.of(_canonical(with_policy(value, is_calibrated=True)))
            return named.for_model(model)
        for part in self.policy.parts:
            with blamed_on(part):
                own = part.model_defaults(model)
                defaults |= {name: value for name, value in own.items() if getattr(part, name) is None}
            for name in part.token_fields:
                if isinstance(text := getattr(part, name), str):
                    if (tokens := model.encode(text)) is None:
                        what = f"the model's tokenizer cannot encode {_shown(text)}"
                        raise refusal(name, "invalid_value", what, "token ids")
                    defaults[name] = tokens
        return parse_compression(value | defaults) if defaults else None

    @property
    def parameters(self) -> dict[str, Any]:
        """The request's ``kv_compression`` with every default spelled out, as plain values."""
        names = {kind: getattr(self.policy, kind).name for kind in PARTS}
        parts = reduce(or_, (part.model_dump(mode="json") for part in self.policy.parts))
        return {"policy": self.name, **self.model_dump(include=set(CommonFields.model_fields)), **names, **parts}

    @cached_property
    def front_policy(self) -> str:
        """All that a context's front depends on besides its tokens, as canonical JSON text."""
        # How long the context is, and what becomes of the cache in the end, say nothing of the front.
        irrelevant = ("context_tokens", "context_messages", "reuse", "verify", "min_agreement")
        parameters = {name: value for name, value in self.parameters.items() if name not in irrelevant}
        return json.dumps(parameters, sort_keys=True)

    def check_tokens_alone(self, is_tokens: bool) -> None:
        """Raises CompressionError if a prompt would have to be repeated that does not consist of tokens alone."""
        if self.policy.tracker.repeats_context and not is_tokens:
            what = f"{self.policy.tracker.name!r} repeats tokens"
            raise refusal("tracker", "incompatible_prompt", what, "prompts of tokens alone")

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Raises CompressionError if the request does not fit a prompt of this length."""
        if (self.context_tokens or 0) > num_prompt_tokens:
            what = f"{self.context_tokens} tokens are more than the prompt has"
            raise refusal("context_tokens", "context_too_long", what, f"1 to {num_prompt_tokens}")
        where = "messages are located in requests to /v1/chat/completions alone"
        if self.context_messages is not None:
            raise unlocated("context_messages", f"{self.context_messages} {where}")
        if self.protect is not None:
            if self.protect.messages:
                raise unlocated("protect.messages", where)
            if (end := max((end for _, end in self.protect.tokens), default=0)) > num_prompt_tokens:
                what = f"a range ends at {end}, after the prompt"
                raise refusal("protect.tokens", "range_too_long", what, f"up to {num_prompt_tokens}")
            self.check_protected(self.resolve_budget(self.resolve_context(num_prompt_tokens)))

    def check_protected(self, budget: int) -> None:
        """Raises CompressionError if the budget has no room for the policy beside the protected tokens."""
        count, least = self.policy.num_protected, self.policy.min_unprotected
        if count and budget < count + least:
            what = f"{count} tokens are protected, beside which the policy needs {least} entries, but the budget is"
            allowed = f"up to {max(0, budget - least)} tokens, or a budget of at least {count + least}"
            raise refusal("protect", "protects_too_much", f"{what} {budget}", allowed)

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

    def resolve_capacity(self, num_context_tokens: int) -> int | None:
        """Entries per KV head that the cache holds after a compression: room for every layer's and head's budget.
        None: all entries."""
        return self.policy.capacity(self.resolve_budget(num_context_tokens))

    def never_compresses(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """True if the cache can never hold more entries than the budget, all as they are: plain attention is exact."""
        budget = self.resolve_budget(self.resolve_context(num_prompt_tokens))
        return self.front is None and budget >= num_prompt_tokens + max_tokens

    def coding(self, num_tokens: int, block_size: int) -> Coding | None:
        """How the front of so many tokens is stored; None: as the cache is, like the tokens that follow, if it has to
        share its only block with them."""
        return self.front if num_tokens >= block_size else None

    def is_refreshed(self, num_prompt_tokens: int) -> bool:
        """True if refreshes come: there are some, and something is lost before them."""
        context = self.resolve_context(num_prompt_tokens)
        return self.refresh is not None and (self.decode == "bounded" or context > self.resolve_budget(context))


_specs: OrderedDict[Hashable, tuple[CompressionSpec | None]] = OrderedDict()
"""The newest specs by canonical text; for a model, by text and model."""


def _kept(key: Hashable, make: Callable[[], CompressionSpec | None]) -> CompressionSpec | None:
    if (found := _specs.get(key)) is None:
        found = _specs[key] = (make(),)
        if len(_specs) > MAX_SPECS:
            _specs.popitem(last=False)
    return found[0]


def parse_compression(value: Any) -> CompressionSpec | None:
    """The spec of a ``kv_compression`` value (object, or its JSON text); None: no compression.

    A process makes one object for each canonical text, which is then looked up without being parsed again.

    Raises:
        CompressionError: names the field, the value and what is allowed.
    """
    if value is None:
        return None
    text = value if isinstance(value, str) and value in _specs else _canonical(value)
    return _kept(text, lambda: _parse(text))


def text_of(spec: CompressionSpec | None) -> str:
    """The canonical JSON text that ``parse_compression`` makes the spec of."""
    return json.dumps({"policy": FULL}) if spec is None else spec.text


def compression(policy: str | None = None, **parameters: Any) -> dict[str, Any]:
    """``SamplingParams(extra_args=compression("keepkv", budget=0.2))``: checked parameters for offline use.

    policy: its name; None: the best that has been measured for the case, by a budget.

    Raises:
        CompressionError: (a ValueError) as for a request to the server.
    """
    value = parameters if policy is None else {"policy": policy, **parameters}
    return {EXTRA_ARGS_KEY: text_of(parse_compression(value))}


def _canonical(value: Any) -> str:
    """The value as canonical JSON text. Raises CompressionError if it is not JSON."""
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
    return text


def _check_depth(text: str) -> None:
    if nests_too_deep(text.encode("utf-8", "surrogatepass")):
        raise refusal("", "too_deep", "nests too deep", f"{MAX_DEPTH} levels")


def _parse(text: str) -> CompressionSpec | None:
    load_plugins()
    data = json.loads(text)
    if not isinstance(data, dict):
        raise CompressionError(EXTRA_ARGS_KEY, f"must be an object, got {type(data).__name__}", "wrong_type")
    if KEPT_CONTEXT in data:
        where = "in requests to /v1/completions and /v1/chat/completions"
        raise refusal(KEPT_CONTEXT, "wrong_place", "contexts are kept by servers", where)
    if data.get("budget") == AUTO:
        allowed = "context_messages in requests to /v1/chat/completions, POST /v1/kvmerge/contexts, or a number"
        raise refusal("budget", "wrong_place", f"{AUTO!r} is for contexts", allowed)
    if "policy" not in data and "budget" in data:
        data = with_policy(data)
    name = data.get("policy")
    if name == FULL:
        _validated(FullRequest, data, FULL)
        return None
    if not isinstance(name, str) or name not in PRESETS:
        raise _unknown_policy(data)
    if isinstance(data.get("budget"), dict):
        data = _with_threshold(data)
    overrides = {kind: data[kind] for kind in PARTS if kind in data}
    for kind, part in overrides.items():
        if not isinstance(part, str) or part not in PARTS[kind]:
            raise refusal(kind, "unknown_part", f"unknown {kind} {_shown(part)}", ", ".join(sorted(PARTS[kind])))
    try:
        names = choose(PRESETS[name], overrides)
    except ValueError as misfit:
        kind, fitting = replaceable(PRESETS[name], overrides)
        param, other = (f"{EXTRA_ARGS_KEY}.{kind}", f"; allowed as {kind}: {fitting}") if kind else (EXTRA_ARGS_KEY, "")
        raise CompressionError(param, f"{misfit}{other}", "incompatible_parts") from None
    what = name + (" with " + ", ".join(f"{kind} {part}" for kind, part in overrides.items()) if overrides else "")
    request = _validated(request_model(name, names), data, what)
    common = {field: getattr(request, field) for field in CommonFields.model_fields}
    if common["context_messages"] is not None and common["context_tokens"] is not None:
        given = f"{common['context_messages']} messages are given beside context_tokens"
        raise refusal("context_messages", "given_twice", given, "one of them")
    parts: dict[str, Any] = {
        kind: _validated(part, {field: getattr(request, field) for field in part.model_fields}, what)
        for kind, part in names.classes.items()
    }
    protect = common["protect"]
    try:
        policy = CompressionPolicy(**parts, protect=protect.ranges if protect else ())
    except ValidationError as error:  # the selector fits, but not all of its members
        why = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        fitting = ", ".join(one for one in get_args(Member) if names._replace(selector=one).misfit() is None)
        raise refusal("of", "incompatible_parts", why, fitting) from None
    try:
        policy.check_constants()
    except PartError as error:
        raise CompressionError(EXTRA_ARGS_KEY, str(error), "part_failed", status=500) from error
    spec = CompressionSpec(name=name, policy=policy, text=text, **common)
    if isinstance(spec.budget, int):
        if spec.budget < (least := policy.min_unprotected):
            few = f"{spec.budget} entries are too few: {what} protects {least - 1} (sinks and recent window)"
            raise refusal("budget", "budget_too_small", few, f">= {least}")
        spec.check_protected(spec.budget)
    refuse_first(_conflicts(spec))
    return spec


def _unknown_policy(data: Mapping[str, Any]) -> CompressionError:
    what = f"unknown policy {_shown(data.get('policy'))}"
    if "policy" not in data:
        what = "no policy and no budget; give either or both"
        known = set().union(*(one.get("properties", {}) for one in request_schema()["$defs"].values()))
        if unknown := sorted(set(data) - known):
            return refusal(unknown[0][:MAX_SHOWN], "unknown_field", "unknown field", ", ".join(sorted(known)))
    return refusal("policy", "unknown_policy", what, ", ".join(sorted((FULL, *PRESETS))))


def _with_threshold(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the allocator that a budget of a threshold stands for. Raises CompressionError."""
    budget = _validated(ThresholdBudget, data["budget"], "with a threshold", "budget.")
    decided = {"allocator": Threshold.name, "threshold": budget.threshold}
    for field, value in decided.items():
        if data.get(field, value) != value:
            what = f"budget.threshold decides what each head keeps, got {_shown(data[field])}"
            raise refusal(field, "incompatible_parts", what, str(value))
    return {**data, **decided, "budget": budget.max}


def _conflicts(spec: CompressionSpec) -> list[Obstacle]:
    """Fields and parts that do not go together."""
    policy, tracker, named = spec.policy, spec.policy.tracker, f"tracker {spec.policy.tracker.name!r}"
    in_cache, is_refreshed, is_pressed = spec.positions == "cache", spec.refresh is not None, spec.awaits_pressure
    repeats = tracker.repeats_context or tracker.reads_ahead
    scores_once = repeats or tracker.predicts_scores
    scores = f"{named} scores {'the context alone, once' if repeats else 'tokens once'}"
    whole = "which needs the whole context"
    pressed = "a request with trigger 'pressure' may be compressed at any time, or never"
    fields, parts = "incompatible_fields", "incompatible_parts"
    # fmt: off
    return [
        (repeats and spec.decode != "grow", "decode", parts, f"{scores}, got {spec.decode!r}", "'grow'"),
        (scores_once and is_refreshed, "refresh", parts, scores, "null"),
        *((spec.front and is_there, field, fields, f"{what} with front {spec.front!r}, which is written once", allowed)
          for is_there, field, what, allowed in (
            (spec.decode != "grow", "decode", repr(spec.decode), "'grow'"),
            (spec.prefill, "prefill", "chunks", "null"),
            (is_refreshed, "refresh", "a refresh", "null"),
            (spec.reuse, "reuse", repr(spec.reuse), "null"),
            (is_pressed, "trigger", "'pressure'", "'budget'"),
            (in_cache, "positions", "'cache'", "'text'"),
        )),
        (spec.prefill and is_refreshed, "prefill", fields, f"chunks with a refresh, {whole}", "null"),
        (spec.prefill and repeats, "prefill", fields, f"chunks with {named}, {whole}", "null"),
        *((in_cache and is_there, "positions", fields, f"'cache' with {what}", "'text'") for is_there, what in (
            (is_refreshed, "a refresh, whose complete cache has the text's positions"),
            (is_pressed, "trigger 'pressure', which may keep all entries"),
            *((part.needs_rotation, f"{part.name!r}, which turns queries or keys back by the text's positions")
              for part in policy.parts),
            (in_cache and policy.capacity(policy.min_budget) is None,
             f"allocator {policy.allocator.name!r}, some of whose layers keep all entries"),
        )),
        *((is_pressed and getattr(spec, field) is not None, field, fields, pressed, "null")
          for field in ("context_tokens", "context_messages", "prefill", "refresh", "reuse")),
        (is_pressed and scores_once,
         "trigger", parts, f"trigger 'pressure' with {named}, which has no scores then", "'budget'"),
        (spec.reuse and tracker.reads_ahead, "reuse", fields, f"{spec.reuse!r} with {named}, {whole}", "null"),
        (spec.reuse and is_refreshed,
         "reuse", fields, f"{spec.reuse!r} with a refresh, whose complete cache ends with the request", "null"),
    ]  # fmt: on


def _validated(model: type[M], data: Mapping[str, Any], what: str, within: str = "") -> M:
    """``data`` as a ``model``. what: names the policy for the message. within: the field, with a point, that holds it.

    Raises:
        CompressionError: for the first field that is wrong.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = error.errors()
    first, place = errors[0], errors[0]["loc"][:1]
    # Within fields that are objects, not within the alternatives of a type.
    info = model.model_fields.get(str(*place))
    types = (info.annotation, *get_args(info.annotation)) if info else ()
    inner: Collection[str] = next((one.model_fields for one in types if hasattr(one, "model_fields")), ())
    nested = [part for part in first["loc"][1:] if part in inner or first["type"] == "extra_forbidden"]
    field = within + ".".join(str(part)[:MAX_SHOWN] for part in (*place, *nested))
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(inner if nested else model.model_fields)
        raise refusal(field, "unknown_field", f"unknown field for policy {what}", allowed)
    # A field of several types has one error for each, and together they say what is allowed.
    messages = (one["msg"].removeprefix("Value error, ") for one in errors if one["loc"][:1] == place)
    reason = "wrong_type" if first["type"].endswith("_type") else "invalid_value"
    param = f"{EXTRA_ARGS_KEY}.{field}" if field else EXTRA_ARGS_KEY
    raise CompressionError(param, f"{' or '.join(dict.fromkeys(messages))}, got {_shown(first['input'])}", reason)


def _shown(value: Any) -> str:
    """The value as shown in an error message, shortened so that a request cannot inflate it."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
