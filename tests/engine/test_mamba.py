"""A model of Mamba layers beside full attention, in float32: this is compressed, those are vLLM's own."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.conftest import Engine, random_prompt, run
from tests.engine.spread import spread_over
from tests.engine.test_hybrid import (
    MAX_TOKENS,
    POLICIES,
    Masked,
    add,
    arguments,
    check_against_transformers,
    check_company_and_preemption,
    greedy,
    num_taken,
    prompts_of_many_lengths,
    running,
    stock,
)
from tests.engine.test_hybrid import jobs as jobs_of_all_policies
from tests.engine.test_speculative import DRAFTING, THREADS
from tests.engine.test_tensor_parallel import NUM_TOKENS, generate, splits_among_heads
from tests.models.probe import refusal
from tests.random_model import write_granite
from vllm_kvmerge.engine.usage import REPORT_KEY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE = 64
"""What vLLM makes of 32, so that a state fits into a block."""

STOCK_DEFAULTS = {"enable_prefix_caching": False}
"""With a prefix cache, vLLM's CPU build fails on Mamba layers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_granite(tmp_path_factory.mktemp("granite"))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder, **STOCK_DEFAULTS) as engine:
        yield engine


@pytest.fixture(scope="module")
def stock_tokens(folder) -> list[list[int]]:
    return stock(folder, **STOCK_DEFAULTS)


def jobs() -> list[tuple[list[int], SamplingParams]]:
    """All that are not refused."""
    return [job for job in jobs_of_all_policies() if "kvzip" not in str(job[1].extra_args)]


def test_plain_requests_equal_stock_vllm(engine, stock_tokens):
    assert [manager.block_size for manager in engine.scheduler._managers] == [2048, 2048, BLOCK_SIZE]
    assert len(engine.compression.compactor.layers) == 2
    assert len({token for tokens in stock_tokens for token in tokens}) > 50  # what they read decides
    assert engine.tokens(prompts_of_many_lengths(), greedy()) == stock_tokens
    engine.assert_empty()


def test_a_budget_that_is_never_exceeded_changes_nothing(engine, stock_tokens):
    prompts, names = prompts_of_many_lengths(), ["streaming_llm", "h2o", "keepkv"]
    params = [
        greedy(names[i % 3], budget=max(40, len(prompt)), interval=MAX_TOKENS) for i, prompt in enumerate(prompts)
    ]
    assert engine.tokens(prompts, params) == stock_tokens
    engine.assert_empty()


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "kvzip"])
def test_entries_stay_within_the_budget(engine, policy):
    assert refusal(engine, {"policy": policy, "decode": "bounded"}, check_budget=True) is None


def test_requests_of_every_kind_beside_each_other_alone_and_preempted(engine):
    check_company_and_preemption(engine, jobs())


def test_compressions_that_are_spread(engine):
    """But for a regression's, which magnify how products round beside other requests."""
    prompts, params = zip(*[job for job in jobs() if "grkv" not in str(job[1].extra_args)], strict=True)
    expected = engine.tokens(list(prompts), list(params))
    with spread_over(3) as spread:
        assert engine.tokens(list(prompts), list(params)) == expected
    assert len(spread.parts) > 10
    engine.assert_empty()


class MaskedAttention(Masked):
    """A model in Transformers that takes no masks: its attention layers are given them."""

    def logits(self, tokens: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = masks["full_attention"]
        hooks = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
            )
            for name, module in self.model.named_modules()
            if name.endswith("self_attn")
        ]
        try:
            return self.model(tokens, use_cache=False).logits
        finally:
            assert len(hooks) == 2
            for hook in hooks:
                hook.remove()


def test_full_layers_forget_what_streaming_llm_drops_and_states_do_not(engine, folder):
    check_against_transformers(engine, folder, masked_type=MaskedAttention)


def test_two_workers_equal_one(engine, folder, tmp_path):
    """But for a regression's, which magnify how products round."""
    some = [(prompt, params.extra_args) for prompt, params in jobs() if "grkv" not in str(params.extra_args)]
    told = [(prompt, extra) for prompt, extra in some if not splits_among_heads(extra)]
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=extra) for _, extra in told
    ]
    alone = engine.tokens([prompt for prompt, _ in told], params)
    first, second = generate(tmp_path, arguments(folder, **STOCK_DEFAULTS), told)
    assert first == alone and second == alone[::4]


def test_what_other_layers_left_in_blocks_is_zeroed(engine, stock_tokens):
    """States may lie anywhere in a page, metadata of a block that is next attention's included."""
    prompts, params = map(list, zip(*jobs(), strict=True))
    expected = engine.tokens(prompts, params)
    free = [block.block_id for block in engine.pool.blocks if not block.ref_cnt and not block.is_null]
    assert len(free) == engine.pool.num_gpu_blocks - 1

    def spoil() -> None:
        for layer in engine.compression.compactor.layers:
            for plane in (layer.keys, layer.values, layer.log_votes, layer.scores, layer.aux):
                plane[free] = float("nan")
            layer.positions[free] = 7

    spoil()
    assert engine.tokens(prompts_of_many_lengths(), greedy()) == stock_tokens
    spoil()
    assert engine.tokens(prompts, params) == expected
    engine.assert_empty()


def test_states_keep_their_blocks(engine):
    """Of a compressed request: one of each group of other layers, and what its front and newest tokens take."""
    states, taken = [one for one in engine.scheduler._managers if one is not engine.manager], []
    add(engine, "one", random_prompt(np.random.default_rng(3), 700), greedy("h2o", 100, budget=64, interval=16))
    held = set()

    def watch():
        for request in engine.scheduler.running:
            held.add(tuple(block.block_id for one in states for block in one.req_to_blocks[request.request_id]))
            taken.append(num_taken(engine))

    run(engine, watch)
    (blocks,) = held  # from the first step to the last
    # The prompt's last chunk, of 256 tokens, is compressed in its step.
    assert len(blocks) == 2 and max(taken) == 2 + 2 * 256 // BLOCK_SIZE
    assert set(taken[2:]) <= {2 + 1 + 1, 2 + 1 + 2}  # front and tail
    engine.assert_empty()


@pytest.mark.parametrize(
    ("policy", "fields", "field"),
    [
        ("streaming_llm", {"positions": "cache"}, "positions: 'cache'"),
        ("morphkv", {"trigger": "pressure"}, "trigger: 'pressure'"),
        ("snapkv", {"reuse": "turns"}, "reuse: 'turns'"),
        ("kvzip", {}, "tracker: 'reconstruction'"),
    ],
)
def test_what_is_refused(engine, policy, fields, field):
    output = engine.generate([random_prompt(np.random.default_rng(2), 200)], greedy(policy, budget=64, **fields))[0]
    assert output.outputs[0].finish_reason == "error"
    said = rf"kv_compression.{field} does not work with a model that has Mamba or linear-attention layers"
    assert re.search(said, output.kv_transfer_params[REPORT_KEY]["error"])
    engine.assert_empty()


def test_vllm_verifies_drafts_wrongly(folder, stock_tokens, monkeypatch):
    """Which is why the server refuses drafts here: stock vLLM's tokens differ from those without drafts."""
    for name, value in THREADS.items():
        monkeypatch.setenv(name, value)
    assert stock(folder, **STOCK_DEFAULTS, **DRAFTING) != stock_tokens
