"""Where some layers have windows: fronts, with which these go, and ``positions: cache``, which turns keys in them."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine import test_kept_contexts, test_turns
from tests.engine.architectures import BLOCK_SIZE, greedy, running
from tests.engine.conftest import Engine, random_prompt
from tests.engine.test_kept_contexts import client, load_saved, saved
from tests.engine.test_shared_contexts import answers, params
from tests.engine.test_stress_contexts import check_sharing
from tests.random_model import WINDOW, write_gemma

pytestmark = [pytest.mark.engine, pytest.mark.slow]

__all__ = ["client", "saved"]  # fixtures

POLICIES = {
    "snapkv": {}, "h2o": {}, "keydiff": {}, "keepkv": {}, "kvzip": {}, "adakv": {"decode": "bounded"},
    "morphkv": {"decode": "bounded"}, "streaming_llm": {"prefill": {"chunk": 100}}, "zsmerge": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    with running(write_gemma(tmp_path_factory.mktemp("gemma"))) as engine:
        yield engine


def check_fronts(engine, policy: str, length: int, **fields) -> None:
    """Requests begin with the front of the first one, and answer as they do where nothing is shared; so does one whose
    prompt is the context itself."""
    rng = np.random.default_rng(length)
    context = random_prompt(rng, length)
    prompts = [context + random_prompt(rng, 20)[1:] for _ in range(2)] + [context]
    fields = {"budget": min(64, length // 2)} | fields
    some = [params(policy, 40, length, **fields)] * 2 + [params(policy, 40, None, **fields)]
    expected = []
    for prompt, one in zip(prompts, some, strict=True):
        assert engine.llm.reset_prefix_cache()
        expected += answers(engine.generate([prompt], one))
    with engine.sharing_contexts() as fronts:
        engine.llm.reset_prefix_cache()
        assert answers(engine.generate(prompts[:1], some[0])) == expected[:1]
        assert fronts.num_blocks == len({block.block_id for one in fronts._fronts.values() for block in one.all_blocks})
        outputs = engine.generate(prompts * 2, some * 2)
        assert answers(outputs) == expected * 2
        is_block = length >= BLOCK_SIZE
        assert [one.num_cached_tokens for one in outputs] == [is_block * length, is_block * length, length - 1] * 2
        engine.assert_empty()


@pytest.mark.parametrize(
    ("policy", "length"),
    [*((policy, 430) for policy in POLICIES), ("snapkv", 97), ("snapkv", 256)],
)
def test_a_request_goes_on_from_the_front_of_another(engine, policy, length):
    check_fronts(engine, policy, length, **POLICIES[policy])


@pytest.mark.parametrize("name", ["streaming_llm", "h2o", "keepkv", "morphkv", "adakv", "snapkv", "kvzip"])
def test_three_turns_are_one_session(engine, fronts, name):
    test_turns.test_three_turns_are_one_session(engine, fronts, name)


def test_a_front_goes_with_a_block_of_its_windows(engine, fronts):
    prompt = random_prompt(np.random.default_rng(4), 300)
    some = params("snapkv", 4, 270, budget=64)
    expected = answers(engine.generate([prompt], some))
    (front,) = fronts._fronts.values()
    assert [len(one.blocks) for one in front.windows] == [3, 3] and 2 * BLOCK_SIZE > WINDOW
    hit = engine.generate([prompt], some)[0]
    fronts.lose(front.windows[1].blocks[:1])
    missed = engine.generate([prompt], some)[0]
    assert hit.num_cached_tokens == 270 and missed.num_cached_tokens < 270
    assert answers([hit, missed]) == expected * 2
    engine.assert_empty()


def test_requests_that_share_contexts(engine, monkeypatch):
    check_sharing(engine, 80, monkeypatch, 150, 80)


def test_saved_contexts_are_there_again(engine, client, saved):
    """With the windows of the other layers, which are counted."""
    load_saved(client, *saved)
    fronts = engine.manager.fronts._fronts.values()
    assert [len(one.windows) for one in fronts] == [2] * len(test_kept_contexts.POLICIES)
    test_kept_contexts.test_saved_contexts_are_there_again(engine, client, saved)


ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    # Angles of next to nothing.
    "full_attention": {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 1e12,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1,
    },
}
"""Where layers of full attention do not count positions, and windows count differences, it does not matter from where
positions are counted."""


@pytest.fixture(scope="module")
def turning(tmp_path_factory) -> Iterator[Engine]:
    with running(write_gemma(tmp_path_factory.mktemp("turning"), rope_parameters=ROPE)) as engine:
        yield engine


def test_it_does_not_matter_from_where_positions_are_counted(turning):
    """Requests are compressed several times, read windows of the prefix cache the second time, and leave it alone."""
    bounded = {"decode": "bounded"}
    asked = {"streaming_llm": bounded, "h2o": bounded, "snapkv": {}, "keepkv": bounded, "adakv": bounded}
    asked["morphkv"] = {"prefill": {"chunk": 100}}
    rng = np.random.default_rng(41)
    prompts = [random_prompt(rng, 230 + 41 * index) for index in range(len(asked))]
    in_text, in_cache = (
        [greedy(name, 100, budget=64, interval=16, positions=positions, **fields) for name, fields in asked.items()]
        for positions in ("text", "cache")
    )
    cold = turning.tokens(prompts, greedy())
    assert turning.llm.reset_prefix_cache()
    expected = turning.tokens(prompts, in_text)
    assert turning.llm.reset_prefix_cache()
    assert [turning.tokens(prompts, in_cache) for _ in range(2)] == [expected] * 2
    assert [one[:24] for one in expected] != cold
    assert turning.tokens(prompts, greedy()) == cold
    turning.assert_empty()


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
@pytest.mark.parametrize("length", [97, 416, 430])
def test_fronts_have_windows_that_have_been_turned(turning, policy, length):
    check_fronts(turning, policy, length, positions="cache", decode="bounded")
