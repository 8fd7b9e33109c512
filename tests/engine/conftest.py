"""One engine inside the test process, small enough in memory that requests compete for blocks."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import preloaded
from tests.demo_model import BLOCK_SIZE, BYTES_PER_BLOCK
from tests.engine.spread import AtOnce
from tests.presets import SMALL
from vllm_kvmerge import compression, demo

if TYPE_CHECKING:  # vLLM must not be imported before it is known which of its libraries is asked for
    from vllm import SamplingParams

    from vllm_kvmerge.engine.fronts import FrontCache
    from vllm_kvmerge.engine.schedule import Segments

NUM_BLOCKS = 230
MAX_MODEL_LEN = 4096


def engine_arguments() -> dict:
    """Arguments common to the stock engine and ours, apart from the size of the pool."""
    return {
        "model": demo.model_path(),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,  # so that longer prompts are computed in chunks
        "block_size": BLOCK_SIZE,
        "seed": 0,
    }


class Engine:
    """vLLM with compression, and a look inside its scheduler."""

    def __init__(self, llm) -> None:
        self.llm = llm
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.manager = self.scheduler._manager
        self._fronts, self.manager.fronts = self.manager.fronts, None
        # By the clock, on a machine that other tests keep busy.
        self.compression._compactor = replace(self.compression.compactor, max_seconds=300.0)
        # What is spread over steps, and so what runs beside what, must not depend on the machine: nothing is, unless a
        # test asks for it.
        self.scheduler._planner._pace = AtOnce(1)

    def add(self, request_id: str, prompt: list[int], params, **more: str) -> None:
        """More: of the prompt, as ``cache_salt``."""
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt, **more}, params)

    def generate(self, prompts: list[list[int]], params) -> list:
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def tokens(self, prompts: list[list[int]], params) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in self.generate(prompts, params)]

    @contextmanager
    def with_blocks(self, count: int) -> Iterator[None]:
        """With as few free blocks, short requests compete for them."""
        taken = self.pool.get_new_blocks(self.pool.get_num_free_blocks() - count)
        try:
            yield
        finally:
            self.pool.free_blocks(taken)

    @contextmanager
    def sharing_contexts(self) -> "Iterator[FrontCache]":
        """Meanwhile compressed contexts stay in the prefix cache; tests that repeat a prompt want it computed again."""
        assert self._fronts is not None
        self.manager.fronts = self._fronts
        try:
            yield self._fronts
        finally:
            assert self.llm.reset_prefix_cache() and len(self._fronts) == 0
            self.manager.fronts = None

    @property
    def compression(self):
        """The worker's."""
        return self.runner.compression

    @property
    def model(self):
        return self.runner.model

    @property
    def runner(self):
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    @property
    def segments(self) -> "dict[str, Segments]":
        """Of requests that are compressed now."""
        states = self.scheduler._states.items()
        return {request_id: state.front for request_id, state in states if state.front is not None}

    def assert_empty(self) -> None:
        """Every block but the null block is free, none is referenced, and nothing is remembered of any request."""
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert [b.block_id for b in self.pool.blocks if b.ref_cnt and not b.is_null] == []
        assert not self.scheduler._states and not self.scheduler._accounts and not self.scheduler._repetitions.orphans
        assert not self.manager._retired and not self.manager._taken_over and not len(self.scheduler._sharing)
        assert set(self.compression.states) <= self.scheduler.finished_req_ids


@contextmanager
def engine_with(**arguments: Any) -> Iterator[Engine]:
    """An engine in this process. With it vLLM ends the groups of workers, which the engines of a process share."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from vllm_kvmerge import kvmerge_engine_args

    llm = LLM(**kvmerge_engine_args(**arguments))
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


DEMO_FILES = {"kvzap": demo.kvzap_path(), "head_budgets": demo.head_budgets_path("demo")}
"""What requests to the demo model may need besides."""


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    from vllm_kvmerge.evaluation.continuation import ForcedContinuation

    with engine_with(
        **engine_arguments(),
        kv_cache_memory_bytes=NUM_BLOCKS * BYTES_PER_BLOCK,
        additional_config={"kvmerge": DEMO_FILES},
        logits_processors=[ForcedContinuation],
    ) as engine:
        yield engine


@pytest.fixture
def fronts(engine: Engine) -> "Iterator[FrontCache]":
    """With an empty prefix cache, in which compressed contexts stay."""
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts() as fronts:
        yield fronts


def in_a_process(words: list[str], job: Any, is_stock: bool = False, timeout: float = 500, **variables: str) -> Any:
    """What a program in a process of its own prints as JSON behind FOUND; job: JSON of its standard input.

    is_stock: no plugin is loaded there. Our modules may have been imported: ``test_compat`` shows that it changes
    nothing.
    """
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | variables
    environment |= {"VLLM_PLUGINS": ""} if is_stock else {}
    done = preloaded.run([sys.executable, *words], input=json.dumps(job), env=environment, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("FOUND", 1)[1].splitlines()[0])


def run(engine, watch=lambda: None) -> dict[str, list[int]]:
    """Steps the engine until nothing is left, calling ``watch`` after each step; what each request generated."""
    tokens: dict[str, list[int]] = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        watch()
    return tokens


def live_entries(engine: Engine) -> dict[str, float]:
    """Mean number of live entries per head of the layers that are compressed, counted in the cache, of each request
    that has been compressed."""
    found = {}
    for request in engine.scheduler.running:
        segments = engine.segments.get(request.request_id)
        if segments is None:
            continue
        row = engine.manager.req_to_blocks[request.request_id][: -(-segments.front // engine.manager.block_size)]
        blocks = [block.block_id for block in row]
        live = [
            float((layer.positions[blocks].transpose(0, 1).flatten(1)[:, : segments.front] >= 0).sum(1).float().mean())
            for layer in engine.compression.compactor.layers
        ]
        found[request.request_id] = sum(live) / len(live) + request.num_computed_tokens - segments.tail
    return found


def preempt_all(engine: Engine) -> None:
    for request in list(engine.scheduler.running):
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, time.monotonic())


def preempting(engine: Engine, when: int) -> Callable[[], None]:
    """What ``run`` calls after each step to have all requests preempted after step ``when``, counted from 1."""
    steps = count(1)
    return lambda: preempt_all(engine) if next(steps) == when else None


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return [2, *rng.integers(19, 780, length - 1).tolist()]


def greedy(policy: str | None = None, max_tokens: int = 24, **fields: Any) -> "SamplingParams":
    """fields: of ``kv_compression``."""
    from vllm import SamplingParams

    extra = compression(policy, **SMALL.get(policy, {}) | fields) if policy else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
