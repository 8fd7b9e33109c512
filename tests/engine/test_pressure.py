"""``trigger: pressure``: requests run uncompressed until the pool is short, and are then compressed, not preempted."""

import json
from collections import defaultdict
from contextlib import suppress

import numpy as np
import pytest
from vllm import SamplingParams

from tests.demo_model import BLOCK_SIZE
from tests.engine.conftest import preempting, random_prompt, run
from tests.engine.test_async_scheduler import make_request, make_scheduler
from tests.engine.test_async_scheduler import run as run_schedule
from tests.engine.test_small_pool import POOL, small_pool
from tests.engine.test_stress import assert_same_or_tied, draw_jobs, run_together
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.engine.scheduler import AsyncCompressionScheduler, SyncCompressionScheduler
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.engine.worker import compactor
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.policies.rescoring import newest_scores
from vllm_kvmerge.request.parameters import EXTRA_ARGS_KEY as KEY
from vllm_kvmerge.request.parameters import CompressionError, parse_compression

BUDGET, PROMPT, ANSWER, BLOCKS = 96, 400, 120, 50
POLICIES = [name for name in sorted(PRESETS) if name not in ("kvzip", "kvzap")]


def params(policy: str | None, max_tokens: int = ANSWER, **fields) -> SamplingParams:
    fields = {"budget": BUDGET, "trigger": "pressure"} | SMALL.get(policy, {}) | fields
    extra = {} if policy is None else compression(policy, **fields)
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args={**extra, USAGE_KEY: True})


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(97)
    return [random_prompt(rng, PROMPT) for _ in range(6)]


@pytest.fixture
def watched(engine, monkeypatch):
    """Preempted requests, and the numbers of tokens at which requests are compressed."""
    preempted, compressed = list[str](), defaultdict[str, list[int]](list)
    preempt, plan = engine.scheduler._preempt_request, engine.scheduler._plan

    def count_preempted(request, *args, **kwargs):
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    def count_plan(request, *args, **fields):
        done = plan(request, *args, **fields)
        if done:
            compressed[request.request_id.rsplit("-", 1)[0]].append(request.num_computed_tokens)
        return done

    monkeypatch.setattr(engine.scheduler, "_preempt_request", count_preempted)
    monkeypatch.setattr(engine.scheduler, "_plan", count_plan)
    assert engine.llm.reset_prefix_cache()
    return preempted, compressed


@pytest.mark.slow
def test_with_room_nothing_is_compressed(engine, prompts, watched):
    """And tokens are those of plain requests."""
    expected = engine.tokens(prompts[:2], params(None, 30))
    for policy in POLICIES:
        assert engine.tokens(prompts[:2], params(policy, 30)) == expected, policy
    assert watched == ([], {})
    engine.assert_empty()


@pytest.mark.thin(6)
@pytest.mark.parametrize("policy", POLICIES)
def test_without_room_requests_are_compressed_and_none_is_preempted(engine, prompts, watched, policy):
    """Where six plain requests of the same lengths lose work."""
    preempted, compressed = watched
    with engine.with_blocks(BLOCKS):
        outputs = engine.generate(prompts, params(policy))
    engine.assert_empty()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [ANSWER] * len(prompts)
    assert preempted == [] and compressed
    reports = [output.kv_transfer_params[REPORT_KEY] for output in outputs]
    assert sum(report["compressions"] for report in reports) == sum(map(len, compressed.values()))
    for counts in compressed.values():
        assert all(
            after - before >= max(BLOCK_SIZE, BUDGET // 4) for before, after in zip(counts, counts[1:], strict=False)
        )


def test_plain_requests_are_preempted_there(engine, prompts, watched):
    with engine.with_blocks(BLOCKS):
        engine.generate(prompts, params(None))
    assert watched[0] and not watched[1]


@pytest.mark.thin(8)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_compressed_like_a_context(engine, prompts, watched, policy):
    """One that fills the pool alone goes on as one whose prompt is the same tokens, compressed at the same count."""
    fields = {"decode": "grow"}
    if "score_window" in parse_compression(compression(policy)[KEY]).parameters:
        fields["score_window"] = 32
    with engine.with_blocks(15):
        ((*tokens,),) = engine.tokens(prompts[:1], params(policy, **fields))
    assert list(watched[1].values()) == [[15 * BLOCK_SIZE]]
    known = 15 * BLOCK_SIZE + 1 - PROMPT
    same = params(policy, ANSWER - known, trigger="budget", context_tokens=15 * BLOCK_SIZE, **fields)
    assert engine.tokens([prompts[0] + tokens[:known]], same) == [tokens[known:]]


def test_a_cached_prompt_is_scored_by_the_queries_at_hand(engine, prompts, watched, monkeypatch):
    """Those of tokens that were found in the prefix cache are not."""
    seen = set()

    def scored(entries, queries, *others):
        seen.add(tuple(queries.positions[0].tolist()))
        return newest_scores(entries, queries, *others)

    monkeypatch.setattr(compactor, "newest_scores", scored)
    with engine.with_blocks(13):
        engine.generate(prompts[:1], params(None, 5))
        engine.generate(prompts[:1], params("snapkv", 40, score_window=64))
    assert seen == {tuple(range(PROMPT // BLOCK_SIZE * BLOCK_SIZE, 13 * BLOCK_SIZE))}


@pytest.mark.slow
def test_one_alone_outgrows_the_pool(engine, prompts, watched):
    """It is compressed again and again, and after a preemption too, although its tokens have no room by then."""
    preempted, compressed = watched
    with small_pool(engine):
        engine.add("long", prompts[0], params("keepkv", 1500, interval=BUDGET))
        tokens = run(engine, preempting(engine, 900))
    assert len(tokens["long"]) == 1500 and len(preempted) == 1
    # From 96 entries on the pool fills again with 672 tokens.
    assert compressed["long"] == [768, 768, 1440]


@pytest.mark.thin(2)
@pytest.mark.parametrize("fields", [{"decode": "grow"}, {"budget": 500, "interval": 400}])
def test_one_that_cannot_shrink_again_ends_with_the_pool(engine, prompts, watched, fields):
    with small_pool(engine):
        (output,) = engine.generate(prompts[:1], params("keepkv", 3000, **fields))
    assert output.outputs[0].finish_reason == "length" and watched[0] == []
    total = PROMPT + len(output.outputs[0].token_ids)
    front = fields.get("budget", BUDGET)
    assert 2 * POOL - front - 4 * BLOCK_SIZE <= total <= 2 * POOL - front


@pytest.mark.slow
def test_beside_others(engine):
    """Requests of every kind, some of which wait for pressure: the others generate what they do alone, and all blocks
    come back."""
    rng = np.random.default_rng(98)
    jobs, sleeping = draw_jobs(rng), set()
    for index, job in enumerate(jobs):
        fields = json.loads((job.params.extra_args or {}).get(KEY, "{}"))
        with suppress(CompressionError):
            if fields and rng.random() < 0.6:
                extra = compression(**fields | {"trigger": "pressure", "context_tokens": None, "prefill": None})
                job.params.extra_args = extra
                sleeping.add(index)
    assert 20 < len(sleeping) < 60
    with engine.with_blocks(130):
        together, _ = run_together(engine, jobs, rng)
    engine.assert_empty()
    for index, job in enumerate(jobs):
        if index in sleeping:
            assert job.abort_after or len(together[index][0]) == job.params.max_tokens
        elif index % 4 == 0:
            alone = engine.generate([job.prompt], job.params)[0].outputs[0]
            assert_same_or_tied(together[index][0], alone, f"request {index} ({job.params.extra_args})")


@pytest.mark.parametrize(("cls", "depth"), [(SyncCompressionScheduler, 1), (AsyncCompressionScheduler, 2)])
def test_schedules_with_steps_in_flight(engine, cls, depth):
    """No model runs. The same requests are compressed at the same counts each time, and none is preempted."""
    found = []
    for _ in range(2):
        scheduler = make_scheduler(engine, cls)
        pool = scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - 60)
        extra = compression("snapkv", budget=100, trigger="pressure", decode="bounded")
        requests = [make_request(f"r{index}", 300 + 90 * index, 400, extra) for index in range(7)]
        found.append(run_schedule(scheduler, requests, depth))
        assert all(request.num_preemptions == 0 for request in requests)
        pool.free_blocks(taken)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not scheduler._manager.segments and not scheduler._compressions and not scheduler._kept_bytes
    assert found[0] == found[1] and sum(map(len, found[0].values())) > 7
