"""Documents have the length that was asked for, and their answers follow from what they state."""

from collections import Counter

import numpy as np
import pytest

from vllm_kvmerge.demo import language
from vllm_kvmerge.demo.documents import KIND_NAMES, MAX_COUNT, draw_prompt, training_sample


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def statements(text: str, verb: str) -> list[list[str]]:
    """Words that follow each ``verb`` up to the full stop."""
    return [part.split(" .")[0].split() for part in text.split(f"{verb} ")[1:]]


def facts(text: str) -> dict[str, list[str]]:
    return {key: digits for key, *digits in statements(text, "remember")}


def answer_recall(context, question, reference):
    return facts(context)[question[1]]


def answer_multikey(context, question, reference):
    return [word for key in question[1:-1] for word in (key, *facts(context)[key])]


def answer_multivalue(context, question, reference):
    _, key, first = question
    notes = {number: word for noted, number, word in statements(context, "note") if noted == key}
    count = language.NUMBER_WORDS.index(first) + 1
    assert sorted(notes) == sorted(language.NUMBER_WORDS[:count])
    parts = [f"{key} {number} {notes[number]}" for number in reversed(language.NUMBER_WORDS[:count])]
    return " , ".join(parts).split()[2:]


def answer_variables(context, question, reference):
    stored = dict(statements(context, "store"))
    assert len(set(stored.values())) == len(stored)
    chain = [question[1]]
    while chain[-1] in stored:
        chain.append(stored[chain[-1]])
    return chain[1:]


def marks(context: str, name: str) -> Counter[str]:
    return Counter(word for marked, word in statements(context, "mark") if marked == name)


def answer_counting(context, question, reference):
    count = marks(context, question[1])[question[2]]
    assert 1 <= count <= MAX_COUNT
    return [str(count)]


def answer_most(context, question, reference):
    (word, count), (_, second) = marks(context, question[1]).most_common(2)
    assert MAX_COUNT >= count > second
    return [word]


def answer_copying(context, question, reference):
    (words,) = [words for key, *words in statements(context, "quote") if key == question[1]]
    return words


def answer_lists(context, question, reference):
    following = dict(statements(context, "next"))
    _, tens, units, word, _ = question
    first, answer = int(tens + units) + 1, []
    for number in range(first, first + len(reference) // 5):
        word = following[word]
        answer += ["item", *f"{number:02}", word, "."]
    return answer


ANSWERS = {name: globals()[f"answer_{name}"] for name in KIND_NAMES}
OPTIONS = [
    ("recall", 16, 0, {}, 4),
    ("multikey", 1, 12, {"asked": 4}, 20),
    ("multikey", 3, 0, {}, None),
    ("multivalue", 4, 2, {"values": 4}, 13),
    ("variables", 5, 0, {"hops": 4}, 4),
    ("variables", 5, 3, {}, None),
    ("counting", 2, 0, {"words": 4}, 1),
    ("most", 3, 1, {}, 1),
    ("copying", 4, 0, {"span": 16}, 16),
    ("lists", 2, 0, {"period": 5, "items": 98, "first": 1}, 490),
    ("lists", 2, 4, {}, None),
]


@pytest.mark.parametrize(("kind", "units", "distractors", "options", "answered"), OPTIONS)
@pytest.mark.parametrize("length", [700, 1501])
def test_the_answer_follows_from_the_prompt(rng, kind, units, distractors, options, answered, length):
    for _ in range(5):
        prompt = draw_prompt(rng, kind, length, units, distractors, **options)
        assert len(prompt.text.split()) == length - 1  # and <s>
        assert prompt.question.startswith(" ")
        reference = prompt.answer.split()
        assert len(reference) == (answered or len(reference))
        assert ANSWERS[kind](prompt.context, prompt.question.split(), reference) == reference


def test_counts_are_as_far_apart_as_is_asked(rng):
    prompt = draw_prompt(rng, "counting", 300, words=3)
    assert len(marks(prompt.context, prompt.question.split()[1])) == 3
    prompt = draw_prompt(rng, "most", 300, words=4, margin=3)
    (_, largest), (_, second), *others = marks(prompt.context, prompt.question.split()[1]).most_common()
    assert largest >= second + 3 and len(others) == 2


def test_what_does_not_fit_is_refused(rng):
    with pytest.raises(ValueError, match="length: 100 tokens cannot hold statements and question of 115"):
        draw_prompt(rng, "recall", 100, 16)
    with pytest.raises(ValueError, match="more keys than there are"):
        draw_prompt(rng, "recall", 4000, 257)


@pytest.mark.parametrize("length", [64, 256, 1000, 4096])
def test_training_samples(rng, length):
    seen = set()
    # Samples are drawn anew each time: a kind that is rare must not be missed by chance. Long ones have many kinds.
    for _ in range(150 if length < 4096 else 50):
        tokens, marks = training_sample(rng, length)
        assert tokens.shape == marks.shape == (length,)
        assert tokens[0] == language.BOS and marks[0] == 0
        assert (tokens[1:] != language.BOS).all() and tokens.max() < len(language.VOCABULARY)
        seen |= {KIND_NAMES[mark - 1] for mark in marks if mark}
        for start, end, kind in runs(marks):
            check_answer(language.words_of(tokens[1:start]), language.words_of(tokens[start:end]), kind)
    assert len(seen) == len(KIND_NAMES) or length < 256


def runs(marks: np.ndarray) -> list[tuple[int, int, str]]:
    """(first, one after the last, kind) of each answer."""
    edges = np.flatnonzero(np.diff(marks, append=0)) + 1
    pairs = zip(edges, edges[1:], strict=False)
    return [(start, end, KIND_NAMES[marks[start] - 1]) for start, end in pairs if marks[start]]


VERBS = {
    "recall": "recall", "multikey": "recite", "multivalue": "list", "variables": "holders", "counting": "count",
    "most": "most", "copying": "repeat", "lists": "item",
}  # fmt: skip


def check_answer(before: str, answer: str, kind: str) -> None:
    """Marks cover the whole answer to the question that stands before it, and no more."""
    context, question = before.rsplit(f"{VERBS[kind]} ", 1)
    wanted = answer.removesuffix(" </s>").split()
    assert (answer.endswith("</s>")) == (kind != "lists")
    assert ANSWERS[kind](context, [VERBS[kind], *question.split()], wanted) == wanted
