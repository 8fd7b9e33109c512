"""The scheduler for asynchronous scheduling: it plans step t + 1 before the tokens of step t are known.

vLLM's CPU workers do not run asynchronously, so this drives the scheduler itself; no model runs.
"""

from copy import copy

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.engine.spread import AtOnce
from vllm_kvmerge import compression
from vllm_kvmerge.engine.known_scores import KnownScores
from vllm_kvmerge.engine.plan import CompressionPlan, CompressionReport, FrontReport, attach, attached_step
from vllm_kvmerge.engine.scheduler import AsyncCompressionScheduler, SyncCompressionScheduler

BLOCK_SIZE = 32


def make_scheduler(engine, cls, prefix_caching: bool = True):
    template = engine.scheduler
    vllm_config = copy(template.vllm_config)
    vllm_config.cache_config = copy(vllm_config.cache_config)
    vllm_config.cache_config.enable_prefix_caching = prefix_caching
    scheduler = cls(
        vllm_config=vllm_config,
        kv_cache_config=template.kv_cache_config,
        structured_output_manager=template.structured_output_manager,
        block_size=BLOCK_SIZE,
    )
    scheduler._pace = AtOnce(1)
    return scheduler


def make_request(name: str, num_prompt_tokens: int, max_tokens: int, extra) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=[(7 * i + len(name)) % 800 for i in range(num_prompt_tokens)],
        sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def run(scheduler, requests: list[Request], depth: int) -> dict[str, list[tuple[int, int, int, int]]]:
    """Runs to the end with ``depth`` steps in flight; returns each request's plans as (front, tail, n, new_front)."""
    for request in requests:
        scheduler.add_request(request)
    plans: dict[str, list[tuple[int, int, int, int]]] = {r.request_id: [] for r in requests}
    in_flight = []
    for _ in range(2000):
        if not scheduler.has_requests() and not in_flight:
            break
        output = scheduler.schedule()
        for plan in attached_step(output).plans:
            plans[plan.request_id].append((plan.front, plan.tail, plan.num_tokens, plan.new_front))
        in_flight.append(output)
        while len(in_flight) >= depth or (in_flight and not output.num_scheduled_tokens):
            finish(scheduler, in_flight.pop(0))
    return plans


def finish(scheduler, output) -> None:
    ids = list(output.num_scheduled_tokens)
    sampled = []
    for request_id in ids:
        request = scheduler.requests.get(request_id)
        done = output.scheduled_cached_reqs.num_computed_tokens
        computed = dict(zip(output.scheduled_cached_reqs.req_ids, done, strict=True))
        computed |= {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        reached = computed[request_id] + output.num_scheduled_tokens[request_id]
        sampled.append([5] if request is not None and reached >= request.num_tokens else [])
    plans = [plan for plan in attached_step(output).plans if plan.may_shrink]
    fronts = {plan.request_id: shrunk(plan) for plan in plans}
    if ids:
        done = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled
        )
        attach(done, CompressionReport(fronts=fronts))
        scheduler.update_from_output(output, done)
    for plan in plans:
        row = scheduler._manager.req_to_blocks.get(plan.request_id)
        if row is not None and scheduler._manager.segments_of(plan.request_id).changed_at == plan.num_tokens:
            front = [block.block_id for block in row[: plan.num_tokens // BLOCK_SIZE] if not block.is_null]
            assert front == plan.blocks[: fronts[plan.request_id].num_blocks]


def shrunk(plan: CompressionPlan) -> FrontReport:
    """What a worker might report."""
    num_blocks = 1 + plan.num_tokens % len(plan.blocks)
    return FrontReport(plan.num_tokens, num_blocks, num_blocks * BLOCK_SIZE - 3)


@pytest.mark.parametrize("context_share", [None, 0.6])
@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "snapkv", "keepkv", "zsmerge", "h2o threshold", "kvzip"])
def test_plans_are_those_of_synchronous_scheduling(engine, policy, context_share):
    def parameters(length: int) -> dict:
        context = {} if context_share is None else {"context_tokens": int(context_share * length)}
        name, _, kind = policy.partition(" ")
        budget = {"threshold": 0.01, "max": 100} if kind == "threshold" else 100
        return compression(name, budget=budget, **context)

    def requests():
        return [
            make_request(f"r{i}", length, 90, parameters(length) if i % 3 else None)
            for i, length in enumerate([50, 700, 90, 1500, 130, 99])
        ]

    results = []
    for cls, depth in ((SyncCompressionScheduler, 1), (AsyncCompressionScheduler, 2)):
        scheduler = make_scheduler(engine, cls)
        pool = scheduler.kv_cache_manager.block_pool
        results.append(run(scheduler, requests(), depth))
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not scheduler._manager.segments and not scheduler._compressions
        assert not scheduler._reported and not scheduler._unreported
    sync, asynchronous = results
    assert any(sync.values())
    for name, plans in sync.items():
        # A step that is in flight when the last token arrives may carry one more plan; it does no harm.
        assert asynchronous[name][: len(plans)] == plans
        assert len(asynchronous[name]) <= len(plans) + 1


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("cls", "depth"), [(SyncCompressionScheduler, 1), (AsyncCompressionScheduler, 2)])
def test_repetitions_end_whatever_happens(engine, cls, depth, prefix_caching):
    """Requests whose contexts are repeated beside others, in pools and with places for few of them, some aborted: each
    context is repeated before it is compressed, or its scores are recalled that workers keep, of some contexts at a
    time; none waits for ever, and everything is returned."""
    rng = np.random.default_rng(11)
    num_aborted = num_preempted = num_repeated = num_recalled = num_forgotten = 0
    for places, num_blocks in ((2, 60), (3, 45), (8, 45), (8, 120)):
        scheduler = make_scheduler(engine, cls, prefix_caching)
        scheduler.max_num_active_reqs = places
        if prefix_caching:
            scheduler._known_scores = KnownScores(scheduler._limits.prompt_score_bytes(1200))
        pool = scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - num_blocks)
        requests = []
        for index in range(14):
            length = int(rng.integers(40, 700)) if rng.random() < 0.5 else 400
            fields = {"budget": int(rng.integers(10, 200)), "chunk_size": 350}
            if rng.random() < 0.4:
                fields["context_tokens"] = int(rng.integers(1, length + 1))
            extra = compression("kvzip", **fields) if index % 4 else None
            requests.append(make_request(f"r{index}", length, int(rng.integers(1, 150)), extra))
        to_abort = [request.request_id for request in requests if rng.random() < 0.2]
        repeated: dict[str, int] = {}
        recalled: set[str] = set()
        kept: set[int] = set()
        waiting, in_flight = list(requests), []
        for _ in range(1500):
            if waiting and rng.random() < 0.3:
                scheduler.add_request(waiting.pop())
            output = scheduler.schedule()
            step = attached_step(output)
            for name, chunk in step.repetitions.items():
                assert name in output.num_scheduled_tokens and chunk.parent in scheduler.requests
                repeated[chunk.parent] = chunk.end
            kept |= set(step.kept_scores.values())
            assert set(step.recalled_scores.values()) <= kept and set(step.forgotten_scores) <= kept
            kept -= set(step.forgotten_scores)
            recalled |= set(step.recalled_scores)
            num_recalled += len(step.recalled_scores)
            num_forgotten += len(step.forgotten_scores)
            for plan in step.plans:
                if plan.request_id not in recalled:
                    assert repeated.pop(plan.request_id) == plan.num_tokens  # to the context's end
                    num_repeated += 1
            in_flight.append(output)
            while len(in_flight) >= depth or (in_flight and not output.num_scheduled_tokens):
                finish(scheduler, in_flight.pop(0))
            if to_abort and rng.random() < 0.05:
                num_aborted += len(scheduler.finish_requests([to_abort.pop()], RequestStatus.FINISHED_ABORTED))
            if not waiting and not scheduler.has_requests() and not in_flight:
                break
        else:
            raise AssertionError(f"{[*scheduler.running, *scheduler.waiting]} do not end")
        num_preempted += sum(request.num_preemptions for request in requests)
        pool.free_blocks(taken)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not scheduler.requests and not scheduler._repeating and not scheduler._orphans
        assert not scheduler._manager.segments and not scheduler._compressions and not scheduler._kept_bytes
        assert len(scheduler._known_scores) == len(kept)
    assert num_aborted and num_preempted and num_repeated > 10
    assert (num_recalled > 5 and num_forgotten > 5) if prefix_caching else not num_recalled
