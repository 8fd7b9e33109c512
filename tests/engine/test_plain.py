"""Requests without a policy get what stock vLLM gives, and policies with room to spare change nothing."""

import json
import os
import sys

import numpy as np
import pytest

from tests import preloaded
from tests.engine.conftest import BYTES_PER_BLOCK, NUM_BLOCKS, engine_arguments, random_prompt
from vllm_kvmerge import compression
from vllm_kvmerge.engine.attention import cpu
from vllm_kvmerge.engine.attention.faster import Faster

STOCK = """
import json, sys
from vllm import LLM, SamplingParams
arguments, prompts, max_tokens = json.load(sys.stdin)
llm = LLM(**arguments)
outputs = llm.generate(
    [{"prompt_token_ids": p} for p in prompts],
    SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)
print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
"""
MAX_TOKENS = 24


def prompts_of_many_lengths() -> list[list[int]]:
    rng = np.random.default_rng(1)
    lengths = np.geomspace(10, 2400, 16).astype(int)
    return [random_prompt(rng, int(n)) for n in lengths]


@pytest.fixture(scope="module")
def stock_tokens() -> list[list[int]]:
    """Tokens from stock vLLM, in a process of its own into which no plugin is loaded.

    Our modules may have been imported there: ``test_compat`` shows that it changes nothing.
    """
    arguments = engine_arguments() | {"kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK}
    job = json.dumps([arguments, prompts_of_many_lengths(), MAX_TOKENS])
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = preloaded.run([sys.executable, "-c", STOCK], input=job, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.split("TOKENS", 1)[1])


def greedy(**extra):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **extra)


@pytest.mark.parametrize(
    "faster", [Faster(), Faster(decode=0, chunk=0), Faster(decode=300), Faster(chunk=300)], ids=str
)
def test_plain_requests_equal_stock_vllm(engine, stock_tokens, faster, monkeypatch):
    """Whichever operator attends for them, and where both do in one batch."""
    runner, calls = engine.runner, []
    (group,) = runner.attn_groups[runner.compression.group]
    monkeypatch.setattr(group.get_metadata_builder(), "faster", faster)
    for name in ("paged_attention", "stock_attention"):
        owner = cpu if name == "paged_attention" else cpu.MergeableAttentionImpl
        attend = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, name=name, attend=attend: calls.append(name) or attend(*args))
    prompts = prompts_of_many_lengths()
    assert engine.llm.reset_prefix_cache()
    assert engine.tokens(prompts, greedy()) == stock_tokens
    assert ("paged_attention" in calls) == faster.is_ever and ("stock_attention" in calls) == (faster.decode != 0)
    engine.assert_empty()


def test_plain_requests_equal_stock_vllm_with_prefix_hits(engine, stock_tokens):
    prompts = prompts_of_many_lengths()
    assert engine.llm.reset_prefix_cache()
    for prompt, expected in zip(prompts, stock_tokens, strict=True):
        first, again = (engine.generate([prompt], greedy())[0] for _ in range(2))
        assert list(first.outputs[0].token_ids) == list(again.outputs[0].token_ids) == expected
        assert again.num_cached_tokens == (len(prompt) - 1) // 32 * 32


@pytest.mark.parametrize("could_be_exceeded", [False, True])
def test_a_budget_that_is_never_exceeded_changes_nothing(engine, stock_tokens, could_be_exceeded):
    """Requests that could outgrow their budget are scored, but still lose nothing."""
    prompts, params = prompts_of_many_lengths(), []
    for index, prompt in enumerate(prompts):
        # One that needs no scores, one that does, and one that merges; each with short and long prompts.
        policy = ["streaming_llm", "h2o", "keepkv"][index % 3]
        budget = max(40, len(prompt)) if could_be_exceeded else 2400 + MAX_TOKENS
        params.append(greedy(extra_args=compression(policy, budget=budget, interval=MAX_TOKENS)))
    assert engine.tokens(prompts, params) == stock_tokens
    engine.assert_empty()


def test_rows_with_different_policies_and_none_share_a_batch(engine, stock_tokens):
    prompts = prompts_of_many_lengths()
    names = ["streaming_llm", "h2o", "snapkv", "keepkv", "zsmerge"]
    params = [
        greedy(extra_args=compression(names[i // 2 % 5], budget=128)) if i % 2 else greedy()
        for i in range(len(prompts))
    ]
    together = engine.tokens(prompts, params)
    assert [t for i, t in enumerate(together) if i % 2 == 0] == stock_tokens[::2]
    engine.assert_empty()
