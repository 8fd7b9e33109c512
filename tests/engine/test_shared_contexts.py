"""Compressed contexts in the prefix cache: requests that begin with one, and what becomes of it."""

import zlib
from unittest.mock import patch

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import greedy, random_prompt, run
from tests.policies import failing
from vllm_kvmerge.engine.metrics import CONTEXT_HIT_TOKENS, CONTEXT_HITS, CONTEXT_MISSES
from vllm_kvmerge.ops.coded import CODINGS
from vllm_kvmerge.policies import PRESETS

CONTEXT, QUESTION, ANSWER = 430, 25, 20


def params(policy: str | None, max_tokens: int = ANSWER, context: int | None = CONTEXT, **fields) -> SamplingParams:
    where = {} if context is None else {"context_tokens": context}
    return greedy(policy, max_tokens, **{"budget": 96, "interval": 8} | fields | where)


def answers(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def counted(policy: str) -> tuple[float, ...]:
    """Requests that began with a front, their tokens that were not computed, and requests that found none."""
    counters = CONTEXT_HITS, CONTEXT_HIT_TOKENS, CONTEXT_MISSES
    return tuple(counter.labels(policy, 0)._value.get() for counter in counters)


FIELDS = {
    "threshold": ("snapkv", {"budget": {"threshold": 0.005, "max": 0.5}}),
    "bounded threshold": ("h2o", {"budget": {"threshold": 0.01, "max": 0.5}, "decode": "bounded"}),
    "bounded adakv": ("adakv", {"decode": "bounded"}),
    "matching": ("keydiff", {"merger": "attention_matching"}),
    **{front: ("snapkv", {"front": front, "merger": "zip", "decode": "grow"}) for front in CODINGS},
    **{f"{front} of uneven heads": ("kvzip", {"front": front}) for front in CODINGS},
    **{f"{front} alone": ("snapkv", {"front": front, "budget": 1.0}) for front in CODINGS},
    "protect": ("keepkv", {"protect": {"tokens": [[10, 40]]}}),
    "positions": ("morphkv", {"positions": "cache"}),
    "positions of uneven heads": ("adakv", {"positions": "cache", "decode": "bounded"}),
}
CASES = {policy: (policy, {}) for policy in sorted(PRESETS)} | FIELDS


@pytest.mark.thin(8)
@pytest.mark.parametrize("case", CASES)
def test_a_request_goes_on_from_the_front_of_another(engine, fronts, case):
    """After the same context, and if the context is all there is: the front then says what comes next."""
    (policy, fields), rng = CASES[case], np.random.default_rng(zlib.crc32(case.encode()))
    context = random_prompt(rng, CONTEXT)
    prompts = [context + random_prompt(rng, QUESTION)[1:] for _ in range(2)] + [context]
    with patch.object(engine.manager, "fronts", None):
        expected = answers(engine.generate(prompts[:2], params(policy, **fields)))
        expected += answers(engine.generate([context], params(policy, context=None, **fields)))
    assert engine.llm.reset_prefix_cache()
    hits, tokens, misses = counted(policy)
    first = engine.generate(prompts[:1], params(policy, **fields))
    assert answers(first) == expected[:1] and len(fronts) == 1
    some = [params(policy, **fields), params(policy, **fields), params(policy, context=None, **fields)] * 2
    outputs = engine.generate(prompts * 2, some)
    assert [output.num_cached_tokens for output in outputs] == [CONTEXT, CONTEXT, CONTEXT - 1] * 2
    assert answers(outputs) == expected * 2
    assert counted(policy) == (hits + 6, tokens + 6 * CONTEXT, misses + 1) and len(fronts) == 1
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
    """And a prompt without a question, with which the next turn of a chat begins."""
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
    assert engine.llm.reset_prefix_cache()
    engine.generate(prompts[:1], params("keydiff", 2, None))
    with engine.with_blocks(70):
        engine.generate([random_prompt(rng, 960)], params(None, 2))
        longer = prompts[0] + random_prompt(rng, 50)
        assert engine.generate([longer], params("keydiff", 2, None))[0].num_cached_tokens == 640
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


def test_what_differs_is_not_shared(engine, fronts):
    """A secret of a request's own (``cache_salt``) included; with every default spelled out it is the same policy."""
    rng = np.random.default_rng(63)
    context = random_prompt(rng, CONTEXT)
    prompt = context + random_prompt(rng, QUESTION)
    other = [*prompt[: CONTEXT - 1], prompt[CONTEXT - 1] ^ 1, *prompt[CONTEXT:]]  # in the partial block
    asked = [
        (prompt, params("snapkv"), {}),
        (prompt, params("snapkv", budget=97), {}),
        (prompt, params("snapkv", context=CONTEXT + 1), {}),
        (other, params("snapkv"), {}),
        (prompt, params("snapkv"), {"cache_salt": "theirs"}),
        (prompt, params("snapkv"), {"cache_salt": "others"}),
    ]
    hits = counted("snapkv")[0]
    for expected in (0, len(asked)):
        for index, (tokens, some, salt) in enumerate(asked):
            engine.add(str(index), tokens, some, **salt)
            run(engine)
        assert counted("snapkv")[0] == hits + expected
    assert len(fronts) == len(asked)
    spelled = params("snapkv", 2, merger=PRESETS["snapkv"].merger, allocator=PRESETS["snapkv"].allocator)
    assert engine.generate([prompt], spelled)[0].num_cached_tokens == CONTEXT
    engine.assert_empty()


def test_a_front_that_failed_is_not_shared(engine, fronts):
    prompt = random_prompt(np.random.default_rng(68), 300)
    with failing.registered():
        bad = params(failing.PRESET, 8, 250, budget=64, merge_fault="raise")
        for _ in range(2):
            output = engine.generate([prompt], bad)[0]
            assert output.outputs[0].finish_reason == "error" and output.num_cached_tokens < 250
    assert len(fronts) == 0
    engine.assert_empty()
