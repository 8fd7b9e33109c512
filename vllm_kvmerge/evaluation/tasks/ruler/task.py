"""Base classes of RULER's tasks."""

import random
import re
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from pydantic import Field

from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer
from vllm_kvmerge.evaluation.tasks.ruler.fitting import Draw, draw_fitting, largest_fitting

SHORT = 4096
"""Below this many tokens the official generators take smaller steps, and other frequencies for common words."""


def string_match_all(prediction: str, references: list[str]) -> float:
    """The share of the references that occur in the prediction, whatever their case."""
    return sum(reference.lower() in prediction.lower() for reference in references) / len(references)


def string_match_part(prediction: str, references: list[str]) -> float:
    """1 if any of the references occurs in the prediction, whatever its case."""
    return float(any(reference.lower() in prediction.lower() for reference in references))


class Ruler(Task):
    """A task whose prompts are grown to a length, and whose answers are looked for in the completion."""

    source: ClassVar[str] = "RULER, arXiv 2404.06654"
    metric: ClassVar[str] = "string_match_all"
    tokens_to_generate: ClassVar[int]
    answer_start: ClassVar[str] = " Answer:"
    """Start of the official answer prefix, which ends the question."""

    length: int = Field(4096, ge=1, description="Tokens of prompt and answer together, special ones included.")

    @staticmethod
    def match(prediction: str, references: list[str]) -> float:
        """From 0 to 1; ``metric`` names it."""
        return string_match_all(prediction, references)

    @abstractmethod
    def step(self) -> int:
        """By how many haystack units a prompt that is too long is shortened."""

    def minimum(self) -> int:
        """The fewest haystack units that a prompt can have."""
        return 1

    def size(self, fits: Callable[[int], bool]) -> tuple[int, int]:
        """Haystack units of a prompt, and the step."""
        return largest_fitting(fits, self.step(), self.minimum())

    def score(self, sample: Sample, completion: Completion) -> float:
        """As the official evaluation: control characters count as line ends."""
        prediction = re.sub(r"[\x00-\x1f]", "\n", completion.text.strip()).strip()
        return self.match(prediction, sample.references)

    def _fits(self, tokenizer: Tokenizer, sample: Sample) -> bool:
        return len(tokenizer.encode(sample.prompt)) + sample.max_tokens <= self.length

    def _sample(self, context: str, question: str, references: list[str]) -> Sample:
        prefix = question[question.rindex(self.answer_start) :]
        return Sample(context, question, references, self.tokens_to_generate, answer_prefix=prefix)


class Synthetic(Ruler):
    """A task that makes up as many samples as are wanted."""

    @abstractmethod
    def generator(self, rng: random.Random, tokenizer: Tokenizer) -> Draw:
        """Function that draws samples of any size."""

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        rng = random.Random(seed)
        draw, fits = self.generator(rng, tokenizer), partial(self._fits, tokenizer)
        units, step = self.size(lambda size: fits(draw(0, size)))
        return [draw_fitting(draw, index, units, step, self.minimum(), fits) for index in range(count)]
