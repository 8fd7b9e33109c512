"""Needles in a haystack."""

import math
import random
import uuid
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from vllm_kvmerge.evaluation.tasks.base import Sample, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.ruler.fitting import Draw
from vllm_kvmerge.evaluation.tasks.ruler.task import SHORT, Synthetic
from vllm_kvmerge.evaluation.tasks.ruler.text import NOISE, compound_word, essay_words, split_sentences

Kind = Literal["words", "numbers", "uuids"]
HaystackType = Annotated[
    Literal["noise", "essay", "needle"],
    Field(description="What surrounds the needles: five sentences over and over, running text, or other needles."),
]
KeyType = Annotated[Kind, Field(description="What keys are.")]
ValueType = Annotated[Kind, Field(description="What values are.")]
NumKeys = Annotated[int, Field(ge=1, description="Keys with needles.")]
NumValues = Annotated[int, Field(ge=1, description="Values, and so needles, of each key.")]
NumQueries = Annotated[int, Field(ge=1, description="Keys that are asked for.")]
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_DEPTHS = [round(100 * place / 39) for place in range(40)]


class Niah(Synthetic):
    """Needles, ``key: value``, in a haystack; the values of some keys are asked for.

    An essay is repeated as needed. RULER's are Paul Graham's, which may not be passed on; the one that ships was
    written for this package.
    """

    tokens_to_generate: ClassVar[int] = 128
    template: ClassVar[str] = (
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards.\n{context}\n"
    )
    question: ClassVar[str] = (
        "What are all the special magic {kind} for {query} mentioned in the provided text? "
        "The special magic {kind} for {query} mentioned in the provided text are"
    )

    answer_start: ClassVar[str] = " The special magic"

    type_haystack: HaystackType = "essay"
    type_needle_k: KeyType = "words"
    type_needle_v: ValueType = "numbers"
    num_needle_k: NumKeys = 1
    num_needle_v: NumValues = 1
    num_needle_q: NumQueries = 1
    haystack: str | None = Field(
        None, description="The essay: plain text, or RULER's PaulGrahamEssays.json; default: 1,400 words that ship."
    )

    @model_validator(mode="after")
    def _needles_have_places(self) -> "Niah":
        if self.type_haystack == "essay" and self._num_needles > len(_DEPTHS):
            raise ValueError(f"num_needle_k, num_needle_v: an essay has places for {len(_DEPTHS)} needles")
        return self

    @property
    def _num_keys(self) -> int:
        return max(self.num_needle_k, self.num_needle_q)

    @property
    def _num_needles(self) -> int:
        return self._num_keys * self.num_needle_v

    def step(self) -> int:
        """The official 500 words of an essay would leave little of a short prompt."""
        if self.type_haystack == "essay":
            return 500 if self.length >= SHORT else 50
        return 25 if self.length >= SHORT else 5

    def minimum(self) -> int:
        return self._num_needles

    def generator(self, rng: random.Random, tokenizer: Tokenizer) -> Draw:
        words = essay_words(self.haystack) if self.type_haystack == "essay" else []
        return lambda index, units: self._draw(rng, words, units)

    def _draw(self, rng: random.Random, words: list[str], units: int) -> Sample:
        keys = [_random_value(rng, self.type_needle_k) for _ in range(self._num_keys)]
        values = [[_random_value(rng, self.type_needle_v) for _ in range(self.num_needle_v)] for _ in keys]
        needles = [self._needle(key, value) for key, own in zip(keys, values, strict=True) for value in own]
        rng.shuffle(needles)
        if self.type_haystack == "essay":
            context = _insert_sentences(rng, words, units, needles)
        else:
            lines = [self._line(rng) for _ in range(units)]
            places = sorted(rng.sample(range(units), len(needles)), reverse=True)
            for place, needle in zip(places, needles, strict=True):
                lines.insert(place, needle)
            context = "\n".join(lines)

        asked = rng.sample(range(len(keys)), self.num_needle_q)
        queries = [keys[place] for place in asked]
        query = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
        references = [value for place in asked for value in values[place]]
        template, question, kind = self.template, self.question, str(self.type_needle_v)
        if len(references) == 1:
            template, question, kind = _singular(template), _singular(question), kind.removesuffix("s")
        return self._sample(
            template.format(kind=kind, context=context), question.format(kind=kind, query=query), references
        )

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.type_needle_v, key=key, value=value)

    def _line(self, rng: random.Random) -> str:
        if self.type_haystack == "noise":
            return NOISE
        return self._needle(_random_value(rng, self.type_needle_k), _random_value(rng, self.type_needle_v))


def _random_value(rng: random.Random, kind: Kind) -> str:
    """A number of seven digits, an adjective and a noun, or a UUID (version 4)."""
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "words":
        return compound_word(rng)
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _singular(template: str) -> str:
    """The official template for one value, by the official replacements."""
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _insert_sentences(rng: random.Random, words: list[str], units: int, needles: Sequence[str]) -> str:
    """The first ``units`` words, over and over if need be, with needles between sentences at 40 equidistant depths."""
    repeated = words * math.ceil(units / len(words))
    sentences = split_sentences(" ".join(repeated[:units]))
    places = sorted(int(len(sentences) * (depth / 100)) for depth in rng.sample(_DEPTHS, len(needles)))
    parts = []
    for start, end, needle in zip([0, *places], places, needles, strict=False):
        parts += [" ".join(sentences[start:end]), needle]
    return " ".join([*parts, " ".join(sentences[places[-1] :])])


@register
class NiahSingle1(Niah):
    name: ClassVar[str] = "ruler_niah_single_1"
    type_haystack: HaystackType = "noise"


@register
class NiahSingle2(Niah):
    name: ClassVar[str] = "ruler_niah_single_2"


@register
class NiahSingle3(Niah):
    name: ClassVar[str] = "ruler_niah_single_3"
    type_needle_v: ValueType = "uuids"


@register
class NiahMultikey1(Niah):
    name: ClassVar[str] = "ruler_niah_multikey_1"
    num_needle_k: NumKeys = 4


@register
class NiahMultikey2(Niah):
    name: ClassVar[str] = "ruler_niah_multikey_2"
    type_haystack: HaystackType = "needle"


@register
class NiahMultikey3(Niah):
    name: ClassVar[str] = "ruler_niah_multikey_3"
    type_haystack: HaystackType = "needle"
    type_needle_k: KeyType = "uuids"
    type_needle_v: ValueType = "uuids"


@register
class NiahMultivalue(Niah):
    name: ClassVar[str] = "ruler_niah_multivalue"
    num_needle_v: NumValues = 4


@register
class NiahMultiquery(Niah):
    name: ClassVar[str] = "ruler_niah_multiquery"
    num_needle_q: NumQueries = 4
