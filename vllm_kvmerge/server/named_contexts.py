"""Requests that begin with a context that the engine keeps, by its id."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from vllm_kvmerge.policies import PARTS
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY as FIELD
from vllm_kvmerge.request.spec import FULL, KEPT_CONTEXT, CompressionError, parse_compression
from vllm_kvmerge.server.body import fields_of
from vllm_kvmerge.server.contexts import COMPLETIONS_ROUTE, contexts_of
from vllm_kvmerge.server.messages import CHAT_ROUTE, RENDERED_WITH, RenderingError, Tokenize, UnknownModelError

NAMED = f"{FIELD}.{KEPT_CONTEXT}"

OWN_FIELDS = ("verify", "min_agreement")
"""Fields that a request has besides the context's."""


async def with_context(
    route: str, data: dict[str, Any], scope: Scope, tokenize: Tokenize
) -> tuple[dict[str, Any], list[int]] | None:
    """The body of an ordinary request that begins with the context which this one names, and the context's tokens;
    None if its field names none.

    Raises:
        CompressionError: there is no such context, or the body says something that does not go with it.
    """
    place = next((one for one in fields_of(data) if one[1].get(KEPT_CONTEXT) is not None), None)
    if place is None:
        return None
    holder, field = place
    context_id = field[KEPT_CONTEXT]
    if not isinstance(context_id, str):
        raise CompressionError(NAMED, f"must be a string, got {type(context_id).__name__}", "wrong_type")
    kept = await contexts_of(scope["app"]).get(context_id, data.get("cache_salt"))
    model = None if kept is None else kept["info"]["model"]
    if kept is None or data.get("model") not in (None, model):
        raise _unknown(context_id)
    _check_same(field, kept["kv_compression"])
    tokens: list[int] = kept["token_ids"]
    own_route = COMPLETIONS_ROUTE if kept["info"]["messages"] is None else CHAT_ROUTE
    if route != own_route:
        what = "a prompt" if own_route == COMPLETIONS_ROUTE else "messages"
        raise CompressionError(NAMED, f"this context is {what}; allowed: {own_route}", "unlike_context")
    holder[FIELD] = kept["kv_compression"]
    if holder[FIELD]["policy"] != FULL:  # then the full cache is what others are compared with
        own = {name: field[name] for name in OWN_FIELDS if name in field}
        holder[FIELD] |= own | {"context_tokens": len(tokens)}
    data = {**data, "model": model}
    if route == CHAT_ROUTE:
        return _with_messages(data, kept["content"]), tokens
    try:
        return {**data, "prompt": await _with_tokens(data, tokens, tokenize)}, tokens
    except RenderingError as error:
        raise CompressionError(NAMED, f"the prompt cannot be made tokens ({error})", "unlike_context") from None
    except UnknownModelError:
        raise _unknown(context_id) from None


def _unknown(context_id: str) -> CompressionError:
    message = f"there is no context {context_id[:80]!r} of this model and cache_salt"
    return CompressionError(NAMED, message, "unknown_context", status=404)


def _check_same(field: Mapping[str, Any], kept: dict[str, Any]) -> None:
    """Raises CompressionError if a field beside the context's name says something else than the context's own."""
    given = {name: value for name, value in field.items() if name not in (KEPT_CONTEXT, *OWN_FIELDS)}
    # First what decides which other fields there are.
    for name in ("policy", *PARTS):
        if given.get(name, kept.get(name)) != kept.get(name):
            raise _differs(name, kept.get(name))
    both, own = parse_compression(kept | given), parse_compression(kept)
    if both is None or own is None:
        return
    for name, value in both.parameters.items():
        if value != own.parameters[name]:
            raise _differs(name, own.parameters[name])


def _differs(name: str, own: Any) -> CompressionError:
    message = f"not the context's; allowed: {json.dumps(own)[:80]}, or to leave it out"
    return CompressionError(f"{FIELD}.{name}", message, "unlike_context")


def _with_messages(data: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """A chat that goes on after a context's messages. request: of the context, the messages and what renders them."""
    for name in RENDERED_WITH:
        if name != "model" and data.get(name) is not None and data[name] != request.get(name):
            message = "not what the context's messages are rendered with; allowed: to leave it out"
            raise CompressionError(name, message, "unlike_context")
    messages = data.get("messages")
    if not isinstance(messages, list):
        raise CompressionError(NAMED, "needs messages that follow; allowed: a list", "unlike_context")
    return {**data, **request, "messages": [*request["messages"], *messages]}


async def _with_tokens(data: dict[str, Any], tokens: list[int], tokenize: Tokenize) -> list[Any]:
    """The prompt of a completion, or each of several, after a context's tokens. Raises what ``tokenize`` does."""

    async def continued(part: Any) -> list[int]:
        if isinstance(part, str):
            part = await tokenize({"model": data["model"], "prompt": part, "add_special_tokens": False})
        if not isinstance(part, list) or not all(isinstance(token, int) for token in part):
            raise CompressionError(NAMED, "needs a prompt that follows; allowed: text or token ids", "unlike_context")
        return tokens + part

    prompt = data.get("prompt")
    if data.get("prompt_embeds") is not None:
        raise CompressionError(NAMED, "not with prompt_embeds; allowed: prompt", "unlike_context")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return [await continued(part) for part in prompt]
    return await continued(prompt)
