"""A server whose default policy waits for pressure."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.demo_model import BYTES_PER_BLOCK
from tests.server.conftest import Server, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DEFAULT = json.dumps({"policy": "keepkv", "budget": 96, "trigger": "pressure"})
COUNTER = "vllm:kvmerge_pressure_compressions_total"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--kv-cache-memory-bytes", str(41 * BYTES_PER_BLOCK), "--kv-compression", DEFAULT) as server:
        yield server


def compressions(answer: dict) -> int:
    return answer["kv_transfer_params"]["kvmerge"]["compressions"]


def test_it_compresses_only_when_the_pool_is_short(server: Server) -> None:
    rng = np.random.default_rng(99)
    prompts = [rng.integers(19, 780, 300).tolist() for _ in range(5)]

    def ask(prompt: list[int], **fields) -> dict:
        asked = {"vllm_xargs": {"kvmerge_usage": 1}} | fields
        return server.complete(prompt, max_tokens=150, ignore_eos=True, stream=False, **asked)

    alone = ask(prompts[0])
    assert compressions(alone) == 0
    plain = ask(prompts[0], kv_compression={"policy": "full"})
    assert alone["choices"][0]["text"] == plain["choices"][0]["text"]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, prompts))
    assert all(answer["usage"]["completion_tokens"] == 150 for answer in answers)
    done = sum(map(compressions, answers))
    assert done and server.metric(COUNTER, policy="keepkv") == done
    assert server.metric("vllm:num_preemptions_total") == 0
