"""A server whose requests may outlast the model's positions, and have no room in its pool uncompressed."""

from collections.abc import Iterator

import pytest

from tests.demo_model import BYTES_PER_BLOCK
from tests.server.conftest import Server, check_refused, random_prompt, serving
from tests.server.deaths import kill

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def endless() -> Iterator[Server]:
    """768 tokens, and the null block."""
    options = "--kv-cache-memory-bytes", str(25 * BYTES_PER_BLOCK), "--max-model-len", "40000"
    with serving(*options, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1") as server:
        line = "The KV cache has room for 768 tokens, fewer than max_model_len (40000)"
        assert any(line in written for written in server.log)
        yield server


PROMPT = random_prompt(97, 9000)
STREAMING = {"policy": "streaming_llm", "budget": 128, "prefill": {"chunk": 256}, "positions": "cache"}


@pytest.mark.parametrize(("length", "compression"), [(9000, STREAMING), (3000, STREAMING | {"positions": "text"})])
def test_a_prompt_longer_than_pool_and_positions_is_answered(endless: Server, length: int, compression: dict) -> None:
    body = endless.complete(PROMPT[:length], max_tokens=8, ignore_eos=True, kv_compression=compression)
    assert body["usage"]["prompt_tokens"] == length and body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("compression", "param", "message"),
    [
        (STREAMING | {"decode": "grow"}, "kv_compression.positions", "'cache' comes to 30128 positions at once"),
        ({"policy": "snapkv", "budget": 128}, "kv_compression.prefill", "9000 slots of the KV cache with 'snapkv'"),
        (None, "prompt", "9000 slots of the KV cache without compression, and it has 768; allowed: up to 767"),
    ],
)
def test_what_would_never_fit_is_refused(endless: Server, compression: dict | None, param: str, message: str) -> None:
    check_refused(endless.ask(PROMPT, max_tokens=30_000, kv_compression=compression), param, message)


def test_the_engine_is_killed_while_it_answers(endless: Server) -> None:
    """The last test here."""
    kill(endless, "EngineCore")
