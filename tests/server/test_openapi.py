"""The OpenAPI schema describes the body field."""

import asyncio
from argparse import Namespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from vllm_kvmerge.engine.arguments import plugin_config
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.catalogue import describe_policies
from vllm_kvmerge.request.parameters import request_schema
from vllm_kvmerge.request.proof import CompressionProof
from vllm_kvmerge.server.endpoint import KVMergeEndpoint, served
from vllm_kvmerge.server.middleware import CompressionFieldMiddleware


class CompletionRequest(BaseModel):
    prompt: str


class ChatCompletionRequest(BaseModel):
    messages: list[str]


class EmbeddingRequest(BaseModel):
    input: str


class UsageInfo(BaseModel):
    prompt_tokens: int


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(scheduler_cls="some.Scheduler", model="some/model", api_key=None, additional_config=None)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> UsageInfo:
        return UsageInfo(prompt_tokens=0)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatCompletionRequest) -> None: ...

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> None: ...

    return app


def references(node: Any) -> set[str]:
    """Every ``$ref`` and discriminator target below ``node``."""
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        own |= set(node.get("discriminator", {}).get("mapping", {}).values())
        return own.union(*(references(child) for child in node.values()))
    return set().union(*(references(child) for child in node)) if isinstance(node, list) else set()


def test_generation_bodies_have_the_field(app: FastAPI) -> None:
    app.state.args.additional_config = {"kvmerge": {"kvzap": "some/model"}}
    KVMergeEndpoint().attach_router(app)
    schema = app.openapi()
    models = schema["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        field = models[name]["properties"]["kv_compression"]
        assert "$defs" not in field
        by_policy, without, named_context = field["anyOf"]
        assert named_context["required"] == ["context"]
        assert set(by_policy["discriminator"]["mapping"]) == {"full", *PRESETS}
        assert without["required"] == ["budget"] and "policy" not in without["properties"]
        named = {ref.rsplit("/", 1)[1] for ref in references(field)}
        assert named | {"Protect", "Refresh"} == set(request_schema()["$defs"])
    assert "kv_compression" not in models["EmbeddingRequest"]["properties"]
    said = models["UsageInfo"]["properties"]["kv_compression"]["$ref"].rsplit("/", 1)[1]
    assert set(models[said]["properties"]) == set(CompressionProof.model_fields)
    assert len(models["NewContext"]["properties"]["kv_compression"]["anyOf"]) == 2  # it cannot name another


def test_every_reference_resolves_and_a_second_look_changes_nothing(app: FastAPI) -> None:
    KVMergeEndpoint().attach_router(app)
    schema = app.openapi()
    for ref in references(schema):
        assert ref.removeprefix("#/components/schemas/") in schema["components"]["schemas"]
    assert app.openapi() == schema


def test_policies_are_listed(app: FastAPI) -> None:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/kvmerge/policies")

    before = list(app.routes)
    KVMergeEndpoint().attach_router(app)
    new = [str(vars(route)["path"]) for route in app.routes if route not in before]
    assert new[0] == "/kvmerge/policies"
    contexts = ["/v1/kvmerge/contexts", "/v1/kvmerge/contexts/{context_id}"]
    assert set(new[1:5]) == set(contexts)
    assert new[5:] and all(path.startswith("/kvmerge/ui") for path in new[5:])
    assert [path for path in app.openapi()["paths"] if "kvmerge" in path] == ["/kvmerge/policies", *contexts]
    response = asyncio.run(get())
    assert response.status_code == 200
    names = [name for name in PRESETS if name != "kvzap"]  # which needs a model that this server has not been given
    assert response.json() == describe_policies(names) != describe_policies()
    app.state.args.additional_config = {"kvmerge": {"kvzap": "some/model"}}
    assert served(plugin_config(app.state.args)) is None


def test_middleware_is_innermost(app: FastAPI) -> None:
    KVMergeEndpoint().attach_router(app)
    assert app.user_middleware[-1].cls is CompressionFieldMiddleware  # inside the one that counts responses


def test_server_with_vllms_scheduler_stays_stock(app: FastAPI) -> None:
    app.state.args.scheduler_cls = None
    KVMergeEndpoint().attach_router(app)
    assert app.user_middleware == []
    assert "kv" not in str(app.openapi())
