"""Models whose layers of full attention have heads of another size than those with a window, so that blocks of one kind
hold more tokens."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.conftest import Engine, random_prompt
from tests.engine.test_hybrid import (
    POLICIES,
    check_against_transformers,
    check_budgets,
    check_company_and_preemption,
    check_prefix_cache,
    greedy,
    jobs,
    prompts_of_many_lengths,
    running,
    stock,
)
from tests.engine.test_hybrid_sharing import check_fronts
from tests.engine.test_pressure import params as asleep
from tests.engine.test_pressure import watched
from tests.models.probe import refusal
from tests.random_model import write_gemma4
from vllm_kvmerge.request.parameters import parse_compression

pytestmark = [pytest.mark.engine, pytest.mark.slow]

__all__ = ["watched"]  # a fixture

MEMORY = {"kv_cache_memory_bytes": 400 * 2 * 2 * 32 * (2 * 64 * 4 + 16)}
"""Of 400 blocks of two layers."""

MODELS = {
    # As in Gemma 4 E2B: as many KV heads. Blocks of the layers with a window are longer; the last layers read others'
    # caches.
    "small": {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4,
              "num_kv_shared_layers": 4},
    # As in Gemma 4 31B: a quarter of the KV heads, whose values are their keys. Blocks of full attention are longer.
    "large": {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
}  # fmt: skip
BLOCKS = {"small": (32, 64), "large": (64, 32)}
"""Tokens in a block of full attention, and in one of the others."""

TURNED = {"expected_attention", "compactor"}
"""Policies that undo RoPE, of a kind that they do not know here."""


@pytest.fixture(scope="module", params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, name) -> Path:
    return write_gemma4(tmp_path_factory.mktemp("gemma4"), **MODELS[name])


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder, **MEMORY) as engine:
        yield engine


@pytest.fixture(scope="module")
def stock_tokens(folder) -> list[list[int]]:
    return stock(folder, **MEMORY)


def possible() -> list:
    """Those of the jobs that turn no keys."""
    told = []
    for prompt, params in jobs():
        config = parse_compression(params.extra_args["kv_compression"]) if params.extra_args else None
        if config is None or (config.name not in TURNED and config.positions != "cache"):
            told.append((prompt, params))
    assert len(told) == len(jobs()) - len(TURNED) - 1
    return told


def test_blocks_of_both_kinds_are_as_large(engine, name):
    specs = {type(one.kv_cache_spec).__name__: one.kv_cache_spec for one in engine.scheduler._managers}
    full, window = specs["MergeableAttentionSpec"], specs["SlidingWindowSpec"]
    assert (full.block_size, window.block_size) == BLOCKS[name] and full.head_size == 2 * window.head_size
    assert full.page_size_bytes == window.page_size_bytes
    assert window.state_content_bytes == 2 * window.head_size * 4 + 8
    assert full.page_size_padded is None and window.page_size_padded is None
    assert engine.pool.num_gpu_blocks == 400


def test_plain_requests_equal_stock_vllm(engine, stock_tokens):
    assert len({token for tokens in stock_tokens for token in tokens}) > 50
    prompts = prompts_of_many_lengths()
    assert engine.tokens(prompts, greedy()) == stock_tokens
    engine.assert_empty()
    for prompt, expected in zip(prompts, stock_tokens, strict=True):
        first, again = (engine.generate([prompt], greedy())[0] for _ in range(2))
        assert list(first.outputs[0].token_ids) == list(again.outputs[0].token_ids) == expected
        assert again.num_cached_tokens == (len(prompt) - 1) // 64 * 64
    engine.assert_empty()


def test_entries_stay_within_budget_and_interval(engine):
    assert len(engine.compression.compactor.layers) == 2
    check_budgets(engine, sorted(set(POLICIES) - TURNED))


def test_requests_of_every_kind_beside_each_other_alone_and_preempted(engine):
    check_company_and_preemption(engine, possible())


def test_full_layers_forget_what_streaming_llm_drops_and_windows_do_not(engine, folder):
    check_against_transformers(engine, folder)


@pytest.mark.parametrize("policy", ["h2o", "keepkv"])
def test_the_prefix_cache_stays_as_full_attention_left_it(engine, policy):
    check_prefix_cache(engine, policy, 80, 384)


@pytest.mark.parametrize("length", [96, 256, 430])
def test_fronts_are_shared_with_their_windows(engine, length):
    check_fronts(engine, "h2o", length)


def test_blocks_that_compressed_requests_wrote_are_zeroed_for_all_layers(engine, stock_tokens):
    assert engine.llm.reset_prefix_cache()
    rng = np.random.default_rng(9)
    engine.tokens([random_prompt(rng, 600) for _ in range(4)], greedy("keepkv", 60, budget=200))
    unclean = sorted(engine.manager._unclean)
    assert len(unclean) > 10
    for cache in engine.compression.pool:
        cache.poison_blocks(torch.tensor(unclean))
    with engine.with_blocks(200):
        assert engine.tokens(prompts_of_many_lengths(), greedy()) == stock_tokens
    engine.assert_empty()


@pytest.mark.parametrize("policy", ["snapkv", "keepkv"])
def test_under_pressure_requests_are_compressed_and_none_is_preempted(engine, watched, policy):
    preempted, compressed = watched
    prompts = [random_prompt(np.random.default_rng(seed), 100) for seed in range(6)]
    with engine.with_blocks(64):
        tokens = engine.tokens(prompts, asleep(policy, 300))
    engine.assert_empty()
    assert [len(one) for one in tokens] == [300] * 6
    assert preempted == [] and compressed


def test_what_turns_keys_is_refused(engine):
    for fields in ({"policy": "h2o", "positions": "cache"}, *({"policy": policy} for policy in sorted(TURNED))):
        reason = refusal(engine, fields, check_budget=False)
        assert reason is not None and "the model has a RoPE of another kind (proportional)" in reason
