"""A user's own questions, from a file."""

import random
import string
from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.data import choose, read_rows


@register
class JsonLines(Task):
    """One JSON object per line: ``question``, ``references`` (right answers) and, before the question, ``context``.

    With ``metric: agreement``, references may be left out.
    """

    name = "jsonl"
    source = "a file of your own"
    metric = "right answers"

    path: Annotated[str, Field(description="A .jsonl file: question, references and, optionally, context per line.")]
    max_tokens: Annotated[int, Field(ge=1, description="Tokens to generate.")] = 32
    match: Annotated[
        Literal["contains", "exact"],
        Field(
            description="Whether an answer must hold a reference or be one; case, edges and edge marks do not count."
        ),
    ] = "contains"

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        """All lines, or ``count`` of them drawn at random, in their order."""
        samples = [self._sample(place, row) for place, row in read_rows("path", self.path)]
        return choose(samples, count, random.Random(seed))

    def _sample(self, place: str, data: dict[str, Any]) -> Sample:
        if unknown := set(data) - {"context", "question", "references"}:
            raise ValueError(f"{place}: unknown field {sorted(unknown)[0]}; allowed: context, question, references")
        context, question, references = data.get("context", ""), data.get("question"), data.get("references")
        if references is None and self.is_verified:
            references = []
        elif not isinstance(references, list) or not references or not all(isinstance(one, str) for one in references):
            raise ValueError(f"{place}: references must be a list of one or more texts, but for metric: agreement")
        if not isinstance(context, str) or not isinstance(question, str):
            raise ValueError(f"{place}: question and context must be texts")
        return Sample(context, question, references, self.max_tokens)

    def score(self, sample: Sample, completion: Completion) -> float:
        answer, references = _plain(completion.text), [_plain(reference) for reference in sample.references]
        if self.match == "exact":
            return float(answer in references)
        return float(any(reference in answer for reference in references))


def _plain(text: str) -> str:
    """In small letters, with single spaces, without marks and spaces at the edges."""
    return " ".join(text.casefold().split()).strip(string.punctuation + " ")
