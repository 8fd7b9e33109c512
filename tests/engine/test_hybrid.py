"""A model of sliding-window layers beside full attention: these are compressed, those are vLLM's own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine.architectures import (
    BLOCK_SIZE,
    BYTES_PER_BLOCK,
    POLICIES,
    greedy,
    jobs,
    num_taken,
    running,
)
from tests.engine.conftest import Engine, preempting, random_prompt, run
from tests.engine.test_async_scheduler import make_request, make_scheduler
from tests.engine.test_async_scheduler import run as run_schedule
from tests.engine.test_pressure import params as asleep
from tests.engine.test_pressure import watched
from tests.engine.test_repetition import PROMPTS, dense_scores, scores
from tests.random_model import WINDOW, write_gemma
from vllm_kvmerge.engine.scheduler import AsyncCompressionScheduler, SyncCompressionScheduler
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY

pytestmark = pytest.mark.engine

__all__ = ["scores", "watched"]  # fixtures

NUM_PRESSED = 80
"""Blocks for six requests of 100 tokens and 300 more, which take some 110."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder) as engine:
        yield engine


@pytest.mark.slow
def test_requests_of_every_kind_that_a_pool_preempts(engine):
    told = jobs(engine)
    alone = [engine.tokens([prompt], params)[0] for prompt, params in told]
    growing = [random_prompt(np.random.default_rng(seed), 100) for seed in range(5)]
    with engine.with_blocks(60):
        for index, prompt in enumerate(growing):
            engine.add(f"growing{index}", prompt, greedy(max_tokens=300))
        for index, (prompt, params) in enumerate(told):
            engine.add(str(index), prompt, params)
        counts = []
        squeezed = run(engine, lambda: counts.extend(r.num_preemptions for r in engine.scheduler.requests.values()))
    assert max(counts) > 0, "the pool is too large to test preemption"
    assert [squeezed[str(index)] for index in range(len(told))] == alone
    engine.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize(("length", "chunk_size"), [(500, 150), (267, 2000), (511, 300)])
def test_scores_of_a_repeated_context_are_those_of_a_dense_computation(engine, folder, scores, length, chunk_size):
    """A repetition begins with its parent's window. Beside a request that generates, 510 tokens of the last context
    would be computed after two steps, so that the window at its last block would be gone after the third."""
    prompt = random_prompt(np.random.default_rng(61), length + 20)
    fields = {"chunk_size": chunk_size, "num_prefix_tokens": 4, **PROMPTS}
    assert engine.llm.reset_prefix_cache()
    engine.add("other", random_prompt(np.random.default_rng(62), 20), greedy(max_tokens=60))
    engine.llm.llm_engine.step()
    engine.add("one", prompt, greedy("kvzip", budget=0.5, context_tokens=length, **fields))
    run(engine)
    (found,) = scores
    expected = dense_scores(prompt[:length], chunk_size, 4, PROMPTS, path=folder)
    assert (found - expected).abs().max() < 1e-4 * expected.max()
    engine.assert_empty()


def test_a_report_counts_the_blocks_of_all_layers(engine):
    assert engine.llm.reset_prefix_cache()
    params = greedy("keepkv", 40, budget=64)
    params.extra_args = {**(params.extra_args or {}), USAGE_KEY: True}
    engine.add("one", random_prompt(np.random.default_rng(10), 500), params)
    taken, reports = [], []
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            reports.append(output.kv_transfer_params)
        taken.append(num_taken(engine))
    report = reports[-1][REPORT_KEY]
    assert report["mean_bytes"] == pytest.approx(np.mean(taken[1:-1]) * BYTES_PER_BLOCK, rel=0.05)
    # Chunks of 256 tokens: at most the prompt's blocks in one group, and a window and two chunks in the two others.
    assert 16 * BYTES_PER_BLOCK <= report["peak_bytes"] <= (16 + 2 * 16) * BYTES_PER_BLOCK
    assert max(taken[2:]) <= (64 + 40) // BLOCK_SIZE + 1 + 2 * (WINDOW // BLOCK_SIZE + 2)


@pytest.mark.thin(24)
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"kvzip"}))
def test_under_pressure_requests_are_compressed_and_none_is_preempted(engine, watched, policy):
    preempted, compressed = watched
    prompts = [random_prompt(np.random.default_rng(seed), 100) for seed in range(6)]
    with engine.with_blocks(NUM_PRESSED):
        tokens = engine.tokens(prompts, asleep(policy, 300))
    engine.assert_empty()
    assert [len(one) for one in tokens] == [300] * 6
    assert preempted == [] and compressed


def test_plain_requests_are_preempted_there(engine, watched):
    prompts = [random_prompt(np.random.default_rng(seed), 100) for seed in range(6)]
    with engine.with_blocks(NUM_PRESSED):
        engine.generate(prompts, asleep(None, 300))
    assert watched[0] and not watched[1]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "keepkv", "morphkv", "adakv"])
def test_under_pressure_it_is_compressed_like_a_context(engine, watched, policy):
    """One that fills the pool alone, with blocks of three groups of layers."""
    prompt = random_prompt(np.random.default_rng(21), 200)
    fields = {"decode": "grow"} | ({"score_window": 32} if policy in ("snapkv", "adakv") else {})
    with engine.with_blocks(22):
        (tokens,) = engine.tokens([prompt], asleep(policy, 400, **fields))
    ((count,),) = watched[1].values()
    assert len(tokens) == 400 and watched[0] == []
    known = count + 1 - len(prompt)
    # 16 blocks or more for all tokens, and up to 3 of each window.
    assert 16 * BLOCK_SIZE <= count <= 18 * BLOCK_SIZE
    same = asleep(policy, len(tokens) - known, trigger="budget", context_tokens=count, **fields)
    assert engine.tokens([prompt + tokens[:known]], same) == [tokens[known:]]
    engine.assert_empty()


@pytest.mark.parametrize(("cls", "depth"), [(SyncCompressionScheduler, 1), (AsyncCompressionScheduler, 2)])
def test_under_pressure_one_alone_outgrows_the_pool(engine, cls, depth):
    """No model runs. When it is computed again, its tokens do not all find room, and it is compressed before that."""
    scheduler = make_scheduler(engine, cls)
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 60)
    scheduler._limits = replace(scheduler._limits, pool_tokens=60 * BLOCK_SIZE)
    schedule, watch = scheduler.schedule, preempting(SimpleNamespace(scheduler=scheduler), 1200)

    def schedule_and_preempt():
        watch()
        return schedule()

    scheduler.schedule = schedule_and_preempt
    request = make_request("long", 600, 1400, asleep("keepkv", interval=96).extra_args)
    plans = run_schedule(scheduler, [request], depth)["long"]
    assert request.num_preemptions == 1 and request.num_output_tokens == 1400
    ends = [num_tokens for _, _, num_tokens, _ in plans]
    assert len(ends) >= 2 and 50 * BLOCK_SIZE < ends[0] <= 55 * BLOCK_SIZE and ends[1] < ends[0]
    pool.free_blocks(taken)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.slow
def test_under_pressure_beside_others(engine, watched):
    """Which give the same tokens as alone."""
    told = jobs(engine)
    alone = [engine.tokens([prompt], params)[0] for prompt, params in told]
    assert engine.llm.reset_prefix_cache()
    with engine.with_blocks(100):
        for index in range(5):
            prompt = random_prompt(np.random.default_rng(30 + index), 300)
            engine.add(f"asleep{index}", prompt, asleep(["snapkv", "morphkv"][index % 2], 200))
        for index, (prompt, params) in enumerate(told):
            engine.add(str(index), prompt, params)
        together = run(engine)
    assert {one for one in watched[1] if one.startswith("asleep")}
    assert [len(together[f"asleep{index}"]) for index in range(5)] == [200] * 5
    assert [together[str(index)] for index in range(len(told))] == alone
    engine.assert_empty()
