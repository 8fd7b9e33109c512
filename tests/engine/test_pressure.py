"""``trigger: pressure``: requests run uncompressed until the pool is short, and are then compressed, not preempted."""

from collections import defaultdict

import numpy as np
import pytest
from vllm import SamplingParams

from tests.demo_model import BLOCK_SIZE
from tests.engine.conftest import random_prompt
from tests.engine.machine.driver import Driver
from tests.engine.machine.machine import TEXTS
from tests.engine.machine.setting import Setting
from tests.engine.test_small_pool import POOL, small_pool
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.engine.worker import gather
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.policies.rescoring import newest_scores
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY as KEY
from vllm_kvmerge.request.spec import parse_compression

BUDGET, PROMPT, ANSWER, BLOCKS = 96, 400, 120, 50
POLICIES = [name for name in sorted(PRESETS) if name not in ("kvzip", "kvzip_once", "kvzap")]


def params(policy: str | None, max_tokens: int = ANSWER, **fields) -> SamplingParams:
    fields = {"budget": BUDGET, "trigger": "pressure"} | SMALL.get(policy, {}) | fields
    extra = {} if policy is None else compression(policy, **fields)
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args={**extra, USAGE_KEY: True})


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(97)
    return [random_prompt(rng, PROMPT) for _ in range(6)]


@pytest.fixture
def watched(engine, monkeypatch):
    """Preempted requests, and the numbers of tokens at which requests are compressed."""
    preempted, compressed = list[str](), defaultdict[str, list[int]](list)
    preempt, plan = engine.scheduler._preempt_request, engine.scheduler._planner._plan

    def count_preempted(request, *args, **kwargs):
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    def count_plan(state, *args, **fields):
        done, request = plan(state, *args, **fields), state.request
        if done:
            compressed[request.request_id.rsplit("-", 1)[0]].append(request.num_computed_tokens)
        return done

    monkeypatch.setattr(engine.scheduler, "_preempt_request", count_preempted)
    monkeypatch.setattr(engine.scheduler._planner, "_plan", count_plan)
    assert engine.llm.reset_prefix_cache()
    return preempted, compressed


@pytest.mark.slow
def test_with_room_nothing_is_compressed(engine, prompts, watched):
    """And tokens are those of plain requests."""
    expected = engine.tokens(prompts[:2], params(None, 30))
    for policy in POLICIES:
        assert engine.tokens(prompts[:2], params(policy, 30)) == expected, policy
    assert watched == ([], {})
    engine.assert_empty()


@pytest.mark.thin(6)
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
        assert all(np.diff(counts) >= max(BLOCK_SIZE, BUDGET // 4))


@pytest.mark.thin(8)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_compressed_like_a_context(engine, prompts, watched, policy):
    """One that fills the pool alone goes on as one whose prompt is the same tokens, compressed at the same count."""
    fields = {"decode": "grow"}
    if "score_window" in parse_compression(compression(policy)[KEY]).parameters:
        fields["score_window"] = 32
    with engine.with_blocks(15):
        ((*tokens,),) = engine.tokens(prompts[:1], params(policy, **fields))
    assert list(watched[1].values()) == [[15 * BLOCK_SIZE]]
    known = 15 * BLOCK_SIZE + 1 - PROMPT
    same = params(policy, ANSWER - known, trigger="budget", context_tokens=15 * BLOCK_SIZE, **fields)
    assert engine.tokens([prompts[0] + tokens[:known]], same) == [tokens[known:]]


def test_a_cached_prompt_is_scored_by_the_queries_at_hand(engine, prompts, watched, monkeypatch):
    """Those of tokens that were found in the prefix cache are not."""
    seen = set()

    def scored(entries, queries, *others):
        seen.add(tuple(queries.positions[0].tolist()))
        return newest_scores(entries, queries, *others)

    monkeypatch.setattr(gather, "newest_scores", scored)
    with engine.with_blocks(13):
        engine.generate(prompts[:1], params(None, 5))
        engine.generate(prompts[:1], params("snapkv", 40, score_window=64))
    assert seen == {tuple(range(PROMPT // BLOCK_SIZE * BLOCK_SIZE, 13 * BLOCK_SIZE))}


@pytest.mark.thin(2)
@pytest.mark.parametrize("fields", [{"decode": "grow"}, {"budget": 500, "interval": 400}])
def test_one_that_cannot_shrink_again_ends_with_the_pool(engine, prompts, watched, fields):
    with small_pool(engine):
        (output,) = engine.generate(prompts[:1], params("keepkv", 3000, **fields))
    assert output.outputs[0].finish_reason == "length" and watched[0] == []
    total = PROMPT + len(output.outputs[0].token_ids)
    front = fields.get("budget", BUDGET)
    assert 2 * POOL - front - 4 * BLOCK_SIZE <= total <= 2 * POOL - front


@pytest.mark.parametrize("is_async", [False, True])
def test_schedules_with_steps_in_flight(is_async):
    """Without a model: none is preempted."""
    driver = Driver(Setting(num_blocks=48, is_async=is_async, max_seqs=7))
    fields = {"policy": "snapkv", "budget": 12, "window_size": 3, "trigger": "pressure", "decode": "bounded"}
    for index in range(7):
        driver.add(TEXTS[index % 3][index:30], 60, fields)
    driver.finish()
    assert driver.events["later compressions"] > 7 and not driver.events["preemptions"]
