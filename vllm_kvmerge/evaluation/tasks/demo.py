"""Questions that the demo model was trained to answer, about randomly generated facts, and its plain text."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from vllm_kvmerge.demo import documents
from vllm_kvmerge.demo.language import NUM_KEYS, plain_text, words_of
from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register


class DemoTask(Task):
    """A question of one kind (see ``vllm_kvmerge.demo.documents``) at the end of plain text that states the answer."""

    source = "vllm_kvmerge.demo.documents"
    length: Annotated[int, Field(ge=16, description="Tokens of the prompt.")] = 1024

    def draw(self, rng: np.random.Generator) -> documents.Prompt:
        raise NotImplementedError

    def parts(self, words: list[str]) -> list[Any]:
        """An answer's parts, each of which counts alone. Default: it counts as a whole."""
        return [words]

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        """One more token than the answer has may be generated, so that an answer that goes on is wrong."""
        prompts = [self.draw(np.random.default_rng((seed, index))) for index in range(count)]
        return [
            Sample(prompt.context, prompt.question, [prompt.answer], max_tokens=len(prompt.answer.split()) + 1)
            for prompt in prompts
        ]

    def score(self, sample: Sample, completion: Completion) -> float:
        """Share of the reference's parts that the completion has at the same place."""
        given, wanted = (self.parts(text.split()) for text in (completion.text, sample.references[0]))
        return sum(a == b for a, b in zip(given, wanted, strict=False)) / len(wanted)


@register
class DemoRecall(DemoTask):
    """One of several facts."""

    name = "demo_recall"
    metric = "exact match"
    facts: Annotated[int, Field(ge=1, le=NUM_KEYS, description="Facts per prompt.")] = 16
    asked_in: Annotated[float, Field(ge=0.1, le=1, description="Last share of the prompt that the fact is in.")] = 1.0

    def draw(self, rng: np.random.Generator) -> documents.Prompt:
        for _ in range(1000):
            prompt = documents.draw_prompt(rng, "recall", self.length, self.facts)
            words = prompt.text.split()
            if words.index(words[-1]) >= (1 - self.asked_in) * len(words):
                return prompt
        raise ValueError(f"asked_in: no fact begins in the last {self.asked_in} of {self.length} tokens")


@register
class DemoMultikey(DemoTask):
    """Several of several facts, by one question that names their keys."""

    name = "demo_multikey"
    metric = "share of facts that are right"
    facts: Annotated[int, Field(ge=1, le=NUM_KEYS, description="Facts per prompt.")] = 16
    asked: Annotated[int, Field(ge=1, le=4, description="Facts that are asked for.")] = 4

    def draw(self, rng: np.random.Generator) -> documents.Prompt:
        if self.asked > self.facts:
            raise ValueError(f"asked: {self.asked} facts of {self.facts} cannot be asked for")
        others = self.facts - self.asked
        return documents.draw_prompt(rng, "multikey", self.length, distractors=others, asked=self.asked)

    def parts(self, words: list[str]) -> list[Any]:
        size = 1 + documents.DIGITS_PER_ANSWER
        return [words[i : i + size] for i in range(0, len(words), size)]


@register
class DemoText(Task):
    """Prediction of plain text that goes on for a while."""

    name = "demo_text"
    source = "vllm_kvmerge.demo.language"
    metric = "nats per token"
    higher_is_better = False
    needs_logprobs = True

    length: Annotated[int, Field(ge=16, description="Tokens of the prompt.")] = 1024
    continuation: Annotated[int, Field(ge=1, description="Tokens that are foretold.")] = 256

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        samples = []
        for index in range(count):
            text = plain_text(np.random.default_rng((seed, index)), self.length - 1 + self.continuation)
            context, continuation = words_of(text[: self.length - 1]), " " + words_of(text[self.length - 1 :])
            samples.append(Sample(context, "", [], max_tokens=self.continuation, continuation=continuation))
        return samples

    def score(self, sample: Sample, completion: Completion) -> float:
        return -sum(completion.logprobs) / len(completion.logprobs)
