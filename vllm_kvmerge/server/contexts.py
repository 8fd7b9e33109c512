"""Contexts that an engine keeps under an id: the routes that create and delete them.

Nothing about them is kept here: the engine and a folder have them all, so that all servers see the same ones.
"""

import json
import time
import uuid
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.types import Message

from vllm_kvmerge.engine.arguments import PluginConfig
from vllm_kvmerge.engine.contexts import CONTEXT_KEY, AskedContext, call_contexts
from vllm_kvmerge.engine.metrics import count_rejection
from vllm_kvmerge.engine.saved_contexts import SavedContexts
from vllm_kvmerge.engine.validation import KEEPS_CONTEXT
from vllm_kvmerge.request.proof import Chosen
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY as FIELD
from vllm_kvmerge.request.spec import FULL, CompressionError, parse_compression
from vllm_kvmerge.server.auto_budget import ANSWERED, Ask, AutoBudget, ask_of, auto_budget, choose
from vllm_kvmerge.server.body import Refusal, as_refusal
from vllm_kvmerge.server.messages import (
    CHAT_ROUTE,
    RENDERED_WITH,
    TOKENIZE_ROUTE,
    answered,
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

NO_ANSWER = {"add_generation_prompt": False}
"""Of ``/tokenize``: messages alone."""


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
    """Whether it is in files: there after a restart, and for all servers that share their folder."""
    chosen: Chosen | None = None
    """How its budget was chosen, if that was asked for."""


class KVContexts(BaseModel):
    """The contexts of one cache salt, or of none."""

    object: Literal["list"] = "list"
    data: list[KVContext]


class DeletedKVContext(BaseModel):
    """A context that is gone."""

    id: str
    object: Literal["kv_context"] = "kv_context"
    deleted: Literal[True] = True


def kept_contexts(engine_client: "EngineClient", config: PluginConfig) -> SavedContexts:
    """The contexts that a server keeps, with those of the folder that its configuration names."""
    folder = config.contexts_dir if keeps_contexts(engine_client) else None
    return SavedContexts(engine_client, None if folder is None else Path(folder), config.contexts_dir_bytes)


def contexts_of(app: Any) -> SavedContexts:
    """The contexts of an application's server."""
    contexts: SavedContexts = app.state.kvmerge_contexts
    return contexts


def keeps_contexts(engine_client: "EngineClient") -> bool:
    """Whether contexts can be kept: with several engines, one of them would have a context, and requests go to any."""
    return bool(engine_client.vllm_config.parallel_config.data_parallel_size == 1)


def add_context_routes(app: FastAPI, config: PluginConfig) -> None:
    """Adds the routes that create, list, show and delete contexts."""

    def shown(kept: dict[str, Any], seconds: float | None = None) -> KVContext:
        return KVContext.model_validate({**kept, **kept["info"], "seconds": seconds})

    def unknown(context_id: str) -> Refusal:
        return Refusal(404, f"there is no context {context_id[:80]!r}")

    @app.post(CONTEXTS_ROUTE, response_model=KVContext)
    async def create_kv_context(body: NewContext, request: Request) -> KVContext:
        """Compresses a context and keeps it until it is deleted or its time is up."""
        start, engine_client = time.monotonic(), request.app.state.engine_client
        if not keeps_contexts(engine_client):
            raise Refusal(400, "contexts are kept by one engine; allowed: --data-parallel-size 1")
        asked = config.default if body.kv_compression is None else body.kv_compression
        try:
            auto = auto_budget(asked)
            fields = [asked] if auto is None else chain.from_iterable(auto.candidates())
            field, *_ = [_field_of_context(one) for one in fields]
        except CompressionError as error:
            count_rejection(error.reason)
            raise as_refusal(error) from None
        context_id = f"ctx-{uuid.uuid4().hex}"
        new = _Creation(request, body, context_id)
        try:
            kept = await (new.created(field) if auto is None else new.chosen(auto))
            seconds = time.monotonic() - start
            kept["saved"] = await _save(contexts_of(request.app), context_id, body.cache_salt, seconds)
            return shown(kept, seconds)
        except BaseException:  # nobody would know the id
            await call_contexts(engine_client, "delete", id=context_id, salt=body.cache_salt)
            raise

    @app.get(CONTEXTS_ROUTE)
    async def list_kv_contexts(request: Request, cache_salt: str | None = None) -> KVContexts:
        """The contexts that are kept under this cache salt, or under none."""
        return KVContexts(data=[shown(one) for one in await contexts_of(request.app).listed(cache_salt)])

    @app.get(CONTEXTS_ROUTE + "/{context_id}")
    async def get_kv_context(context_id: str, request: Request, cache_salt: str | None = None) -> KVContext:
        """A context that is kept."""
        if (kept := await contexts_of(request.app).get(context_id, cache_salt)) is None:
            raise unknown(context_id)
        return shown(kept)

    @app.delete(CONTEXTS_ROUTE + "/{context_id}")
    async def delete_kv_context(context_id: str, request: Request, cache_salt: str | None = None) -> DeletedKVContext:
        """Deletes a context. Requests that have begun with it go on."""
        if not await contexts_of(request.app).delete(context_id, cache_salt):
            raise unknown(context_id)
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


class _Creation:
    """A context that is being made, for a request to do so."""

    def __init__(self, request: Request, body: NewContext, context_id: str) -> None:
        self._request, self._body, self._id = request, body, context_id
        self._app, self._scope = request.scope[CHECKED_APP], request.scope
        self._salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
        self._info: dict[str, Any] = {"model": body.model, "messages": body.messages and len(body.messages)}
        self._tokens: list[int] | None = None

    async def chosen(self, auto: AutoBudget) -> dict[str, Any]:
        """The context as ``call_contexts`` describes it, under the smallest budget that is good enough.

        Raises as ``created``, and CompressionError.
        """
        field, chosen = await choose(auto, self._ask())
        self._info["chosen"] = chosen.model_dump(mode="json")
        if field is not None:
            return await self.created(field)
        context = AskedContext(id=self._id, ttl=self._body.ttl, info=self._info, content=self._body.chat)
        tokens = await self._all_tokens()
        await self._check_client()
        return await self._call("uncompressed", context=context.model_dump(), tokens=tokens)

    async def _check_client(self) -> None:
        """Raises Refusal if the client has left, to whom the context would be of no use."""
        if await self._request.is_disconnected():
            raise Refusal(400, "the client left before a budget was chosen")

    def _ask(self) -> Ask:
        messages = self._body.messages
        ask_chat = ask_of(self._app, self._scope, self._body.model_dump(), len(messages or ()))

        async def ask(field: dict[str, Any], probe: str) -> dict[str, Any]:
            await self._check_client()
            if messages is not None:
                return await ask_chat(field, probe)
            question = {"prompt": f"\n\nQuestion: {probe}\nAnswer:", "add_special_tokens": False}
            tokens = await self._all_tokens()
            prompt = tokens + (await self._answered(TOKENIZE_ROUTE, **question))["tokens"]
            own = {FIELD: field | {"context_tokens": len(tokens)}, **self._salt, **ANSWERED}
            return await self._answered(COMPLETIONS_ROUTE, prompt=prompt, **own)

        return ask

    async def _answered(self, route: str, **request: Any) -> dict[str, Any]:
        return await answered(self._app, self._scope, route, {"model": self._body.model, **request})

    async def _all_tokens(self) -> list[int]:
        if self._tokens is None:
            body = self._body
            if isinstance(body.prompt, list):
                self._tokens = body.prompt
            else:
                content = {"prompt": body.prompt} if body.prompt is not None else body.chat | NO_ANSWER
                self._tokens = (await self._answered(TOKENIZE_ROUTE, **content))["tokens"]
        return self._tokens

    async def created(self, field: dict[str, Any]) -> dict[str, Any]:
        """Makes a request whose context the engine keeps, compressed by ``field``; the context as ``call_contexts``
        describes it.

        Raises Refusal: as of any other request, or the engine does not keep its context, or the client has left.
        """
        has_left, body = False, self._body

        async def leave() -> Message:
            nonlocal has_left
            message = await self._request.receive()
            has_left = True
            return message

        # A context that is repeated before it is compressed is so after the prompt's first token.
        inner: dict[str, Any] = {"model": body.model, "max_tokens": 2, "ignore_eos": True, **self._salt}
        if body.messages is not None:
            route = CHAT_ROUTE
            # What comes after the messages, to be answered, is no part of the context.
            inner |= body.chat | {FIELD: field | {"context_messages": len(body.messages)}}
            if body.tools is not None:
                inner["tool_choice"] = "none"  # whether the server reads calls of tools does not matter here
        else:
            route, tokens = COMPLETIONS_ROUTE, await self._all_tokens()
            inner |= {"prompt": tokens, FIELD: field | {"context_tokens": len(tokens)}}
        asked = AskedContext(id=self._id, ttl=body.ttl, info=self._info, content=body.chat)
        inner["vllm_xargs"] = {CONTEXT_KEY: asked.model_dump_json()}
        KEEPS_CONTEXT.set(True)
        status, content = await post(self._app, self._scope, route, inner, leave)
        kept = await self._call("created")
        if has_left:
            raise Refusal(400, "the client left before the context was there")
        if status != 200:
            raise Refusal.of(status, content)
        if kept is None:
            raise Refusal(409, "the context's time was up before it could be used; allowed: a longer ttl")
        return kept

    async def _call(self, call: str, **arguments: Any) -> Any:
        """``call_contexts``. Raises Refusal: the context cannot be kept."""
        engine_client = self._request.app.state.engine_client
        kept = await call_contexts(engine_client, call, id=self._id, salt=self._body.cache_salt, **arguments)
        if kept is not None and "refused" in kept:
            raise Refusal(*kept["refused"])
        return kept


async def _save(contexts: SavedContexts, context_id: str, salt: str | None, seconds: float) -> bool:
    try:
        return await contexts.save(context_id, salt, seconds)
    except (OSError, RuntimeError) as error:
        raise Refusal(507, f"the context cannot be saved: {error}") from error
