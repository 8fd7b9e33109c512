"""``prefill``: a context is compressed while it is being computed, so that it need not fit into the pool."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.demo_model import BLOCK_SIZE
from tests.engine.conftest import preempting, random_prompt, run
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.engine.worker import compactor
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.policies.rescoring import newest_scores

BUDGET, CHUNK, PROMPT, ANSWER = 96, 128, 700, 20
POLICIES = [name for name in sorted(PRESETS) if name != "kvzip"]
"""A context that is not whole cannot be repeated."""


def params(policy: str, max_tokens: int = ANSWER, **fields) -> SamplingParams:
    fields = {"budget": BUDGET, "prefill": {"chunk": CHUNK}} | SMALL.get(policy, {}) | fields
    extra = compression(policy, **fields)
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_prompt(np.random.default_rng(91), PROMPT)


@pytest.fixture(scope="module")
def alone(engine, prompt):
    """What each policy generates without company."""
    assert engine.llm.reset_prefix_cache()
    return {policy: engine.tokens([prompt], params(policy))[0] for policy in POLICIES}


def test_no_more_than_budget_and_chunk_is_held(engine, prompt):
    """By any of the policies, all in one batch, from the first chunk to the last token."""
    assert engine.llm.reset_prefix_cache()
    most: dict[str, int] = {}
    compressed: dict[str, set[int]] = {}

    def watch() -> None:
        for request in engine.scheduler.running:
            name, held = request.request_id.rsplit("-", 1)[0], engine.manager.num_held_blocks(request.request_id)
            most[name] = max(most.get(name, 0), held)
            compressed.setdefault(name, set()).add(engine.manager.segments_of(request.request_id).tail)

    for policy in POLICIES:
        engine.add(policy, prompt, params(policy))
    tokens = run(engine, watch)
    engine.assert_empty()
    assert all(len(tokens[policy]) == ANSWER for policy in POLICIES)
    for policy in POLICIES:
        chunk, budget = CHUNK, BUDGET
        # Where the tail begins within a block, and layers or heads with more than others.
        assert most[policy] <= (budget + chunk) / BLOCK_SIZE + 3, policy
        first = {224, 352, 480, 608, 700}
        assert {tail for tail in compressed[policy] if 0 < tail <= PROMPT} == first, policy


def test_later_chunks_are_scored_by_the_newest_queries(engine, prompt, monkeypatch):
    """For trackers of a window: of each layer, by so many queries up to the chunk's end."""
    seen = []

    def watched(entries, queries, *others):
        seen.append((len(entries), queries.positions[0].tolist()))
        return newest_scores(entries, queries, *others)

    monkeypatch.setattr(compactor, "newest_scores", watched)
    engine.tokens([prompt], params("snapkv", score_window=20))
    expected = [(BUDGET + CHUNK, list(range(end - 20, end))) for end in (352, 480, 608)]
    assert sorted({(count, tuple(where)) for count, where in seen}) == sorted(
        (count, tuple(where)) for count, where in [*expected, (BUDGET + 92, list(range(680, 700)))]
    )
    seen.clear()
    engine.tokens([prompt], params("h2o", score_window="all"))
    assert not seen


@pytest.mark.slow
def test_company_changes_nothing(engine, prompt, alone):
    rng = np.random.default_rng(92)
    for policy in POLICIES:
        engine.add(policy, prompt, params(policy))
    for index in range(3):
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        engine.add(f"plain{index}", random_prompt(rng, 90 + 300 * index), sampling)
    tokens = run(engine)
    engine.assert_empty()
    assert {policy: tokens[policy] for policy in POLICIES} == alone


@pytest.mark.thin(4)
@pytest.mark.parametrize("when", [1, 2, 4, 9])
def test_a_preempted_request_goes_through_the_same_compressions(engine, prompt, alone, when):
    for policy in POLICIES:
        engine.add(policy, prompt, params(policy))
    tokens = run(engine, preempting(engine, when))
    engine.assert_empty()
    assert {policy: tokens[policy] for policy in POLICIES} == alone


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


def test_the_context_alone_is_compressed_while_it_is_computed(engine, prompt):
    """What follows it stays whole; a context within budget and chunk is compressed once, as without the field."""
    fields = {"budget": BUDGET, "decode": "grow", "context_tokens": 400}
    tails = set()
    engine.add("asked", prompt, params("snapkv", **fields))
    run(engine, lambda: tails.update(one.tail for one in engine.manager.segments.values()))
    assert tails == {224, 352, 400}
    fields["prefill"] = {"chunk": 400 - BUDGET}
    assert engine.tokens([prompt], params("snapkv", **fields)) == engine.tokens(
        [prompt], params("snapkv", **fields | {"prefill": None})
    )
    engine.assert_empty()


def test_what_is_known_is_shared_once_the_context_ends(engine, prompt, alone):
    """The front of all chunks serves the next request with the same context."""
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts() as fronts:
        for policy in ("snapkv", "keepkv", "adakv"):
            for _ in range(2):
                (output,) = engine.generate([prompt], params(policy))
                assert list(output.outputs[0].token_ids) == alone[policy]
            assert output.num_cached_tokens == PROMPT - 1
        assert len(fronts) == 3 * 5  # four parts, and the whole
        other = params("snapkv", prefill={"chunk": CHUNK - 1})
        assert engine.generate([prompt], other)[0].num_cached_tokens < BUDGET + CHUNK
        assert len(fronts) == 4 * 5


@pytest.mark.thin(8)
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "keepkv", "adakv", "kvzap", "morphkv", "streaming_llm", "rkv"])
def test_parts_of_a_context_are_shared(engine, prompt, policy):
    """Another request goes on from the longest part of its context that is there, as if it had computed it."""
    fields = {"score_window": "all"} if policy == "h2o" else {}
    rng = np.random.default_rng(97)
    others = [prompt[:500] + random_prompt(rng, length)[1:] for length in (10, 300)]
    alone = [engine.tokens([other], params(policy, **fields))[0] for other in others]
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts() as fronts:
        engine.tokens([prompt], params(policy, **fields))
        assert len(fronts) == 5
        outputs = engine.generate(others, params(policy, **fields))
        assert [list(output.outputs[0].token_ids) for output in outputs] == alone
        assert [output.num_cached_tokens for output in outputs] == [480, 480]
        share = params(policy, **fields, budget=0.2)
        assert engine.generate([prompt], share)[0].num_cached_tokens <= BUDGET + CHUNK
    engine.assert_empty()


def test_parts_are_not_shared_where_blocks_are_few(engine, prompt):
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts() as fronts, engine.with_blocks(11):
        assert len(engine.tokens([prompt], params("snapkv"))[0]) == ANSWER
        assert len(fronts) <= 2


def test_plain_requests_find_only_what_the_model_computed(engine, prompt):
    """The prefix cache after a compressed request holds the blocks of its first chunk, and no others."""
    plain = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    assert engine.llm.reset_prefix_cache()
    expected = engine.tokens([prompt], plain)
    assert engine.llm.reset_prefix_cache()
    engine.tokens([prompt], params("keepkv"))
    (output,) = engine.generate([prompt], plain)
    assert 0 < output.num_cached_tokens <= BUDGET + CHUNK
    assert [list(output.outputs[0].token_ids)] == expected
