"""Every policy answers what it has answered before, so that a change of structure shows that it changes nothing.

Where ``tests/data/answers.json`` is missing it is written anew, for changes that are to change answers.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from vllm import SamplingParams

from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.demo import recall
from vllm_kvmerge.policies import PRESETS

pytestmark = pytest.mark.slow

ANSWERS = Path(__file__).parents[1] / "data" / "answers.json"

MARGIN = 0.2
"""Difference of log-probability between the two best tokens below which another processor may choose the other: an
answer is kept up to there."""

SETTINGS = {
    f"{policy} {budget}{' context' * bool(extra)}": {"policy": policy, "budget": budget} | SMALL.get(policy, {}) | extra
    for policy in sorted(PRESETS)
    for budget, extra in ((0.5, {}), (96, {}), (96, {"context_tokens": 250}))
}
"""Every policy at two budgets, with a context that ends before the prompt at the smaller one."""


def clear(output) -> list[int]:
    """Tokens up to the first that was chosen by a small margin."""
    tokens: list[int] = []
    for token, choices in zip(output.token_ids, output.logprobs, strict=True):
        best, second, *_ = sorted((choice.logprob for choice in choices.values()), reverse=True)
        if best - second < MARGIN:
            break
        tokens.append(token)
    return tokens


def test_tokens(engine):
    """All in one batch. An answer ends where two tokens are nearly as likely, which another processor may find earlier
    or later."""
    rng = np.random.default_rng(18)
    prompts = [recall.draw_prompt(rng, length, facts).text for length, facts in ((300, 6), (450, 4), (700, 10))]
    params = [
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=2, extra_args=compression(**fields))
        for fields in SETTINGS.values()
        for _ in prompts
    ]
    outputs = [clear(one.outputs[0]) for one in engine.llm.generate(prompts * len(SETTINGS), params, use_tqdm=False)]
    found = {name: outputs[3 * index : 3 * index + 3] for index, name in enumerate(SETTINGS)}
    if not ANSWERS.exists():
        lines = (f"{json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in found.items())
        ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        pytest.fail("answers have been written anew")
    answers, others = json.loads(ANSWERS.read_text()), {}
    assert answers.keys() == found.keys()
    for name, expected in answers.items():
        lengths = [min(len(one), len(other)) for one, other in zip(expected, found[name], strict=True)]
        pairs = zip(lengths, expected, found[name], strict=True)
        alike = all(one[:length] == other[:length] for length, one, other in pairs)
        if not alike or sum(lengths) <= sum(map(len, expected)) // 2:
            others[name] = found[name]
    assert others == {}
