"""``protect``: entries of protected tokens stay as they are through all compressions of a real engine."""

import time
from collections import Counter

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.conftest import random_prompt
from vllm_kvmerge import compression
from vllm_kvmerge.policies import CompressionPolicy
from vllm_kvmerge.policies.protection import count_below, within

REQUESTS = [
    {"policy": "keepkv"},
    {"policy": "zsmerge", "refresh": {"every": 24}},
    {"policy": "snapkv", "refresh": {"every": 24}, "context_tokens": 400},
    {"policy": "adakv", "decode": "bounded", "merger": "attention_matching"},
    {"policy": "snapkv", "decode": "bounded", "budget": {"threshold": 0.005, "max": 300}},
    {"policy": "pyramidkv", "ratio": 3.0, "context_tokens": 450, "decode": "bounded"},
    {"policy": "local", "context_tokens": 300},
]
PROMPT = 600


@pytest.fixture
def seen(monkeypatch):
    """Number of compressions by their ranges; what any of them does to protected entries is checked as it happens.

    Requests are told apart by their ranges. What a later compression finds must be what the first one left.
    """
    counts, first = Counter(), {}
    compress = CompressionPolicy.compress

    def checked(policy, entries, context, *args):
        result = compress(policy, entries, context, *args)
        if policy.protect:
            counts[policy.protect] += 1
            count = count_below(policy.protect, context.num_covered)
            before, after = (
                one.take(within(policy.protect, one.positions).nonzero()[:, 1].view(one.num_rows, count))
                for one in (entries, result.entries)
            )
            orders = [one.positions.argsort(1) for one in (before, after)]
            before, after = (one.take(order) for one, order in zip((before, after), orders, strict=True))
            assert (before.log_votes == 0.0).all()
            for name in ("keys", "values", "log_votes", "scores", "aux", "positions"):
                assert torch.equal(getattr(before, name), getattr(after, name)), (policy, name)
            for row, layer in enumerate(context.heads.layers):
                key = policy.protect, layer, context.heads.indices[row], count
                keys, values = first.setdefault(key, (before.keys[row], before.values[row]))
                # A preempted request computes its prompt once more.
                torch.testing.assert_close(before.keys[row], keys, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(before.values[row], values, rtol=1e-4, atol=1e-4)
        return result

    monkeypatch.setattr(CompressionPolicy, "compress", checked)
    return counts


def test_protected_entries_survive_compressions_refreshes_and_preemption(engine, seen):
    rng, core, preempted = np.random.default_rng(41), engine.llm.llm_engine, set()
    for i, fields in enumerate(REQUESTS):
        # The second range is read after the context where there is one.
        protect = {"tokens": [[i, 40 + i], [500, 520 + i]]}
        extra = compression(**{"budget": 200, **fields, "protect": protect})
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, extra_args=extra)
        core.add_request(f"r{i}", {"prompt_token_ids": random_prompt(rng, PROMPT)}, params)
    while core.has_unfinished_requests():
        core.step()
        for request in list(engine.scheduler.running):
            if request.num_output_tokens > 30 and request.request_id not in preempted:
                engine.scheduler.running.remove(request)
                engine.scheduler._preempt_request(request, time.monotonic())
                preempted.add(request.request_id)
    assert len(preempted) == len(seen) == len(REQUESTS)
    assert all(count >= 3 for count in seen.values()), seen
    engine.assert_empty()
