"""Words, sentences and names that haystacks are made of."""

import json
import random
import re
from functools import cache
from importlib.resources import files

from vllm_kvmerge.evaluation.tasks.data import read_text

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@cache
def english_words(*kinds: str) -> list[str]:
    """wonderwords' lists of these kinds (NOUNS, ADJECTIVES, VERBS), sorted, each word once."""
    try:
        from wonderwords import Defaults, RandomWord
    except ImportError as error:
        raise ImportError("RULER takes its words from wonderwords: pip install 'vllm-kvmerge[eval]'") from error
    return RandomWord(enhanced_prefixes=False, **{kind: Defaults[kind] for kind in kinds}).filter()


def compound_word(rng: random.Random) -> str:
    return f"{rng.choice(english_words('ADJECTIVES'))}-{rng.choice(english_words('NOUNS'))}"


def essay_words(path: str | None) -> list[str]:
    """The words of a text, or of the official PaulGrahamEssays.json; by default of the text that ships."""
    if path is None:
        text = files(__package__).joinpath("haystack.txt").read_text(encoding="utf-8")
    else:
        text = read_text("haystack", path)
        if path.endswith(".json"):
            try:
                text = json.loads(text)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f'haystack: {path} is not JSON with a field "text"') from error
    words = text.split()
    if not words:
        raise ValueError(f"haystack: {path} has no words")
    return words


def split_sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text.strip())


def distinct_names(rng: random.Random, count: int, alphabet: str, letters: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(alphabet, k=letters))] = None
    return list(names)
