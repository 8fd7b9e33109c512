"""A pool without room for an uncompressed request of ``max_model_len``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from tests.demo_model import BLOCK_SIZE
from tests.engine.conftest import Engine, greedy, preempting, random_prompt, run
from vllm_kvmerge.request.spec import CompressionError, parse_compression

NUM_BLOCKS = 24
POOL = NUM_BLOCKS * BLOCK_SIZE
"""Tokens, with which prompts of 4,000 are served."""


@contextmanager
def small_pool(engine: Engine) -> Iterator[None]:
    """The engine as if its pool had no other blocks."""
    assert engine.llm.reset_prefix_cache()
    limits, is_small = engine.scheduler._admission.limits, engine.scheduler._is_small
    with engine.with_blocks(NUM_BLOCKS):
        engine.scheduler._admission.limits, engine.scheduler._is_small = replace(limits, pool_tokens=POOL), True
        try:
            yield
        finally:
            engine.scheduler._admission.limits, engine.scheduler._is_small = limits, is_small
    engine.assert_empty()


CHUNKED = {"budget": 128, "prefill": {"chunk": 256}}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(93)
    return [random_prompt(rng, length) for length in (4000, 2000, 640)]


@pytest.mark.thin(6)
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "keepkv", "adakv", "streaming_llm", "grkv"])
def test_prompts_longer_than_the_pool_are_served(engine, prompts, policy):
    """As where there is room: together, when all are preempted, and with parts shared where blocks are free."""
    sampling = greedy(policy, 30, **CHUNKED)
    expected = [engine.tokens([prompt], sampling)[0] for prompt in prompts]
    with small_pool(engine):
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, sampling)
        tokens = run(engine, preempting(engine, 8))
        assert [tokens[str(index)] for index in range(len(prompts))] == expected
    with engine.sharing_contexts(), small_pool(engine):
        for _ in range(2):
            assert engine.tokens(prompts, sampling) == expected


REFUSED = [
    ({}, POOL, "prompt: 768 tokens take 768 slots of the KV cache without compression, and it has 768; .* up to 767"),
    ({"policy": "snapkv", "budget": 128}, 4000, "prefill: 4000 tokens take 4000 slots of the KV cache with 'snapkv'"),
    ({"policy": "snapkv", "budget": 128, "prefill": {"chunk": 700}}, 4000, "take 892 slots"),
    ({"policy": "snapkv", "budget": 0.5, "prefill": {"chunk": 64}}, 4000, "allowed: up to 1278 tokens"),
]


@pytest.mark.parametrize(("fields", "length", "why"), REFUSED)
def test_what_would_never_fit_is_refused(engine, fields, length, why):
    """Offline the scheduler refuses: the request ends with an error, and others go on."""
    rng = np.random.default_rng(94)
    prompt, other = random_prompt(rng, length), random_prompt(rng, 300)
    with small_pool(engine):
        outputs = engine.generate([prompt, other], [greedy(max_tokens=5, **fields), greedy(max_tokens=5)])
        with pytest.raises(CompressionError, match=why):
            engine.scheduler._admission.limits.check_room(parse_compression(fields) if fields else None, length)
    answers = [output.outputs[0] for output in outputs]
    assert [(one.finish_reason, len(one.token_ids)) for one in answers] == [("error", 0), ("length", 5)]


def test_generation_ends_where_the_pool_does(engine):
    """Instead of being preempted and computed again for ever."""
    rng = np.random.default_rng(95)
    prompt, longer = random_prompt(rng, POOL - 20), random_prompt(rng, 1000)
    with small_pool(engine):
        for fields, most in (({}, 20), ({"policy": "snapkv", "budget": 128, "decode": "bounded"}, 60)):
            (output,) = engine.generate([prompt], greedy(max_tokens=60, **fields))
            assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == most
        (output,) = engine.generate([longer], greedy("snapkv", 3000, decode="grow", **CHUNKED))
        assert output.outputs[0].finish_reason == "length"
        assert POOL - 128 - 3 * BLOCK_SIZE <= len(output.outputs[0].token_ids) <= POOL - 128
