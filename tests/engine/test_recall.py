"""The demo model recalls facts, and compression costs what one would expect."""

import secrets

import numpy as np
import pytest
from vllm import SamplingParams

from tests.measures import evaluate
from vllm_kvmerge.demo import recall
from vllm_kvmerge.evaluation.tasks.base import Completion
from vllm_kvmerge.evaluation.tasks.demo import DemoMultikey, DemoRecall
from vllm_kvmerge.request.parameters import compression


def test_recall_on_fresh_prompts(engine):
    rng = np.random.default_rng()
    prompts = [recall.draw_prompt(rng, 512, 8) for _ in range(40)]
    scores = {s.policy: s for s in evaluate(engine.llm, prompts, ["full", "snapkv", "local"], 0.3)}
    assert scores["full"].exact >= 0.95
    assert scores["snapkv"].exact >= 0.5
    assert scores["local"].exact < 0.6  # it has forgotten two facts in three


@pytest.mark.slow
def test_a_question_that_comes_after_the_compression(engine):
    """Leverage keeps facts that nobody has asked for yet; what the filler at the end attends to is something else.

    Expected attention takes questions to be like the text before them, which the demo model's are not.
    """
    task = DemoRecall(length=512, facts=8)
    samples, tokenizer = task.samples(20, secrets.randbits(32), engine.llm.get_tokenizer()), engine.llm.get_tokenizer()

    def share_right(policy: str, budget: float, **parts: str) -> float:
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=sample.max_tokens,
                extra_args=compression(
                    policy, budget=budget, context_tokens=len(tokenizer(sample.context).input_ids), **parts
                ),
            )
            for sample in samples
        ]
        outputs = engine.llm.generate([sample.prompt for sample in samples], params, use_tqdm=False)
        completions = [Completion(output.outputs[0].text) for output in outputs]
        return float(np.mean([task.score(*pair) for pair in zip(samples, completions, strict=True)]))

    assert share_right("compactor", 0.5) >= 0.75
    assert share_right("expected_attention", 0.75, allocator="adaptive") >= 0.35
    engine.assert_empty()


@pytest.mark.slow
def test_merging_keeps_more_than_dropping(engine):
    """Of several facts, those that were not selected: the same selection, merged into or not."""
    task = DemoMultikey(length=512)
    samples = task.samples(40, secrets.randbits(32), engine.llm.get_tokenizer())

    def share_right(**parts: str) -> float:
        fields = compression("snapkv", budget=0.5, **parts)
        params = SamplingParams(temperature=0, max_tokens=samples[0].max_tokens, extra_args=fields)
        outputs = engine.llm.generate([sample.prompt for sample in samples], params, use_tqdm=False)
        completions = [Completion(output.outputs[0].text) for output in outputs]
        return float(np.mean([task.score(*pair) for pair in zip(samples, completions, strict=True)]))

    assert share_right(merger="zip", tracker="log_ema") > share_right(tracker="log_ema") + 0.03
