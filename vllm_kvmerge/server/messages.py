"""Protected messages of a chat, located as ranges of the prompt's tokens."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from vllm_kvmerge.policies.fields import MAX_RANGES, Protect
from vllm_kvmerge.policies.protection import disjoint
from vllm_kvmerge.request.parameters import EXTRA_ARGS_KEY, CompressionError

CHAT_ROUTE = "/v1/chat/completions"

TOKENIZE_ROUTE = "/tokenize"
"""vLLM's, which renders messages as the chat route does."""

RENDERED_WITH = ("model", "tools", "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs")
"""Fields of a chat request that ``/tokenize`` takes as well."""

MESSAGES = f"{EXTRA_ARGS_KEY}.protect.messages"

Tokenize = Callable[[dict[str, Any]], Awaitable[list[int]]]
"""The tokens of a body of ``/tokenize``. Raises CompressionError if they are not known."""


async def locate(protect: Protect, request: dict[str, Any], tokenize: Tokenize) -> tuple[Protect, list[int]]:
    """The same with ranges instead of messages, and the tokens that the prompt must begin with for them to hold.

    A message is what it adds to those before it, whatever the template: the conversation is rendered up to it and with
    it, and the one must be a beginning of the other. The first includes what comes ahead of it, such as definitions of
    tools.

    Raises:
        CompressionError: the messages do not exist, or the template does not render a conversation piece by piece.
    """
    messages = request.get("messages")
    chosen = sorted(_indices(protect.messages, messages if isinstance(messages, list) else []))
    counts = sorted({count for index in chosen for count in (index, index + 1)} - {0})
    if len(chosen) > MAX_RANGES:
        message = f"{len(chosen)} messages are too many; allowed: {MAX_RANGES}"
        raise CompressionError(MESSAGES, message, "unknown_messages")
    ends, before = {0: 0}, list[int]()
    for count in counts:
        body = {name: request[name] for name in RENDERED_WITH if request.get(name) is not None}
        tokens = await tokenize({**body, "messages": messages[:count], "add_generation_prompt": False})  # type: ignore[index]
        if tokens[: len(before)] != before:
            raise CompressionError(
                MESSAGES,
                f"the chat template renders the first {count} messages with another beginning than fewer of them, so "
                "that they cannot be located; allowed: tokens",
                "unknown_messages",
            )
        ends[count], before = len(tokens), tokens
    # A message of which the template renders nothing has no tokens.
    located = [(ends[index], ends[index + 1]) for index in chosen if ends[index] < ends[index + 1]]
    return Protect(tokens=disjoint([*protect.tokens, *located]), messages=()), before


def _indices(wanted: tuple[int | str, ...], messages: list[Any]) -> set[int]:
    """The indices of messages that are named by index or role."""
    indices: set[int] = set()
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    for one in wanted:
        found = {index for index, role in enumerate(roles) if one in (index, role)}
        if not found:
            known = ", ".join(sorted({role[:80] for role in roles if isinstance(role, str)}))
            raise CompressionError(
                MESSAGES,
                f"there is no message {str(one)[:80]!r}; allowed: {known}, or an index below {len(messages)}",
                "unknown_messages",
            )
        indices |= found
    return indices


def tokenizer_of(app: ASGIApp, scope: Scope) -> Tokenize:
    """Asks ``app``, the application of the request with this scope, for tokens."""

    async def tokenize(body: dict[str, Any]) -> list[int]:
        status, answer = await _post(app, scope, json.dumps(body).encode())
        try:
            answered = json.loads(answer)
        except ValueError:
            answered = None
        if status == 200 and isinstance(answered, dict):
            return list(answered["tokens"])
        reason = answer[:200].decode(errors="replace")
        raise CompressionError(
            MESSAGES,
            f"the first {len(body['messages'])} messages cannot be rendered alone ({reason}); allowed: tokens",
            "unknown_messages",
        )

    return tokenize


async def _post(app: ASGIApp, scope: Scope, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer of ``TOKENIZE_ROUTE``."""
    known = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "app", "state")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    inner = {name: scope[name] for name in known if name in scope} | {
        "method": "POST",
        "path": scope.get("root_path", "") + TOKENIZE_ROUTE,
        "raw_path": TOKENIZE_ROUTE.encode(),
        "query_string": b"",
        "headers": headers,
    }
    unread, answer = [body], list[Message]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # nobody disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        answer.append(message)

    await app(inner, receive, send)
    parts = [message.get("body", b"") for message in answer if message["type"] == "http.response.body"]
    return answer[0]["status"], b"".join(parts)
