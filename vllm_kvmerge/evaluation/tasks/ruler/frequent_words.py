"""The words of a text whose frequencies follow a zeta distribution that occur most often."""

import random
import string
from collections.abc import Callable
from functools import cache
from typing import ClassVar

from pydantic import Field, model_validator

from vllm_kvmerge.evaluation.tasks.base import Sample, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.ruler.fitting import Draw, NoRoomError
from vllm_kvmerge.evaluation.tasks.ruler.task import Synthetic
from vllm_kvmerge.evaluation.tasks.ruler.text import distinct_names


@register
class FrequentWords(Synthetic):
    """Made-up words in random order; asked are the three most frequent ones.

    The k-th word occurs in proportion to ``k ** -alpha``; the first is ``...`` and does not count.
    """

    name: ClassVar[str] = "ruler_fwe"
    tokens_to_generate: ClassVar[int] = 50
    template: ClassVar[str] = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. {context}\n"
    )
    question: ClassVar[str] = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )

    alpha: float = Field(2.0, gt=1, description="How steeply frequencies fall.")
    coded_wordlen: int = Field(6, ge=2, description="Letters of a word.")
    vocab_size: int | None = Field(None, ge=4, description="Different words; default: one for 50 tokens of the prompt.")

    @model_validator(mode="after")
    def _vocabulary_exists(self) -> "FrequentWords":
        if self._num_words > 26**self.coded_wordlen // 2:
            raise ValueError(f"coded_wordlen: there are not {self._num_words} words of {self.coded_wordlen} letters")
        return self

    @property
    def _prompt_tokens(self) -> int:
        return self.length - self.tokens_to_generate

    @property
    def _num_words(self) -> int:
        return self._prompt_tokens // 50 if self.vocab_size is None else self.vocab_size

    def step(self) -> int:
        return max(1, self._prompt_tokens // 32)

    def size(self, fits: Callable[[int], bool]) -> tuple[int, int]:
        """Grows step by step from a word for every ``coded_wordlen`` tokens, as the official generator does."""
        if self._num_words < 4:
            raise NoRoomError("length: leaves no room for a vocabulary of four words")
        step = self.step()
        units = max(step, self._prompt_tokens // self.coded_wordlen)
        while fits(units):
            units += step
        units = max(step, units - step)
        counts = [*self._counts(units), 0]
        if counts[3] == counts[4]:
            raise NoRoomError("length: too few words for three of them to stand out")
        return units, step

    def _counts(self, units: int) -> list[int]:
        """Number of times that each word of the vocabulary occurs among about ``units``."""
        return [int(units * rank**-self.alpha / zeta(self.alpha)) for rank in range(1, self._num_words + 1)]

    def generator(self, rng: random.Random, tokenizer: Tokenizer) -> Draw:
        def draw(index: int, units: int) -> Sample:
            vocabulary = ["...", *distinct_names(rng, self._num_words - 1, string.ascii_lowercase, self.coded_wordlen)]
            text = [word for word, count in zip(vocabulary, self._counts(units), strict=True) for _ in range(count)]
            rng.shuffle(text)
            return self._sample(self.template.format(context=" ".join(text)), self.question, vocabulary[1:4])

        return draw


@cache
def zeta(alpha: float) -> float:
    """Riemann's zeta function for alpha > 1, by the Euler-Maclaurin formula; its error is below 1e-14."""
    terms = 1000
    head = sum(rank**-alpha for rank in range(1, terms))
    return head + terms ** (1 - alpha) / (alpha - 1) + terms**-alpha / 2 + alpha * terms ** (-alpha - 1) / 12
