"""The words of a list that occur most often."""

import json
import random
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from vllm_kvmerge.evaluation.tasks.base import Sample, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.data import read_text
from vllm_kvmerge.evaluation.tasks.ruler.fitting import Draw
from vllm_kvmerge.evaluation.tasks.ruler.task import SHORT, Synthetic
from vllm_kvmerge.evaluation.tasks.ruler.text import compound_word, english_words


@register
class CommonWords(Synthetic):
    """A numbered list of words in random order, some of them more often than the others; asked are those.

    A short solved example precedes. wonderwords has too few words for lists of more than some 100,000 tokens; RULER
    then turns to its json/english_words.json.
    """

    name: ClassVar[str] = "ruler_cwe"
    tokens_to_generate: ClassVar[int] = 120
    template: ClassVar[str] = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n{context}\n"
    )
    question: ClassVar[str] = (
        "Question: What are the 10 most common words in the above list?"
        " Answer: The top 10 words that appear most often in the list are:"
    )

    freq_cw: int = Field(30, ge=1, description="How often a common word occurs; below 4,096 tokens: 6, officially.")
    freq_ucw: int = Field(3, ge=1, description="How often another word occurs; below 4,096 tokens: 1, officially.")
    num_cw: int = Field(10, ge=1, le=20, description="Common words.")
    words: str | None = Field(
        None, description="For long lists: JSON with words as values, or one per line; default: adjective-noun pairs."
    )

    def step(self) -> int:
        return 10

    def minimum(self) -> int:
        return self.num_cw

    def generator(self, rng: random.Random, tokenizer: Tokenizer) -> Draw:
        words = english_words("NOUNS", "ADJECTIVES", "VERBS")
        more_words = [] if self.words is None else _word_list(self.words)
        short = self.length < SHORT

        def pick(count: int) -> list[str]:
            if count <= len(words):
                return rng.sample(words, count)
            if count <= len(more_words):
                return rng.sample(more_words, count)
            picked: dict[str, None] = {}
            while len(picked) < count:
                picked[compound_word(rng)] = None
            return list(picked)

        def draw(index: int, units: int) -> Sample:
            solved = self._draw(rng, pick(20 if short else 40), *((3, 1) if short else (10, 3)))
            sample = self._draw(rng, pick(units), *((6, 1) if short else (self.freq_cw, self.freq_ucw)))
            example = f"{solved.prompt} {_numbered(solved.references)}\n"
            return self._sample(example + sample.context, sample.question, sample.references)

        return draw

    def _draw(self, rng: random.Random, words: list[str], common_repeats: int, uncommon_repeats: int) -> Sample:
        common, uncommon = words[: self.num_cw], words[self.num_cw :]
        listed = common * common_repeats + uncommon * uncommon_repeats
        rng.shuffle(listed)
        return self._sample(self.template.format(context=_numbered(listed)), self.question, common)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _word_list(path: str) -> list[str]:
    text = read_text("words", path)
    if not path.endswith(".json"):
        return sorted(set(text.split("\n")) - {""})
    try:
        return [str(word) for word in json.loads(text).values()]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"words: {path} is not a JSON object") from error
