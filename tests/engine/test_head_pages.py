"""Budgets that differ by layer and head, in an engine: they cost what their average costs, and change no answer."""

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.demo_model import BLOCK_SIZE, BYTES_PER_BLOCK
from tests.engine.conftest import Engine, random_prompt
from tests.engine.worker.test_head_pages import POLICIES
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.evaluation.continuation import forced
from vllm_kvmerge.request.parameters import parse_compression

UNEVEN = POLICIES[:7]


def losses(engine: Engine, prompts: list[list[int]], asked: list[dict], num_tokens: int) -> np.ndarray:
    """``[requests, tokens]``: -ln p of the same continuation of each prompt."""
    continuations = [random_prompt(np.random.default_rng(len(prompt)), num_tokens) for prompt in prompts]
    params = [forced(tokens, fields) for tokens, fields in zip(continuations, asked, strict=True)]
    outputs = [output.outputs[0] for output in engine.generate(prompts, params)]
    return np.array(
        [[-at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)] for one in outputs]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("decode", "num_tokens"), [("bounded", 300), ("grow", 40)])
def test_probabilities_are_those_with_dead_entries_in_place(engine, monkeypatch, decode, num_tokens):
    """A cache that grows is compressed once."""
    rng = np.random.default_rng(4)
    budgets = [0.5, 130, 200, 0.4, 0.3, 150, 180]
    asked = [fields | {"budget": one, "decode": decode} for fields, one in zip(UNEVEN, budgets, strict=True)]
    prompts = [random_prompt(rng, int(rng.integers(400, 700))) for _ in asked]
    paged = losses(engine, prompts, asked, num_tokens)
    engine.llm.reset_prefix_cache()
    monkeypatch.setattr(engine.scheduler, "_limits", replace(engine.scheduler._limits, head_pages=False))
    assert np.abs(paged - losses(engine, prompts, asked, num_tokens)).max() < 1e-3
    engine.assert_empty()


def test_bytes_are_those_of_the_average(engine, monkeypatch):
    """Beside snapkv at the same average: the layers that ``skip_layers`` leaves whole cost what they cost."""
    length, num_layers = 1500, engine.scheduler._limits.shape.num_layers
    prompt = random_prompt(np.random.default_rng(8), length)
    asked = []
    for fields in UNEVEN:
        for budget in (750, 150):
            skipped = fields.get("skip_layers", 0)
            average = (skipped * length + (num_layers - skipped) * budget) // num_layers
            asked += [fields | {"budget": budget}, {"policy": "snapkv", "budget": average}]
    params = [forced(prompt[:4], fields | {"decode": "grow"}) for fields in asked]
    for one in params:
        one.extra_args[USAGE_KEY] = True
    outputs = engine.generate([prompt] * len(asked), params)
    held = [output.kv_transfer_params[REPORT_KEY]["mean_bytes"] for output in outputs]
    for fields, uneven, even in zip(asked[::2], held[::2], held[1::2], strict=True):
        assert uneven <= 1.06 * even, fields
    engine.assert_empty()


THRESHOLDS = [
    {"policy": "snapkv", "decode": "grow", "budget": {"threshold": 0.004, "max": 0.6}},
    {"policy": "keepkv", "interval": 16, "budget": {"threshold": 0.01, "max": 0.5}},
    {"policy": "h2o", "interval": 8, "budget": {"threshold": 0.02, "max": 300}},
    {"policy": "adakv", "budget": {"threshold": 0.01, "max": 0.5}, "context_tokens": 500},
]


def test_blocks_that_no_head_needs_are_returned(engine):
    """Alone, and in company and preempted: the same probabilities, and nothing is left behind."""
    rng = np.random.default_rng(3)
    prompts = [random_prompt(rng, 700) for _ in THRESHOLDS]
    continuations = [random_prompt(rng, 80) for _ in THRESHOLDS]
    params = [forced(tokens, fields) for tokens, fields in zip(continuations, THRESHOLDS, strict=True)]
    for one in params:
        one.extra_args[USAGE_KEY] = True

    def logprobs(output):
        return [at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True)]

    alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    for output, fields in zip(alone, THRESHOLDS, strict=True):
        report = output.kv_transfer_params[REPORT_KEY]
        most = parse_compression(fields).resolve_budget(700) + 80
        assert report["mean_entries"] < 0.8 * most
        # Beside the entries: half a page of each head, and what came after the last compression.
        assert report["mean_bytes"] * BLOCK_SIZE / BYTES_PER_BLOCK < report["mean_entries"] + 3 * BLOCK_SIZE
    core, together, preempted = engine.llm.llm_engine, {}, set()
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(f"{i}", {"prompt_token_ids": prompt}, one)
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                together[output.request_id] = logprobs(output.outputs[0])
        for request in list(engine.scheduler.running):
            if request.num_output_tokens > 40 and request.request_id not in preempted:
                engine.scheduler.running.remove(request)
                engine.scheduler._preempt_request(request, time.monotonic())
                preempted.add(request.request_id)
    assert len(preempted) == len(THRESHOLDS)
    for i, output in enumerate(alone):
        assert np.abs(np.subtract(together[str(i)], logprobs(output.outputs[0]))).max() < 1e-3, THRESHOLDS[i]
    engine.assert_empty()


@pytest.mark.parametrize(("length", "settled"), [(200, [True, False, False]), (20, [False, False, False])])
def test_shares_are_settled_by_contexts_alone(engine, monkeypatch, length, settled):
    """What generation asks for waits for no GPU, a first compression either."""
    plans, complete = [], engine.scheduler._complete

    def watched(spread, step):
        plans.append(spread.plan)
        complete(spread, step)

    monkeypatch.setattr(engine.scheduler, "_complete", watched)
    fields = {"policy": "adakv", "budget": 100, "interval": 32, "decode": "bounded"}
    prompt = random_prompt(np.random.default_rng(5), length)
    engine.generate([prompt], forced(random_prompt(np.random.default_rng(6), 64 if length == 200 else 200), fields))
    plans = [plan for plan in plans if plan.share_blocks]
    assert [plan.settles_shares for plan in plans][: len(settled)] == settled[: len(plans)] and len(plans) > 1
    engine.assert_empty()
