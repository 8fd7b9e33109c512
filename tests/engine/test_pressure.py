"""``trigger: pressure``: requests run uncompressed until the pool is short, and are then compressed, not preempted."""

from collections import defaultdict

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import random_prompt
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.policies import PRESETS

BUDGET, PROMPT, ANSWER, BLOCKS = 96, 400, 120, 50
POLICIES = [name for name in sorted(PRESETS) if name not in ("kvzip", "kvzap")]


def params(policy: str | None, max_tokens: int = ANSWER, **fields) -> SamplingParams:
    fields = {"budget": BUDGET, "trigger": "pressure"} | SMALL.get(policy, {}) | fields
    extra = {} if policy is None else compression(policy, **fields)
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args={**extra, USAGE_KEY: True})


def add(engine, name: str, prompt: list[int], some: SamplingParams) -> None:
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, some)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(97)
    return [random_prompt(rng, PROMPT) for _ in range(6)]


@pytest.fixture
def watched(engine, monkeypatch):
    """Preempted requests, and the numbers of tokens at which requests are compressed."""
    preempted, compressed = list[str](), defaultdict[str, list[int]](list)
    preempt, plan = engine.scheduler._preempt_request, engine.scheduler._plan

    def count_preempted(request, *args, **kwargs):
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    def count_plan(request, *args):
        done = plan(request, *args)
        if done:
            compressed[request.request_id.rsplit("-", 1)[0]].append(request.num_computed_tokens)
        return done

    monkeypatch.setattr(engine.scheduler, "_preempt_request", count_preempted)
    monkeypatch.setattr(engine.scheduler, "_plan", count_plan)
    assert engine.llm.reset_prefix_cache()
    return preempted, compressed


def test_with_room_nothing_is_compressed(engine, prompts, watched):
    """And tokens are those of plain requests."""
    expected = engine.tokens(prompts[:2], params(None))
    for policy in POLICIES:
        assert engine.tokens(prompts[:2], params(policy)) == expected, policy
    assert watched == ([], {})
    engine.assert_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_without_room_requests_are_compressed_and_none_is_preempted(engine, prompts, watched, policy):
    """Where six plain requests of the same lengths lose work."""
    preempted, compressed = watched
    with engine.with_blocks(BLOCKS):
        outputs = engine.generate(prompts, params(policy))
    engine.assert_empty()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [ANSWER] * len(prompts)
    assert preempted == [] and compressed
    reports = [output.kv_transfer_params[REPORT_KEY] for output in outputs]
    assert sum(report["compressions"] for report in reports) == sum(map(len, compressed.values()))
    for counts in compressed.values():
        assert all(after - before >= BUDGET for before, after in zip(counts, counts[1:], strict=False))


def test_plain_requests_are_preempted_there(engine, prompts, watched):
    with engine.with_blocks(BLOCKS):
        engine.generate(prompts, params(None))
    assert watched[0] and not watched[1]
