"""A server whose requests may outlast the positions that the model has."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.demo_model import BYTES_PER_BLOCK
from tests.server.conftest import Server, serving
from tests.server.deaths import ask_for_long, kill

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def endless() -> Iterator[Server]:
    options = "--kv-cache-memory-bytes", str(25 * BYTES_PER_BLOCK), "--max-model-len", "40000"
    with serving(*options, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1") as server:
        yield server


PROMPT = np.random.default_rng(97).integers(19, 780, 9000).tolist()
STREAMING = {"policy": "streaming_llm", "budget": 128, "prefill": {"chunk": 256}, "positions": "cache"}


def test_a_prompt_longer_than_the_models_positions_is_answered(endless: Server) -> None:
    body = endless.complete(PROMPT, max_tokens=8, ignore_eos=True, kv_compression=STREAMING, stream=False)
    assert body["usage"]["prompt_tokens"] == 9000 and body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"positions": "sink"}, "positions", "Input should be 'text' or 'cache', got 'sink'"),
        ({"prefill": None, "refresh": {"every": 8}}, "positions", "'cache' with a refresh"),
        ({"selector": "expected_attention"}, "positions", "'cache' with 'expected_attention', which turns"),
        ({"skip_layers": 1}, "positions", "'cache' with allocator 'uniform', some of whose layers keep all"),
        ({"budget": 9000}, "positions", "'cache' comes to 9032 positions at once, and the model has 8192; allowed: "),
        ({"decode": "grow"}, "positions", "'cache' comes to 30128 positions at once, and the model has 8192"),
    ],
)
def test_what_cannot_be_is_refused(endless: Server, fields: dict, param: str, message: str) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 30_000, "kv_compression": STREAMING | fields}
    response = endless.post("/v1/completions", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == f"kv_compression.{param}" and message in error["message"]


def test_the_engine_is_killed_while_it_answers(endless: Server) -> None:
    """The last test here."""
    asker = ask_for_long(endless)
    kill(endless, "EngineCore")
    asker.check_told()
