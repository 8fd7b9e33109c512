"""The demo model's own task: recall a fact that was spread, with others, through filler text."""

from typing import Annotated

import numpy as np
from pydantic import Field

from vllm_kvmerge.demo import recall
from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register


@register
class DemoRecall(Task):
    """One question about one of the facts, at the end of the prompt."""

    name = "demo_recall"
    source = "vllm_kvmerge.demo.recall"
    metric = "exact match"

    length: Annotated[int, Field(ge=16, description="Tokens of the prompt.")] = 1024
    facts: Annotated[int, Field(ge=1, description="Facts per prompt.")] = 16

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        rng = np.random.default_rng(seed)
        prompts = [recall.draw_prompt(rng, self.length, self.facts) for _ in range(count)]
        return [
            Sample(
                context=prompt.text.removesuffix(question := f" recall {prompt.key}"),
                question=question,
                references=[prompt.answer],
                max_tokens=recall.DIGITS_PER_ANSWER + 1,
            )
            for prompt in prompts
        ]

    def score(self, sample: Sample, completion: Completion) -> float:
        return float(completion.text.split() == sample.references[0].split())
