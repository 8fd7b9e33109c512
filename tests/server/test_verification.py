"""Answers that say in ``usage`` what the full cache would have picked, and metrics of it."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

import httpx
import pytest

from tests.server.conftest import Server, check_refused, events, random_prompt, serving, wait_until
from vllm_kvmerge.request.proof import Verified

SALTS = itertools.count()
HARSH = {"policy": "random", "budget": 33, "verify": True}
"""Keeps what happens to stay, of 300 tokens."""
WHOLE = {"policy": "snapkv", "budget": 2000, "verify": True}


def body(field: dict, **more) -> dict:
    prompt = random_prompt(5, 300)
    salt = f"v{next(SALTS)}"
    return {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "cache_salt": salt, "kv_compression": field, **more}


def said(usage: dict) -> Verified:
    return Verified.model_validate(usage["kv_compression"]["verified"])


def test_a_budget_above_the_length_agrees_wholly(server: Server):
    answer = server.complete(**body(WHOLE))
    told = said(answer["usage"])
    assert (told.tokens, told.agreeing, told.first_difference, told.skipped) == (40, 1.0, None, None)
    assert abs(told.log_prob_change) < 1e-3 and told.tokens_computed < 340
    assert answer["choices"][0]["logprobs"] is None


def test_what_was_lost_is_seen(server: Server):
    told = said(server.complete(**body(HARSH))["usage"])
    assert told.tokens == 40 and told.agreeing < 1.0 and told.log_prob_change > 0.01
    assert told.first_difference is not None and not told.fallback


def test_streams_and_several_sequences(server: Server):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = events(server.ask(**body(HARSH, **options)))
    whole = server.complete(**body(HARSH))
    assert said(stream[-1]["usage"]) == said(whole["usage"])
    told = said(server.complete(**body(HARSH, n=2, temperature=0.7, seed=1))["usage"])
    assert told.tokens == 80 and told.agreeing is None and told.log_prob_change is not None
    own = server.complete(**body(HARSH, logprobs=1))
    assert len(own["choices"][0]["logprobs"]["token_logprobs"]) == 40 and said(own["usage"]).tokens == 40


def test_an_answer_that_a_stop_string_ends(server: Server):
    text = server.complete(**body(HARSH))["choices"][0]["text"]
    stop = text.split()[20]
    answer = server.complete(**body(HARSH, stop=[stop]))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert said(answer["usage"]).tokens == answer["usage"]["completion_tokens"] < 40


def test_under_a_grammar(server: Server):
    """Log-probabilities are of what it allows, on both sides."""
    field = {"structured_outputs": {"regex": "((dada|gofo|duzi)[0-9]){20}"}, "ignore_eos": False}
    whole = server.complete(**body(WHOLE, **field))
    told = said(whole["usage"])
    assert told.tokens == 40 and told.agreeing == 1.0 and abs(told.log_prob_change) < 1e-3
    again = server.complete(**body({**HARSH, "min_agreement": 1.0}, **field))
    assert said(again["usage"]).fallback and again["choices"][0]["text"] == whole["choices"][0]["text"]


def test_a_floor_has_the_answer_made_again(server: Server):
    plain = server.complete(**body({"policy": "full"}))["choices"][0]["text"]
    before = server.metric("vllm:kvmerge_fallback_answers_total", policy="random")
    answer = server.complete(**body({**HARSH, "min_agreement": 0.99}))
    told = said(answer["usage"])
    assert told.fallback and told.tokens == 40 and answer["choices"][0]["text"] == plain
    assert answer["usage"]["kv_compression"]["policy"] == "random"
    assert server.metric("vllm:kvmerge_fallback_answers_total", policy="random") == before + 1
    kept = server.complete(**body({**WHOLE, "min_agreement": 0.99}))
    assert not said(kept["usage"]).fallback


@pytest.mark.parametrize(
    ("field", "more", "param", "words"),
    [
        ({"min_agreement": 0.9}, {"stream": True}, "min_agreement", "a stream cannot be taken back"),
        ({"min_agreement": 0.9}, {"temperature": 0.5}, "min_agreement", "sampled answers"),
        ({"min_agreement": 1.5}, {}, "min_agreement", "less than or equal to 1"),
    ],
)
def test_what_cannot_be_verified_is_refused(server: Server, field, more, param, words):
    asked = body({"policy": "snapkv", "budget": 64, **field}, **more)
    check_refused(server.ask(**asked), f"kv_compression.{param}", words)


def test_a_client_that_leaves_ends_nothing_else(server: Server):
    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            asked = {"model": "demo", "temperature": 0, **body(HARSH, max_tokens=400)}
            with contextlib.suppress(httpx.TimeoutException):
                await client.post(server.url + "/v1/completions", json=asked, timeout=0.1)

    asyncio.run(leave())
    assert said(server.complete(**body(WHOLE))["usage"]).agreeing == 1.0


@pytest.fixture(
    scope="module",
    params=[(), pytest.param(("--tensor-parallel-size", "2"), marks=pytest.mark.slow)],
    ids=["one", "two"],
)
def sharing(request) -> Iterator[Server]:
    """A server, of one worker or two, that verifies all answers of its own accord."""
    with serving("--verify-share", "1", *request.param) as ready:
        yield ready


def test_a_share_is_verified_after_its_answers(sharing: Server):
    for field in ({"policy": "full"}, {"policy": "random", "budget": 33}):
        answer = sharing.complete(**body(field))
        assert answer["usage"].get("kv_compression", {}).get("verified") is None
    compared = "vllm:kvmerge_verified_tokens_total"
    wait_until(lambda: sharing.metric(compared) == 80)
    agreeing = "vllm:kvmerge_agreeing_tokens_total"
    assert sharing.metric(agreeing, policy="full", budget="1") == 40
    assert sharing.metric(agreeing, policy="random", budget="33") < 40
    assert sharing.metric("vllm:kvmerge_log_prob_drop_count") == 2
    assert sharing.metric("vllm:kvmerge_verification_tokens_total", policy="full") >= 40
