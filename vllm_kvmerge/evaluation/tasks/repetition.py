"""Repetition in a long text: MorphKV's measure of degeneration (arXiv 2503.00979, section 7.2)."""

import random
import re

from pydantic import Field

from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.data import choose, read_rows

_KINDS = ("story", "travel report", "essay", "radio play", "biography", "handbook")
_SUBJECTS = (
    "a lighthouse keeper who learns to read the weather",
    "the last ferry across a river that is to be bridged",
    "a village that moves its church stone by stone",
    "how bread was baked before there were mills",
    "two sisters who restore an old observatory",
    "the winter in which a railway line stood still",
    "a gardener who breeds a rose without thorns",
    "a map with an island that nobody finds",
    "the making of a violin, from the tree to the concert",
    "a town that decides to live without clocks",
)


def repetition(text: str, n: int) -> float:
    """The share of a text's n-grams that occurred before in it: 1 - different n-grams / n-grams.

    n-grams are of words and punctuation marks in lower case; MorphKV's script cuts words with NLTK, which also
    separates endings such as ``n't``. A text of fewer than ``n`` has no n-gram, and repeats nothing: 0.
    """
    words = re.findall(r"\w+(?:['’]\w+)*|[^\w\s]", text.lower())
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@register
class NgramRepetition(Task):
    """Asks for a long text and looks at how much of it is repetition; less is better, 0 is none.

    MorphKV reports this of LongWriter's prompts, n = 10, over answers of at least 5,000 words: 0.68 with its cache of
    600 entries, 0.89 with full attention (Llama 3.1 8B Instruct, table 5). Look at completions as well: a text that
    ends early or dissolves into noise hardly repeats itself.
    """

    name = "ngram_repetition"
    source = "MorphKV, arXiv 2503.00979, table 5"
    metric = "share of repeated n-grams"
    higher_is_better = False

    words: int = Field(5000, ge=1, description="How long the text is to be.")
    max_tokens: int = Field(8192, ge=1, description="After which it is cut off.")
    n: int = Field(10, ge=1, description="Words of an n-gram.")
    data_file: str | None = Field(
        None,
        description="Prompts to use instead of our own, in lines of JSON, as LongWriter's longbench_write_en.jsonl.",
    )

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        """``count`` of all prompts, drawn at random."""
        prompts = self._own() if self.data_file is None else self._read(self.data_file)
        return [Sample("", prompt, [], self.max_tokens) for prompt in choose(prompts, count, random.Random(seed))]

    def score(self, sample: Sample, completion: Completion) -> float:
        return repetition(completion.text, self.n)

    def _own(self) -> list[str]:
        return [
            f"Write a {kind} of at least {self.words} words about {subject}. Do not stop before it has that length.\n\n"
            for kind in _KINDS
            for subject in _SUBJECTS
        ]

    def _read(self, path: str) -> list[str]:
        prompts = []
        for place, row in read_rows("data_file", path):
            if "prompt" not in row:
                raise ValueError(f"{place}: no object with the field prompt")
            prompts.append(str(row["prompt"]))
        return prompts
