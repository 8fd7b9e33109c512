"""Requests of every kind at once, a hundred: no crash, no leak, no cross-talk."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate, cycle
from operator import and_, eq

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.conftest import random_prompt
from tests.engine.spread import spread_over
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.engine.contexts import CONTEXT_KEY
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.spec import CompressionError

NUM_REQUESTS = 100
NUM_ALONE = 30
"""How many of a hundred are asked again, alone."""
POLICIES = sorted(PRESETS)


@dataclass
class Job:
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None  # generated tokens
    leaves_after: int | None = None  # steps, whatever has been computed by then


def draw_jobs(
    rng: np.random.Generator,
    num_requests: int = NUM_REQUESTS,
    longest: int = 2000,
    num_logprobs: int = 2,
    of: Sequence[str] = POLICIES,
) -> list[Job]:
    shared = [random_prompt(rng, longest) for _ in range(5)]
    policies = cycle(of)
    jobs = []
    for _ in range(num_requests):
        length = int(np.exp(rng.uniform(np.log(50), np.log(longest))))
        prompt = random_prompt(rng, length)
        if rng.random() < 0.5:
            common = int(rng.integers(1, length))
            prompt = [*shared[rng.integers(5)][:common], *prompt[common:]]
        extra = None
        if rng.random() < 0.75:
            budget = [64, 128, 300, 700, 0.1, 0.3, 0.9][rng.integers(7)]
            context = {"context_tokens": int(rng.integers(1, length + 1))} if rng.random() < 0.4 else {}
            fields = context | {"interval": int(rng.integers(1, 50))}
            extra = uneven(rng, next(policies), budget, fields)
        num_tokens = int(rng.integers(2, 60))
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=num_logprobs, extra_args=extra
        )
        jobs.append(Job(prompt, params, int(rng.integers(1, num_tokens)) if rng.random() < 0.2 else None))
    return jobs


def uneven(rng: np.random.Generator, policy: str, budget: int | float, fields: dict) -> dict:
    """Sometimes with shares that differ by head or layer, a budget that depends on the scores, or a context that is
    compressed while it is computed, where they fit."""
    fields = SMALL.get(policy, {}) | fields
    threshold = {"threshold": float(10 ** rng.uniform(-3.5, -1.5)), "max": budget}
    chunks = {"prefill": {"chunk": int(rng.integers(8, 300))}}
    changes = [{"budget": threshold}, {"allocator": "adaptive"}, {"allocator": "pyramid"}, chunks, {}, {}, {}]
    with suppress(CompressionError):
        return compression(policy, **{"budget": budget, **fields, **changes[rng.integers(7)]})
    return compression(policy, budget=budget, **fields)


def run_together(engine, jobs: list[Job], rng: np.random.Generator) -> tuple[list[list[list[int]]], int]:
    """Tokens of each job's answers, and how often requests were preempted. Requests arrive while others run."""
    core = engine.llm.llm_engine
    tokens: list[list[list[int]]] = [[[] for _ in range(job.params.n)] for job in jobs]
    preempted: set[tuple[str, int]] = set()
    waiting = list(range(len(jobs)))
    leaving: dict[int, int] = {}
    while waiting or core.has_unfinished_requests():
        for _ in range(int(rng.integers(0, 8))):
            if waiting:
                index = waiting.pop(0)
                core.add_request(str(index), {"prompt_token_ids": jobs[index].prompt}, jobs[index].params)
                if (steps := jobs[index].leaves_after) is not None:
                    leaving[index] = steps
        for index in [one for one, steps in leaving.items() if not steps]:
            core.abort_request([str(index)])  # nothing comes of it if it has ended
        leaving = {index: steps - 1 for index, steps in leaving.items() if steps}
        for output in core.step():
            index = int(output.request_id)
            for answer in output.outputs:
                tokens[index][answer.index] = list(answer.token_ids)
                is_refused = CONTEXT_KEY in (jobs[index].params.extra_args or {})  # contexts may hold so many blocks
                assert answer.finish_reason != "error" or is_refused, f"request {index}: {jobs[index].params}"
            stop = jobs[index].abort_after
            if stop is not None and max(map(len, tokens[index])) >= stop and not output.finished:
                core.abort_request([output.request_id])
        preempted |= {
            (r.request_id, r.num_preemptions) for r in engine.scheduler.requests.values() if r.num_preemptions
        }
    return tokens, len(preempted)


def assert_same_or_tied(
    together: list[int], alone, name: str, tolerance: float = 1e-3, params: SamplingParams | None = None
) -> bool:
    """Equal up to the first difference, if any, where the two candidates must be as good as tied: ``tolerance``, of
    log-probabilities, to which sampling adds its noise. Returns whether there is none."""
    for position, (token, expected) in enumerate(zip(together, alone.token_ids, strict=False)):
        if token != expected:
            candidates = alone.logprobs[position]
            assert token in candidates, f"{name}: token {position} is not among the best"
            gap = candidates[expected].logprob - candidates[token].logprob
            if params is None or not params.temperature:
                assert gap < tolerance, f"{name}: token {position} differs by {gap} in log-probability"
            else:
                seed = params.seed + (alone.index if params.n > 1 else 0)
                scores = {token: (tolerance - gap) / params.temperature, expected: 0.0}
                assert _sampled(seed, position, scores) == token, f"{name}: token {position} was not nearly sampled"
            return False
    return True


def _sampled(seed: int, position: int, scores: dict[int, float]) -> int:
    """The token that vLLM's CPU sampler takes at a position of an answer: the largest of logits and noise."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(position + 1):
        drawn = torch.randint(0, 2**31, (1,), generator=draws)
    logits = torch.full((1, max(scores) + 1), float("-inf"))
    logits[0, list(scores)] = torch.tensor(list(scores.values()))
    return int(torch.ops._C.fused_gumbel_argmax(logits, drawn))


@pytest.mark.parametrize("num_steps", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_requests_of_every_kind(engine, num_steps):
    """num_steps: that compressions are spread over."""
    rng = np.random.default_rng(20)
    jobs = draw_jobs(rng)
    with engine.with_blocks(130), spread_over(num_steps) if num_steps else nullcontext() as spread:
        together, num_preemptions = run_together(engine, jobs, rng)
    engine.assert_empty()
    assert num_preemptions > 0, "the pool is too large to test preemption"
    assert spread is None or len(spread.parts) > len(jobs)
    assert_answers_alone(engine, jobs, together, rng, NUM_ALONE)


def assert_answers_alone(engine, jobs: list[Job], together: list[list[list[int]]], rng, num_alone: int) -> None:
    """Some of the jobs, chosen at random, generate alone what they have ``together``."""
    for index in rng.permutation(len(jobs))[:num_alone]:
        job = jobs[index]
        name = f"request {index} ({job.params}, {len(job.prompt)} tokens)"
        assert any(together[index]) or job.leaves_after is not None, f"{name} generated nothing"
        for tokens, alone in zip(together[index], engine.generate([job.prompt], job.params)[0].outputs, strict=True):
            try:
                same = assert_same_or_tied(tokens, alone, name, params=job.params)
            except AssertionError:
                tolerance = 4 * own_difference(engine, job, alone.index)
                same = assert_same_or_tied(tokens, alone, name, max(tolerance, 1e-3), job.params)
            is_cut = job.abort_after is not None or job.leaves_after is not None
            assert not same or is_cut or len(tokens) == len(alone.token_ids), name
    engine.assert_empty()


def own_difference(engine, job: Job, sample: int) -> float:
    """The largest difference of log-probabilities between an answer and the same answer with embeddings that differ in
    their last bit: of what rounding comes to, which a regression over entries makes 10,000 times as large."""
    embeddings = engine.model.model.embed_tokens.weight.data
    kept = embeddings.clone()
    exact = engine.generate([job.prompt], job.params)[0].outputs[sample]
    try:
        assert engine.llm.reset_prefix_cache()
        embeddings *= 1 + 2.0**-23
        rounded = engine.generate([job.prompt], job.params)[0].outputs[sample]
    finally:
        embeddings.copy_(kept)
        assert engine.llm.reset_prefix_cache()
    same = accumulate([True, *map(eq, exact.token_ids, rounded.token_ids)], and_)
    return max(
        abs(one[token].logprob - other[token].logprob)
        for one, other, was_same in zip(exact.logprobs, rounded.logprobs, same, strict=False)
        if was_same
        for token in one.keys() & other.keys()
    )
