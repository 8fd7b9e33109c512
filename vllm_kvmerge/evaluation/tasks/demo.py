"""Questions that the demo model was trained to answer, about randomly generated facts, lists and text."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from vllm_kvmerge.demo import documents
from vllm_kvmerge.demo.language import NUM_KEYS, NUMBER_WORDS, plain_text, words_of
from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.repetition import repetition


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
class DemoMultivalue(DemoTask):
    """All values of one of several keys."""

    name = "demo_multivalue"
    metric = "share of values that are right"
    keys: Annotated[int, Field(ge=1, le=NUM_KEYS, description="Keys per prompt.")] = 4
    values: Annotated[int, Field(ge=1, le=len(NUMBER_WORDS), description="Values per key.")] = 4

    def draw(self, rng: np.random.Generator) -> documents.Prompt:
        return documents.draw_prompt(rng, "multivalue", self.length, self.keys, values=self.values)

    def parts(self, words: list[str]) -> list[Any]:
        return [part.split()[-1:] for part in " ".join(words).split(",")]


@register
class DemoVariables(DemoTask):
    """All variables that hold one of several values; each but the first was set from another."""

    name = "demo_variables"
    metric = "share of variables that are right"
    chains: Annotated[int, Field(ge=1, le=51, description="Values, each with its own variables.")] = 4
    hops: Annotated[int, Field(ge=1, le=4, description="Variables that hold each value.")] = 4

    def draw(self, rng: np.random.Generator) -> documents.Prompt:
        return documents.draw_prompt(rng, "variables", self.length, self.chains, hops=self.hops)

    def parts(self, words: list[str]) -> list[Any]:
        return words


@register
class DemoCounting(DemoTask):
    """The number of times that a word is marked, or the word that is marked most."""

    name = "demo_counting"
    metric = "exact match"
    words: Annotated[int, Field(ge=2, le=4, description="Different words that are marked.")] = 4
    asks: Annotated[Literal["count", "most"], Field(description="For the count of a word, or for the word.")] = "most"
    margin: Annotated[int, Field(ge=1, le=documents.MAX_COUNT - 1, description="Of the word marked most.")] = 2

    def draw(self, rng: np.random.Generator) -> documents.Prompt:
        if self.asks == "count":
            return documents.draw_prompt(rng, "counting", self.length, words=self.words)
        return documents.draw_prompt(rng, "most", self.length, words=self.words, margin=self.margin)


@register
class DemoCopying(DemoTask):
    """One of several spans of plain text, word by word."""

    name = "demo_copying"
    metric = "share of words that are right"
    spans: Annotated[int, Field(ge=1, le=NUM_KEYS, description="Spans per prompt.")] = 4
    span: Annotated[int, Field(ge=1, le=24, description="Words of a span.")] = 16

    def draw(self, rng: np.random.Generator) -> documents.Prompt:
        return documents.draw_prompt(rng, "copying", self.length, self.spans, span=self.span)

    def parts(self, words: list[str]) -> list[Any]:
        return words


@register
class DemoLists(DemoTask):
    """A numbered list that goes on for hundreds of tokens and goes round the words of a cycle."""

    name = "demo_lists"
    metric = "share of items that are right"
    period: Annotated[int, Field(ge=2, le=6, description="Words of the cycle.")] = 4
    items: Annotated[int, Field(ge=1, le=documents.LAST_ITEM - 1, description="Items to be written.")] = 60

    def draw(self, rng: np.random.Generator) -> documents.Prompt:
        return documents.draw_prompt(rng, "lists", self.length, period=self.period, items=self.items, first=1)

    def parts(self, words: list[str]) -> list[Any]:
        return [item.split() for item in " ".join(words).removesuffix(".").split(".")]


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


@register
class DemoRepetition(Task):
    """Plain text to be continued, greedily, and how much of the continuation is repetition: ``ngram_repetition`` in
    the demo model's language. Less is better, but noise hardly repeats itself."""

    name = "demo_repetition"
    source = "MorphKV, arXiv 2503.00979, table 5; vllm_kvmerge.demo.language"
    metric = "share of repeated n-grams"
    higher_is_better = False

    length: Annotated[int, Field(ge=16, description="Tokens of the prompt.")] = 512
    max_tokens: Annotated[int, Field(ge=1, description="After which the continuation is cut off.")] = 512
    n: Annotated[int, Field(ge=1, description="Words of an n-gram.")] = 10

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        texts = (plain_text(np.random.default_rng((seed, index)), self.length - 1) for index in range(count))
        return [Sample(words_of(text), "", [], self.max_tokens) for text in texts]

    def score(self, sample: Sample, completion: Completion) -> float:
        return repetition(completion.text, self.n)
