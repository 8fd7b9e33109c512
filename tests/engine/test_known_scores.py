"""Scores of contexts that were repeated, shared by the requests that read the same context."""

import numpy as np
import pytest
from vllm.lora.request import LoRARequest

from tests.engine.conftest import random_prompt, run
from tests.engine.test_fronts import make_request
from tests.engine.test_repetition import add, internal, params
from vllm_kvmerge.engine.known_scores import KnownScores, context_key
from vllm_kvmerge.request.parameters import parse_compression

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


def repeated(engine, asked: dict) -> tuple[dict[str, list[int]], set[str]]:
    """What requests generate, and the names of the internal ones that ran for them. asked: prompt and parameters."""
    for name, (prompt, sampling) in asked.items():
        add(engine, name, prompt, sampling)
    seen: set[str] = set()
    tokens = run(engine, lambda: seen.update(one.request_id for one in internal(engine)))
    engine.assert_empty()
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    known = {engine.scheduler._known_scores.find(key) for key in list(engine.scheduler._known_scores._known)}
    assert set(worker.model_runner.compression.known_scores) == known
    return tokens, seen


def test_requests_with_the_same_context_share_its_scores(engine, questions):
    """At the same time and later, whatever else differs; as if each had its context repeated for itself."""
    others = [{}, {"budget": 100}, {"allocator": "uniform"}, {"merger": "attention_matching"}]
    variants = [FIELDS | other for other in others]
    alone = []
    for prompt, fields in zip(questions, variants, strict=True):
        assert engine.llm.reset_prefix_cache()
        tokens, seen = repeated(engine, {"alone": (prompt, params(8, **fields))})
        assert len(seen) == 3
        alone.append(tokens["alone"])
    assert engine.llm.reset_prefix_cache()
    asked = {str(i): (prompt, params(8, **variants[i])) for i, prompt in enumerate(questions)}
    together = {name: asked[name] for name in ("0", "1", "2")}
    tokens, seen = repeated(engine, together)
    assert [tokens[name] for name in together] == alone[:3]
    assert len(seen) == 3
    tokens, seen = repeated(engine, {"3": asked["3"]})
    assert tokens == {"3": alone[3]} and not seen


@pytest.mark.parametrize(
    "others",
    [{"normalized": True}, {"chunk_size": 250}, {"context_tokens": CONTEXT - 1}, {"salt": "another user's"}, {}],
    ids=["tracker", "chunks", "context", "salt", "reset"],
)
def test_what_scores_depend_on_is_not_shared(engine, questions, others):
    repeated(engine, {"first": (questions[0], params(2, **FIELDS))})
    others = dict(others)
    prompt = {"prompt_token_ids": questions[1]}
    if salt := others.pop("salt", None):
        prompt["cache_salt"] = salt
    elif not others:
        assert engine.llm.reset_prefix_cache()
    engine.llm.llm_engine.add_request("second", prompt, params(2, **(FIELDS | others)))
    seen: set[str] = set()
    run(engine, lambda: seen.update(one.request_id for one in internal(engine)))
    assert seen
    engine.assert_empty()


def test_scores_are_told_apart_by_their_adapter():
    """By its name and its path: one that is loaded in the place of another has its number."""
    config = parse_compression({"policy": "kvzip"})
    assert config is not None
    tracker = config.policy.tracker
    adapters = [None, LoRARequest("a", 1, "/one"), LoRARequest("b", 2, "/one"), LoRARequest("a", 1, "/two")]
    requests = [make_request(lora_request=one) for one in adapters]
    assert len({context_key(one, 80, tracker) for one in requests}) == len(adapters)
    again = make_request(lora_request=LoRARequest("a", 7, "/one"))
    assert context_key(again, 80, tracker) == context_key(requests[1], 80, tracker)


def test_who_waits_for_scores_takes_over_when_the_other_ends(engine, questions):
    tokens, _ = repeated(engine, {"alone": (questions[1], params(8, **FIELDS))})
    assert engine.llm.reset_prefix_cache()
    for name, prompt in zip(("first", "second"), questions, strict=False):
        add(engine, name, prompt, params(8, **FIELDS))
    while not any(one.index for one in internal(engine)):
        engine.llm.llm_engine.step()
    assert {one.parent.request_id.split("-")[0] for one in internal(engine)} == {"first"}
    engine.llm.llm_engine.abort_request(["first"])
    assert run(engine) == {"second": tokens["alone"]}
    engine.assert_empty()
