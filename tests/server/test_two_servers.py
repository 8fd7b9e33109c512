"""One engine behind two API servers, with LoRA adapters: contexts are the engine's, and those of an adapter its own."""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.engine.test_inputs import write_with_adapters
from tests.server.conftest import ONE_PROCESS_PER_ENGINE, Server, serving
from tests.server.test_contexts import FACTS, FIELD, QUESTION, ROUTE, ask, assert_said, cached, keep, said, tokens_of
from tests.server.test_several_processes import from_both

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_adapters(tmp_path_factory.mktemp("model"))


def with_contexts(model: Path, folder: Path, *options: str) -> AbstractContextManager[Server]:
    options += "--api-server-count", "2", "--enable-prompt-tokens-details", "--kvmerge-contexts", str(folder)
    options += "--served-model-name", "demo", *ONE_PROCESS_PER_ENGINE
    return serving(*options, command=("-m", "vllm_kvmerge.cli", "serve", str(model)))


@pytest.fixture(scope="module")
def both(model: Path, folder: Path) -> Iterator[Server]:
    # One slot stays empty: on CPU, vLLM gives requests without an adapter the last slot's.
    options = "--enable-lora", "--max-loras", "3", "--max-lora-rank", "8", "--lora-modules"
    with with_contexts(model, folder, *options, f"a={model}/a", f"b={model}/b") as ready:
        yield ready


def listed(server: Server) -> list[list[str]]:
    """Ids of the contexts that either API server knows."""
    return [[one["id"] for one in answer.json()["data"]] for answer in from_both(server, "GET", ROUTE)]


def completion(**body) -> dict:
    return {"model": "demo", "max_tokens": 6, "temperature": 0, "logprobs": 1, "prompt": QUESTION} | body


def test_each_knows_what_the_other_keeps(both, model, folder, tmp_path):
    tokens = tokens_of(both, prompt=FACTS)
    question = tokens_of(both, prompt=QUESTION, add_special_tokens=False)
    whole = {"kv_compression": FIELD | {"context_tokens": len(tokens)}, "cache_salt": "other"}
    expected = said(ask(both, prompt=tokens + question, **whole))
    body = {"model": "demo", "prompt": FACTS, "kv_compression": FIELD}
    made = [answer.json() for answer in from_both(both, "POST", ROUTE, json=body)]
    ids = [one["id"] for one in made]
    assert len({*ids}) == len(ids) >= 2 and all(one["saved"] for one in made)
    assert all(found == ids for found in listed(both))
    for one in made:
        for answer in from_both(both, "GET", f"{ROUTE}/{one['id']}"):
            assert answer.json() == one | {"seconds": None}
        asked = completion(kv_compression={"context": one["id"]})
        for answer in from_both(both, "POST", "/v1/completions", json=asked):
            assert_said(answer, expected)
            assert cached(answer) == len(tokens)
    deleted, *left = ids
    assert httpx.delete(f"{both.url}{ROUTE}/{deleted}").status_code == 200
    assert {answer.status_code for answer in from_both(both, "GET", f"{ROUTE}/{deleted}")} == {404}
    asked = completion(kv_compression={"context": deleted})
    assert {answer.status_code for answer in from_both(both, "POST", "/v1/completions", json=asked)} == {404}
    # A server that starts has them too, without the adapters as well.
    shutil.copytree(folder, tmp_path / "saved")
    with with_contexts(model, tmp_path / "saved") as later:
        assert all(sorted(found) == sorted(left) for found in listed(later))
        asked = completion(kv_compression={"context": left[0]})
        for answer in from_both(later, "POST", "/v1/completions", json=asked):
            assert_said(answer, expected)
            assert cached(answer) == len(tokens)
        assert later.metric("vllm:kvmerge_saved_contexts_total", event="loaded") == 1
        assert not any("is not used" in line for line in later.log)
        assert httpx.delete(f"{later.url}{ROUTE}/{left[0]}").status_code == 200
        assert len(list((tmp_path / "saved").iterdir())) == len(left) - 1
    for one in left:
        assert httpx.delete(f"{both.url}{ROUTE}/{one}").status_code == 200
    assert not any(listed(both)) and not list(folder.iterdir())


def test_contexts_of_an_adapter_are_kept_for_it_alone(both, folder):
    kept = keep(both, model="a")
    whole = {"model": "a", "prompt": FACTS + QUESTION, "cache_salt": "other"}
    expected = said(ask(both, **whole, kv_compression=FIELD | {"context_tokens": kept["tokens"]}))
    body = completion(model="a", kv_compression={"context": kept["id"]})
    for answer in from_both(both, "POST", "/v1/completions", json=body):
        assert_said(answer, expected)
        assert cached(answer) == kept["tokens"]
    for other in ("demo", "b"):
        assert ask(both, **body | {"model": other}).status_code == 404
    # Its tokens do not say all of it.
    assert not kept["saved"] and not list(folder.iterdir())
    assert httpx.delete(f"{both.url}{ROUTE}/{kept['id']}").status_code == 200
