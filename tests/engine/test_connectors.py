"""A KV connector of vLLM's, which stores blocks in files and loads them: for plain requests alone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams

from tests.engine.conftest import BYTES_PER_BLOCK, Engine, engine_arguments, engine_with, in_a_process, random_prompt
from tests.engine.test_plain import STOCK
from vllm_kvmerge import compression

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE, MAX_TOKENS = 32, 24
POLICIES = "snapkv", "h2o", "keepkv", "kvzip", "adakv", "streaming_llm"
NOT_OFFLOADED = "vllm:kvmerge_not_offloaded_requests_total"


SIZE = {"kv_cache_memory_bytes": 600 * BYTES_PER_BLOCK, "max_num_batched_tokens": 8192}
"""The connector stores a prompt in its first step, so chunks are long enough for all."""


def arguments(folder: Path) -> dict:
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": str(folder)}
    return engine_arguments() | SIZE | {"kv_transfer_config": transfer}


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def engine(stored) -> Iterator[Engine]:
    with engine_with(**arguments(stored)) as engine:
        yield engine


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [random_prompt(rng, int(length)) for length in np.geomspace(40, 1500, 8)]


def greedy(policy: str | None = None) -> SamplingParams:
    extra = compression(policy, budget=64, interval=8) if policy else None
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, extra_args=extra)


def tokens(outputs: list) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def test_plain_requests_load_what_plain_requests_have_stored(engine, stored, tmp_path):
    """As stock vLLM does with a connector, in a process of its own; the second time from files."""
    job = [arguments(tmp_path) | {"enable_prefix_caching": False}, prompts() * 2, MAX_TOKENS]
    expected = in_a_process(["-c", STOCK], job, is_stock=True)[0][: len(prompts())]
    assert len(list(tmp_path.iterdir())) == len(prompts())
    assert engine.tokens(prompts(), greedy()) == expected
    assert len(list(stored.iterdir())) == len(prompts())
    assert all(cache.is_interleaved for cache in engine.compression.compactor.layers)
    for cache in engine.compression.pool:  # nothing is left of what was computed
        cache.content.fill_(0)
    assert engine.llm.reset_prefix_cache()
    again = engine.generate(prompts(), greedy())
    assert tokens(again) == expected
    assert [one.num_cached_tokens for one in again] == [(len(one) - 1) // BLOCK_SIZE * BLOCK_SIZE for one in prompts()]
    engine.assert_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_compressed_requests_are_neither_loaded_nor_stored(engine, stored, policy):
    prompt = random_prompt(np.random.default_rng(POLICIES.index(policy)), 500)
    labels = {"policy": policy, "engine": "0"}
    assert engine.llm.reset_prefix_cache()
    counted, folders = REGISTRY.get_sample_value(NOT_OFFLOADED, labels) or 0, set(stored.iterdir())
    compressed = engine.tokens([prompt], greedy(policy))
    assert set(stored.iterdir()) == folders
    assert REGISTRY.get_sample_value(NOT_OFFLOADED, labels) == counted + 1
    assert engine.llm.reset_prefix_cache()
    # Beside each other: the plain one is stored.
    plain, same = engine.generate([prompt, prompt], [greedy(), greedy(policy)])
    assert len(set(stored.iterdir()) - folders) == 1
    assert engine.llm.reset_prefix_cache()
    again = engine.generate([prompt], greedy(policy))[0]
    assert again.num_cached_tokens == 0
    assert engine.llm.reset_prefix_cache()
    loaded = engine.generate([prompt], greedy())[0]
    assert loaded.num_cached_tokens == 480 and tokens([loaded]) == tokens([plain])
    # From the prefix cache, where a plain request has put what it has loaded.
    after = engine.generate([prompt], greedy(policy))
    assert tokens([same, again, *after]) == compressed * 3
    engine.assert_empty()
