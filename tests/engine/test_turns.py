"""``reuse: turns``: a request that goes on where another one ended, as if that had never stopped."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import random_prompt, run
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.evaluation.continuation import CONTINUATION

FIRST, QUESTION, ANSWER = 300, 24, 20
POLICIES = {
    "streaming_llm": "bounded", "keydiff": "bounded", "h2o": "bounded", "keepkv": "bounded", "morphkv": "bounded",
    "zsmerge": "bounded", "adakv": "bounded", "kvzap": "bounded", "snapkv": "grow", "kvzip": "grow",
    "calibrated": "bounded", "adakv grow": "grow", "morphkv cache": "bounded", "adakv cache": "bounded",
}  # fmt: skip


def params(name: str, max_tokens: int = ANSWER, forced: list[int] | None = None, **fields) -> SamplingParams:
    policy = name.split()[0]
    common = {"budget": 96, "interval": 95, "decode": POLICIES[name], "reuse": "turns"}
    if name.endswith("cache"):
        common["positions"] = "cache"
    fields = common | SMALL.get(policy, {}) | fields
    extra = compression(policy, **fields) | ({} if forced is None else {CONTINUATION: forced})
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, extra_args=extra)


def ask(engine, prompt: list[int], some: SamplingParams) -> tuple[list[int], int, list[float]]:
    """What a request answers, how many of its tokens were not computed, and the answer's log-probabilities."""
    output = engine.generate([prompt], some)[0]
    tokens = list(output.outputs[0].token_ids)
    rows = zip(output.outputs[0].logprobs, tokens, strict=True)
    return tokens, output.num_cached_tokens, [row[token].logprob for row, token in rows]


@pytest.mark.thin(6)
@pytest.mark.parametrize("name", POLICIES)
def test_three_turns_are_one_session(engine, fronts, name):
    """The reference is one request that is made to generate questions and answers. Each turn ends with a block that is
    not full, and in the third one ``bounded`` policies compress once more."""
    rng = np.random.default_rng(71)
    prompt = random_prompt(rng, FIRST)
    session, found, cached = prompt, [], []
    for _ in range(3):
        answer, num_cached, losses = ask(engine, session, params(name))
        found.append(losses)
        cached.append(num_cached)
        session = session + answer + random_prompt(rng, QUESTION)[1:]
    ends = [FIRST + ANSWER + turn * (QUESTION - 1 + ANSWER) for turn in range(3)]
    assert cached == [0, *(end - 1 for end in ends[:2])]
    assert engine.llm.reset_prefix_cache()
    tokens, _, losses = ask(engine, prompt, params(name, ends[-1] - FIRST, session[FIRST : ends[-1]]))
    assert tokens == session[FIRST : ends[-1]]
    expected = [losses[end - FIRST - ANSWER : end - FIRST] for end in ends]
    assert np.abs(np.subtract(found, expected)).max() < 2e-3
    engine.assert_empty()


@pytest.mark.parametrize("name", ["snapkv", "h2o", "adakv"])
def test_the_longest_turn_that_matches_wins(engine, fronts, name):
    rng = np.random.default_rng(72)
    first = random_prompt(rng, FIRST)
    answer = ask(engine, first, params(name))[0]
    others = [first + answer + random_prompt(rng, QUESTION)[1:] for _ in range(2)]
    before = [ask(engine, prompt, params(name)) for prompt in others]
    assert [num_cached for _, num_cached, _ in before] == [FIRST + ANSWER - 1] * 2
    # The first turn can still be found beside those that go on from it.
    assert [ask(engine, prompt, params(name)) for prompt in others] == before
    third = others[1] + before[1][0] + random_prompt(rng, QUESTION)[1:]
    assert ask(engine, third, params(name))[1] == len(others[1]) + ANSWER - 1
    edited = list(third)
    edited[len(others[1]) + 3] ^= 1  # in the second answer
    assert ask(engine, edited, params(name))[1] == FIRST + ANSWER - 1
    edited[7] ^= 1
    assert ask(engine, edited, params(name))[1] == 0
    for change in ({"reuse": None}, {"budget": 97}):
        assert ask(engine, others[0], params(name, **change))[1] % 32 == 0
    engine.assert_empty()


def test_requests_that_do_not_end_as_they_should_leave_nothing(engine, fronts):
    prompt = random_prompt(np.random.default_rng(74), FIRST)
    engine.llm.llm_engine.add_request("aborted", {"prompt_token_ids": prompt}, params("snapkv", 60))
    for _ in range(8):
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request(list(engine.scheduler.requests), internal=True)
    assert [front for front in fronts._fronts.values() if front.turn] == []
    engine.assert_empty()


def test_turns_that_are_not_compressed_again_keep_no_queries(engine, fronts):
    rng = np.random.default_rng(79)
    for policy in ("morphkv", "grkv", "expected_attention"):
        asked = compression(policy, budget=96, decode="grow", reuse="turns")
        engine.generate([random_prompt(rng, FIRST)], SamplingParams(max_tokens=8, ignore_eos=True, extra_args=asked))
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    assert len(fronts) == 6 and all(kept.queries is None for kept in engine.compression._fronts.values())
    assert sum(front.kept_bytes for front in fronts._fronts.values()) == 0


def test_a_turn_that_is_lost_and_left_again_is_not_forgotten(engine, fronts, monkeypatch):
    """Within one step: another one takes its room, and a request that ends with the same tokens leaves it anew."""
    rng = np.random.default_rng(80)
    x, y = (random_prompt(rng, FIRST) for _ in range(2))
    answer = ask(engine, x, params("morphkv", 6))[0]
    most = max(front.kept_bytes for front in fronts._fronts.values())
    monkeypatch.setattr(fronts, "_max_kept_bytes", 3 * most)
    core = engine.llm.llm_engine
    core.add_request("y", {"prompt_token_ids": y}, params("morphkv", 7))
    core.step()
    core.add_request("x", {"prompt_token_ids": x}, params("morphkv", 6))
    run(engine)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    assert set(engine.compression._fronts) == set(fronts._fronts)
    assert len(ask(engine, x + answer + random_prompt(rng, 5)[1:], params("morphkv", 6))[0]) == 6
    engine.assert_empty()
