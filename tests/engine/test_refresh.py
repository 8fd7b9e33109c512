"""``refresh``: the front is made anew from the complete cache, which is kept outside the pool."""

from dataclasses import replace

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import random_prompt, run
from tests.measures import forced, recall_document
from vllm_kvmerge import compression
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.engine.worker.external import ExternalCache


def greedy(max_tokens: int, **fields) -> SamplingParams:
    extra = compression(**fields) | {USAGE_KEY: True}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def logprobs_of(output, tokens: list[int]) -> list[float]:
    return [at[token].logprob for at, token in zip(output.outputs[0].logprobs, tokens, strict=True)]


def test_a_refresh_is_the_compression_of_all_tokens_as_a_prompt(engine):
    """Up to the refresh at 340 tokens nothing is lost, so keys and values are those of the full model."""
    document = recall_document(np.random.default_rng(31), 400, 6, 8)
    policies, prompts, params = ["keepkv", "h2o", "zsmerge", "weightedkv", "pyramidkv"], [], []
    for policy in policies:
        fields = {"policy": policy, "budget": 250, "interval": 500, "decode": "bounded", "score_window": 32}
        prompts += [document[:240], document[:340], document[:240]]
        params += [
            forced(document[240:], fields | {"refresh": {"every": 100}}),
            forced(document[340:], fields),
            forced(document[240:], fields),
        ]
    outputs = iter(engine.generate(prompts, params))
    for policy in policies:
        refreshed, whole, never = (next(outputs) for _ in range(3))
        # The token after the refresh is computed before it.
        found = logprobs_of(refreshed, document[240:])[101:]
        assert np.abs(np.subtract(found, logprobs_of(whole, document[340:])[1:])).max() < 2e-3, policy
        assert np.abs(np.subtract(found, logprobs_of(never, document[240:])[101:])).max() > 0.05, policy
    engine.assert_empty()


def test_it_is_counted_and_reported(engine):
    prompt = random_prompt(np.random.default_rng(32), 500)
    (output,) = engine.generate([prompt], greedy(100, policy="keepkv", budget=128, refresh={"every": 24}))
    report = output.kv_transfer_params[REPORT_KEY]
    assert report["refreshes"] == 99 // 24  # the last token is not computed
    assert report["external_bytes"] == engine.scheduler._admission.limits.external_bytes(500 + 4 * 24)
    (output,) = engine.generate([prompt], greedy(100, policy="keepkv", budget=128))
    assert "refreshes" not in output.kv_transfer_params[REPORT_KEY]


def test_requests_wait_for_room_outside_the_pool(engine, monkeypatch):
    limits = engine.scheduler._admission.limits
    room = 2 * limits.external_bytes(640)
    monkeypatch.setattr(engine.scheduler._admission, "limits", replace(limits, max_external_bytes=room))
    rng = np.random.default_rng(34)
    params = greedy(40, policy="h2o", budget=128, refresh={"every": 16})
    for i in range(4):
        engine.add(f"r{i}", random_prompt(rng, 600), params)
    most, held = 0, set()

    def watch():
        nonlocal most
        # Who waits holds nothing, or requests that wait for each other's room would wait for ever.
        running = {request.request_id for request in engine.scheduler.running}
        assert {name for name, one in engine.scheduler._states.items() if one.external_bytes} <= running
        compressed = [r for r in engine.scheduler.running if r.request_id in engine.segments]
        most = max(most, len(compressed))
        held.add(sum(engine.scheduler._size(request).external_bytes for request in compressed))

    run(engine, watch)
    assert most == 2
    assert 0 < max(held) <= room
    engine.assert_empty()


@pytest.mark.parametrize("error", [OSError("No space left on device"), RuntimeError("can't allocate memory")], ids=repr)
def test_a_complete_cache_that_finds_no_room_ends_its_request_alone(engine, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(ExternalCache, "empty", fail)
    prompt = random_prompt(np.random.default_rng(36), 300)
    fields = {"policy": "h2o", "budget": 128}
    failed, fine = engine.generate([prompt] * 2, [greedy(30, **fields, refresh={"every": 16}), greedy(30, **fields)])
    assert failed.outputs[0].finish_reason == "error"
    assert str(error) in failed.kv_transfer_params[REPORT_KEY]["error"]
    assert len(fine.outputs[0].token_ids) == 30
    engine.assert_empty()
