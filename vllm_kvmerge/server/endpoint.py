"""The endpoint plugin: adds the body field ``kv_compression`` and a page for trying it to vLLM's HTTP server."""

import logging
import pkgutil
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from vllm import envs

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.arguments import PluginConfig, plugin_config
from vllm_kvmerge.engine.validation import check_prompt, enforce_limits
from vllm_kvmerge.policies import ALLOCATORS, PRESETS, TRACKERS
from vllm_kvmerge.request.catalogue import describe_policies
from vllm_kvmerge.request.limits import CALIBRATED
from vllm_kvmerge.request.proof import CompressionProof
from vllm_kvmerge.request.schema import FULL, field_schema
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY
from vllm_kvmerge.server.auto_budget import AutoBudget
from vllm_kvmerge.server.body import BodyMiddleware, Refusal, answer_recursion, answer_refusal
from vllm_kvmerge.server.contexts import NamedContext, NewContext, add_context_routes, kept_contexts
from vllm_kvmerge.server.draining import DrainingMiddleware, drain_first
from vllm_kvmerge.server.guard import GuardMiddleware
from vllm_kvmerge.server.middleware import CompressionFieldMiddleware
from vllm_kvmerge.server.outputs import follow_outputs
from vllm_kvmerge.server.page import UI_ROUTE, add_page_routes
from vllm_kvmerge.server.request_id import mark_log_records

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger(__name__)

POLICIES_ROUTE = "/kvmerge/policies"
HANDBOOK = "vllm_kvmerge.demo.handbook:draw_example"

BODY_MODELS = (
    "CompletionRequest",
    "ChatCompletionRequest",
    "ResponsesRequest",
    "AnthropicMessagesRequest",
    "GenerateRequest",
    NewContext.__name__,
)
"""Names of the schemas of bodies that take the field."""

SERVERS_OWN = {
    "CompletionRequest": (NamedContext,),
    "ChatCompletionRequest": (NamedContext, AutoBudget),
    NewContext.__name__: (AutoBudget,),
}
"""Those of bodies whose field a server may resolve itself, and what it may be besides."""


USAGE_MODELS = ("UsageInfo", "ResponseUsage", "AnthropicUsage")
"""Those of the objects ``usage`` of answers."""

PROOF_SCHEMA = {"$ref": f"#/components/schemas/{CompressionProof.__name__}"}


def served(config: PluginConfig) -> list[str] | None:
    """Names of the policies that requests may take; None: all. Some need a file that a server may lack."""
    if config.kvzap is not None and config.head_budgets is not None:
        return config.allowed_policies

    def has_files(name: str) -> bool:
        if name == FULL:
            return True
        tracker, allocator = TRACKERS[PRESETS[name].tracker], ALLOCATORS[PRESETS[name].allocator]
        lacks_model = tracker.predicts_scores and config.kvzap is None
        return not lacks_model and not (allocator.needs_head_budgets and config.head_budgets is None)

    return list(filter(has_files, (FULL, *PRESETS) if config.allowed_policies is None else config.allowed_policies))


class KVMergeEndpoint:
    """Entry point ``kvmerge`` of ``vllm.endpoint_plugins`` (see vLLM's ``EndpointPlugin``)."""

    name = "kvmerge"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds the middleware, the field's schema, the list of policies, the routes of contexts and the page."""
        compat.log_as_vllm()
        mark_log_records()
        if app.state.args.scheduler_cls is None:
            return  # the field is refused
        app.state.kvmerge = True
        compat.install_front_end(check_prompt)
        add_middleware(app)
        config = plugin_config(app.state.args)
        policies_served = served(config)
        document_field(app, policies_served)
        is_calibrated = config.head_budgets is not None and (policies_served is None or CALIBRATED in policies_served)
        catalogue = describe_policies(policies_served, is_calibrated)  # constant: nothing is registered after start-up

        @app.get(POLICIES_ROUTE)
        async def policies() -> dict[str, Any]:
            """The policies and parts that `kv_compression` can name, their parameters, and the field's JSON schema."""
            return catalogue

        add_context_routes(app, config)
        is_demo = config.example_prompts is not None
        add_page_routes(app, pkgutil.resolve_name(config.example_prompts or HANDBOOK), is_demo)

    async def init_state(self, engine_client: "EngineClient | None", state: "State", args: Namespace) -> None:
        """Drains the server before it stops, follows the engine's outputs, and enforces its limits."""
        if engine_client is None:
            return
        drain_first(engine_client, state)
        if args.scheduler_cls is not None:
            config = plugin_config(args)
            state.kvmerge_contexts = kept_contexts(engine_client, config)
            follow_outputs(engine_client, config, state.kvmerge_contexts)
            await enforce_limits(engine_client)


def add_middleware(app: FastAPI) -> None:
    """Adds the middleware, outermost first: without the key, a client learns nothing and no body is read."""
    args = app.state.args
    config = plugin_config(args)
    tokens = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    middlewares = [
        Middleware(DrainingMiddleware),
        Middleware(BodyMiddleware, max_bytes=config.max_body_bytes),
        Middleware(CompressionFieldMiddleware, has_default=config.default is not None),
    ]
    if tokens and config.api_key_routes == "all":
        page_routes = (UI_ROUTE, POLICIES_ROUTE)  # loaded before the page asks for the key
        middlewares.insert(0, Middleware(GuardMiddleware, tokens=tokens, page_routes=page_routes))
    # app.add_middleware would put them around the one that counts HTTP responses, which would miss refusals.
    app.user_middleware += middlewares
    app.add_exception_handler(Refusal, answer_refusal)
    app.add_exception_handler(RecursionError, answer_recursion)


def document_field(app: FastAPI, policies: list[str] | None) -> None:
    """Makes ``app.openapi`` describe the field. policies: those that requests may name; None: all."""
    build_schema = app.openapi

    def openapi() -> dict[str, Any]:
        schema = build_schema()  # FastAPI caches it: the field is added to the same object each time
        models = schema.get("components", {}).get("schemas", {})
        field = field_schema(policies)
        definitions = field.pop("$defs", {})
        field["description"] = "Compression of this request's KV cache; default: the server's."
        for name in BODY_MODELS:
            if name in models:
                properties = models[name].setdefault("properties", {})
                more = [model.model_json_schema() for model in SERVERS_OWN.get(name, ())]
                properties[EXTRA_ARGS_KEY] = {**field, "anyOf": [*field["anyOf"], *more]}
                models.update(definitions)
        proof = CompressionProof.model_json_schema(ref_template="#/components/schemas/{model}")
        models.update(proof.pop("$defs"))
        models[CompressionProof.__name__] = proof
        for name in USAGE_MODELS:
            if name in models:
                models[name].setdefault("properties", {})[EXTRA_ARGS_KEY] = PROOF_SCHEMA
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
