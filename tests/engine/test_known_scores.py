"""Scores of contexts that were repeated, shared by the requests that read the same context."""

import numpy as np
import pytest

from tests.engine.conftest import random_prompt, run
from tests.engine.test_repetition import internal, params
from vllm_kvmerge.engine.known_scores import KnownScores

CONTEXT = 500
FIELDS = {"budget": 0.25, "chunk_size": 200, "context_tokens": CONTEXT}
"""Three chunks."""


def test_the_least_recently_used_go() -> None:
    known = KnownScores(max_bytes=100)
    first, second = known.keep(b"first", 40), known.keep(b"second", 40)
    assert known.find(b"first") == first and known.find(b"second") == second and known.find(b"third") is None
    assert known.find(b"first") == first  # used again
    third = known.keep(b"third", 60)
    assert known.find(b"second") is None and known.find(b"first") == first and known.find(b"third") == third
    assert known.take_forgotten() == [second] and known.take_forgotten() == []
    again = known.keep(b"first", 30)
    assert again not in (first, second, third) and known.take_forgotten() == [first]
    assert known.keep(b"large", 101) is None and not known.has_room(101) and len(known) == 2
    known.clear()
    assert len(known) == 0 and sorted(known.take_forgotten()) == sorted([again, third])


@pytest.fixture
def questions(engine) -> list[list[int]]:
    """Prompts with the same context, and nothing in the prefix cache."""
    assert engine.llm.reset_prefix_cache()
    rng = np.random.default_rng(71)
    context = random_prompt(rng, CONTEXT)
    return [context + rng.integers(19, 780, 12).tolist() for _ in range(4)]


def repeated(engine, asked: dict, **more: str) -> tuple[dict[str, list[int]], set[str]]:
    """What requests generate, and the names of the internal ones that ran for them. asked: prompt and parameters."""
    for name, (prompt, sampling) in asked.items():
        engine.add(name, prompt, sampling, **more)
    seen: set[str] = set()
    tokens = run(engine, lambda: seen.update(one.request_id for one in internal(engine)))
    engine.assert_empty()
    known = {
        engine.scheduler._repetitions.known_scores.find(key)
        for key in list(engine.scheduler._repetitions.known_scores._known)
    }
    assert set(engine.compression.known_scores) == known
    return tokens, seen


def test_requests_with_the_same_context_share_its_scores(engine, questions):
    """At the same time and later, whatever else differs; as if each had its context repeated for itself."""
    others = [{}, {"budget": 100}, {"allocator": "uniform"}, {"merger": "attention_matching"}]
    asked = {
        str(index): (prompt, params(8, **FIELDS | other))
        for index, (prompt, other) in enumerate(zip(questions, others, strict=True))
    }
    alone = {}
    for name, one in asked.items():
        assert engine.llm.reset_prefix_cache()
        tokens, seen = repeated(engine, {name: one})
        alone |= tokens
        assert len(seen) == 3
    assert engine.llm.reset_prefix_cache()
    last = {"3": asked.pop("3")}
    together, seen = repeated(engine, asked)
    assert len(seen) == 3
    later, seen = repeated(engine, last)
    assert together | later == alone and not seen


@pytest.mark.parametrize(
    "others",
    [{"normalized": True}, {"chunk_size": 250}, {"context_tokens": CONTEXT - 1}, {"cache_salt": "another user's"}, {}],
    ids=["tracker", "chunks", "context", "salt", "reset"],
)
def test_what_scores_depend_on_is_not_shared(engine, questions, others):
    repeated(engine, {"first": (questions[0], params(2, **FIELDS))})
    if not others:
        assert engine.llm.reset_prefix_cache()
    fields, salt = ({}, others) if "cache_salt" in others else (others, {})
    assert repeated(engine, {"second": (questions[1], params(2, **FIELDS | fields))}, **salt)[1]
