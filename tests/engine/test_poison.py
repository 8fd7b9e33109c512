"""With ``debug_poison_freed``, blocks that nobody holds are NaN: whatever reads what another request left shows it."""

import json
from contextlib import suppress
from math import isfinite
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.demo_model import BYTES_PER_BLOCK
from tests.engine.conftest import DEMO_FILES, NUM_BLOCKS, Engine, engine_arguments, engine_with
from tests.engine.test_stress import Job, assert_answers_alone, draw_jobs, run_together
from tests.engine.test_stress_contexts import check_sharing
from vllm_kvmerge import compression
from vllm_kvmerge.ops.coded import CODINGS
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, CompressionError

pytestmark = pytest.mark.engine

ROUND = 60
"""Requests that run together."""

PARAMETERS: dict[str, tuple[Any, ...]] = {
    "window_size": (8, 16, 32),
    "score_window": (1, 16, 40, "all"),
    "recent_window": (1, 8, 24),
    "num_sink_tokens": (0, 1, 8),
    "kernel_size": (1, 3, 7),
    "chunk_length": (1, 4),
    "decay": (0.5, 0.99),
    "merger": ("drop", "attention_matching", "zip"),
    "decode": ("bounded", "grow"),
    "front": tuple(CODINGS),
    "positions": ("text", "cache"),
    "refresh": ({"every": 20, "queries": 8},),
    "skip_layers": (1,),
}
"""What requests may say beside what ``draw_jobs`` gives them, where their policy takes it."""


@pytest.fixture(scope="module")
def poisoned():
    """An engine whose freed blocks are NaN."""
    own = DEMO_FILES | {"debug_poison_freed": True, "compaction_workspace_bytes": 1 << 20}
    # On a machine that is busy with other things, a compression takes longer than it may.
    own["max_compaction_seconds"] = 600.0
    size = {"kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK}
    with engine_with(**engine_arguments(), **size, additional_config={"kvmerge": own}) as engine:
        assert engine.compression.compactor.max_bytes == 1 << 20  # so that some go head by head
        yield engine


def vary(jobs: list[Job], rng: np.random.Generator) -> None:
    """Parameters of the policies, sampling, several answers to one prompt, ends before the last token, and clients that
    go, some before their prompts have been computed or compressed."""
    for job in jobs:
        extra = dict(job.params.extra_args or {})
        for name in rng.permutation(list(PARAMETERS))[: rng.integers(4)] if extra else []:
            values = PARAMETERS[name]
            with suppress(CompressionError):
                extra = compression(
                    **json.loads(extra[EXTRA_ARGS_KEY]) | {str(name): values[rng.integers(len(values))]}
                )
        job.params.extra_args = extra or None
        if rng.random() < 0.4:
            job.params.temperature = float(rng.choice([0.3, 0.7, 1.0]))
            job.params.seed = int(rng.integers(2**31))
            job.params.logprobs = 20
            job.params.top_k, job.params.top_p = int(rng.choice([0, 20])), float(rng.choice([0.9, 1.0]))
            job.params.n = int(rng.integers(1, 4))
        if rng.random() < 0.2:
            job.params.stop_token_ids = rng.integers(19, 780, 40).tolist()
        elif rng.random() < 0.2:
            job.params.stop = [str(digit) for digit in rng.choice(10, 2, replace=False)]
        if rng.random() < 0.1:
            job.leaves_after = int(rng.integers(0, 60))


def run_stress(engine: Engine, num_requests: int, seed: int = 24):
    rng = np.random.default_rng(seed)
    jobs = draw_jobs(rng, num_requests)
    vary(jobs, rng)
    assert num_requests < ROUND or any(job.leaves_after is not None for job in jobs)
    with engine.with_blocks(130):
        together, num_preemptions = run_together(engine, jobs, rng)
    engine.assert_empty()
    return jobs, together, num_preemptions, rng


@pytest.mark.timeout(0)
def test_no_request_reads_what_another_left(poisoned, request):
    """Where a number is asked for, each request is asked again, alone; by default one in four."""
    asked = request.config.getoption("--requests")
    total = 0
    for number in range(-(-(asked or ROUND) // ROUND)):
        jobs, together, num_preemptions, rng = run_stress(poisoned, ROUND, seed=24 + number)
        total += num_preemptions
        assert_answers_alone(poisoned, jobs, together, rng, ROUND if asked else ROUND // 4)
        if asked:
            print(f"{(number + 1) * ROUND} requests, seed {24 + number}, {total} preemptions", flush=True)
    assert total > 0


def test_no_head_gets_places_that_it_has_no_entries_for(poisoned):
    """Budgets by layer grow with the text, faster than a layer may have entries."""
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        logprobs=1,
        ignore_eos=True,
        extra_args=compression("pyramidinfer", budget=128, interval=19),
    )
    prompt = {"prompt_token_ids": [3 + i % 200 for i in range(158)]}
    (answer,) = poisoned.llm.generate(prompt, params, use_tqdm=False)[0].outputs
    assert all(isfinite(one.logprob) for position in answer.logprobs for one in position.values())


@pytest.mark.slow
def test_no_front_reads_what_another_left(poisoned, monkeypatch):
    # A pool in which blocks run out however fast this machine compresses.
    check_sharing(poisoned, 40, monkeypatch, num_blocks=90)


def test_a_block_that_is_not_zeroed_shows(poisoned, monkeypatch):
    """vLLM's operators multiply what follows a sequence's last token by 0: the mode finds that this is not zeroed."""
    monkeypatch.setattr(type(poisoned.compression), "zero_block_ids", lambda *_: None)
    with pytest.raises((AssertionError, ValueError)):
        jobs, together, _, rng = run_stress(poisoned, 20)
        monkeypatch.undo()
        assert_answers_alone(poisoned, jobs, together, rng, 20)
    monkeypatch.undo()
