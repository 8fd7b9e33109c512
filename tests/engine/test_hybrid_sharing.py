"""Compressed contexts and turns that are shared where some layers have windows, which go with them."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine import test_kept_contexts, test_turns
from tests.engine.architectures import BLOCK_SIZE, greedy
from tests.engine.conftest import preempting, random_prompt, run
from tests.engine.test_hybrid import engine, folder
from tests.engine.test_kept_contexts import client, saved
from tests.engine.test_shared_contexts import answers, fronts, params
from tests.engine.test_stress_contexts import check_sharing
from tests.presets import SMALL
from tests.random_model import WINDOW

pytestmark = [pytest.mark.engine, pytest.mark.slow]

__all__ = ["client", "engine", "folder", "fronts", "saved"]

POLICIES = {
    "snapkv": {}, "h2o": {}, "keydiff": {}, "keepkv": {}, "kvzip": {}, "adakv": {"decode": "bounded"},
    "morphkv": {"decode": "bounded"}, "streaming_llm": {"prefill": {"chunk": 100}}, "zsmerge": {},
}  # fmt: skip
LENGTHS = 30, 96, 97, 256, 416, 430
"""Of contexts: less than a window, and ends of blocks and of the tokens of a step among them."""


def check_fronts(engine, policy: str, length: int, **fields) -> None:
    """Requests begin with the front of the first one, and answer as they do where nothing is shared; so does one whose
    prompt is the context itself."""
    rng = np.random.default_rng(length)
    context = random_prompt(rng, length)
    prompts = [context + random_prompt(rng, 20)[1:] for _ in range(2)] + [context]
    fields = {"budget": min(64, length // 2)} | fields
    some = [params(policy, 40, length, **fields)] * 2 + [params(policy, 40, None, **fields)]
    expected = []
    for prompt, one in zip(prompts, some, strict=True):
        assert engine.llm.reset_prefix_cache()
        expected += answers(engine.generate([prompt], one))
    with engine.sharing_contexts() as fronts:
        engine.llm.reset_prefix_cache()
        assert answers(engine.generate(prompts[:1], some[0])) == expected[:1]
        assert fronts.num_blocks == len({block.block_id for one in fronts._fronts.values() for block in one.all_blocks})
        outputs = engine.generate(prompts * 2, some * 2)
        assert answers(outputs) == expected * 2
        is_block = length >= BLOCK_SIZE
        assert [one.num_cached_tokens for one in outputs] == [is_block * length, is_block * length, length - 1] * 2
        engine.assert_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_goes_on_from_the_front_of_another(engine, policy):
    check_fronts(engine, policy, 430, **SMALL.get(policy, {}) | POLICIES[policy])


@pytest.mark.parametrize("length", LENGTHS[1:-1])
@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_fronts_end_anywhere(engine, policy, length):
    check_fronts(engine, policy, length)


@pytest.mark.parametrize("name", ["streaming_llm", "h2o", "keepkv", "morphkv", "adakv", "snapkv", "kvzip"])
def test_three_turns_are_one_session(engine, fronts, name):
    test_turns.test_three_turns_are_one_session(engine, fronts, name)


def test_a_front_goes_with_a_block_of_its_windows(engine, fronts):
    prompt = random_prompt(np.random.default_rng(4), 300)
    some = params("snapkv", 4, 270, budget=64)
    expected = answers(engine.generate([prompt], some))
    (front,) = fronts._fronts.values()
    assert [len(one.blocks) for one in front.windows] == [3, 3] and 2 * BLOCK_SIZE > WINDOW
    hit = engine.generate([prompt], some)[0]
    fronts.lose(front.windows[1].blocks[:1])
    missed = engine.generate([prompt], some)[0]
    assert hit.num_cached_tokens == 270 and missed.num_cached_tokens < 270
    assert answers([hit, missed]) == expected * 2
    engine.assert_empty()


def test_fronts_are_evicted_with_their_windows(engine, fronts):
    rng = np.random.default_rng(5)
    prompts = [random_prompt(rng, 400) for _ in range(8)]
    some = params("h2o", 4, 380, budget=64)
    expected = [answers(engine.generate([prompt], some)) for prompt in prompts]
    with engine.with_blocks(60):
        engine.generate([random_prompt(rng, 400)], SamplingParams(max_tokens=2))
        assert [answers(engine.generate([prompt], some)) for prompt in prompts] == expected
        assert 0 < len(fronts) < 8
    engine.assert_empty()


def test_the_plain_prefix_cache_is_unharmed(engine, fronts):
    prompts = [random_prompt(np.random.default_rng(seed), 455) for seed in range(4)]
    cold = engine.generate(prompts, greedy())
    for policy in ("snapkv", "h2o", "kvzip"):
        for _ in range(2):
            engine.generate(prompts, params(policy))
    warm = engine.generate(prompts, greedy())
    assert answers(warm) == answers(cold) and {one.num_cached_tokens for one in warm} == {448}
    engine.assert_empty()


def test_preempted_requests_begin_with_fronts(engine, fronts):
    rng = np.random.default_rng(7)
    prompts = [random_prompt(rng, 300) for _ in range(6)]
    some = [params(policy, 60, 250, budget=64) for policy in ("snapkv", "h2o", "keepkv", "morphkv", "kvzip", "adakv")]
    expected = [engine.tokens([prompt], one)[0] for prompt, one in zip(prompts, some, strict=True)]
    assert engine.llm.reset_prefix_cache()
    for index, (prompt, one) in enumerate(zip(prompts * 2, some * 2, strict=True)):
        engine.add(str(index), prompt, one)
    tokens = run(engine, preempting(engine, 30))
    assert [tokens[str(index)] for index in range(12)] == expected * 2
    engine.assert_empty()


def test_requests_that_share_contexts(engine, monkeypatch):
    check_sharing(engine, 80, monkeypatch, 150, 80)


def test_saved_contexts_are_there_again(engine, client, saved):
    """With the windows of the other layers, which are counted."""
    assert all(len(one.front.windows) == 2 for one in engine.scheduler._contexts._kept.values())
    test_kept_contexts.test_saved_contexts_are_there_again(engine, client, saved)
