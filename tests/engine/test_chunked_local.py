"""A model of chunked-local layers beside full attention: these are compressed, those are vLLM's own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import Engine, preempting, random_prompt, run
from tests.engine.test_hybrid import (
    MAX_TOKENS,
    Masked,
    add,
    greedy,
    jobs,
    prompts_of_many_lengths,
    running,
    stock,
)
from tests.random_model import CHUNK, write_llama4

pytestmark = pytest.mark.engine

ROTATING = ("expected_attention", "compactor")
"""They are refused: layers of full attention have no RoPE."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_llama4(tmp_path_factory.mktemp("llama4"))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder) as engine:
        yield engine


def test_plain_requests_equal_stock_vllm(engine, folder):
    assert len(engine.scheduler._managers) == 3 and len(engine.compression.compactor.layers) == 2
    expected = stock(folder)
    assert len({token for tokens in expected for token in tokens}) > 50
    assert engine.tokens(prompts_of_many_lengths(), greedy()) == expected
    engine.assert_empty()


def test_requests_of_every_kind_beside_each_other_alone_and_preempted(engine):
    told = [job for job in jobs() if not any(name in str(job[1].extra_args) for name in ROTATING)]
    assert engine.llm.reset_prefix_cache()
    together = engine.tokens([prompt for prompt, _ in told], [params for _, params in told])
    assert together == [engine.tokens([prompt], params)[0] for prompt, params in told]
    for index, (prompt, params) in enumerate(told):
        add(engine, str(index), prompt, params)
    preempted = run(engine, preempting(engine, 20))
    assert [preempted[str(index)] for index in range(len(told))] == together
    engine.assert_empty()


def test_full_layers_forget_what_streaming_llm_drops_and_chunks_do_not(engine, folder):
    """Against the model in Transformers: a prompt computed with full attention, then sinks and the newest tokens."""
    masked, budget, sinks = Masked(folder), 40, 4
    different = 0
    for seed in range(4):
        prompt = random_prompt(np.random.default_rng(seed), 150 + 37 * seed)
        params = greedy("streaming_llm", budget=budget, num_sink_tokens=sinks, interval=MAX_TOKENS)
        seen = [*range(sinks), *range(len(prompt) - budget + sinks, len(prompt))]
        expected = masked.generate(prompt, seen, MAX_TOKENS, CHUNK)
        assert engine.tokens([prompt], params)[0] == expected
        different += expected != engine.tokens([prompt], greedy())[0]
    assert different > 1
