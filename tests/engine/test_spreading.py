"""Compressions that take long are spread over steps, and come to what they come to at once."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, greedy, random_prompt, run
from tests.engine.spread import spread_over
from vllm_kvmerge.engine.messages import Compress, Spent
from vllm_kvmerge.engine.schedule import UNCOMPRESSED
from vllm_kvmerge.engine.spreading import GUESS, MAX_KINDS, SHARE, STEP_SECONDS, Pace, SpreadCompression

CONTEXT = 430
CASES = {
    "keepkv": {"budget": 96},
    "h2o": {"budget": 96, "interval": 8},
    "adakv": {"budget": 96},
    "d2o": {"budget": 96},
    "kvzip": {"budget": 96},
    "snapkv": {"budget": {"threshold": 0.005, "max": 0.5}},
    "morphkv": {"budget": 64, "interval": 4},
    "grkv": {"budget": 96, "prefill": {"chunk": 100}},
    "expected_attention": {"budget": 96, "selector": "fused", "refresh": {"every": 8}},
    "pyramidkv": {"budget": 96, "front": "int8"},
    "chunkkv": {"budget": 96, "front": "int4"},
}
"""Policies whose heads have equal and different budgets, with a count that depends on data, repeated contexts, contexts
that are compressed while they are computed, refreshes, and fronts in 8 and 4 bits."""


def params(policy: str | None, max_tokens: int = 24) -> SamplingParams:
    return greedy(policy, max_tokens, **CASES.get(policy, {}))


def alone(engine: Engine, policy: str) -> tuple[list[int], list[int]]:
    """A prompt, and what a request alone answers."""
    prompt = random_prompt(np.random.default_rng(7), CONTEXT)
    return prompt, engine.tokens([prompt], params(policy))[0]


def begin(engine: Engine) -> None:
    """Adds requests that generate meanwhile, without compression."""
    for index in range(2):
        engine.add(f"other {index}", random_prompt(np.random.default_rng(index), 40), params(None, 600))
    engine.llm.llm_engine.step()


def named(engine: Engine, name: str):
    """The scheduler's request, to whose name vLLM has added something."""
    (request,) = (one for one in engine.scheduler.requests.values() if one.request_id.startswith(f"{name}-"))
    return request


def at_work(engine: Engine) -> list[str]:
    """Requests whose compression is under way."""
    return [request_id for request_id, state in engine.scheduler._states.items() if state.work is not None]


def step_into_the_middle(engine: Engine, name: str) -> str:
    """Until a part of the request's compression has been made, but not the last; its id in the scheduler."""
    request_id = named(engine, name).request_id
    for _ in range(200):
        if request_id in engine.compression._begun:
            break
        engine.llm.llm_engine.step()
    assert at_work(engine) == [request_id]
    return request_id


def finish(engine: Engine) -> dict[str, list[int]]:
    """What requests other than those of ``begin`` answer, which end with them."""
    tokens: dict[str, list[int]] = {}
    core = engine.llm.llm_engine
    while any(not one.startswith("other") for one in engine.scheduler.requests):
        for output in core.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    core.abort_request([f"other {index}" for index in range(2)])
    assert not run(engine)
    engine.assert_empty()
    assert engine.compression._begun == {}
    return {name: found for name, found in tokens.items() if not name.startswith("other")}


@pytest.mark.thin(3)
@pytest.mark.parametrize("policy", CASES)
def test_a_request_computes_nothing_meanwhile_and_others_go_on(engine, policy):
    prompt, expected = alone(engine, policy)
    with spread_over(5):
        begin(engine)
        engine.add("long", prompt, params(policy))
        request_id = step_into_the_middle(engine, "long")
        long, other = (named(engine, name) for name in ("long", "other 0"))
        held = engine.manager.num_held_blocks(request_id)
        for _ in range(3):
            before = long.num_computed_tokens, other.num_computed_tokens
            engine.llm.llm_engine.step()
            assert (long.num_computed_tokens, other.num_computed_tokens) == (before[0], before[1] + 1)
            assert engine.manager.num_held_blocks(request_id) == held, "a part's blocks are read until the last"
        engine.llm.llm_engine.step()
        assert not at_work(engine) and engine.manager.num_held_blocks(request_id) < held
        assert finish(engine) == {"long": expected}


def test_nobody_waits_for_a_request_alone(engine):
    prompt, expected = alone(engine, "keepkv")
    with spread_over(5) as spread:
        assert engine.tokens([prompt], params("keepkv")) == [expected]
        assert not spread.parts


def test_the_rest_is_done_at_once_when_nobody_waits_any_more(engine):
    prompt, expected = alone(engine, "keepkv")
    with spread_over(1000):
        begin(engine)
        engine.add("long", prompt, params("keepkv"))
        step_into_the_middle(engine, "long")
        engine.llm.llm_engine.abort_request([f"other {index}" for index in range(2)])
        engine.llm.llm_engine.step()
        assert not at_work(engine)
        assert finish(engine) == {"long": expected}


@pytest.mark.thin(3)
@pytest.mark.parametrize("policy", CASES)
def test_a_request_that_ends_or_is_preempted_in_between(engine, policy):
    prompt, expected = alone(engine, policy)
    with spread_over(20):
        begin(engine)
        for _ in range(2):
            engine.add("gone", prompt, params(policy))
            step_into_the_middle(engine, "gone")
            engine.llm.llm_engine.abort_request(["gone"])
            assert not at_work(engine)
        engine.add("long", prompt, params(policy))
        request_id = step_into_the_middle(engine, "long")
        begun = engine.compression._begun[request_id]
        engine.scheduler.running.remove(named(engine, "long"))
        engine.scheduler._preempt_request(named(engine, "long"), 0.0)
        assert not at_work(engine)
        # Its prompt may be computed, and its compression begun, in the very next step.
        engine.llm.llm_engine.step()
        assert engine.compression._begun.get(request_id) is not begun
        step_into_the_middle(engine, "long")
        assert finish(engine) == {"long": expected}


PLAN = Compress("a", "{}", "context", 1000, 1000, 100, 100, list(range(4)))
KIND = "{}", 10


def spread_compression() -> SpreadCompression:
    return SpreadCompression(PLAN, None, [], UNCOMPRESSED, 0, KIND, 1000)


def test_parts_follow_what_workers_report():
    """Of a second's work: a 64th at first, and then as much as a step has time for, whatever has been guessed."""
    pace, spread, done, parts = Pace(1), spread_compression(), 0.0, []
    while (part := spread.next_part(STEP_SECONDS, pace)) is not None:
        parts.append(part.until - done)
        done = part.until
        pace.learn({KIND: Spent(parts[-1], 1000 * parts[-1])})
        spread.learn(done)
    assert parts[0] == 1 / 64 and parts[1:] == pytest.approx([STEP_SECONDS] * len(parts[1:]))
    assert len(parts) == pytest.approx(1.0 / STEP_SECONDS, abs=2)


def test_parts_that_workers_have_not_reported_are_not_asked_for_again():
    spread, pace = spread_compression(), Pace(1)
    pace.learn({KIND: Spent(1.0, 1000)})
    first, second = (spread.next_part(0.1, pace) for _ in range(2))
    assert first.until == pytest.approx(0.1) and second.until == pytest.approx(0.2)
    spread.learn(0.04)  # the worker was slower
    assert spread.next_part(0.1, pace).until == pytest.approx(0.24)


@pytest.mark.parametrize("step", [0.001, 0.02, 0.2, 3.0])
@pytest.mark.parametrize("work", [0.0005, 0.01, 0.3])
def test_compressions_get_their_share_of_the_time_while_others_wait(step, work):
    """Over many steps, whatever a step and its compressions take; and nothing is put off for ever."""
    now = 0.0
    pace, spent = Pace(1, clock=lambda: now), 0.0
    for _ in range(2000):
        now += step
        if pace.room(is_awaited=True):
            now, spent = now + work, spent + work
            pace.learn({KIND: Spent(work, 1, work)})
    assert spent <= SHARE * now + STEP_SECONDS + work
    assert spent >= 0.9 * min(SHARE * now, 2000 * work)


def test_nobody_waits_for_the_share_without_others():
    pace = Pace(1, clock=lambda: 0.0)
    pace.learn({KIND: Spent(10.0, 1)})
    assert pace.room(is_awaited=True), "what nobody waited for does not count"
    pace.learn({KIND: Spent(10.0, 1, 10.0)})
    assert not pace.room(is_awaited=True) and pace.room(is_awaited=False)


def test_an_idle_time_is_not_made_up_for():
    now = 0.0
    pace = Pace(1, clock=lambda: now)
    now = 1000.0
    assert pace.room(is_awaited=True)
    pace.learn({KIND: Spent(1.0, 1, 1.0)})
    assert not pace.room(is_awaited=True)


def test_the_oldest_of_many_kinds_is_forgotten():
    pace = Pace(2)
    for number in range(MAX_KINDS + 1):
        pace.learn({("{}", number): Spent(3.0, 100)})
    assert not pace.is_known(("{}", 0)) and pace.seconds(("{}", 0), 100) == 2 * 100**2 * GUESS
    assert pace.seconds(("{}", 1), 50) == 1.5
