"""The body field ``kv_compression``: checked, and moved to where vLLM passes it on to the engine."""

import json
import re
from collections import Counter, OrderedDict
from difflib import SequenceMatcher
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import envs

from vllm_kvmerge.engine.contexts import CONTEXT_KEY
from vllm_kvmerge.engine.metrics import count_rejection
from vllm_kvmerge.engine.usage import USAGE_KEY
from vllm_kvmerge.engine.validation import PREFIX, VERDICT, Prefix, Verdict
from vllm_kvmerge.request.proof import Chosen
from vllm_kvmerge.request.spec import AUTO, FULL, IN_TOKENS, KEPT_CONTEXT, CompressionError, parse_compression, text_of
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY as FIELD
from vllm_kvmerge.server.auto_budget import Choices, auto_budget
from vllm_kvmerge.server.body import BODILESS_METHODS, Refusal, as_refusal, fields_of, holders
from vllm_kvmerge.server.contexts import CHECKED_APP, COMPLETIONS_ROUTE, CONTEXTS_ROUTE
from vllm_kvmerge.server.messages import CHAT_ROUTE, CONTEXT, UnknownModelError, check_context, locate, tokenizer_of
from vllm_kvmerge.server.named_contexts import with_context
from vllm_kvmerge.server.outputs import ANSWER, FEED, FEED_ROUTES, Answer, UsageFeed

RESPONSES_ROUTE = "/v1/responses"
READ_BACK = re.compile(rf"{RESPONSES_ROUTE}/([^/]+)(?:/cancel)?$")
"""Paths of responses that vLLM has stored (``VLLM_ENABLE_RESPONSES_API_STORE``), and their id."""
RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[^"]+)"')
MOST_STORED = 4096
"""Newest stored responses whose reports are kept."""

CARRIERS: dict[str, tuple[str, ...]] = {
    COMPLETIONS_ROUTE: ("vllm_xargs",),
    "/v1/completions/render": ("vllm_xargs",),
    CHAT_ROUTE: ("vllm_xargs",),
    "/v1/chat/completions/batch": ("vllm_xargs",),
    "/v1/chat/completions/render": ("vllm_xargs",),
    RESPONSES_ROUTE: ("vllm_xargs",),
    "/v1/responses/render": ("vllm_xargs",),
    "/v1/messages": ("vllm_xargs",),
    "/v1/messages/render": ("vllm_xargs",),
    "/invocations": ("vllm_xargs",),
    "/inference/v1/generate": ("sampling_params", "extra_args"),
    CONTEXTS_ROUTE: (),
}
"""Routes that take the field, and the object in their body that becomes ``SamplingParams.extra_args``; none: the route
is the server's own, and reads the field itself."""

HOLDERS = {FIELD, *(name for carrier in CARRIERS.values() for name in carrier)}
"""Names whose repetition in an object could hide the field."""

ESCAPED_LETTER = re.compile(rb"\\u00[567]")
"""A JSON escape of a small letter or underscore, the characters of these names."""

FORM_FIELD = re.compile(rb"""(?:name=["']?|^|&)kv_compression\b""")
"""The field in a form."""


NEAR_MISS = re.compile(rb'"(?!kv_compression")[kK][vV][\w-]{8,18}"\s*:')
"""A name in an object that may be meant for the field's."""

LEAST_LIKENESS = 0.85
"""Share of letters in common from which a name is taken for the field's (``difflib``)."""


class CompressionFieldMiddleware:
    """ASGI middleware over vLLM's routes, inside ``BodyMiddleware``, which passes it whole bodies.

    Requests without the field pass unchanged, and so do their responses, except streams that report ``kvmerge_usage``.
    Others say in ``usage`` what compression did.
    has_default: whether requests without the field are compressed too.
    """

    def __init__(self, app: ASGIApp, has_default: bool = False) -> None:
        self.app = app
        self.has_default = has_default
        self.choices = Choices()
        self._stored: OrderedDict[str, Answer] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := READ_BACK.search(scope["path"])) and found[1] in self._stored:
            await self._read_back(self._stored[found[1]].again(), scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] in BODILESS_METHODS:
            await self.app(scope, receive, send)
            return
        scope[CHECKED_APP] = self
        exchange = _Exchange(self, scope, receive, send)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except Exception:
            if not await exchange.broken_off():
                raise

    def store(self, response_id: str, answer: Answer) -> None:
        self._stored[response_id] = answer
        if len(self._stored) > MOST_STORED:
            self._stored.popitem(last=False)

    async def _read_back(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_report(message: Message) -> None:
            for one in answer.messages(message):
                await send(one)

        await self.app(scope, receive, send_with_report)


class _Exchange:
    """A request and its response: the body is inspected as the application reads it, and determines how the response is
    handled.

    By then the router has chosen the route, so the path's spelling does not matter. FEED, ANSWER, VERDICT and PREFIX
    are set in the application's context and never reset: each request is a task with a context of its own. The response
    is held back until there is a verdict on the request, and replaced by HTTP 400 if that is a refusal: vLLM checks the
    prompt after it has sent a stream's status, and would report the error as an event of the stream, or cut it off.
    """

    def __init__(self, middleware: CompressionFieldMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        self._middleware, self._app = middleware, middleware.app
        self._scope, self._receive, self._send = scope, receive, send
        self._chosen: Chosen | None = None
        self._is_stored = False  # until its id is known
        self._is_read = self._is_refused = False
        self._feed: UsageFeed | None = None
        self._answer: Answer | None = None
        self._verdict: Verdict | None = None  # None once the response need not wait for it
        self._held: list[Message] = []

    async def receive(self) -> Message:
        message = await self._receive()
        if self._is_read or message["type"] != "http.request":
            return message
        self._is_read = True
        route = str(getattr(self._scope.get("route"), "path", self._scope["path"]))
        body = message["body"]
        try:
            if route in (COMPLETIONS_ROUTE, CHAT_ROUTE) and _may_name(FIELD, body) and _may_name(KEPT_CONTEXT, body):
                body = await self._with_context(route, body)
            if route == CHAT_ROUTE and _may_name(FIELD, body) and _may_name(AUTO, body):
                body = await self._with_budget(body)
            body = rewrite_body(route, body) or body
            if route == CHAT_ROUTE and any(_may_name(field.partition(".")[0], body) for field in IN_TOKENS):
                body = await self._with_located(body)
        except CompressionError as error:
            count_rejection(error.reason)
            raise as_refusal(error) from None
        if route in FEED_ROUTES and USAGE_KEY.encode() in body:
            self._feed = UsageFeed()
            FEED.set(self._feed)
        is_named = _may_name(FIELD, body) or _may_name(CONTEXT_KEY, body)
        if (is_named or (self._middleware.has_default and route in CARRIERS)) and route != CONTEXTS_ROUTE:
            self._verdict = Verdict()
            VERDICT.set(self._verdict)
            self._answer = Answer()
            self._answer.chosen = self._chosen
            self._is_stored = route == RESPONSES_ROUTE and envs.VLLM_ENABLE_RESPONSES_API_STORE
            ANSWER.set(self._answer)
        return {**message, "body": body}

    async def _with_context(self, route: str, body: bytes) -> bytes:
        """A body with a context that the server keeps in front of the prompt, if its field names one."""
        if (data := _parsed(body)) is None:
            return body
        tokenize = tokenizer_of(self._app, self._scope)
        try:
            found = await with_context(route, data, self._scope, tokenize)
        except RuntimeError as error:
            raise Refusal(500, f"the engine does not answer: {error}") from error
        if found is None:
            return body
        data, tokens = found
        PREFIX.set(Prefix(KEPT_CONTEXT, tokens))
        return json.dumps(data).encode()

    async def _with_budget(self, body: bytes) -> bytes:
        """A body of the chat route with the budget that was chosen for its context, if its field leaves that open."""
        if (data := _parsed(body)) is None:
            return body
        for holder, field in fields_of(data):
            auto, count, messages = auto_budget(field), field.get(CONTEXT), data.get("messages")
            if auto is None or not isinstance(count, int) or not isinstance(messages, list):
                continue
            check_context(count, messages)
            app = self._scope[CHECKED_APP]
            chosen, self._chosen = await self._middleware.choices.of(auto, app, self._scope, data, count)
            holder[FIELD] = {"policy": FULL} if chosen is None else chosen
        return body if self._chosen is None else json.dumps(data).encode()

    async def _with_located(self, body: bytes) -> bytes:
        """A body of the chat route, as ``rewrite_body`` leaves it, with tokens instead of messages in the field."""
        data = json.loads(body)
        carried = data.get("vllm_xargs") if isinstance(data, dict) else None
        text = carried.get(FIELD) if isinstance(carried, dict) else None
        config = parse_compression(text) if isinstance(text, str) else None
        if config is None or not config.names_messages:
            return body
        try:
            value, prefix = await locate(config, data, tokenizer_of(self._app, self._scope))
        except UnknownModelError:
            return body  # vLLM reports the error
        PREFIX.set(prefix)
        # The budget may be too small for them.
        data["vllm_xargs"][FIELD] = text_of(parse_compression(value))
        return json.dumps(data).encode()

    async def send(self, message: Message) -> None:
        if self._verdict is None:
            if not self._is_refused:
                await self._pass_on(message)
            return
        self._held.append(message)
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if self._verdict.checked or is_last:
            await self._end_wait(self._verdict.error)

    async def broken_off(self) -> bool:
        """True if the application raised because the request was refused; the refusal has been sent then."""
        if self._verdict is not None and self._verdict.error is not None:
            await self._end_wait(self._verdict.error)
        return self._is_refused

    async def _end_wait(self, error: CompressionError | None) -> None:
        self._verdict = None
        if error is not None:
            self._is_refused = True
            await as_refusal(error).response()(self._scope, self._receive, self._send)
            return
        for message in self._held:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if self._is_stored and self._answer and (found := RESPONSE_ID.search(bytes(message.get("body", b"")))):
            self._is_stored = False
            self._middleware.store(found[1].decode(), self._answer)
        if self._feed is not None and message["type"] == "http.response.body":
            message = {**message, "body": self._feed.add_to(bytes(message.get("body", b"")))}
        for one in [message] if self._answer is None else self._answer.messages(message):
            await self._send(one)


def rewrite_body(route: str, body: bytes) -> bytes | None:
    """The body to pass on instead of ``body``; None for ``body`` itself. Raises CompressionError for the field."""
    may_miss = NEAR_MISS.search(body) is not None
    if not may_miss and not _may_name(FIELD, body):
        return None
    try:
        data = json.loads(body, object_pairs_hook=_checked_pairs)
    except CompressionError:
        raise
    except ValueError:
        if FORM_FIELD.search(body):
            raise CompressionError(FIELD, "not supported in a form; allowed: vllm_xargs", "wrong_place") from None
        return None  # vLLM reports the error
    if not isinstance(data, dict):
        return None
    if may_miss:
        _check_names(data)
    carrier = CARRIERS.get(route)
    _check_places(route, data, carrier)
    if carrier == () and data.get(FIELD) is not None:
        field = _checked_object(data[FIELD])
        if auto_budget(field) is None:
            parse_compression(field)
    return json.dumps(data).encode() if carrier and _move_field(data, carrier) else None


def _parsed(body: bytes) -> dict[str, Any] | None:
    """A body that is an object; None for others, which vLLM refuses. Raises CompressionError as ``_checked_pairs``."""
    try:
        data = json.loads(body, object_pairs_hook=_checked_pairs)
    except CompressionError:
        raise
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _may_name(field: str, body: bytes) -> bool:
    """True if the body may name the field, in plain letters or JSON escapes, and has to be parsed."""
    return field.encode() in body or (b"\\u00" in body and ESCAPED_LETTER.search(body) is not None)


def _checked_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Refuses repetitions that could hide the field: one value of a repeated name is ignored."""
    data = dict(pairs)
    if len(data) < len(pairs):
        repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        for name in HOLDERS.intersection(repeated):
            raise CompressionError(name, "comes twice in one object; allowed: once", "given_twice")
    return data


def _check_names(data: dict[str, Any]) -> None:
    """Refuses names that are nearly the field's: vLLM ignores what it does not know."""
    for place, holder in holders(data):
        for name in holder:
            spelling = name.lower().replace("-", "_")
            if name != FIELD and SequenceMatcher(None, spelling, FIELD).ratio() >= LEAST_LIKENESS:
                raise CompressionError(".".join((*place, name)), f"no such field; allowed: {FIELD}", "unknown_field")


def _check_places(route: str, data: dict[str, Any], carrier: tuple[str, ...] | None) -> None:
    """Refuses the field where vLLM would ignore it."""
    for place, holder in holders(data):
        if holder.get(FIELD) is None:
            continue
        name = ".".join((*place, FIELD))
        if carrier is None:
            raise CompressionError(name, f"not supported on {route}; allowed: {', '.join(CARRIERS)}", "wrong_route")
        if place not in ((), carrier):
            raise CompressionError(name, f"is not read on {route}; allowed: {FIELD}", "wrong_place")
        if _is_true(data.get("use_beam_search")):
            raise CompressionError(
                FIELD, "beam search does not support it; allowed: use_beam_search=false", "beam_search"
            )


def _is_true(value: Any) -> bool:
    """True if vLLM reads the value as true."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return False


def _move_field(data: dict[str, Any], carrier: tuple[str, ...]) -> bool:
    """Checks the field and moves it into its carrier, as canonical JSON text; False if that is there already."""
    holder = data
    for key in carrier[:-1]:
        holder = holder.get(key)  # type: ignore[assignment]
        if not isinstance(holder, dict):
            return False  # vLLM refuses the request
    carried = holder.get(carrier[-1]) or {}
    if not isinstance(carried, dict):
        return False
    field, inner = data.pop(FIELD, None), carried.get(FIELD)
    if field is None and inner is None:
        return False
    if field is not None and inner is not None:
        raise CompressionError(FIELD, f"given twice, also in {'.'.join(carrier)}; allowed: one of them", "given_twice")
    value = inner if field is None else _checked_object(field)
    holder[carrier[-1]] = carried | {FIELD: text_of(parse_compression(value))}
    return holder[carrier[-1]] != carried


def _checked_object(field: Any) -> dict[str, Any]:
    if isinstance(field, dict):
        return field
    raise CompressionError(FIELD, f"must be an object, got {type(field).__name__}", "wrong_type")
