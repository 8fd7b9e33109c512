"""``positions: cache`` where some layers have windows, whose keys move with those of the others."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.architectures import greedy, running
from tests.engine.conftest import Engine, random_prompt
from tests.engine.test_hybrid_sharing import check_fronts
from tests.random_model import write_gemma

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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

FIELDS = {
    "streaming_llm": {"decode": "bounded"},
    "h2o": {"decode": "bounded"},
    "snapkv": {},
    "keepkv": {"decode": "bounded"},
    "adakv": {"decode": "bounded"},
    "morphkv": {"prefill": {"chunk": 100}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma"), rope_parameters=ROPE)


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder) as engine:
        yield engine


def jobs(positions: str) -> tuple[list[list[int]], list]:
    rng = np.random.default_rng(41)
    prompts = [random_prompt(rng, 230 + 41 * index) for index in range(len(FIELDS))]
    common = {"budget": 64, "interval": 16, "positions": positions}
    return prompts, [greedy(policy, 100, **common | fields) for policy, fields in FIELDS.items()]


def test_it_does_not_matter_from_where_positions_are_counted(engine):
    """Requests are compressed several times, read windows of the prefix cache the second time, and leave it alone."""
    prompts, counted = jobs("cache")
    cold = engine.tokens(prompts, greedy())
    assert engine.llm.reset_prefix_cache()
    expected = engine.tokens(prompts, jobs("text")[1])
    assert engine.llm.reset_prefix_cache()
    assert [engine.tokens(prompts, counted) for _ in range(2)] == [expected] * 2
    assert [one[:24] for one in expected] != cold
    assert engine.tokens(prompts, greedy()) == cold
    engine.assert_empty()


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
@pytest.mark.parametrize("length", [97, 416, 430])
def test_fronts_have_windows_that_have_been_turned(engine, policy, length):
    check_fronts(engine, policy, length, positions="cache", decode="bounded")
