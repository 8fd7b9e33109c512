"""Budgets that differ by layer and head, in an engine: they cost what their average costs, and change no answer."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.demo_model import BLOCK_SIZE, BYTES_PER_BLOCK
from tests.engine.conftest import preempting, random_prompt
from tests.engine.worker.test_head_pages import POLICIES
from tests.measures import forced
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.engine.worker.compression import Compression
from vllm_kvmerge.ops.coded import slots_of
from vllm_kvmerge.request.spec import parse_compression

UNEVEN = POLICIES[:7]


def logprobs(output) -> list[float]:
    """Of the tokens that a request was made to generate."""
    answer = output.outputs[0]
    return [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)]


def reported(tokens: list[int], fields: dict) -> SamplingParams:
    params = forced(tokens, fields)
    params.extra_args[USAGE_KEY] = True
    return params


def test_bytes_are_those_of_the_average(engine):
    """Beside snapkv at the same average: the layers that ``skip_layers`` leaves whole cost what they cost."""
    length, num_layers = 1500, engine.scheduler._admission.limits.shape.num_layers
    prompt = random_prompt(np.random.default_rng(8), length)
    asked = []
    for fields in UNEVEN:
        for budget in (750, 150):
            skipped = fields.get("skip_layers", 0)
            average = (skipped * length + (num_layers - skipped) * budget) // num_layers
            asked += [fields | {"budget": budget}, {"policy": "snapkv", "budget": average}]
    params = [reported(prompt[:4], fields | {"decode": "grow"}) for fields in asked]
    outputs = engine.generate([prompt] * len(asked), params)
    held = [output.kv_transfer_params[REPORT_KEY]["mean_bytes"] for output in outputs]
    for fields, uneven, even in zip(asked[::2], held[::2], held[1::2], strict=True):
        assert uneven <= 1.06 * even, fields
    engine.assert_empty()


CODED = [
    {"policy": "snapkv"},
    {"policy": "snapkv", "merger": "zip"},
    {"policy": "adakv"},
    {"policy": "kvzip", "context_tokens": 1400, "allocator": "uniform"},
    {"policy": "snapkv", "budget": {"threshold": 0.004, "max": 0.3}},
]


@pytest.mark.parametrize(("coding", "far"), [("int8", 0.05), ("int4", 0.8)])
def test_coded_fronts_take_a_part_of_the_bytes(engine, coding, far):
    """And have almost the same probabilities."""
    prompt = random_prompt(np.random.default_rng(9), 1500)
    asked = [
        {"budget": 0.3, "decode": "grow"} | fields | front for fields in CODED for front in ({}, {"front": coding})
    ]
    outputs = engine.generate([prompt] * len(asked), [reported(prompt[:8], fields) for fields in asked])
    for number, fields in enumerate(CODED):
        plain, coded = outputs[2 * number : 2 * number + 2]
        held = [output.kv_transfer_params[REPORT_KEY]["mean_bytes"] for output in (plain, coded)]
        # Beside the front: what came after it, up to 100 tokens of a question among it.
        blocks, share = [num_bytes / BYTES_PER_BLOCK for num_bytes in held], 1 / slots_of(coding)
        assert 0.8 * share * blocks[0] < blocks[1] < share * blocks[0] + 3.5, fields
        differences = np.abs(np.subtract(logprobs(plain), logprobs(coded)))
        assert 0 < differences.max() < far, fields
    engine.assert_empty()


@pytest.mark.parametrize("coding", ["int8", "int4"])
def test_a_coded_front_shares_no_block_with_what_follows(engine, coding):
    """A context without a block of its own stays as it is; longer ones are coded, though nothing is evicted."""
    far = {"int8": 0.05, "int4": 0.8}[coding]
    for length, budget in ((20, 10), (31, 30), (32, 1.0), (40, 500), (97, 1.0)):
        prompt = random_prompt(np.random.default_rng(length), length)
        fields = {"policy": "kvzip", "allocator": "uniform", "budget": budget}
        asked = [fields, fields | {"front": coding}]
        plain, coded = engine.generate([prompt] * 2, [reported(prompt[:40], one) for one in asked])
        difference = np.abs(np.subtract(logprobs(plain), logprobs(coded))).max()
        assert difference < 1e-4 if length < BLOCK_SIZE else 0 < difference < far, length
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
    params = [reported(random_prompt(rng, 80), fields) for fields in THRESHOLDS]
    alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    for output, fields in zip(alone, THRESHOLDS, strict=True):
        report = output.kv_transfer_params[REPORT_KEY]
        most = parse_compression(fields).resolve_budget(700) + 80
        assert report["mean_entries"] < 0.8 * most
        # Beside the entries: half a page of each head, and what came after the last compression.
        assert report["mean_bytes"] * BLOCK_SIZE / BYTES_PER_BLOCK < report["mean_entries"] + 3 * BLOCK_SIZE
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(index), prompt, one)
    together, preempt, preemptions = {}, preempting(engine, 45), []
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            together[output.request_id] = logprobs(output)
        preempt()
        preemptions.append(sum(one.num_preemptions for one in engine.scheduler.requests.values()))
    assert max(preemptions) == len(THRESHOLDS)
    for index, output in enumerate(alone):
        assert np.abs(np.subtract(together[str(index)], logprobs(output))).max() < 1e-3, THRESHOLDS[index]
    engine.assert_empty()


@pytest.mark.parametrize(("length", "num_tokens", "settled"), [(200, 64, [True, False]), (20, 200, [False, False])])
def test_shares_are_settled_by_contexts_alone(engine, monkeypatch, length, num_tokens, settled):
    """What generation asks for waits for no GPU, a first compression either."""
    compactions, compaction = [], Compression._compaction
    monkeypatch.setattr(
        Compression, "_compaction", lambda self, *args: compactions.append(found := compaction(self, *args)) or found
    )
    fields = {"policy": "adakv", "budget": 100, "interval": 32, "decode": "bounded"}
    forced_tokens = random_prompt(np.random.default_rng(6), num_tokens)
    engine.generate([random_prompt(np.random.default_rng(5), length)], forced(forced_tokens, fields))
    assert [one.settles_shares for one, _ in compactions if one.plan.share_blocks][:2] == settled
    engine.assert_empty()
