"""Compressed contexts in the prefix cache: requests that begin with one, and what becomes of it."""

import zlib
from functools import cache

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import random_prompt, run
from tests.policies import failing
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.engine.metrics import CONTEXT_HIT_TOKENS, CONTEXT_HITS, CONTEXT_MISSES
from vllm_kvmerge.policies import PRESETS

CONTEXT, QUESTION, ANSWER = 430, 25, 20
SHARED = ["keydiff", "snapkv", "kvzip", "adakv", "attention_matching"]
"""Policies, and a merger, whose requests read one front; those of others get a copy each."""


@pytest.fixture
def fronts(engine):
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts() as fronts:
        yield fronts


def params(policy: str | None, max_tokens: int = ANSWER, context: int | None = CONTEXT, **fields) -> SamplingParams:
    extra = None
    if policy is not None:
        fields = {"budget": 96, "interval": 8} | SMALL.get(policy, {}) | fields
        extra = compression(policy, **fields, **({} if context is None else {"context_tokens": context}))
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def answers(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


FIELDS = {
    "threshold": ("snapkv", {"budget": {"threshold": 0.005, "max": 0.5}}),
    "bounded threshold": ("h2o", {"budget": {"threshold": 0.01, "max": 0.5}, "decode": "bounded"}),
    "bounded adakv": ("adakv", {"decode": "bounded"}),
    "matching": ("keydiff", {"merger": "attention_matching"}),
    "protect": ("keepkv", {"protect": {"tokens": [[10, 40]]}}),
    "positions": ("morphkv", {"positions": "cache"}),
    "positions of uneven heads": ("adakv", {"positions": "cache", "decode": "bounded"}),
}
CASES = {policy: (policy, {}) for policy in sorted(PRESETS)} | FIELDS


@pytest.fixture(scope="module")
def asked(engine):
    """Of a case: the context and two questions, and what lone requests answer that share nothing."""

    @cache
    def ask(name):
        policy, fields = CASES[name]
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        context = random_prompt(rng, CONTEXT)
        prompts = [context + random_prompt(rng, QUESTION)[1:] for _ in range(2)] + [context]
        assert engine.llm.reset_prefix_cache()
        answered = answers(engine.generate(prompts[:2], params(policy, **fields)))
        return prompts, answered + answers(engine.generate([context], params(policy, context=None, **fields)))

    return ask


@pytest.mark.thin(8)
@pytest.mark.parametrize("case", CASES)
def test_a_request_goes_on_from_the_front_of_another(engine, fronts, asked, case):
    """After the same context, and if the context is all there is: the front then says what comes next."""
    (policy, fields), (prompts, expected) = CASES[case], asked(case)
    first = engine.generate(prompts[:1], params(policy, **fields))
    assert answers(first) == expected[:1] and len(fronts) == 1
    hits, computed = CONTEXT_HITS.labels(policy, 0)._value.get(), CONTEXT_HIT_TOKENS.labels(policy, 0)._value.get()
    some = [params(policy, **fields), params(policy, **fields), params(policy, context=None, **fields)] * 2
    outputs = engine.generate(prompts * 2, some)
    assert [output.num_cached_tokens for output in outputs] == [CONTEXT, CONTEXT, CONTEXT - 1] * 2
    assert answers(outputs) == expected * 2
    assert CONTEXT_HITS.labels(policy, 0)._value.get() == hits + 6
    assert CONTEXT_HIT_TOKENS.labels(policy, 0)._value.get() == computed + 6 * CONTEXT
    assert len(fronts) == 1
    engine.assert_empty()


def test_all_read_one_front_that_none_of_them_writes_to(engine, fronts):
    rng = np.random.default_rng(62)
    context = random_prompt(rng, 960)
    prompts = [context + random_prompt(rng, 20) for _ in range(5)]
    some = params("snapkv", context=960, budget=256, decode="grow")
    engine.generate(prompts[:1], some)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, some)
    held = []
    run(engine, lambda: held.append(engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()))
    assert max(held) == 256 // 32 + 5 * 2  # each has a question and an answer of its own
    engine.add("tracks", prompts[0], params("h2o", context=960, budget=256))
    run(engine)
    held.clear()
    for index in range(5):
        engine.add(str(index), prompts[index], params("h2o", context=960, budget=256))
    run(engine, lambda: held.append(engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()))
    assert 5 * 256 // 32 <= max(held) <= 5 * (256 // 32 + 2)
    engine.assert_empty()


@pytest.mark.thin(3)
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "kvzip"])
def test_what_differs_is_not_shared(engine, fronts, policy):
    rng = np.random.default_rng(63)
    context = random_prompt(rng, CONTEXT)
    prompt = context + random_prompt(rng, QUESTION)
    other = [*prompt[: CONTEXT - 1], prompt[CONTEXT - 1] ^ 1, *prompt[CONTEXT:]]  # in the partial block
    asked = {
        "one": (prompt, params(policy), {}),
        "budget": (prompt, params(policy, budget=97), {}),
        "longer": (prompt, params(policy, context=CONTEXT + 1), {}),
        "token": (other, params(policy), {}),
        "salt": (prompt, params(policy), {"cache_salt": "theirs"}),
        "salted so": (prompt, params(policy), {"cache_salt": "others"}),
        "refreshed": (prompt, params("keepkv", refresh={"every": 8}), {}),
    }
    for name, (tokens, some, salt) in asked.items():
        engine.add(name, tokens, some, **salt)
        hits = CONTEXT_HITS.labels(policy, 0)._value.get()
        run(engine)
        assert CONTEXT_HITS.labels(policy, 0)._value.get() == hits, name
    assert len(fronts) == len(asked) - 1  # what a refresh needs besides is gone
    for name, (tokens, some, salt) in asked.items():
        engine.add(name, tokens, some, **salt)
        run(engine)
    assert CONTEXT_HITS.labels(policy, 0)._value.get() == hits + len(asked) - 1
    # Every default spelled out is the same policy.
    own = {"merger": PRESETS[policy].merger, "allocator": PRESETS[policy].allocator}
    spelled = params(policy, 2, **own)
    assert engine.generate([prompt], spelled)[0].num_cached_tokens == CONTEXT
    engine.assert_empty()


def test_a_front_goes_with_its_first_block(engine, fronts):
    """Blocks that are needed for something else are taken from the front that was used least recently, and workers
    forget what they kept of it."""
    rng = np.random.default_rng(64)
    prompts = [random_prompt(rng, 700) for _ in range(6)]
    some = params("adakv", 4, 640, budget=320, decode="bounded")
    for prompt in prompts:
        engine.generate([prompt], some)
    assert len(fronts) == 6 == len(engine.compression._fronts)
    assert fronts.num_blocks == 6 * 10
    engine.generate(prompts[:1], some)  # now the second is the oldest
    for num_tokens in (3500, 2600):  # with the fronts, these would take 252 of 229 blocks
        engine.generate([random_prompt(rng, num_tokens)], params(None, 2))
    cached = [output.num_cached_tokens for output in engine.generate(prompts, some)]
    assert cached[0] == 640 and cached[1] < 640
    engine.generate([random_prompt(rng, 4000)], params(None, 2))
    engine.generate([random_prompt(rng, 3900)], params(None, 2))
    assert len(fronts) == 0
    engine.generate(prompts[:1], params(None, 1))
    assert engine.compression._fronts == {}
    engine.assert_empty()


def test_what_a_front_stands_for_is_evicted_before_fronts(engine, fronts):
    """Contexts fill the pool three times over. Their fronts fill less than half of it."""
    rng = np.random.default_rng(77)
    prompts = [random_prompt(rng, 660) for _ in range(10)]
    some = params("snapkv", 2, 640)
    with engine.with_blocks(70):
        for prompt in prompts:
            engine.generate([prompt], some)
        assert len(fronts) == 10
        assert [engine.generate([prompt], some)[0].num_cached_tokens for prompt in prompts] == [640] * 10
    engine.assert_empty()


def test_what_several_contexts_begin_with_is_evicted_in_its_turn(engine, fronts):
    rng = np.random.default_rng(78)
    common = random_prompt(rng, 320)
    prompts = [common + random_prompt(rng, 340)[1:] for _ in range(3)]
    some = params("snapkv", 2, 640)
    assert [engine.generate([prompt], some)[0].num_cached_tokens for prompt in prompts[:2]] == [0, 320]
    with engine.with_blocks(70):
        # 30 blocks, of which 20 are what fronts stand for.
        engine.generate([random_prompt(rng, 960)], params(None, 2))
        assert engine.generate(prompts[:1], params(None, 2))[0].num_cached_tokens == 320
        assert engine.generate(prompts[2:], some)[0].num_cached_tokens == 320
    engine.assert_empty()


def test_a_prompt_without_a_question_keeps_its_blocks(engine, fronts):
    """The next turn of a chat begins with it."""
    rng = np.random.default_rng(79)
    first = random_prompt(rng, 640)
    engine.generate([first], params("keydiff", 2, None))
    with engine.with_blocks(70):
        engine.generate([random_prompt(rng, 960)], params(None, 2))
        second = first + random_prompt(rng, 50)
        assert engine.generate([second], params("keydiff", 2, None))[0].num_cached_tokens == 640
    engine.assert_empty()


def test_the_memory_that_workers_keep_for_fronts_is_bounded(engine, fronts, monkeypatch):
    rng = np.random.default_rng(65)
    prompts = [random_prompt(rng, 300) for _ in range(4)]
    some = params("morphkv", 4, 250, decode="bounded")
    engine.generate(prompts[:1], some)
    (front,) = (fronts.find(key) for key in list(fronts._fronts))
    assert front.kept_bytes > 0
    monkeypatch.setattr(fronts, "_max_kept_bytes", 2 * front.kept_bytes)
    for prompt in prompts[1:]:
        engine.generate([prompt], some)
    assert len(fronts) == 2
    assert [output.num_cached_tokens == 250 for output in engine.generate(prompts, some)] == [False, False, True, True]
    engine.assert_empty()


def test_the_plain_prefix_cache_is_unharmed(engine, fronts):
    """A plain request after requests that shared fronts hits what it hit before, and answers as before."""
    rng = np.random.default_rng(66)
    prompts = [random_prompt(rng, CONTEXT + QUESTION) for _ in range(4)]
    cold = engine.generate(prompts, params(None))
    for policy in ("snapkv", "h2o", "keepkv", "kvzip"):
        for _ in range(2):
            engine.generate(prompts, params(policy))
    warm = engine.generate(prompts, params(None))
    assert answers(warm) == answers(cold)
    assert {output.num_cached_tokens for output in warm} == {(CONTEXT + QUESTION) // 32 * 32}
    engine.assert_empty()


def test_preempted_and_aborted_requests_leave_their_fronts(engine, fronts):
    rng = np.random.default_rng(67)
    policies = ["snapkv", "h2o", "keepkv", "morphkv", "kvzip", "adakv"]
    contexts = {policy: random_prompt(rng, 250) for policy in policies}
    prompts = [contexts[policy] + random_prompt(rng, 20) for policy in policies for _ in range(2)]
    some = [params(policy, 60, 250, budget=150) for policy in policies for _ in range(2)]
    fronts_before = len(fronts)
    expected = []
    for prompt, one in zip(prompts, some, strict=True):
        assert engine.llm.reset_prefix_cache() and len(fronts) == fronts_before == 0
        expected += answers(engine.generate([prompt], one))
    for index in range(5):  # these only grow, and push the others out
        engine.add(f"plain{index}", random_prompt(rng, 150), params(None, 150))
    for index, (prompt, one) in enumerate(zip(prompts, some, strict=True)):
        engine.add(str(index), prompt, one)
    preempted: set[str] = set()

    def watch():
        preempted.update(name for name, one in engine.scheduler.requests.items() if one.num_preemptions)

    with engine.with_blocks(70):
        tokens = run(engine, watch)
    assert len(preempted) >= 3
    assert [tokens[str(index)] for index in range(len(prompts))] == expected
    engine.assert_empty()
    for steps in range(1, 5):
        for index, (prompt, one) in enumerate(zip(prompts, some, strict=True)):
            engine.add(str(index), prompt, one)
        for _ in range(steps):
            engine.llm.llm_engine.step()
        engine.llm.llm_engine.abort_request(list(engine.scheduler.requests), internal=True)
        engine.assert_empty()
    assert answers(engine.generate(prompts, some)) == expected
    engine.assert_empty()


def test_a_front_that_failed_is_not_shared(engine, fronts):
    prompt = random_prompt(np.random.default_rng(68), 300)
    with failing.registered():
        bad = params(failing.PRESET, 8, 250, budget=64, merge_fault="raise")
        for _ in range(2):
            output = engine.generate([prompt], bad)[0]
            assert output.outputs[0].finish_reason == "error" and output.num_cached_tokens < 250
    assert len(fronts) == 0
    engine.generate([prompt], params(None, 1))
    assert engine.compression._fronts == {}
    engine.assert_empty()


def test_misses_are_counted(engine, fronts):
    prompt = random_prompt(np.random.default_rng(69), 300)
    misses = CONTEXT_MISSES.labels("snapkv", 0)._value.get()
    for _ in range(3):
        engine.generate([prompt], params("snapkv", 4, 250))
    assert CONTEXT_MISSES.labels("snapkv", 0)._value.get() == misses + 1
    engine.assert_empty()
