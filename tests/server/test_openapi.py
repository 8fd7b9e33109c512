"""The OpenAPI schema describes the body field."""

from argparse import Namespace
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import create_model

from tests.server.conftest import send
from vllm_kvmerge.engine.arguments import plugin_config
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.catalogue import describe_policies
from vllm_kvmerge.request.proof import CompressionProof
from vllm_kvmerge.request.schema import request_schema
from vllm_kvmerge.server.endpoint import KVMergeEndpoint, served
from vllm_kvmerge.server.middleware import CompressionFieldMiddleware

TAKING = {"CompletionRequest": "/v1/completions", "ChatCompletionRequest": "/v1/chat/completions"}
OTHERS = {"EmbeddingRequest": "/v1/embeddings"}


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(scheduler_cls="some.Scheduler", model="some/model", api_key=None, additional_config=None)
    usage = create_model("UsageInfo", prompt_tokens=(int, 0))
    for name, path in (TAKING | OTHERS).items():

        async def answer(body: Any) -> None: ...

        answer.__annotations__["body"] = create_model(name, prompt=(str, ""))
        app.add_api_route(path, answer, methods=["POST"], response_model=usage)
    return app


def references(node: Any) -> set[str]:
    """Every ``$ref`` and discriminator target below ``node``."""
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        own |= set(node.get("discriminator", {}).get("mapping", {}).values())
        return own.union(*(references(child) for child in node.values()))
    return set().union(*(references(child) for child in node)) if isinstance(node, list) else set()


def test_generation_bodies_have_the_field(app: FastAPI) -> None:
    app.state.args.additional_config = {"kvmerge": {"kvzap": "some/model", "head_budgets": "some.json"}}
    KVMergeEndpoint().attach_router(app)
    models = app.openapi()["components"]["schemas"]
    for name in TAKING:
        field = models[name]["properties"]["kv_compression"]
        assert "$defs" not in field
        by_policy, without, named_context, *auto = field["anyOf"]
        assert named_context["required"] == ["context"]
        assert [one["required"] for one in auto] == [["budget", "min_agreement"]] * name.startswith("Chat")
        assert set(by_policy["discriminator"]["mapping"]) == {"full", *PRESETS}
        assert without["required"] == ["budget"] and "policy" not in without["properties"]
        named = {ref.rsplit("/", 1)[1] for ref in references(field)}
        assert named | {"Protect", "Refresh"} == set(request_schema()["$defs"])
    assert "kv_compression" not in models["EmbeddingRequest"]["properties"]
    said = models["UsageInfo"]["properties"]["kv_compression"]["$ref"].rsplit("/", 1)[1]
    assert set(models[said]["properties"]) == set(CompressionProof.model_fields)
    *_, auto = own = models["NewContext"]["properties"]["kv_compression"]["anyOf"]
    assert len(own) == 3 and auto["required"] == ["budget", "min_agreement"]  # it cannot name another


def test_every_reference_resolves_and_a_second_look_changes_nothing(app: FastAPI) -> None:
    KVMergeEndpoint().attach_router(app)
    schema = app.openapi()
    for ref in references(schema):
        assert ref.removeprefix("#/components/schemas/") in schema["components"]["schemas"]
    assert app.openapi() == schema


def test_policies_are_listed(app: FastAPI) -> None:
    KVMergeEndpoint().attach_router(app)
    contexts = ["/v1/kvmerge/contexts", "/v1/kvmerge/contexts/{context_id}"]
    assert [path for path in app.openapi()["paths"] if "kvmerge" in path] == ["/kvmerge/policies", *contexts]
    names = [name for name in PRESETS if name not in ("kvzap", "calibrated")]  # which need files
    assert send(app, "GET", "/kvmerge/policies").json() == describe_policies(names) != describe_policies()
    app.state.args.additional_config = {"kvmerge": {"kvzap": "some/model", "head_budgets": "some.json"}}
    assert served(plugin_config(app.state.args)) is None


def test_middleware_is_innermost_and_that_of_servers_which_compress(app: FastAPI) -> None:
    app.state.args.scheduler_cls = None
    KVMergeEndpoint().attach_router(app)
    assert app.user_middleware == [] and "kv" not in str(app.openapi())
    app.state.args.scheduler_cls = "some.Scheduler"
    KVMergeEndpoint().attach_router(app)
    assert app.user_middleware[-1].cls is CompressionFieldMiddleware  # inside the one that counts responses
