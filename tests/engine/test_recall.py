"""The demo model recalls facts, and compression costs what one would expect."""

import secrets

import numpy as np
import pytest
from vllm import SamplingParams

from tests.measures import evaluate
from vllm_kvmerge.demo import recall
from vllm_kvmerge.evaluation.tasks.base import Completion
from vllm_kvmerge.evaluation.tasks.demo import DemoRecall
from vllm_kvmerge.request.spec import compression


def test_recall_on_fresh_prompts(engine):
    rng = np.random.default_rng()
    prompts = [recall.draw_prompt(rng, 512, 8) for _ in range(40)]
    scores = {s.policy: s for s in evaluate(engine.llm, prompts, ["full", "snapkv", "local"], 0.3)}
    assert scores["full"].exact >= 0.95
    assert scores["snapkv"].exact >= 0.5
    assert scores["local"].exact < 0.6  # it has forgotten two facts in three


def share_right(engine, task, samples, policy: str, budget: float, knows_question: bool = False, **parts: str) -> float:
    tokenizer = engine.llm.get_tokenizer()
    contexts = [{} if knows_question else {"context_tokens": len(tokenizer(one.context).input_ids)} for one in samples]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=one.max_tokens,
            extra_args=compression(policy, budget=budget, **parts, **context),
        )
        for one, context in zip(samples, contexts, strict=True)
    ]
    outputs = engine.llm.generate([one.prompt for one in samples], params, use_tqdm=False)
    answers = [Completion(output.outputs[0].text) for output in outputs]
    return float(np.mean([task.score(*pair) for pair in zip(samples, answers, strict=True)]))


@pytest.mark.slow
def test_a_question_that_comes_after_the_compression(engine):
    """Leverage, a repeated context and predictions keep facts that nobody has asked for yet; what the filler at the end
    attends to is something else. Expected attention takes questions to be like the text before them, which the demo
    model's are not."""
    task = DemoRecall(length=512, facts=8)
    asked = engine, task, task.samples(20, secrets.randbits(32), engine.llm.get_tokenizer())
    assert share_right(*asked, "compactor", 0.5) >= 0.75
    assert share_right(*asked, "expected_attention", 0.75, allocator="adaptive") >= 0.35
    by_attention = share_right(*asked, "snapkv", 0.25)
    assert share_right(*asked, "kvzip", 0.25) >= max(0.9, by_attention + 0.3)
    assert share_right(*asked, "kvzap", 0.25, window_size=32, decode="grow") >= by_attention + 0.3
    engine.assert_empty()
