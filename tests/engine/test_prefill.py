"""``prefill``: a context is compressed while it is being computed, so that it need not fit into the pool."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.demo_model import BLOCK_SIZE
from tests.engine.conftest import greedy, random_prompt, run
from vllm_kvmerge.engine.worker import gather
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.policies.rescoring import newest_scores

BUDGET, CHUNK, PROMPT, ANSWER = 96, 128, 700, 20
POLICIES = sorted(set(PRESETS) - {"kvzip", "kvzip_once"})
"""A context that is not whole cannot be repeated."""


def params(policy: str, max_tokens: int = ANSWER, **fields) -> SamplingParams:
    return greedy(policy, max_tokens, **{"budget": BUDGET, "prefill": {"chunk": CHUNK}} | fields)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_prompt(np.random.default_rng(91), PROMPT)


def test_no_more_than_budget_and_chunk_is_held(engine, prompt):
    """By any of the policies, all in one batch, from the first chunk to the last token."""
    assert engine.llm.reset_prefix_cache()
    most: dict[str, int] = {}
    compressed: dict[str, set[int]] = {}

    def watch() -> None:
        for request in engine.scheduler.running:
            name, held = request.request_id.rsplit("-", 1)[0], engine.manager.num_held_blocks(request.request_id)
            most[name] = max(most.get(name, 0), held)
            compressed.setdefault(name, set()).add(engine.scheduler._states[request.request_id].segments.tail)

    for policy in POLICIES:
        engine.add(policy, prompt, params(policy))
    tokens = run(engine, watch)
    engine.assert_empty()
    for policy in POLICIES:
        assert len(tokens[policy]) == ANSWER
        # Where the tail begins within a block, and layers or heads with more than others.
        assert most[policy] <= (BUDGET + CHUNK) / BLOCK_SIZE + 3, policy
        assert {tail for tail in compressed[policy] if 0 < tail <= PROMPT} == {224, 352, 480, 608, 700}, policy


def test_later_chunks_are_scored_by_the_newest_queries(engine, prompt, monkeypatch):
    """For trackers of a window: of each layer, by so many queries up to the chunk's end."""
    seen = []

    def watched(entries, queries, *others):
        seen.append((len(entries), queries.positions[0].tolist()))
        return newest_scores(entries, queries, *others)

    monkeypatch.setattr(gather, "newest_scores", watched)
    engine.tokens([prompt], params("snapkv", score_window=20))
    expected = {(BUDGET + CHUNK, range(end - 20, end)) for end in (352, 480, 608)} | {(BUDGET + 92, range(680, 700))}
    assert {(count, range(where[0], where[-1] + 1)) for count, where in seen} == expected
    assert all(len(where) == 20 for _, where in seen)
    seen.clear()
    engine.tokens([prompt], params("h2o", score_window="all"))
    assert not seen


TWO_CHUNKS = ["h2o", "keepkv", "weightedkv", "streaming_llm", "zsmerge", "knorm", "local"]


@pytest.mark.thin(7)
@pytest.mark.parametrize("policy", TWO_CHUNKS)
def test_of_two_chunks_the_second_is_as_what_follows_a_context(engine, prompt, policy):
    """Trackers of all queries, and those of none, go on from a context's front as they do while generating."""
    scored = {} if policy in ("streaming_llm", "knorm", "local") else {"score_window": "all"}
    common = {"budget": BUDGET, "interval": CHUNK, "decode": "bounded", **scored}
    whole = prompt[: BUDGET + 2 * CHUNK]
    chunked = engine.tokens([whole], params(policy, 60, **common))
    followed = engine.tokens([whole], params(policy, 60, **common, prefill=None, context_tokens=BUDGET + CHUNK))
    assert chunked == followed
    assert chunked != engine.tokens([whole], params(policy, 60, **common, prefill=None))


@pytest.mark.thin(8)
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "keepkv", "adakv", "kvzap", "morphkv", "streaming_llm", "rkv"])
def test_parts_of_a_context_are_shared(engine, prompt, policy):
    """Another request goes on from the longest part of its context that is there, as if it had computed it."""
    fields = {"score_window": "all"} if policy == "h2o" else {}
    rng = np.random.default_rng(97)
    others = [prompt[:500] + random_prompt(rng, length)[1:] for length in (10, 300)]
    alone = [engine.tokens([other], params(policy, **fields))[0] for other in (*others, prompt)]
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts() as fronts:
        assert engine.tokens([prompt], params(policy, **fields)) == alone[2:]
        assert len(fronts) == 5  # four parts, and the whole
        outputs = engine.generate([*others, prompt], params(policy, **fields))
        assert [list(output.outputs[0].token_ids) for output in outputs] == alone
        assert [output.num_cached_tokens for output in outputs] == [480, 480, PROMPT - 1]
        for change in ({"budget": 0.2}, {"prefill": {"chunk": CHUNK - 1}}):
            assert engine.generate([prompt], params(policy, **fields | change))[0].num_cached_tokens <= BUDGET + CHUNK
    engine.assert_empty()


def test_parts_are_not_shared_where_blocks_are_few(engine, prompt):
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts() as fronts, engine.with_blocks(11):
        assert len(engine.tokens([prompt], params("snapkv"))[0]) == ANSWER
        assert len(fronts) <= 2
