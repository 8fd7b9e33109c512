"""Blocks: what compression frees, what it never touches, and that nothing leaks."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.architectures import check_budgets
from tests.engine.conftest import random_prompt
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.policies import PRESETS

POLICIES = ["h2o", "snapkv", "keepkv"]
"""One that evicts, one that compresses once and then grows, and one that merges."""


def greedy(max_tokens: int, policy: str | None = None, **parameters) -> SamplingParams:
    extra = compression(policy, **parameters) if policy else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def run_steps(engine, watch) -> None:
    """Steps the engine until nothing is left, calling ``watch`` after each step."""
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
        watch()


@pytest.mark.parametrize("policy", POLICIES)
def test_usage_drops_to_the_budget_after_the_prompt(engine, policy):
    prompt = random_prompt(np.random.default_rng(5), 3000)
    assert engine.llm.reset_prefix_cache()
    engine.add("long", prompt, greedy(70, policy, budget=256))
    held, live = [], []

    def watch():
        held.append(engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks())
        for request in engine.scheduler.running:
            segments = engine.manager.segments.get(request.request_id)
            if segments:
                live.append(segments.front + request.num_computed_tokens - segments.tail)

    run_steps(engine, watch)
    assert held[:2] == [32, 64]  # two chunks of the prompt; the third ends with the compression
    settled = held[2:-1]
    grown = 70 if policy == "snapkv" else 32
    assert len(settled) > 60
    assert max(settled) <= 8 + -(-grown // 32) + 1
    assert max(live) <= 256 + grown
    engine.assert_empty()


@pytest.mark.slow
def test_three_hundred_generated_tokens_stay_within_budget_and_interval(engine):
    check_budgets(engine, sorted(set(PRESETS) - {"kvzip"}), 300)


def test_layers_that_are_skipped_keep_every_token(engine):
    """MorphKV appendix A.6: the first layer holds all, the others the budget; generation goes on as in its solo run."""
    prompt = random_prompt(np.random.default_rng(13), 500)
    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    engine.add("skipping", prompt, greedy(100, "morphkv", budget=64, interval=8, skip_layers=1))
    fronts = set()

    def watch():
        for request in engine.scheduler.running:
            segments = engine.manager.segments.get(request.request_id)
            if segments is None:
                continue
            assert segments.num_places == segments.tail and request.num_computed_tokens - segments.tail <= 8
            fronts.add(segments.tail)
            pages = runner.compression.states[request.request_id].pages
            assert pages.fronts.unique(dim=1).flatten().tolist() == [segments.tail, *[64] * (len(pages.fronts) - 1)]
            blocks = [b.block_id for b in engine.manager.req_to_blocks[request.request_id] if not b.is_null]
            assert {int(block) for block in pages.places(pages.ids[:, :, 0])[1].unique()} <= set(blocks)
            # All layers together: four times 64 entries, or what the first layer has, and the tail.
            num_pages = int((-(-pages.fronts[:, 0] // 32)).sum())
            assert len(blocks) <= -(-num_pages // len(pages.fronts)) + 2

    run_steps(engine, watch)
    assert fronts == set(range(500, 600, 8))
    # With every layer skipped nothing is compressed at all.
    everything = greedy(40, "morphkv", budget=64, interval=8, skip_layers=len(runner.compression.compactor.layers))
    assert engine.tokens([prompt], everything) == engine.tokens([prompt], greedy(40))
    engine.assert_empty()


@pytest.fixture(scope="module")
def cold(engine):
    """What a cold engine answers to a plain request."""
    assert engine.llm.reset_prefix_cache()
    output = engine.generate([random_prompt(np.random.default_rng(6), 430)], greedy(12))[0]
    assert output.num_cached_tokens == 0
    return output


@pytest.mark.thin(7)
@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_the_prefix_cache_stays_as_full_attention_left_it(engine, policy, cold):
    """After compressed requests on a prompt, a plain one hits the cache and answers as a cold engine does."""
    prompt = cold.prompt_token_ids
    for reset in (True, False):
        if reset:  # blocks hashed by the compressed request itself; otherwise by the plain one before
            assert engine.llm.reset_prefix_cache()
        # It fills a block after its compression, which must not be found.
        engine.generate([prompt], greedy(20, policy, budget=100, interval=8, **SMALL.get(policy, {})))
        warm = engine.generate([prompt], greedy(12))[0]
        assert warm.num_cached_tokens == 416
        assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)
    engine.assert_empty()


def test_eight_compressed_requests_share_a_pool_of_two(engine):
    """The pool holds two uncompressed requests of this length; eight compressed ones run at once, none preempted."""
    rng = np.random.default_rng(7)
    length, num_tokens, num_blocks = 1000, 60, 95
    assert num_blocks < 3 * -(-(length + num_tokens) // 32)
    for i in range(8):
        engine.add(f"r{i}", random_prompt(rng, length), greedy(num_tokens, "keepkv", budget=96))
    running, preempted = [], []

    def watch():
        running.append(len(engine.scheduler.running))
        preempted.extend(r.request_id for r in engine.scheduler.requests.values() if r.num_preemptions)

    with engine.with_blocks(num_blocks):
        run_steps(engine, watch)
    assert max(running) == 8
    assert preempted == []
    engine.assert_empty()


def test_a_preempted_request_comes_back_to_the_same_tokens(engine):
    """Its prompt and generated tokens are computed again, through the same compressions."""
    rng = np.random.default_rng(8)
    prompts = [random_prompt(rng, 200) for _ in range(7)]
    policies = ["h2o", "keepkv", "zsmerge", "streaming_llm", "snapkv", "keepkv", "zsmerge"]
    params = [greedy(60, policy, budget=150, interval=8) for policy in policies]
    undisturbed = engine.tokens(prompts, params)
    seen: dict[str, int] = {}
    outputs: dict[str, list[int]] = {}
    plain = [random_prompt(rng, 300) for _ in range(3)]
    for i, prompt in enumerate(plain):  # these only grow, and push the others out
        engine.add(f"plain{i}", prompt, greedy(200))
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add(f"r{i}", prompt, p)
    with engine.with_blocks(70):
        while engine.llm.llm_engine.has_unfinished_requests():
            for request in engine.scheduler.requests.values():
                seen[request.request_id] = max(seen.get(request.request_id, 0), request.num_preemptions)
            for output in engine.llm.llm_engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
    preempted = [name for name, count in seen.items() if count and name.split("-")[0].startswith("r")]
    assert preempted, "nothing was preempted: the pool is too large for this test"
    assert [outputs[f"r{i}"] for i in range(len(prompts))] == undisturbed
    engine.assert_empty()


def test_a_prompt_that_fills_the_pool_is_compressed_in_place(engine):
    """No room for a copy: the prompt's blocks lose their hash, and the request goes on."""
    rng = np.random.default_rng(9)
    assert engine.llm.reset_prefix_cache()
    engine.add("plain", random_prompt(rng, 3500), greedy(6))
    num_left = engine.pool.num_gpu_blocks - 1 - 110
    engine.add("full", random_prompt(rng, num_left * 32 - 1), greedy(8, "keepkv", budget=1000))
    least = engine.pool.num_gpu_blocks

    def watch():
        nonlocal least
        if "full" in engine.manager.segments and least > num_left:
            front = engine.manager.req_to_blocks["full"][: 1000 // 32]
            assert all(block.block_hash is None and block.ref_cnt == 1 for block in front)
        least = min(least, engine.pool.get_num_free_blocks())

    run_steps(engine, watch)
    engine.assert_empty()


def test_requests_that_share_everything_in_a_full_pool_do_not_wait_for_each_other(engine):
    """Neither can copy the blocks it shares with the other: one is preempted, and both end as if alone."""
    prompt = random_prompt(np.random.default_rng(11), 3500)
    params = greedy(8, "keepkv", budget=1000)
    alone = engine.tokens([prompt], params)[0]
    outputs = {}
    taken = engine.pool.get_new_blocks(engine.pool.num_gpu_blocks - 1 - 115)
    try:
        for name in "01":
            engine.add(name, prompt, params)
        for _ in range(100):
            if not engine.llm.llm_engine.has_unfinished_requests():
                break
            for output in engine.llm.llm_engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
    finally:
        engine.pool.free_blocks(taken)
        engine.llm.llm_engine.abort_request(list(engine.scheduler.requests), internal=True)
    assert outputs == {"0": alone, "1": alone}
    engine.assert_empty()


def test_parallel_samples_of_one_prompt(engine):
    """n > 1: the samples share the prompt's blocks, and each compresses a copy of its own."""
    prompt = random_prompt(np.random.default_rng(10), 900)
    params = greedy(40, "keepkv", budget=200)
    assert engine.tokens([prompt] * 4, params) == engine.tokens([prompt], params) * 4
    sampled = SamplingParams(
        n=4, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, extra_args=compression("keepkv", budget=200)
    )
    first, second = (engine.generate([prompt], sampled)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) > 1
    engine.assert_empty()


def test_hand_written_parameters_are_checked_before_they_are_queued(engine):
    from vllm.exceptions import VLLMValidationError

    bad = SamplingParams(extra_args={"kv_compression": {"policy": "keepkv", "budget": 2.5}})
    with pytest.raises(VLLMValidationError, match=r"kv_compression.budget: .* got 2.5"):
        engine.generate([[2, 3, 4]], bad)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert len(engine.tokens([[2, 3, 4]], greedy(3))[0]) == 3
