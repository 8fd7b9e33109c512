"""A model whose last layers read earlier layers' caches: these are compressed once, and their readers follow."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import Engine, random_prompt, run
from tests.engine.test_hybrid import (
    BLOCK_SIZE,
    add,
    check_against_transformers,
    check_company_and_preemption,
    greedy,
    jobs,
    prompts_of_many_lengths,
    running,
    stock,
)
from tests.engine.test_hybrid_sharing import check_fronts
from tests.random_model import write_gemma3n

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_gemma3n(tmp_path_factory.mktemp("gemma3n"))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder) as engine:
        yield engine


def test_plain_requests_equal_stock_vllm(engine, folder):
    assert len(engine.compression.compactor.layers) == 2 and len(engine.compression.layers) == 8
    expected = stock(folder)
    assert len({token for tokens in expected for token in tokens}) > 50
    assert engine.tokens(prompts_of_many_lengths(), greedy()) == expected
    engine.assert_empty()


def test_requests_of_every_kind_beside_each_other_alone_and_preempted(engine):
    check_company_and_preemption(engine, jobs())


def test_queries_of_the_caches_own_layer_alone_count(engine):
    """keepkv's second statistic counts the queries that have met an entry."""
    add(engine, "one", random_prompt(np.random.default_rng(1), 200), greedy("keepkv", 40, budget=64, interval=100))
    seen = []

    def watch():
        for request in engine.scheduler.running:
            segments, computed = engine.manager.segments[request.request_id], request.num_computed_tokens
            blocks = [block.block_id for block in engine.manager.req_to_blocks[request.request_id]]
            for slot in range(segments.tail, computed):
                block, offset = blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE
                for layer in engine.compression.compactor.layers:
                    seen.append((layer.aux[block, :, offset].unique().tolist(), [computed - slot]))

    run(engine, watch)
    assert len(seen) > 1000 and all(counted == expected for counted, expected in seen)
    engine.assert_empty()


def test_readers_see_what_is_left_of_their_owners_caches(engine, folder):
    check_against_transformers(engine, folder)


def test_fronts_are_shared_with_their_windows(engine):
    check_fronts(engine, "h2o", 430)
