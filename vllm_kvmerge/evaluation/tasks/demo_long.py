"""The demo model over long texts: perplexity of documents, and repetition in text of its own."""

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from vllm_kvmerge.demo import documents
from vllm_kvmerge.demo.language import plain_text, words_of
from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.perplexity import PerplexityTask
from vllm_kvmerge.evaluation.tasks.repetition import repetition


@register
class DemoPerplexity(PerplexityTask):
    """``perplexity``'s protocol on documents that are drawn afresh, one window each."""

    name = "demo_perplexity"
    source = f"{PerplexityTask.source}; vllm_kvmerge.demo.documents"

    length: Annotated[int, Field(ge=16, description="Tokens of a document.")] = 2048
    prompt: Annotated[int, Field(ge=1, description="Of them, read at once, and not scored.")] = 64
    scored: Annotated[int, Field(ge=1, description="Of them, the last ones, which are scored.")] = 1024
    text: Annotated[
        Literal["documents", "plain"], Field(description="Statements and questions in plain text, or plain text alone.")
    ] = "documents"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt + self.scored > self.length:
            raise ValueError(
                f"scored: must be at most length - prompt ({self.length - self.prompt}), got {self.scored}"
            )
        return self

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        samples = []
        for index in range(count):
            rng = np.random.default_rng((seed, index))
            # Without <s>, which the tokenizer puts in front.
            if self.text == "plain":
                tokens = plain_text(rng, self.length - 1)
            else:
                tokens = documents.training_sample(rng, self.length)[0][1:].tolist()
            prompt, continuation = tokens[: self.prompt - 1], tokens[self.prompt - 1 :]
            text = " " * bool(prompt) + words_of(continuation)
            samples.append(Sample(words_of(prompt), "", [], len(continuation), text, {"num_scored": self.scored}))
        return samples


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
