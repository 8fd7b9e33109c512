"""A greedy request has one answer: after each start of a server, alone and beside others, on a busy machine too."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from tests.processes import end_with_tests
from tests.server.conftest import Server, serving
from vllm_kvmerge.demo import recall

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STARTS = 2
MAX_TOKENS = 48


def bodies() -> list[dict]:
    rng = np.random.default_rng(3)
    prompts = [
        recall.draw_prompt(rng, length, facts).text for length, facts in ((64, 2), (300, 8), (1200, 16), (3000, 32))
    ]
    fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return [{"prompt": prompt, **fields} for prompt in prompts]


@contextmanager
def load() -> Iterator[None]:
    """Two processes that keep two cores busy."""
    words = [sys.executable, "-c", "while True: sum(range(1000))"]
    processes = [subprocess.Popen(words, preexec_fn=end_with_tests) for _ in range(2)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens(server: Server, body: dict) -> list[int]:
    return server.complete(body.pop("prompt"), **body)["choices"][0]["token_ids"]


@pytest.mark.timeout(3600)
def test_greedy_answers(request):
    found = []
    for start in range(request.config.getoption("--starts") or STARTS):
        with load(), serving("--dtype", "bfloat16", "--no-enable-prefix-caching") as server:
            alone = [tokens(server, body) for body in bodies()]
            others = np.random.default_rng(start).integers(19, 780, (12, 400)).tolist()
            with ThreadPoolExecutor(16) as pool:
                company = [pool.submit(server.complete, prompt, max_tokens=64) for prompt in others]
                beside = list(pool.map(lambda body: tokens(server, body), bodies()))
                for one in company:
                    one.result()
            found += [alone, beside]
    assert all(answers == found[0] for answers in found)
