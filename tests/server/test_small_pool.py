"""A server whose KV cache has no room for an uncompressed request of ``--max-model-len``."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.demo_model import BYTES_PER_BLOCK
from tests.server.conftest import Server, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL = str(25 * BYTES_PER_BLOCK)
"""768 tokens, and the null block."""


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    with serving("--kv-cache-memory-bytes", SMALL) as server:
        yield server


PROMPT = np.random.default_rng(96).integers(19, 780, 3000).tolist()
CHUNKED = {"policy": "snapkv", "budget": 128, "prefill": {"chunk": 256}}


def test_it_starts_and_says_what_it_serves(small: Server) -> None:
    line = "The KV cache has room for 768 tokens, fewer than max_model_len (4096)"
    assert any(line in written for written in small.log)


def test_a_prompt_longer_than_the_pool_is_answered(small: Server) -> None:
    body = small.complete(PROMPT, max_tokens=8, ignore_eos=True, kv_compression=CHUNKED, stream=False)
    assert body["usage"]["prompt_tokens"] == 3000 and body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("compression", "param", "message"),
    [
        (
            None,
            "prompt",
            "3000 slots of the KV cache without compression, and it has 768; allowed: up to 767",
        ),
        ({"policy": "snapkv", "budget": 128}, "kv_compression.prefill", "3000 slots of the KV cache with 'snapkv'"),
        (CHUNKED | {"prefill": {"chunk": 0}}, "kv_compression.prefill.chunk", "greater than or equal to 1"),
        (CHUNKED | {"refresh": {"every": 8}}, "kv_compression.prefill", "a refresh, which needs the whole context"),
        ({"policy": "kvzip", "prefill": {"chunk": 64}}, "kv_compression.prefill", "'reconstruction', which needs the"),
    ],
)
def test_what_would_never_fit_is_refused(small: Server, compression: dict | None, param: str, message: str) -> None:
    field = {} if compression is None else {"kv_compression": compression}
    response = small.post("/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": 8, **field})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and message in error["message"]
    assert small.complete([5, 6, 7], max_tokens=2)["usage"]["completion_tokens"] == 2
