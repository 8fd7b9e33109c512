"""Batch files (``vllm run-batch``): their chats pass through the same middleware as a server's, which may refuse them
and reports what compression did."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.arguments import is_asked, plugin_config
from vllm_kvmerge.engine.validation import check_prompt, enforce_limits
from vllm_kvmerge.server.body import Refusal, answer_refusal
from vllm_kvmerge.server.contexts import kept_contexts
from vllm_kvmerge.server.messages import CHAT_ROUTE, TOKENIZE_ROUTE, post
from vllm_kvmerge.server.middleware import CompressionFieldMiddleware
from vllm_kvmerge.server.outputs import follow_outputs
from vllm_kvmerge.server.refusal import FieldRefusal

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat


async def start(engine_client: "EngineClient") -> Callable[[compat.Handler, str], compat.Handler]:
    """Prepares the process as endpoint plugins prepare a server, and returns what puts the middleware around a handler
    of vLLM's, which has the URL."""
    middleware, contexts = Middleware(FieldRefusal), None
    if is_asked(engine_client.vllm_config.additional_config):
        config = plugin_config(engine_client.vllm_config)
        compat.install_front_end(check_prompt)
        contexts = kept_contexts(engine_client, config)
        follow_outputs(engine_client, config, contexts)
        await enforce_limits(engine_client)
        middleware = Middleware(CompressionFieldMiddleware, has_default=config.default is not None)

    def around(handler: compat.Handler, url: str) -> compat.Handler:
        if url != CHAT_ROUTE:
            return handler
        serving: OpenAIServingChat = handler.__self__  # type: ignore[attr-defined]
        routes = [
            Route(CHAT_ROUTE, _chat_with(serving), methods=["POST"]),
            Route(TOKENIZE_ROUTE, _tokenize_with(serving), methods=["POST"]),
        ]
        app = Starlette(routes=routes, middleware=[middleware], exception_handlers={Refusal: answer_refusal})
        app.state.engine_client, app.state.kvmerge_contexts = engine_client, contexts

        async def answer(body: ChatCompletionRequest) -> JSONResponse:
            scope = {"type": "http", "http_version": "1.1", "scheme": "http"}
            status, content = await post(app, scope, CHAT_ROUTE, body.model_dump(mode="json", exclude_unset=True))
            return JSONResponse(json.loads(content), status)

        return answer

    return around


def _chat_with(serving: "OpenAIServingChat") -> Callable[[Request], Awaitable[JSONResponse]]:
    async def chat(request: Request) -> JSONResponse:
        response = await serving.create_chat_completion(ChatCompletionRequest.model_validate(await request.json()))
        if isinstance(response, AsyncGenerator):
            raise Refusal(400, "stream: batch files do not support it; allowed: false", "stream")
        status = 200 if isinstance(response, ChatCompletionResponse) else response.error.code
        return JSONResponse(response.model_dump(mode="json"), status)

    return chat


def _tokenize_with(serving: "OpenAIServingChat") -> Callable[[Request], Awaitable[JSONResponse]]:
    async def tokenize(request: Request) -> JSONResponse:
        rendered = await serving.render_chat_request(ChatCompletionRequest.model_validate(await request.json()))
        if not isinstance(rendered, tuple):
            return JSONResponse(rendered.model_dump(mode="json"), rendered.error.code)
        _, (prompt,) = rendered
        return JSONResponse({"tokens": prompt["prompt_token_ids"]})

    return tokenize
