"""Requests that share contexts, and keep some, at random: each answers as it would alone, and nothing leaks."""

import json

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import random_prompt
from tests.engine.test_stress import NUM_ALONE, Job, assert_same_or_tied, run_together
from vllm_kvmerge import compression
from vllm_kvmerge.engine.contexts import CONTEXT_KEY

pytestmark = pytest.mark.slow

NUM_REQUESTS = 100
POLICIES: tuple[tuple[str, dict], ...] = (
    ("snapkv", {}), ("h2o", {}), ("kvzip", {}), ("adakv", {"decode": "bounded"}),
    ("keydiff", {"merger": "attention_matching"}),
)  # fmt: skip


def draw(rng: np.random.Generator, num_requests: int) -> tuple[list[list[int]], list[Job]]:
    """Requests over 20 contexts and 5 policies; a few have none, some are aborted, and some keep their context."""
    contexts = [random_prompt(rng, int(rng.integers(200, 900))) for _ in range(20)]
    jobs = []
    for index in range(num_requests):
        context = contexts[min(int(rng.zipf(1.4)), 20) - 1]
        whole = rng.random() < 0.2
        prompt = context if whole else context + random_prompt(rng, int(rng.integers(2, 60)))
        policy, fields = POLICIES[rng.integers(5)]
        extra = None
        if rng.random() < 0.9:
            where = {} if whole else {"context_tokens": len(context)}
            if policy != "kvzip" and rng.random() < 0.3:  # its parts are shared too
                where |= {"prefill": {"chunk": 96}}
            extra = compression(policy, budget=0.25, interval=16, **fields, **where)
            if rng.random() < 0.05:
                extra |= {CONTEXT_KEY: json.dumps({"id": str(index)})}
        num_tokens = int(rng.integers(2, 40))
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=2, extra_args=extra)
        jobs.append(Job(prompt, params, int(rng.integers(1, num_tokens)) if rng.random() < 0.15 else None))
    return contexts, jobs


def test_requests_that_share_contexts(engine, monkeypatch):
    check_sharing(engine, NUM_REQUESTS, monkeypatch)


def check_sharing(engine, num_requests: int, monkeypatch, num_blocks: int = 130, num_kept: int = 40) -> None:
    """num_blocks: that are free. num_kept: that contexts may hold."""
    rng = np.random.default_rng(21)
    contexts, jobs = draw(rng, num_requests)
    plain = contexts[:3]
    some = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert engine.llm.reset_prefix_cache()
    cold = engine.tokens(plain, some)
    monkeypatch.setattr(engine.scheduler._contexts, "_max_blocks", num_kept)
    with engine.sharing_contexts() as fronts, engine.with_blocks(num_blocks):
        # Blocks run out: fronts are evicted, requests preempted, contexts refused.
        together, num_preemptions = run_together(engine, jobs, rng)
        assert num_preemptions > 0 and len(fronts) > 0 and len(engine.scheduler._contexts) > 0
        assert set(engine.compression._fronts) >= set(fronts._fronts)
        engine.scheduler._contexts.clear()
    engine.assert_empty()
    assert engine.tokens(plain, some) == cold
    refused = 0
    for index in rng.permutation(num_requests)[: num_requests * NUM_ALONE // NUM_REQUESTS]:
        job, (tokens,) = jobs[index], together[index]
        extra = {key: value for key, value in (job.params.extra_args or {}).items() if key != CONTEXT_KEY}
        if not tokens and CONTEXT_KEY in (job.params.extra_args or {}):
            refused += 1
            continue
        params = job.params.clone()
        params.extra_args = extra
        alone = engine.generate([job.prompt], params)[0].outputs[0]
        if job.abort_after is None:
            assert len(tokens) == len(alone.token_ids)
        assert tokens, f"request {index} generated nothing: {extra}, {len(job.prompt)} tokens"
        assert_same_or_tied(tokens, alone, f"request {index} ({extra}, {len(job.prompt)} tokens)")
    assert refused < num_requests * 0.05
    engine.assert_empty()
