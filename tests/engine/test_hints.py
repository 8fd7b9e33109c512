"""Our actions of vLLM's ``kv_hints``: what compressed requests leave in the prefix cache when it is short of room."""

import time

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from tests.engine import test_turns
from tests.engine.test_kept_contexts import CONTEXT, params, text
from tests.engine.test_turns import ANSWER, FIRST
from vllm_kvmerge.engine.hints import DROP, EXPECT, PIN, Hints

LONG = {"seconds": 3600}


def envelope(action_type: str, payload: dict, version: str = "1.0") -> KvHintsEnvelope:
    """With an action of somebody else's."""
    actions = [KvHintAction("1", "kv.fetch", "1.0", {"block_hashes": []})]
    return KvHintsEnvelope("0.1", "message", [*actions, KvHintAction("2", action_type, version, payload)])


def ask(engine, prompt, some, *hint) -> tuple[list[int], int]:
    """What a request answers, and how many of its tokens were not computed."""
    vllm = engine.llm.llm_engine
    vllm.add_request("asks", {"prompt_token_ids": prompt}, some, kv_hints=envelope(*hint) if hint else None)
    while vllm.has_unfinished_requests():
        outputs = vllm.step()
    return list(outputs[0].outputs[0].token_ids), outputs[0].num_cached_tokens


def fill(engine) -> None:
    """Has others take and return all free blocks."""
    with engine.with_blocks(0):
        pass


def test_a_pinned_context_stays_for_its_time_where_there_is_room(engine, fronts, monkeypatch):
    some = params("snapkv")
    monkeypatch.setattr(engine.scheduler._contexts, "_max_blocks", 3)  # of one context
    brief, pinned, roomless, plain = (text(seed) for seed in range(740, 744))
    ask(engine, brief, some, PIN, {"seconds": 0.01})
    time.sleep(0.02)
    answer, _ = ask(engine, pinned, some, PIN, LONG)
    ask(engine, roomless, some, PIN, LONG)
    ask(engine, plain, some)
    fill(engine)
    for _ in range(2):
        assert ask(engine, pinned, some) == (answer, CONTEXT - 1)
    assert [ask(engine, prompt, some)[1] for prompt in (brief, roomless, plain)] == [0, 0, 0]
    assert engine.llm.reset_prefix_cache()
    engine.assert_empty()


def test_an_expected_turn_stays_until_somebody_goes_on_from_it(engine, fronts):
    some = test_turns.params("snapkv")
    expected, plain = text(750, FIRST), text(751, FIRST)
    sessions = [ask(engine, expected, some, EXPECT, LONG)[0], ask(engine, plain, some)[0]]
    sessions = [first + answer + text(752, 20)[1:] for first, answer in zip((expected, plain), sessions, strict=True)]
    fill(engine)
    assert [ask(engine, session, some)[1] for session in sessions] == [FIRST + ANSWER - 1, 0]
    fill(engine)
    assert ask(engine, sessions[0], some)[1] == 0
    engine.assert_empty()


@pytest.mark.parametrize("some", [params("snapkv"), test_turns.params("h2o")], ids=["context", "turn"])
def test_a_request_that_is_dropped_leaves_nothing_but_finds_what_is_there(engine, fronts, some):
    prompt = text(760)
    answer, _ = ask(engine, prompt, some, DROP, {})
    assert len(fronts) == 0 and not engine.pool.cached_block_hash_to_block._cache
    assert ask(engine, prompt, some) == (answer, 0)
    left = len(fronts)
    assert ask(engine, prompt, some, DROP, {})[0] == answer and len(fronts) == left > 0
    assert ask(engine, prompt, some)[1] == CONTEXT - 1
    engine.assert_empty()


@pytest.mark.parametrize(
    ("action_type", "payload", "version"),
    [
        ("kv.pin", LONG, "1.0"),
        (DROP, {}, "2.0"),
        *((PIN, payload, "1.0") for payload in ({}, {"seconds": -1}, {"seconds": float("inf")}, {"seconds": "60"})),
    ],
)
def test_other_actions_versions_and_payloads_are_ignored(action_type, payload, version):
    assert Hints.of(envelope(action_type, payload, version)) == Hints() == Hints.of(None)
    assert Hints.of(envelope(PIN, LONG | {"why": "tool"}, "1.1")) == Hints(pin=3600.0)
