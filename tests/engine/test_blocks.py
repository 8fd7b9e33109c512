"""Blocks of layers that are skipped, and those of the prefix cache, which compression never touches."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import random_prompt, run
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.policies import PRESETS


def greedy(max_tokens: int, policy: str | None = None, **parameters) -> SamplingParams:
    extra = compression(policy, **parameters) if policy else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def test_layers_that_are_skipped_keep_every_token(engine):
    """MorphKV appendix A.6: the first layer holds all, the others the budget; generation goes on as in its solo run."""
    prompt = random_prompt(np.random.default_rng(13), 500)
    engine.add("skipping", prompt, greedy(100, "morphkv", budget=64, interval=8, skip_layers=1))
    fronts = set()

    def watch():
        for request in engine.scheduler.running:
            segments = engine.segments.get(request.request_id)
            if segments is None:
                continue
            assert segments.num_places == segments.tail and request.num_computed_tokens - segments.tail <= 8
            fronts.add(segments.tail)
            pages = engine.compression.states[request.request_id].pages
            assert pages.fronts.unique(dim=1).flatten().tolist() == [segments.tail, *[64] * (len(pages.fronts) - 1)]
            blocks = [b.block_id for b in engine.manager.req_to_blocks[request.request_id] if not b.is_null]
            assert {int(block) for block in pages.places(pages.ids[:, :, 0])[1].unique()} <= set(blocks)
            # All layers together: four times 64 entries, or what the first layer has, and the tail.
            num_pages = int((-(-pages.fronts[:, 0] // 32)).sum())
            assert len(blocks) <= -(-num_pages // len(pages.fronts)) + 2

    run(engine, watch)
    assert fronts == set(range(500, 600, 8))
    # With every layer skipped nothing is compressed at all.
    everything = greedy(40, "morphkv", budget=64, interval=8, skip_layers=len(engine.compression.compactor.layers))
    assert engine.tokens([prompt], everything) == engine.tokens([prompt], greedy(40))
    engine.assert_empty()


@pytest.fixture(scope="module")
def cold(engine):
    """What a cold engine answers to a plain request."""
    assert engine.llm.reset_prefix_cache()
    output = engine.generate([random_prompt(np.random.default_rng(6), 430)], greedy(12))[0]
    assert output.num_cached_tokens == 0
    return output


@pytest.mark.thin(7)
@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_the_prefix_cache_stays_as_full_attention_left_it(engine, policy, cold):
    """After compressed requests on a prompt, a plain one hits the cache and answers as a cold engine does."""
    prompt = cold.prompt_token_ids
    for reset in (True, False):
        if reset:  # blocks hashed by the compressed request itself; otherwise by the plain one before
            assert engine.llm.reset_prefix_cache()
        # It fills a block after its compression, which must not be found.
        engine.generate([prompt], greedy(20, policy, budget=100, interval=8, **SMALL.get(policy, {})))
        warm = engine.generate([prompt], greedy(12))[0]
        assert warm.num_cached_tokens == 416
        assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)
    engine.assert_empty()
