"""The demo model's synthetic task: facts spread through filler text, questions at the end.

``python -m vllm_kvmerge.demo.recall --length 1000 --facts 16`` prints a prompt, and its answer on stderr.

Text is a sequence of words, one token each. A fact is ``remember K d d d d .``, a question
``recall K`` and its answer ``d d d d </s>``. Filler walks a fixed random graph (eight
successors per word), so that a language model has something to learn from it.
"""

import argparse
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

NUM_KEYS = 256
NUM_FILLERS = 512
DIGITS_PER_ANSWER = 4
SPECIAL_WORDS = ("<pad>", "<unk>", "<s>", "</s>")
FUNCTION_WORDS = ("remember", "recall", ".", ",", "?")
DIGIT_WORDS = tuple("0123456789")
_SUCCESSORS_PER_WORD = 8


def _pronounceable(count: int, ending: str) -> tuple[str, ...]:
    """``count`` distinct made-up words; keys end in a vowel, fillers in a consonant."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words = [a + b + ending for a in syllables for b in syllables]
    order = np.random.default_rng(20_260).permutation(len(words))
    return tuple(words[i] for i in order[:count])


KEY_WORDS = _pronounceable(NUM_KEYS, "")
FILLER_WORDS = _pronounceable(NUM_FILLERS, "n")
VOCABULARY = SPECIAL_WORDS + FUNCTION_WORDS + DIGIT_WORDS + KEY_WORDS + FILLER_WORDS
_ID = {word: index for index, word in enumerate(VOCABULARY)}
BOS, EOS = _ID["<s>"], _ID["</s>"]
_KEY_BASE, _FILLER_BASE, _DIGIT_BASE = _ID[KEY_WORDS[0]], _ID[FILLER_WORDS[0]], _ID["0"]
_SUCCESSORS = np.random.default_rng(20_261).integers(0, NUM_FILLERS, (NUM_FILLERS, _SUCCESSORS_PER_WORD))


@dataclass(frozen=True)
class RecallPrompt:
    """One prompt: its text (without ``<s>``), the asked key and the digits expected after it."""

    text: str
    key: str
    answer: str


def _filler(rng: np.random.Generator, count: int) -> np.ndarray:
    steps = rng.integers(0, _SUCCESSORS_PER_WORD, count).tolist()
    words, word = np.empty(count, dtype=np.int64), int(rng.integers(NUM_FILLERS))
    for i, step in enumerate(steps):
        words[i] = word
        word = int(_SUCCESSORS[word, step])
    return words + _FILLER_BASE


def _document(rng: np.random.Generator, length: int, num_facts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``length`` token ids holding ``num_facts`` facts, their key ids and their ``[num_facts, 4]`` digit ids."""
    keys = rng.choice(NUM_KEYS, num_facts, replace=False) + _KEY_BASE
    digits = rng.integers(0, 10, (num_facts, DIGITS_PER_ANSWER)) + _DIGIT_BASE
    fact_length = DIGITS_PER_ANSWER + 3
    room = length - num_facts * fact_length
    if room < 0:
        raise ValueError(f"length {length} cannot hold {num_facts} facts of {fact_length} tokens")
    pieces = np.split(_filler(rng, room), np.sort(rng.integers(0, room + 1, num_facts)))
    tokens: list[ArrayLike] = [pieces[0]]
    for key, value, piece in zip(keys, digits, pieces[1:], strict=True):
        tokens += [[_ID["remember"], key], value, [_ID["."]], piece]
    return np.concatenate(tokens).astype(np.int64), keys, digits


def training_sample(
    rng: np.random.Generator, length: int, num_facts: int, num_questions: int
) -> tuple[np.ndarray, np.ndarray]:
    """``[length]`` token ids from ``<s>`` on, and a ``[length]`` bool mask of the answer tokens (digits, ``</s>``)."""
    question_length = DIGITS_PER_ANSWER + 3
    document, keys, digits = _document(rng, length - 1 - num_questions * question_length, num_facts)
    tokens: list[ArrayLike] = [[BOS], document]
    is_answer = [np.zeros(1 + len(document), dtype=bool)]
    for fact in rng.integers(0, num_facts, num_questions):
        tokens += [[_ID["recall"], keys[fact]], digits[fact], [EOS]]
        is_answer += [np.zeros(2, dtype=bool), np.ones(DIGITS_PER_ANSWER + 1, dtype=bool)]
    return np.concatenate(tokens).astype(np.int64), np.concatenate(is_answer)


def draw_prompt(rng: np.random.Generator, length: int, num_facts: int) -> RecallPrompt:
    """A prompt of exactly ``length`` tokens (``<s>`` included) that asks for one of its facts."""
    document, keys, digits = _document(rng, length - 3, num_facts)
    fact = int(rng.integers(num_facts))
    key = VOCABULARY[keys[fact]]
    text = " ".join(VOCABULARY[i] for i in document) + f" recall {key}"
    return RecallPrompt(text=text, key=key, answer=" ".join(VOCABULARY[i] for i in digits[fact]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints a prompt of the recall task, and its answer on stderr.")
    parser.add_argument("--length", type=int, default=1000, help="tokens")
    parser.add_argument("--facts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=None, help="default: another prompt at each run")
    arguments = parser.parse_args()
    prompt = draw_prompt(np.random.default_rng(arguments.seed), arguments.length, arguments.facts)
    print(prompt.text)
    print("answer:", prompt.answer, file=sys.stderr)


if __name__ == "__main__":
    main()
