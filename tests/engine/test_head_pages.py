"""Budgets that differ by layer and head, in an engine: they cost what their average costs, and change no answer."""

from dataclasses import replace

import numpy as np
import pytest

from tests.engine.conftest import Engine, random_prompt
from tests.engine.worker.test_head_pages import POLICIES
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.evaluation.continuation import forced

UNEVEN = POLICIES[:7]


def losses(engine: Engine, prompts: list[list[int]], asked: list[dict], num_tokens: int) -> np.ndarray:
    """``[requests, tokens]``: -ln p of the same continuation of each prompt."""
    continuations = [random_prompt(np.random.default_rng(len(prompt)), num_tokens) for prompt in prompts]
    params = [forced(tokens, fields) for tokens, fields in zip(continuations, asked, strict=True)]
    outputs = [output.outputs[0] for output in engine.generate(prompts, params)]
    return np.array(
        [[-at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)] for one in outputs]
    )


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


def test_bytes_are_those_of_the_average(engine):
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
