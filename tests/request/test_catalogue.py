"""The list of policies and parts says everything that a request needs to know."""

import json

import pytest
from pydantic_core import to_jsonable_python

from vllm_kvmerge.policies import PARTS, PRESETS
from vllm_kvmerge.request.catalogue import describe_policies
from vllm_kvmerge.request.schema import request_schema
from vllm_kvmerge.request.spec import parse_compression

CATALOGUE = describe_policies()


def test_everything_is_listed_and_is_json() -> None:
    assert json.loads(json.dumps(CATALOGUE)) == CATALOGUE
    assert [preset["name"] for preset in CATALOGUE["presets"]] == ["full", *PRESETS]
    assert {kind: [part["name"] for part in parts] for kind, parts in CATALOGUE["parts"].items()} == {
        kind: list(parts) for kind, parts in PARTS.items()
    }
    assert CATALOGUE["schema"] == request_schema()


@pytest.mark.parametrize("preset", CATALOGUE["presets"][1:], ids=lambda preset: preset["name"])
def test_a_preset_is_what_a_request_that_spells_it_out_gets(preset: dict) -> None:
    spelled_out = {"policy": preset["name"], "decode": preset["decode"], **preset["parts"], **preset["defaults"]}
    full, short = (parse_compression(request) for request in (spelled_out, {"policy": preset["name"]}))
    assert full is not None and short is not None and (short.budget, short.interval) == (0.2, None)
    assert full.model_copy(update={"text": short.text}) == short
    assert preset["source"]


def test_what_a_server_does_not_allow_is_not_listed() -> None:
    described = describe_policies(["snapkv"])
    assert [preset["name"] for preset in described["presets"]] == ["full", "snapkv"]
    assert set(described["schema"]["discriminator"]["mapping"]) == {"full", "snapkv"}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_are_described(kind: str) -> None:
    for part in CATALOGUE["parts"][kind]:
        registered = PARTS[kind][part["name"]]
        assert part["source"] == registered.source
        assert part["summary"] and "\n" not in part["summary"]
        assert [field["name"] for field in part["fields"]] == list(registered.model_fields)
        for field in part["fields"]:
            assert field["default"] == to_jsonable_python(registered.model_fields[field["name"]].default)
            assert field["description"], field
            assert field["type"] not in ("", "object"), field
