"""Contexts that an engine keeps under an id: the routes that create and delete them, and requests that begin with one.

Nothing about them is kept here: the engine has them all, so that every server of the engine sees the same ones.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response
from starlette.types import Message, Scope

from vllm_kvmerge.engine.arguments import PluginConfig
from vllm_kvmerge.engine.contexts import CONTEXT_KEY, AskedContext, call_contexts
from vllm_kvmerge.engine.metrics import count_rejection
from vllm_kvmerge.engine.saved_contexts import is_saved, remove, remove_expired, save
from vllm_kvmerge.engine.validation import KEEPS_CONTEXT
from vllm_kvmerge.policies import PARTS
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY as FIELD
from vllm_kvmerge.request.spec import FULL, KEPT_CONTEXT, CompressionError, parse_compression
from vllm_kvmerge.server.body import Refusal, as_refusal
from vllm_kvmerge.server.messages import (
    CHAT_ROUTE,
    RENDERED_WITH,
    TOKENIZE_ROUTE,
    RenderingError,
    Tokenize,
    UnknownModelError,
    post,
)

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

CONTEXTS_ROUTE = "/v1/kvmerge/contexts"
COMPLETIONS_ROUTE = "/v1/completions"

CHECKED_APP = "kvmerge_app"
"""Key in a scope: the application for requests of the server's own, behind the guards, with the field checked."""

NOT_OF_CONTEXTS = ("context_tokens", "context_messages", "reuse", "refresh")
"""Fields that say what a request does with its context, or need what is gone with the request that made the context."""

NAMED = f"{FIELD}.{KEPT_CONTEXT}"


class NewContext(BaseModel):
    """A context to compress and keep: a prompt, or messages as a chat request has them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    model: str
    prompt: Annotated[str | list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Text, or token ids."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    kv_compression: dict[str, Any] | None = None
    ttl: float | None = Field(None, gt=0.0, le=1e9)
    """Seconds after which the context is deleted. Default: never."""
    cache_salt: str | None = None
    """Only requests and calls that name the same salt find the context."""

    @model_validator(mode="after")
    def _check_contents(self) -> "NewContext":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        given = [name for name in RENDERED_WITH if name != "model" and getattr(self, name) is not None]
        if self.prompt is not None and given:
            raise ValueError(f"{given[0]} goes with messages alone")
        return self

    @property
    def chat(self) -> dict[str, Any]:
        """The fields that render messages, and these; none of a prompt."""
        fields = self.model_dump(include={"messages", *RENDERED_WITH} - {"model"}, exclude_none=True)
        return fields if self.messages is not None else {}


class NamedContext(BaseModel):
    """A context that the server keeps, in front of the request's prompt or messages. Other fields may only repeat the
    context's own."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    context: str
    """Its id."""


class KVContext(BaseModel):
    """A context that is kept."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["kv_context"] = "kv_context"
    created: int
    """Seconds since the epoch."""
    expires_at: int | None
    """Seconds since the epoch; null: never."""
    model: str
    messages: int | None
    """Number of messages; null: it is a prompt, for completions."""
    tokens: int
    entries: int
    """Cache entries per KV head that are kept in their place, on average."""
    bytes: int
    """Of the blocks that it holds, over all layers and ranks."""
    seconds: float | None = None
    """That it took to create it; in the answer to its creation alone."""
    kv_compression: dict[str, Any]
    """With every default spelled out."""
    saved: bool
    """Whether it is there after a restart."""


class KVContexts(BaseModel):
    """The contexts of one cache salt, or of none."""

    object: Literal["list"] = "list"
    data: list[KVContext]


class DeletedKVContext(BaseModel):
    """A context that is gone."""

    id: str
    object: Literal["kv_context"] = "kv_context"
    deleted: Literal[True] = True


class _RequestFailed(Exception):
    """A request of the server's own got another answer than 200."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(status)
        self.response = Response(content, status, media_type="application/json")


def keeps_contexts(engine_client: "EngineClient") -> bool:
    """Whether contexts can be kept: with several engines, one of them would have a context, and requests go to any."""
    return bool(engine_client.vllm_config.parallel_config.data_parallel_size == 1)


def add_context_routes(app: FastAPI, config: PluginConfig) -> None:
    """Adds the routes that create, list, show and delete contexts."""
    folder = None if config.contexts_dir is None else Path(config.contexts_dir)

    def shown(kept: dict[str, Any], seconds: float | None = None) -> KVContext:
        info = kept["info"]
        own = {"model": info["model"], "messages": info["messages"], "saved": is_saved(folder, kept["id"])}
        return KVContext.model_validate({**kept, **own, "seconds": seconds})

    async def found(request: Request, call: str, context_id: str, salt: str | None) -> dict[str, Any]:
        kept: dict[str, Any] | None = await call_contexts(
            request.app.state.engine_client, call, id=context_id, salt=salt
        )
        if kept is None:
            raise Refusal(404, f"there is no context {context_id[:80]!r}")
        return kept

    @app.post(CONTEXTS_ROUTE, response_model=KVContext)
    async def create_kv_context(body: NewContext, request: Request) -> KVContext | Response:
        """Compresses a context and keeps it until it is deleted or its time is up."""
        start, engine_client = time.monotonic(), request.app.state.engine_client
        if not keeps_contexts(engine_client):
            raise Refusal(400, "contexts are kept by one engine; allowed: --data-parallel-size 1")
        try:
            field = _field_of_context(config.default if body.kv_compression is None else body.kv_compression)
        except CompressionError as error:
            count_rejection(error.reason)
            raise as_refusal(error) from None
        context_id = f"ctx-{uuid.uuid4().hex}"
        try:
            kept = await _created(request, body, field, context_id)
            if folder is not None:
                await _save(engine_client, folder, context_id, body.cache_salt)
            return shown(kept, time.monotonic() - start)
        except BaseException as error:  # nobody would know the id
            await call_contexts(engine_client, "delete", id=context_id, salt=body.cache_salt)
            if isinstance(error, _RequestFailed):
                return error.response
            raise

    @app.get(CONTEXTS_ROUTE)
    async def list_kv_contexts(request: Request, cache_salt: str | None = None) -> KVContexts:
        """The contexts that are kept under this cache salt, or under none."""
        kept = await call_contexts(request.app.state.engine_client, "list", salt=cache_salt)
        return KVContexts(data=[shown(one) for one in kept])

    @app.get(CONTEXTS_ROUTE + "/{context_id}")
    async def get_kv_context(context_id: str, request: Request, cache_salt: str | None = None) -> KVContext:
        """A context that is kept."""
        return shown(await found(request, "get", context_id, cache_salt))

    @app.delete(CONTEXTS_ROUTE + "/{context_id}")
    async def delete_kv_context(context_id: str, request: Request, cache_salt: str | None = None) -> DeletedKVContext:
        """Deletes a context. Requests that have begun with it go on."""
        await found(request, "delete", context_id, cache_salt)
        if folder is not None:
            remove(folder, context_id)
        return DeletedKVContext(id=context_id)


def _field_of_context(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """The ``kv_compression`` that a context is made with. Raises CompressionError."""
    if value is None:
        raise CompressionError(FIELD, "is missing, and this server has no default; allowed: an object", "nothing_kept")
    config = parse_compression(value)
    if config is None:
        raise CompressionError(f"{FIELD}.policy", f"{FULL!r} leaves nothing to keep; allowed: others", "nothing_kept")
    for name in NOT_OF_CONTEXTS:
        if (given := getattr(config, name)) is not None:
            message = f"a context that is kept has none, got {str(given)[:80]}; allowed: null"
            raise CompressionError(f"{FIELD}.{name}", message, "nothing_kept")
    field: dict[str, Any] = json.loads(config.text)
    return field


async def _created(request: Request, body: NewContext, field: dict[str, Any], context_id: str) -> dict[str, Any]:
    """Makes a request whose context the engine keeps.

    Raises:
        _RequestFailed: it is refused, as any other request would be.
        Refusal: the engine does not keep its context, or the client has left.
    """
    has_left = False

    async def leave() -> Message:
        nonlocal has_left
        message = await request.receive()
        has_left = True
        return message

    app, scope = request.scope[CHECKED_APP], request.scope
    # A context that is repeated before it is compressed is so after the prompt's first token.
    inner: dict[str, Any] = {"model": body.model, "max_tokens": 2, "ignore_eos": True}
    if body.messages is not None:
        route = CHAT_ROUTE
        # What comes after the messages, to be answered, is no part of the context.
        inner |= body.chat | {FIELD: field | {"context_messages": len(body.messages)}}
        if body.tools is not None:
            inner["tool_choice"] = "none"  # whether the server reads calls of tools does not matter here
    else:
        route, tokens = COMPLETIONS_ROUTE, body.prompt
        if isinstance(tokens, str):
            status, content = await post(app, scope, TOKENIZE_ROUTE, {"model": body.model, "prompt": tokens})
            if status != 200:
                raise _RequestFailed(status, content)
            tokens = json.loads(content)["tokens"]
        assert tokens is not None
        inner |= {"prompt": tokens, FIELD: field | {"context_tokens": len(tokens)}}
    if body.cache_salt is not None:
        inner["cache_salt"] = body.cache_salt
    info = {"model": body.model, "messages": None if body.messages is None else len(body.messages)}
    asked = AskedContext(id=context_id, ttl=body.ttl, info=info, content=body.chat)
    inner["vllm_xargs"] = {CONTEXT_KEY: asked.model_dump_json()}
    KEEPS_CONTEXT.set(True)
    status, content = await post(app, scope, route, inner, leave)
    kept: dict[str, Any] | None = await call_contexts(
        request.app.state.engine_client, "created", id=context_id, salt=body.cache_salt
    )
    if has_left:
        raise Refusal(400, "the client left before the context was there")
    if kept is not None and "refused" in kept:
        raise Refusal(*kept["refused"])
    if status != 200:
        raise _RequestFailed(status, content)
    if kept is None:
        raise Refusal(409, "the context's time was up before it could be used; allowed: a longer ttl")
    return kept


async def _save(engine_client: "EngineClient", folder: Path, context_id: str, salt: str | None) -> None:
    try:
        await asyncio.to_thread(remove_expired, folder)
        await save(engine_client, folder, context_id, salt)
    except (OSError, RuntimeError) as error:
        raise Refusal(507, f"the context cannot be saved: {error}") from error


async def with_context(
    route: str, data: dict[str, Any], scope: Scope, tokenize: Tokenize
) -> tuple[dict[str, Any], list[int]] | None:
    """The body of an ordinary request that begins with the context which this one names, and the context's tokens;
    None if its field names none.

    Raises:
        CompressionError: there is no such context, or the body says something that does not go with it.
    """
    place = _place_of_name(data)
    if place is None:
        return None
    holder, field = place
    context_id = field[KEPT_CONTEXT]
    if not isinstance(context_id, str):
        raise CompressionError(NAMED, f"must be a string, got {type(context_id).__name__}", "wrong_type")
    engine_client = scope["app"].state.engine_client
    kept = await call_contexts(engine_client, "get", id=context_id, salt=data.get("cache_salt"))
    model = None if kept is None else kept["info"]["model"]
    if kept is None or data.get("model") not in (None, model):
        raise _unknown(context_id)
    _check_same(field, kept["kv_compression"])
    tokens: list[int] = kept["token_ids"]
    own_route = COMPLETIONS_ROUTE if kept["info"]["messages"] is None else CHAT_ROUTE
    if route != own_route:
        what = "a prompt" if own_route == COMPLETIONS_ROUTE else "messages"
        raise CompressionError(NAMED, f"this context is {what}; allowed: {own_route}", "unlike_context")
    holder[FIELD] = kept["kv_compression"] | {"context_tokens": len(tokens)}
    data = {**data, "model": model}
    if route == CHAT_ROUTE:
        return _with_messages(data, kept["content"]), tokens
    try:
        return {**data, "prompt": await _with_tokens(data, tokens, tokenize)}, tokens
    except RenderingError as error:
        raise CompressionError(NAMED, f"the prompt cannot be made tokens ({error})", "unlike_context") from None
    except UnknownModelError:
        raise _unknown(context_id) from None


def _place_of_name(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The object of a body that holds a field which names a context, and that field."""
    for holder in (data, data.get("vllm_xargs")):
        field = holder.get(FIELD) if isinstance(holder, dict) else None
        if isinstance(field, str):
            try:
                field = json.loads(field)
            except ValueError:
                continue
        if isinstance(holder, dict) and isinstance(field, dict) and field.get(KEPT_CONTEXT) is not None:
            return holder, field
    return None


def _unknown(context_id: str) -> CompressionError:
    message = f"there is no context {context_id[:80]!r} of this model and cache_salt"
    return CompressionError(NAMED, message, "unknown_context", status=404)


def _check_same(field: Mapping[str, Any], kept: dict[str, Any]) -> None:
    """Raises CompressionError if a field beside the context's name says something else than the context's own."""
    given = {name: value for name, value in field.items() if name != KEPT_CONTEXT}
    # First what decides which other fields there are.
    for name in ("policy", *PARTS):
        if given.get(name, kept[name]) != kept[name]:
            raise _differs(name, kept[name])
    both, own = parse_compression(kept | given), parse_compression(kept)
    assert both is not None and own is not None
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
