"""An engine whose pool has no room for an uncompressed request of ``max_model_len``."""

import time

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from tests.demo_model import BLOCK_SIZE, BYTES_PER_BLOCK
from tests.engine.conftest import Engine, engine_arguments, random_prompt, run
from vllm_kvmerge import compression, kvmerge_engine_args
from vllm_kvmerge.request.parameters import CompressionError, parse_compression

POOL = 24 * BLOCK_SIZE
"""Tokens, with which prompts of 4,000 are served."""


@pytest.fixture(scope="module")
def small(engine):
    llm = LLM(**kvmerge_engine_args(**engine_arguments(), kv_cache_memory_bytes=25 * BYTES_PER_BLOCK))
    yield Engine(llm)
    llm.llm_engine.engine_core.shutdown()


def params(max_tokens: int, **fields) -> SamplingParams:
    extra = compression(**fields) if fields else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


CHUNKED = {"budget": 128, "prefill": {"chunk": 256}}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(93)
    return [random_prompt(rng, length) for length in (4000, 3100, 2000, 640)]


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "keepkv", "adakv", "streaming_llm", "grkv"])
def test_prompts_longer_than_the_pool_are_served(small, engine, prompts, policy):
    """As where there is room, one by one and together, and when all are preempted."""
    sampling = params(30, policy=policy, **CHUNKED)
    expected = [engine.tokens([prompt], sampling)[0] for prompt in prompts]
    assert [small.tokens([prompt], sampling)[0] for prompt in prompts] == expected
    assert small.tokens(prompts, sampling) == expected
    for index, prompt in enumerate(prompts):
        small.llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
    steps = 0

    def watch() -> None:
        nonlocal steps
        steps += 1
        if steps == 7:
            for request in list(small.scheduler.running):
                small.scheduler.running.remove(request)
                small.scheduler._preempt_request(request, time.monotonic())

    tokens = run(small, watch)
    assert [tokens[str(index)] for index in range(len(prompts))] == expected
    small.assert_empty()
    with small.sharing_contexts():  # of parts too, where blocks are free
        for _ in range(2):
            assert small.tokens(prompts, sampling) == expected
    small.assert_empty()


REFUSED = [
    (
        {},
        POOL,
        "prompt: 768 tokens take 768 slots of the KV cache without compression, and it has 768; allowed: up to 767",
    ),
    ({"policy": "snapkv", "budget": 128}, 4000, "prefill: 4000 tokens take 4000 slots of the KV cache with 'snapkv'"),
    ({"policy": "snapkv", "budget": 128, "prefill": {"chunk": 700}}, 4000, "take 892 slots"),
    ({"policy": "snapkv", "budget": 0.5, "prefill": {"chunk": 64}}, 4000, "allowed: up to 1278 tokens"),
]


@pytest.mark.parametrize(("fields", "length", "why"), REFUSED)
def test_what_would_never_fit_is_refused(small, fields, length, why):
    """Offline the scheduler refuses: the request ends with an error, and others go on."""
    rng = np.random.default_rng(94)
    prompt, other = random_prompt(rng, length), random_prompt(rng, 300)
    small.llm.llm_engine.add_request("refused", {"prompt_token_ids": prompt}, params(5, **fields))
    small.llm.llm_engine.add_request("other", {"prompt_token_ids": other}, params(5))
    reasons, tokens = {}, {}
    while small.llm.llm_engine.has_unfinished_requests():
        for output in small.llm.llm_engine.step():
            reasons[output.request_id] = output.outputs[0].finish_reason
            tokens[output.request_id] = len(output.outputs[0].token_ids)
    assert reasons == {"refused": "error", "other": "length"} and tokens == {"refused": 0, "other": 5}
    with pytest.raises(CompressionError, match=why):
        small.scheduler._limits.check_room(parse_compression(fields) if fields else None, length)
    small.assert_empty()


def test_generation_ends_where_the_pool_does(small):
    """Instead of being preempted and computed again for ever."""
    rng = np.random.default_rng(95)
    prompt = random_prompt(rng, POOL - 20)
    for fields, most in (({}, 20), ({"policy": "snapkv", "budget": 128, "decode": "bounded"}, 60)):
        (output,) = small.generate([prompt], params(60, **fields))
        assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == most
    grown = params(3000, policy="snapkv", decode="grow", **CHUNKED)
    (output,) = small.generate([random_prompt(rng, 1000)], grown)
    assert output.outputs[0].finish_reason == "length"
    assert POOL - 128 - 3 * BLOCK_SIZE <= len(output.outputs[0].token_ids) <= POOL - 128
    small.assert_empty()
