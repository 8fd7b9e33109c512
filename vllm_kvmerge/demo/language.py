"""The demo model's vocabulary and its plain text.

Text is a sequence of words, one token each. Plain text walks a fixed random graph with eight successors per word. The
walk has habits: where a word came up before in the same document, the successor chosen last is chosen again with
probability 0.7. So the language has something to be learnt once, and every document something to be remembered.
"""

from collections.abc import Iterable, Iterator

import numpy as np

NUM_KEYS = 256
NUM_FILLERS = 512
SPECIAL_WORDS = ("<pad>", "<unk>", "<s>", "</s>")
DIGIT_WORDS = tuple("0123456789")
_SUCCESSORS_PER_WORD = 8
_HABIT = 0.7


def _pronounceable(count: int, ending: str) -> tuple[str, ...]:
    """``count`` distinct made-up words; keys end in a vowel, fillers in a consonant."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words = [a + b + ending for a in syllables for b in syllables]
    order = np.random.default_rng(20_260).permutation(len(words))
    return tuple(words[i] for i in order[:count])


KEY_WORDS = _pronounceable(NUM_KEYS, "")
FILLER_WORDS = _pronounceable(NUM_FILLERS, "n")
NUMBER_WORDS = ("one", "two", "three", "four")
VOCABULARY = (
    *SPECIAL_WORDS,
    *("remember", "recall", ".", ",", "?"),
    *DIGIT_WORDS,
    *KEY_WORDS,
    *FILLER_WORDS,
    *(":", "recite", "note", "list", "store", "holders", "mark", "count", "most", "quote", "repeat", "next", "item"),
    *NUMBER_WORDS,
)
ID = {word: index for index, word in enumerate(VOCABULARY)}
BOS, EOS = ID["<s>"], ID["</s>"]
KEY_BASE, FILLER_BASE, DIGIT_BASE = ID[KEY_WORDS[0]], ID[FILLER_WORDS[0]], ID["0"]
_SUCCESSORS = np.random.default_rng(20_261).integers(0, NUM_FILLERS, (NUM_FILLERS, _SUCCESSORS_PER_WORD)).tolist()


def words_of(ids: Iterable[int]) -> str:
    return " ".join(VOCABULARY[i] for i in ids)


def plain_text(rng: np.random.Generator, count: int) -> list[int]:
    """``count`` token ids of plain text."""
    steps, habits = rng.integers(0, _SUCCESSORS_PER_WORD, count).tolist(), (rng.random(count) < _HABIT).tolist()
    word, last, text = int(rng.integers(NUM_FILLERS)), {}, []
    for step, habit in zip(steps, habits, strict=True):
        text.append(word + FILLER_BASE)
        if not habit or word not in last:
            last[word] = _SUCCESSORS[word][step]
        word = last[word]
    return text


def distinct_keys(rng: np.random.Generator) -> Iterator[int]:
    """Token ids of all key words, in random order."""
    return iter((rng.permutation(NUM_KEYS) + KEY_BASE).tolist())


def random_digits(rng: np.random.Generator, count: int) -> list[int]:
    """``count`` token ids of digits."""
    return (rng.integers(0, 10, count) + DIGIT_BASE).tolist()
