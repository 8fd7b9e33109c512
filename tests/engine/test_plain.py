"""Requests without a policy get what stock vLLM gives."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import BYTES_PER_BLOCK, NUM_BLOCKS, engine_arguments, in_a_process, random_prompt
from vllm_kvmerge.engine.attention import cpu

STOCK = """
import json, sys
from vllm import LLM, SamplingParams
arguments, prompts, max_tokens = json.load(sys.stdin)
llm = LLM(**arguments)
outputs = llm.generate(
    [{"prompt_token_ids": p} for p in prompts],
    SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0), use_tqdm=False)
answers = [o.outputs[0] for o in outputs]
print("FOUND", json.dumps([[list(a.token_ids) for a in answers], [a.cumulative_logprob for a in answers]]))
"""
MAX_TOKENS = 24


def prompts_of_many_lengths() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [random_prompt(rng, int(length)) for length in np.geomspace(10, 2400, 16)]


@pytest.fixture(scope="module")
def stock() -> list[tuple[list[int], float]]:
    """Tokens and log-probabilities."""
    arguments = engine_arguments() | {"kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK}
    job = [arguments, prompts_of_many_lengths(), MAX_TOKENS]
    return list(zip(*in_a_process(["-c", STOCK], job, is_stock=True), strict=True))


def greedy(**extra):
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **extra)


@pytest.mark.parametrize("is_ours", [False, True], ids=["vllm", "ours"])
def test_plain_requests_equal_stock_vllm(engine, stock, is_ours, monkeypatch):
    """To the bit on vLLM's operator, to rounding on ours; the other one never runs."""
    runner, calls = engine.runner, []
    (group,) = runner.attn_groups[runner.compression.group]
    monkeypatch.setattr(group.get_metadata_builder(), "attends_plain", is_ours)
    for name in ("paged_attention", "stock_attention"):
        owner = cpu if name == "paged_attention" else cpu.MergeableAttentionImpl
        attend = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, name=name, attend=attend: calls.append(name) or attend(*args))
    prompts = prompts_of_many_lengths()
    assert engine.llm.reset_prefix_cache()
    found = [output.outputs[0] for output in engine.generate(prompts, greedy(logprobs=0))]
    assert [list(one.token_ids) for one in found] == [tokens for tokens, _ in stock]
    logprobs, expected = [one.cumulative_logprob for one in found], [logprob for _, logprob in stock]
    assert logprobs == (pytest.approx(expected, abs=1e-3) if is_ours else expected)
    assert set(calls) == {"paged_attention" if is_ours else "stock_attention"}
    engine.assert_empty()


def test_a_seed_outlasts_a_prompt_of_several_steps(engine):
    """vLLM winds a request's generator back after each chunk but the last, which CPU generators refuse."""
    prompts = [random_prompt(np.random.default_rng(length), length) for length in (2300, 60)]
    some = SamplingParams(temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True)
    beside = engine.tokens(prompts, some)
    assert beside == [engine.tokens([prompt], some)[0] for prompt in prompts]
    assert beside != engine.tokens(prompts, greedy())
