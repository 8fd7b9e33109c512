"""Messages that a chat's ``kv_compression`` names, located in the prompt's tokens."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope

from vllm_kvmerge.engine.validation import Prefix
from vllm_kvmerge.policies.fields import MAX_RANGES
from vllm_kvmerge.policies.protection import disjoint
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, CompressionError, CompressionSpec, refusal, unlocated
from vllm_kvmerge.server.body import Refusal

CHAT_ROUTE = "/v1/chat/completions"

TOKENIZE_ROUTE = "/tokenize"
"""vLLM's, which renders messages as the chat route does."""

RENDERED_WITH = ("model", "tools", "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs")
"""Fields of a chat request that ``/tokenize`` takes as well."""

PROTECTED = "protect.messages"
CONTEXT = "context_messages"

Tokenize = Callable[[dict[str, Any]], Awaitable[list[int]]]
"""The tokens of a body of ``/tokenize``. Raises RenderingError or UnknownModelError if they are not known."""


class RenderingError(Exception):
    """``/tokenize`` does not render this text or these messages. The message is the reason that it gives."""


class UnknownModelError(Exception):
    """The server does not have the model whose tokens were asked for."""


async def locate(config: CompressionSpec, request: dict[str, Any], tokenize: Tokenize) -> tuple[dict[str, Any], Prefix]:
    """The ``kv_compression`` of a chat with tokens in place of messages, and what the prompt must begin with for that
    to hold.

    A message is what it adds to those before it, whatever the template: the conversation is rendered up to it and with
    it, and the one must be a beginning of the other. The first includes what comes ahead of it, such as definitions of
    tools. A context ends where its last message does. Each number of messages is rendered once, whatever needs it.

    Raises:
        CompressionError: the messages do not exist, or the template does not render a conversation piece by piece.
        UnknownModelError: as ``tokenize`` raises it.
    """
    messages = request.get("messages")
    if not isinstance(messages, list):
        messages = []
    chosen = sorted(_indices(config.protect.messages, messages)) if config.protect is not None else []
    fields = {count: PROTECTED for index in chosen for count in (index, index + 1) if count > 0}
    context = config.context_messages
    if context is not None:
        check_context(context, messages)
        fields.setdefault(context, CONTEXT)
    ends, tokens = await _render({**request, "messages": messages}, fields, tokenize)
    value = json.loads(config.text)
    if config.protect is not None and chosen:
        # A message of which the template renders nothing has no tokens.
        located = [(ends[index], ends[index + 1]) for index in chosen if ends[index] < ends[index + 1]]
        value["protect"] = {"tokens": disjoint([*config.protect.tokens, *located])}
    if context is not None:
        if ends[context] == 0:
            raise unlocated(CONTEXT, f"the chat template renders nothing of the first {context} messages")
        del value[CONTEXT]
        value["context_tokens"] = ends[context]
    return value, Prefix(fields[max(fields)], tokens)


def check_context(count: int, messages: list[Any]) -> None:
    """Raises CompressionError if a chat has no ``count`` messages."""
    if count > len(messages):
        what = f"{count} messages are more than the chat has"
        raise refusal(CONTEXT, "unknown_messages", what, f"up to {len(messages)}")


async def _render(
    request: dict[str, Any], fields: dict[int, str], tokenize: Tokenize
) -> tuple[dict[int, int], list[int]]:
    """Numbers of tokens of the conversation's beginnings, by numbers of messages, and the tokens of the longest one.

    fields: the numbers of messages to render, and the field that needs each.
    """
    ends, before = {0: 0}, list[int]()
    for count in sorted(fields):
        body = {name: request[name] for name in RENDERED_WITH if request.get(name) is not None}
        try:
            tokens = await tokenize({**body, "messages": request["messages"][:count], "add_generation_prompt": False})
        except RenderingError as error:
            raise unlocated(fields[count], f"the first {count} messages cannot be rendered alone ({error})") from None
        if tokens[: len(before)] != before:
            raise unlocated(
                fields[count],
                f"the chat template renders the first {count} messages with another beginning than fewer of them, so "
                "that they cannot be located",
            )
        ends[count], before = len(tokens), tokens
    return ends, before


def _indices(wanted: tuple[int | str, ...], messages: list[Any]) -> set[int]:
    """The indices of messages that are named by index or role."""
    indices: set[int] = set()
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    for one in wanted:
        found = {index for index, role in enumerate(roles) if one in (index, role)}
        if not found:
            known = ", ".join(sorted({role[:80] for role in roles if isinstance(role, str)}))
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.{PROTECTED}",
                f"there is no message {str(one)[:80]!r}; allowed: {known}, or an index below {len(messages)}",
                "unknown_messages",
            )
        indices |= found
    if len(indices) > MAX_RANGES:
        message = f"{len(indices)} messages are too many; allowed: {MAX_RANGES}"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.{PROTECTED}", message, "unknown_messages")
    return indices


def tokenizer_of(app: ASGIApp, scope: Scope) -> Tokenize:
    """Asks ``app``, the application of the request with this scope, for tokens."""

    async def tokenize(body: dict[str, Any]) -> list[int]:
        status, answer = await post(app, scope, TOKENIZE_ROUTE, body)
        try:
            answered = json.loads(answer)
        except ValueError:
            answered = None
        if status == 200 and isinstance(answered, dict):
            return list(answered["tokens"])
        if status == 404:
            raise UnknownModelError
        raise RenderingError(answer[:200].decode(errors="replace"))

    return tokenize


async def _wait() -> Message:
    await asyncio.Event().wait()  # nobody disconnects
    raise AssertionError


async def post(
    app: ASGIApp, scope: Scope, route: str, request: dict[str, Any], after_body: Receive = _wait
) -> tuple[int, bytes]:
    """Status and body of the answer of ``app`` to a request of the server's own, made for the one with this scope.

    after_body: returns what ``app`` receives then, that the client has left.
    """
    body = json.dumps(request).encode()
    known = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "app", "state")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    inner = {name: scope[name] for name in known if name in scope} | {
        "method": "POST",
        "path": scope.get("root_path", "") + route,
        "raw_path": route.encode(),
        "query_string": b"",
        "headers": headers,
    }
    unread, answer = [body], list[Message]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await after_body()

    async def send(message: Message) -> None:
        answer.append(message)

    await app(inner, receive, send)
    parts = [message.get("body", b"") for message in answer if message["type"] == "http.response.body"]
    return answer[0]["status"], b"".join(parts)


async def answered(app: ASGIApp, scope: Scope, route: str, request: dict[str, Any]) -> dict[str, Any]:
    """The body of the answer of ``app`` to a request of the server's own. Raises Refusal: it is another than 200."""
    status, content = await post(app, scope, route, request)
    if status != 200:
        raise Refusal.of(status, content)
    answer: dict[str, Any] = json.loads(content)
    return answer
