"""A model of chunked-local layers beside full attention: these are compressed, those are vLLM's own."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import Engine, random_prompt
from tests.engine.test_hybrid import (
    check_against_transformers,
    check_company_and_preemption,
    greedy,
    jobs,
    prompts_of_many_lengths,
    running,
    stock,
)
from tests.engine.test_hybrid_sharing import check_fronts
from tests.random_model import CHUNK, write_llama4
from vllm_kvmerge.engine.usage import REPORT_KEY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROTATING = ("expected_attention", "compactor", '"positions": "cache"')
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
    check_company_and_preemption(engine, told)


@pytest.mark.parametrize("length", [2 * CHUNK + 1, 3 * CHUNK, 6 * CHUNK + 46])
def test_fronts_are_shared_with_the_chunk_that_they_end_in(engine, length):
    check_fronts(engine, "snapkv", length)


def test_full_layers_forget_what_streaming_llm_drops_and_chunks_do_not(engine, folder):
    check_against_transformers(engine, folder, CHUNK)


def test_positions_of_the_cache_are_refused(engine):
    params = greedy("streaming_llm", budget=64, positions="cache")
    output = engine.generate([random_prompt(np.random.default_rng(2), 200)], params)[0]
    assert output.outputs[0].finish_reason == "error"
    said = r"kv_compression.positions: 'cache' .* does not declare a RoPE of its sliding-window layers; allowed: 'text'"
    assert re.search(said, output.kv_transfer_params[REPORT_KEY]["error"])
    engine.assert_empty()
