"""``reuse: turns``: a request that goes on where another one ended, as if that had never stopped."""

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.conftest import random_prompt, run
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.evaluation.continuation import CONTINUATION

FIRST, QUESTION, ANSWER = 300, 24, 20
POLICIES = {
    "streaming_llm": "bounded", "keydiff": "bounded", "h2o": "bounded", "keepkv": "bounded", "morphkv": "bounded",
    "zsmerge": "bounded", "adakv": "bounded", "kvzap": "bounded", "snapkv": "grow", "kvzip": "grow",
    "adakv grow": "grow", "morphkv cache": "bounded", "adakv cache": "bounded",
}  # fmt: skip


@pytest.fixture
def fronts(engine):
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts() as fronts:
        yield fronts


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
    engine.assert_empty()


@pytest.mark.slow
def test_what_others_do_does_not_matter_without_it(engine, fronts):
    rng = np.random.default_rng(73)
    first = random_prompt(rng, FIRST)
    for name in POLICIES:
        answer = ask(engine, first, params(name))[0]
        second = first + answer + random_prompt(rng, QUESTION)[1:]
        cold = ask(engine, second, params(name, reuse=None))
        assert cold[1] % 32 == 0
        assert ask(engine, second, params(name, budget=97))[1] % 32 == 0
        assert ask(engine, second, params(name))[1] == FIRST + ANSWER - 1
        assert engine.llm.reset_prefix_cache()
        assert ask(engine, second, params(name, reuse=None))[::2] == (cold[0], pytest.approx(cold[2], abs=1e-4))
    engine.assert_empty()


def test_requests_that_do_not_end_as_they_should_leave_nothing(engine, fronts):
    prompt = random_prompt(np.random.default_rng(74), FIRST)
    engine.llm.llm_engine.add_request("aborted", {"prompt_token_ids": prompt}, params("snapkv", 60))
    for _ in range(8):
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request(list(engine.scheduler.requests), internal=True)
    assert [front for front in fronts._fronts.values() if front.turn] == []
    engine.assert_empty()


def test_turns_are_told_apart_by_their_last_tokens(engine, fronts):
    """Two that differ in the block that is not full alone, of one length."""
    rng = np.random.default_rng(75)
    first = random_prompt(rng, FIRST)
    sampled = params("snapkv", 15)
    sampled.temperature, sampled.output_kind = 1.0, RequestOutputKind.FINAL_ONLY
    answers = []
    for seed in (1, 2):
        sampled.seed = seed
        answers.append(ask(engine, first, sampled.clone())[0])
    assert answers[0] != answers[1]
    for answer in answers:
        assert ask(engine, first + answer + first[1:20], params("snapkv"))[1] == FIRST + 14
    assert sum(front.turn is not None for front in fronts._fronts.values()) == 4
    engine.assert_empty()


def test_a_turn_outlives_the_one_that_it_goes_on_from(engine, fronts):
    """They share blocks, of which each has a hash of its own."""
    rng = np.random.default_rng(76)
    first = random_prompt(rng, FIRST)
    answer = ask(engine, first, params("snapkv"))[0]
    second = first + answer + random_prompt(rng, QUESTION)[1:]
    again = ask(engine, second, params("snapkv"))[0]
    (old,) = [front for front in fronts._fronts.values() if front.turn and front.num_tokens == FIRST + ANSWER - 1]
    fronts.lose(old.partial(32))
    third = second + again + random_prompt(rng, QUESTION)[1:]
    assert ask(engine, second, params("snapkv"))[1] % 32 == 0
    assert ask(engine, third, params("snapkv"))[1] == len(second) + ANSWER - 1
    assert run(engine) == {}
    engine.assert_empty()


def test_a_turn_shorter_than_a_block_is_computed_again(engine, fronts):
    """vLLM takes a hit without a full block for none."""
    rng = np.random.default_rng(77)
    first = random_prompt(rng, 20)
    some = params("streaming_llm", 4, budget=10, interval=4)
    answer = ask(engine, first, some)[0]
    again = ask(engine, first + answer + random_prompt(rng, 5)[1:], params("streaming_llm", 4, budget=10, interval=4))
    assert again[1] == 0 and len(again[0]) == 4
    assert [front for front in fronts._fronts.values() if front.turn] == []
    engine.assert_empty()


def test_a_turn_that_does_not_fit_twice_is_computed_again(engine, fronts):
    """A request that writes to it needs as many blocks again, which an empty pool may not have."""
    rng = np.random.default_rng(78)
    some = params("h2o", 4, budget=3800, interval=300)
    first = random_prompt(rng, 3900)
    second = first + ask(engine, first, some)[0] + random_prompt(rng, 5)[1:]
    assert ask(engine, second, some)[1] < len(first)
    engine.assert_empty()


def test_turns_that_are_not_compressed_again_keep_no_queries(engine, fronts):
    rng = np.random.default_rng(79)
    for policy in ("morphkv", "grkv", "expected_attention"):
        ask(engine, random_prompt(rng, FIRST), grown(policy))
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    assert len(fronts) == 6 and all(kept.queries is None for kept in engine.compression._fronts.values())
    assert sum(front.kept_bytes for front in fronts._fronts.values()) == 0


def grown(policy: str) -> SamplingParams:
    extra = compression(policy, budget=96, decode="grow", reuse="turns")
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, extra_args=extra)


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
