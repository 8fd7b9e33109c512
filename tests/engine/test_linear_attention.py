"""A model of linear attention beside full attention, in bfloat16 and with a prefix cache: this is compressed, those are
vLLM's own, whose states at the ends of blocks are in the prefix cache."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import Engine, preempting, random_prompt, run
from tests.engine.test_hybrid import add, check_prefix_cache, greedy, num_taken, prompts_of_many_lengths, running, stock
from tests.engine.test_mamba import BLOCK_SIZE, jobs
from tests.engine.test_speculative import DRAFTING, THREADS
from tests.random_model import write_qwen3_next
from tests.vllm_library import needs_avx512_bf16

pytestmark = [pytest.mark.engine, needs_avx512_bf16, pytest.mark.slow]

ARGUMENTS = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 1 << 26,
    "additional_config": {"kvmerge": {"plain_attention": "vllm"}},
}
"""vLLM's CPU build has linear attention in no other dtype, in which our operator of attention rounds otherwise."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_qwen3_next(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder, **ARGUMENTS) as engine:
        yield engine


def test_plain_requests_equal_stock_vllm_and_hit_the_prefix_cache(engine, folder):
    assert [manager.block_size for manager in engine.scheduler._managers] == [BLOCK_SIZE] * 3
    expected, prompts = stock(folder, **ARGUMENTS), prompts_of_many_lengths()
    assert len({token for tokens in expected for token in tokens}) > 50  # what they read decides
    assert engine.tokens(prompts, greedy()) == expected
    for prompt, tokens in zip(prompts, expected, strict=True):
        again = engine.generate([prompt], greedy())[0]
        assert list(again.outputs[0].token_ids) == tokens
        assert again.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    engine.assert_empty()


def test_requests_of_every_kind_beside_each_other_and_alone(engine):
    prompts, params = map(list, zip(*jobs()[::3], strict=True))
    assert engine.llm.reset_prefix_cache()
    together = engine.tokens(prompts, params)
    assert together == [engine.tokens([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    engine.assert_empty()


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("streaming_llm", {"context_tokens": 512}),
        ("h2o", {"prefill": {"chunk": 128}}),
        ("snapkv", {"prefill": {"chunk": 192}}),
        ("keepkv", {"prefill": {"chunk": 128}, "context_tokens": 448}),
    ],
)
@pytest.mark.parametrize("when", [2, 4])
def test_a_request_that_is_preempted_while_it_reads(engine, policy, fields, when):
    """Where all parts of a prompt end at a multiple of 64 tokens, linear attention rounds as before. Generated tokens
    that are computed again are rounded otherwise in bfloat16, in stock vLLM too; tests of Mamba layers, in float32,
    preempt them."""
    prompt = random_prompt(np.random.default_rng(5), 641)
    params = greedy(policy, budget=64, **fields)
    assert engine.llm.reset_prefix_cache()
    expected = engine.tokens([prompt], params)[0]
    assert engine.llm.reset_prefix_cache()
    add(engine, "one", prompt, params)
    preemptions, preempt = [], preempting(engine, when)

    def watch() -> None:
        preempt()
        preemptions.extend(request.num_preemptions for request in engine.scheduler.requests.values())

    assert run(engine, watch)["one"] == expected and max(preemptions) == 1
    engine.assert_empty()


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "keepkv", "adakv"])
def test_the_prefix_cache_stays_as_full_attention_left_it(engine, policy):
    """States too."""
    check_prefix_cache(engine, policy, 200, 384)


@pytest.mark.parametrize(
    ("policy", "fields", "num_cached"),
    [("streaming_llm", {}, 448), ("keepkv", {"context_tokens": 400}, 320), ("snapkv", {"score_window": 200}, 256)],
)
def test_what_a_request_finds_again(engine, policy, fields, num_cached):
    """Where its context is compressed, or its last queries are scored, a state is kept for the next one."""
    prompt = random_prompt(np.random.default_rng(8), 500)
    params = greedy(policy, budget=64, **fields)
    assert engine.llm.reset_prefix_cache()
    cold, warm = (engine.generate([prompt], params)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, num_cached)
    assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)
    engine.assert_empty()


def test_what_a_request_holds(engine):
    assert engine.llm.reset_prefix_cache()
    taken: list[int] = []
    add(engine, "one", random_prompt(np.random.default_rng(3), 700), greedy("h2o", 200, budget=64, interval=16))
    run(engine, lambda: taken.append(num_taken(engine)))
    # Two groups of states, up to two blocks each, and a front and a tail.
    assert max(taken[4:-1]) <= 4 + 1 + 2 < 700 // BLOCK_SIZE
    engine.assert_empty()


def test_vllm_verifies_drafts_wrongly(folder, monkeypatch):
    """Which is why the server refuses drafts here: stock vLLM's tokens differ from those without drafts. With a prefix
    cache it fails over them, for want of Triton."""
    for name, value in THREADS.items():
        monkeypatch.setenv(name, value)
    uncached = ARGUMENTS | {"enable_prefix_caching": False}
    assert stock(folder, **uncached, **DRAFTING) != stock(folder, **uncached)
    with pytest.raises(AssertionError, match="object is not subscriptable"):
        stock(folder, **ARGUMENTS, **DRAFTING)
