"""Documents for the demo model: statements spread through plain text, questions about them at the end.

| kind | statements | question | answer |
|---|---|---|---|
| recall | `remember K d d d d .` | `recall K` | `d d d d </s>` |
| multikey | the same, of several keys | `recite K L :` | `K d d d d L d d d d </s>` |
| multivalue | `note K three w .` `note K two w .` `note K one w .` | `list K three` | `w , K two w , K one w </s>` |
| variables | `store V A .` `store A B .` `store B C .` | `holders V` | `A B C </s>` |
| counting | `mark L A .` one to six times for each of several A | `count L A` | `d </s>` |
| most | the same | `most L` | `A </s>` |
| copying | `quote K w w w w .` | `repeat K` | `w w w w </s>` |
| lists | `next A B .` `next B C .` `next C A .` | `item 0 1 A .` | `item 0 2 B . item 0 3 C . item 0 4 A .` ... |

K, L, V, A, B, C are key words, w words of plain text, d digits. What one question is about is a unit; a document has
units of one or several kinds, no key in two of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_kvmerge.demo.language import (
    BOS,
    DIGIT_BASE,
    EOS,
    FILLER_BASE,
    ID,
    NUM_FILLERS,
    NUMBER_WORDS,
    distinct_keys,
    plain_text,
    random_digits,
    words_of,
)

DIGITS_PER_ANSWER = 4
MAX_COUNT = 6
LAST_ITEM = 99


@dataclass(frozen=True)
class Question:
    """Token ids of what is asked and of the answer, which is all that the question's mask covers."""

    ask: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Unit:
    """Statements, each a list of token ids, and questions about them."""

    statements: list[list[int]]
    questions: list[Question]

    def __len__(self) -> int:
        """Tokens of statements, questions and answers."""
        return sum(map(len, self.statements)) + sum(len(q.ask) + len(q.answer) for q in self.questions)


@dataclass(frozen=True)
class Prompt:
    """A question to a model, ``context + question``, and the right answer without ``</s>``, all as text.

    The question begins with a space, the context not with ``<s>``, which the tokenizer puts in front.
    """

    context: str
    question: str
    answer: str

    @property
    def text(self) -> str:
        return self.context + self.question


def recall(rng: np.random.Generator, keys: Iterator[int]) -> Unit:
    key, digits = next(keys), random_digits(rng, DIGITS_PER_ANSWER)
    return Unit([_fact(key, digits)], [Question([ID["recall"], key], [*digits, EOS])])


def _fact(key: int, digits: list[int]) -> list[int]:
    return [ID["remember"], key, *digits, ID["."]]


def multikey(rng: np.random.Generator, keys: Iterator[int], asked: int | None = None) -> Unit:
    """``asked``: how many keys are asked for; 2 to 4 unless told."""
    facts = [(next(keys), random_digits(rng, DIGITS_PER_ANSWER)) for _ in range(asked or int(rng.integers(2, 5)))]
    ask = [ID["recite"], *(key for key, _ in facts), ID[":"]]
    answer = [token for key, digits in facts for token in (key, *digits)]
    order = rng.permutation(len(facts))
    return Unit([_fact(*facts[i]) for i in order], [Question(ask, [*answer, EOS])])


def multivalue(rng: np.random.Generator, keys: Iterator[int], values: int | None = None) -> Unit:
    """``values``: how many the key has, 4 at most; 2 to 4 unless told."""
    numbers = [ID[word] for word in reversed(NUMBER_WORDS[: values or int(rng.integers(2, 5))])]
    key, words = next(keys), (rng.integers(0, NUM_FILLERS, len(numbers)) + FILLER_BASE).tolist()
    notes = [[ID["note"], key, number, word, ID["."]] for number, word in zip(numbers, words, strict=True)]
    answer = [words[0]]
    for number, word in zip(numbers[1:], words[1:], strict=True):
        answer += [ID[","], key, number, word]
    return Unit(
        [notes[i] for i in rng.permutation(len(notes))], [Question([ID["list"], key, numbers[0]], [*answer, EOS])]
    )


def variables(rng: np.random.Generator, keys: Iterator[int], hops: int | None = None) -> Unit:
    """``hops``: variables that hold the value, each but the first set from the one before; 1 to 4 unless told."""
    chain = [next(keys) for _ in range(1 + (hops or int(rng.integers(1, 5))))]
    statements = [[ID["store"], a, b, ID["."]] for a, b in zip(chain, chain[1:], strict=False)]
    return Unit(statements, [Question([ID["holders"], chain[0]], [*chain[1:], EOS])])


def counting(rng: np.random.Generator, keys: Iterator[int], words: int | None = None) -> Unit:
    """``words``: how many different words are marked, each ``MAX_COUNT`` times at most; 2 to 4 unless told."""
    name, marked = next(keys), [next(keys) for _ in range(words or int(rng.integers(2, 5)))]
    counts = rng.integers(1, MAX_COUNT + 1, len(marked)).tolist()
    questions = [
        Question([ID["count"], name, word], [DIGIT_BASE + count, EOS])
        for word, count in zip(marked, counts, strict=True)
    ]
    return Unit(_marks(rng, name, marked, counts), [questions[i] for i in rng.permutation(len(questions))])


def most(rng: np.random.Generator, keys: Iterator[int], words: int | None = None, margin: int = 1) -> Unit:
    """``words``: how many different words are marked; 2 to 4 unless told. ``margin``: how much more often one of them
    is than any other, at least."""
    name, marked = next(keys), [next(keys) for _ in range(words or int(rng.integers(2, 5)))]
    largest = int(rng.integers(1 + margin, MAX_COUNT + 1))
    counts = [largest, *rng.integers(1, largest - margin + 1, len(marked) - 1).tolist()]
    return Unit(_marks(rng, name, marked, counts), [Question([ID["most"], name], [marked[0], EOS])])


def _marks(rng: np.random.Generator, name: int, words: list[int], counts: list[int]) -> list[list[int]]:
    marks = [[ID["mark"], name, w, ID["."]] for w, count in zip(words, counts, strict=True) for _ in range(count)]
    return [marks[i] for i in rng.permutation(len(marks))]


def copying(rng: np.random.Generator, keys: Iterator[int], span: int | None = None) -> Unit:
    """``span``: words to be repeated; 4 to 24 unless told."""
    key, words = next(keys), plain_text(rng, span or int(rng.integers(4, 25)))
    return Unit([[ID["quote"], key, *words, ID["."]]], [Question([ID["repeat"], key], [*words, EOS])])


def lists(
    rng: np.random.Generator,
    keys: Iterator[int],
    period: int | None = None,
    items: int | None = None,
    first: int = 0,
    most_items: int = 24,
) -> Unit:
    """``period``: 2 to 6 unless told. ``items``: in the answer, 4 to ``most_items`` unless told. ``first``: number of
    the item that is given; unless told, one that leaves numbers for the others."""
    cycle = [next(keys) for _ in range(period or int(rng.integers(2, 7)))]
    items = items or int(rng.integers(4, most_items + 1))
    first = first or int(rng.integers(1, LAST_ITEM - items + 1))
    successors = [[ID["next"], a, b, ID["."]] for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]

    def item(index: int) -> list[int]:
        number = first + index
        digits = [DIGIT_BASE + number // 10, DIGIT_BASE + number % 10]
        return [ID["item"], *digits, cycle[index % len(cycle)], ID["."]]

    answer = [token for index in range(1, items + 1) for token in item(index)]
    return Unit([successors[i] for i in rng.permutation(len(cycle))], [Question(item(0), answer)])


KINDS: dict[str, Callable[..., Unit]] = {
    kind.__name__: kind for kind in (recall, multikey, multivalue, variables, counting, most, copying, lists)
}
KIND_NAMES = tuple(KINDS)
_MOST_UNITS = {
    "recall": 32, "multikey": 12, "multivalue": 10, "variables": 10, "counting": 6, "most": 8, "copying": 8, "lists": 2,
}  # fmt: skip
"""Most units of each kind in a training sample."""
_SHARE_OF_UNITS = 0.8
"""Largest share of a training sample's tokens that units take."""


def document(rng: np.random.Generator, length: int, statements: Sequence[Sequence[int]]) -> list[int]:
    """``length`` token ids: the statements, in this order, at random places of plain text.

    Raises:
        ValueError: the statements are longer than that.
    """
    room = length - sum(map(len, statements))
    if room < 0:
        raise ValueError(f"length {length} cannot hold {length - room} tokens of statements")
    text, places, tokens, last = plain_text(rng, room), np.sort(rng.integers(0, room + 1, len(statements))), [], 0
    for place, statement in zip(places.tolist(), statements, strict=True):
        tokens += [*text[last:place], *statement]
        last = place
    return tokens + text[last:]


def interleave(rng: np.random.Generator, units: Sequence[Unit]) -> list[list[int]]:
    """The statements of all units, mixed; those of one unit keep their order."""
    owners = [index for index, unit in enumerate(units) for _ in unit.statements]
    remaining = [iter(unit.statements) for unit in units]
    return [next(remaining[owners[i]]) for i in rng.permutation(len(owners))]


def training_sample(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """``[length]`` token ids from ``<s>`` on, and ``[length]`` int64: 0, or where an answer is, 1 + its kind's index
    in ``KIND_NAMES``. One to three kinds of units; every question is asked, in random order."""
    keys, kinds = distinct_keys(rng), rng.choice(len(KINDS), int(rng.integers(1, 4)), replace=False).tolist()
    budget = int(_SHARE_OF_UNITS * length / len(kinds))
    units: list[Unit] = []
    questions: list[tuple[int, Question]] = []
    for kind in kinds:
        left = budget
        for _ in range(_MOST_UNITS[KIND_NAMES[kind]]):
            options = {"most_items": max(24, min(90, length // 20))} if KIND_NAMES[kind] == "lists" else {}
            unit = KINDS[KIND_NAMES[kind]](rng, keys, **options)
            if len(unit) > left:
                break
            left -= len(unit)
            units.append(unit)
            questions += [(kind, question) for question in unit.questions]
    asked: list[int] = []
    marks: list[int] = []
    for index in rng.permutation(len(questions)):
        kind, question = questions[index]
        asked += question.ask + question.answer
        marks += [0] * len(question.ask) + [1 + kind] * len(question.answer)
    body = document(rng, length - 1 - len(asked), interleave(rng, units))
    return np.array([BOS, *body, *asked]), np.array([0] * (1 + len(body)) + marks)


def prompt_of(rng: np.random.Generator, length: int, units: Sequence[Unit], question: Question) -> Prompt:
    """A prompt of exactly ``length`` tokens (``<s>`` included) with what ``units`` state, in random places.

    Raises:
        ValueError: they do not fit.
    """
    statements = interleave(rng, units)
    needed = 1 + sum(map(len, statements)) + len(question.ask)
    if needed > length:
        raise ValueError(f"length: {length} tokens cannot hold statements and question of {needed}")
    body = document(rng, length - 1 - len(question.ask), statements)
    answer = [token for token in question.answer if token != EOS]
    return Prompt(words_of(body), " " + words_of(question.ask), words_of(answer))


def draw_prompt(
    rng: np.random.Generator, kind: str, length: int, units: int = 1, distractors: int = 0, **options: int
) -> Prompt:
    """A prompt of exactly ``length`` tokens (``<s>`` included) that asks one question about one of ``units`` units.

    distractors: facts of the kind ``recall`` besides. options: of the kind's function, such as ``hops`` of
    :func:`variables`.

    Raises:
        ValueError: the units do not fit.
    """
    keys = distinct_keys(rng)
    try:
        drawn = [KINDS[kind](rng, keys, **options) for _ in range(units)]
        others = [recall(rng, keys) for _ in range(distractors)]
    except StopIteration:
        raise ValueError(f"{units} units of {kind} and {distractors} facts need more keys than there are") from None
    questions = drawn[int(rng.integers(units))].questions
    return prompt_of(rng, length, drawn + others, questions[int(rng.integers(len(questions)))])
