"""Every policy answers what it has answered before, so that a change of structure shows that it changes nothing.

``python -m tests.engine.test_answers`` writes ``tests/data/answers.json`` anew, for changes that are to change answers.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.presets import SMALL
from vllm_kvmerge.policies import PRESETS

pytestmark = pytest.mark.slow

ANSWERS = Path(__file__).parents[1] / "data" / "answers.json"

MARGIN = 0.2
"""Difference of log-probability between the two best tokens below which another processor may choose the other: an
answer is kept up to there."""

MAX_TOKENS = 48


def settings() -> dict[str, dict]:
    """Every policy at two budgets, with a context that ends before the prompt at the smaller one."""
    return {
        f"{policy} {budget}{' context' * bool(extra)}": {
            "policy": policy,
            "budget": budget,
            **SMALL.get(policy, {}),
            **extra,
        }
        for policy in sorted(PRESETS)
        for budget, extra in ((0.5, {}), (96, {}), (96, {"context_tokens": 250}))
    }


def prompts() -> list[str]:
    from vllm_kvmerge.demo import recall

    rng = np.random.default_rng(18)
    return [recall.draw_prompt(rng, length, facts).text for length, facts in ((300, 6), (450, 4), (700, 10))]


def answers(llm) -> dict[str, list[list[int]]]:
    """Tokens by setting and prompt, all in one batch, each up to the first that was chosen by a small margin."""
    from vllm import SamplingParams

    from vllm_kvmerge import compression

    asked = [(name, prompt, fields) for name, fields in settings().items() for prompt in prompts()]
    params = [
        SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2, extra_args=compression(**fields)
        )
        for _, _, fields in asked
    ]
    outputs = llm.generate([prompt for _, prompt, _ in asked], params, use_tqdm=False)
    found: dict[str, list[list[int]]] = {}
    for (name, _, _), output in zip(asked, outputs, strict=True):
        found.setdefault(name, []).append(_clear(output.outputs[0]))
    return found


def _clear(output) -> list[int]:
    tokens: list[int] = []
    for token, choices in zip(output.token_ids, output.logprobs, strict=True):
        best, second, *_ = sorted((choice.logprob for choice in choices.values()), reverse=True)
        if best - second < MARGIN:
            break
        tokens.append(token)
    return tokens


EXPECTED = json.loads(ANSWERS.read_text())


@pytest.fixture(scope="module")
def found(engine) -> dict[str, list[list[int]]]:
    return answers(engine.llm)


@pytest.mark.parametrize("name", settings())
def test_tokens(found, name):
    compared = 0
    for tokens, expected in zip(found[name], EXPECTED[name], strict=True):
        # An answer ends where two tokens are nearly as likely, which another processor may find earlier or later.
        length = min(len(tokens), len(expected))
        assert tokens[:length] == expected[:length]
        compared += length
    assert compared > sum(map(len, EXPECTED[name])) // 2


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from tests.engine.conftest import engine_arguments
    from vllm_kvmerge import demo, kvmerge_engine_args

    own = {"kvmerge": {"kvzap": demo.kvzap_path()}}
    llm = LLM(**kvmerge_engine_args(**engine_arguments(), kv_cache_memory_bytes=1 << 28, additional_config=own))
    lines = (f"{json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in answers(llm).items())
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
