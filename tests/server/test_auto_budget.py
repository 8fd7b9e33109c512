"""Budgets that a server chooses for a context, by what its answers to probes agree in with the full cache's."""

from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, check_refused, events, random_prompt
from tests.server.test_contexts import ASKED, FACTS, MESSAGES, ROUTE, ask, keep, nothing_left, said  # noqa: F401
from vllm_kvmerge.request.proof import Chosen, Verified
from vllm_kvmerge.server.auto_budget import BUDGETS

pytestmark = pytest.mark.engine

CHATS = "/v1/chat/completions"
PROMPT = random_prompt(11, 400)
PROBES = ["recall fiso", "remember bado 7777. recall gofu"]
ANY = 0.001
"""A floor that every budget passes."""
AUTO = {"policy": "random", "budget": "auto", "min_agreement": ANY, "probes": PROBES}


def delete(server: Server, kept: dict[str, Any]) -> None:
    assert httpx.delete(f"{server.url}{ROUTE}/{kept['id']}", params={"cache_salt": "mine"}).status_code == 200


def agreement(server: Server, budget: float, probe: str) -> Verified:
    """What a request says that asks the probe of PROMPT itself."""
    text = f"\n\nQuestion: {probe}\nAnswer:"
    tokens = server.post("/tokenize", {"model": "demo", "prompt": text, "add_special_tokens": False}).json()["tokens"]
    field = {"policy": "random", "budget": budget, "verify": True, "context_tokens": len(PROMPT)}
    answer = server.complete(PROMPT + tokens, max_tokens=32, kv_compression=field, cache_salt="mine")
    return Verified.model_validate(answer["usage"]["kv_compression"]["verified"])


def test_the_smallest_budget_that_passes_is_kept(server: Server):
    parts = {budget: [agreement(server, budget, probe) for probe in PROBES] for budget in BUDGETS}
    agreeing = [Verified.of_all(parts[budget]).agreeing for budget in BUDGETS]
    floors = {ANY, *agreeing, 1.0}
    assert len(floors) > 3, agreeing
    for floor in floors:
        kept = keep(server, prompt=PROMPT, kv_compression=AUTO | {"min_agreement": floor}, cache_salt="mine")
        chosen = Chosen.model_validate(kept["chosen"])
        passed = [one >= floor for one in agreeing]
        count = passed.index(False) if False in passed else len(passed)
        assert [one.kv_compression["budget"] for one in chosen.tried] == list(BUDGETS[: count + 1])
        assert [one.verified.agreeing for one in chosen.tried] == agreeing[: count + 1]
        assert chosen.budget == (BUDGETS[count - 1] if count else None)
        if count:
            assert kept["kv_compression"]["budget"] == chosen.budget and kept["entries"] == 400 * chosen.budget
        delete(server, kept)


def test_where_none_passes_the_context_stays_exact(server: Server):
    question = random_prompt(12, 9)[1:]
    plain = said(ask(server, prompt=PROMPT + question))
    kept = keep(server, prompt=PROMPT, kv_compression=AUTO | {"min_agreement": 1.0}, ttl=1000)
    assert (kept["kv_compression"], kept["entries"], kept["bytes"]) == ({"policy": "full"}, 400, 0)
    assert kept["chosen"]["budget"] is None and not kept["saved"] and kept["expires_at"] is not None
    assert server.metric("vllm:kvmerge_kept_contexts") == 1 and server.metric("vllm:kvmerge_kept_context_bytes") == 0
    for field in ({"context": kept["id"]}, {"context": kept["id"], "verify": True, "policy": "full"}):
        answer = ask(server, prompt=question, kv_compression=field)
        assert said(answer) == (plain[0], pytest.approx(plain[1], abs=1e-4), plain[2])
    refused = ask(server, prompt=question, kv_compression={"context": kept["id"], "policy": "random"})
    check_refused(refused, "kv_compression.policy", 'allowed: "full"')


def test_chats_choose_once_for_a_context(server: Server):
    """Whether a request has its answer verified besides is its own."""
    field = AUTO | {"context_messages": 2, "policy": "auto", "probes": ["recall fiso"]}
    body = {"messages": MESSAGES + ASKED, "logprobs": True, "kv_compression": field, "cache_salt": "mine"}

    def verified() -> float:
        return server.metric("vllm:kvmerge_verified_tokens_total")

    before = verified()
    first = ask(server, CHATS, **body)
    told = first.json()["usage"]["kv_compression"]
    chosen = Chosen.model_validate(told["chosen"])
    assert [one.kv_compression["policy"] for one in chosen.tried] == ["expected_attention"] * 3
    assert told["parameters"]["budget"] == chosen.budget == 0.125 and told["verified"] is None
    counted = verified()
    assert counted > before
    own = ask(server, CHATS, **body | {"kv_compression": chosen.tried[-1].kv_compression})
    assert said(first) == said(own)
    stream = events(ask(server, CHATS, **body, stream=True, stream_options={"include_usage": True}))
    assert stream[-1]["usage"]["kv_compression"]["chosen"] == told["chosen"]
    assert verified() == counted
    usage = ask(server, CHATS, **body | {"kv_compression": field | {"verify": True}}).json()["usage"]
    assert usage["kv_compression"]["verified"]["tokens"] == usage["completion_tokens"]


def test_a_question_about_a_kept_context_is_verified(server: Server):
    kept = keep(server, prompt=FACTS)
    field = {"context": kept["id"], "verify": True}
    usage = ask(server, prompt=" recall gofu", kv_compression=field).json()["usage"]
    assert usage["kv_compression"]["verified"]["tokens"] == usage["completion_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": PROMPT}, "budget", "POST /v1/kvmerge/contexts"),
        (CHATS, {"messages": MESSAGES}, "budget", "context_messages"),
        (CHATS, {"messages": MESSAGES, "kv_compression": AUTO | {"context_messages": 3}}, "context_messages", "to 2"),
        (ROUTE, {"prompt": PROMPT, "kv_compression": {"budget": "auto"}}, "min_agreement", "Field required"),
        (ROUTE, {"prompt": PROMPT, "kv_compression": AUTO | {"min_agreement": 2}}, "min_agreement", "up to 1"),
        (ROUTE, {"prompt": PROMPT, "kv_compression": AUTO | {"probes": []}}, "probes", "1 to 16 texts"),
        (ROUTE, {"prompt": PROMPT, "kv_compression": AUTO | {"policy": "none"}}, "policy", "unknown policy"),
        (ROUTE, {"prompt": PROMPT, "kv_compression": AUTO | {"policy": "full"}}, "budget", "unknown field"),
        (ROUTE, {"prompt": PROMPT, "kv_compression": AUTO | {"reuse": "turns"}}, "reuse", "allowed: null"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_refused(server: Server, path: str, body: dict[str, Any], param: str, words: str):
    response = server.post(path, {"model": "demo", "kv_compression": AUTO, **body})
    check_refused(response, f"kv_compression.{param}", words)
