"""``AsyncLLM``, vLLM's engine for programs with an event loop, gives what the offline ``LLM`` gives."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests import preloaded
from tests.demo_model import BYTES_PER_BLOCK
from tests.documented import ROOT, blocks
from tests.engine.conftest import NUM_BLOCKS, engine_arguments, random_prompt
from tests.engine.generating_async import ABANDONED
from vllm_kvmerge import compression

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FIELDS = [
    {"policy": "keepkv", "budget": 64},
    None,
    {"policy": "snapkv", "budget": 0.3},
    None,
    {"policy": "d2o", "budget": 96},
    {"policy": "local", "budget": 64, "context_tokens": 200},
]
MAX_TOKENS = 24


def run(words: list[str], **options) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = preloaded.run([sys.executable, *words], env=environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], dict | None]]:
    rng = np.random.default_rng(28)
    return [(random_prompt(rng, 300 + 60 * number), fields) for number, fields in enumerate(FIELDS)]


@pytest.fixture(scope="module")
def found(requests) -> dict:
    """What an AsyncLLM that answers them at once made of them."""
    arguments = engine_arguments() | {"kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK}
    job = json.dumps([arguments | {"additional_config": {"kvmerge": {}}}, MAX_TOKENS, requests])
    done = run(["-m", "tests.engine.generating_async"], input=job)
    return json.loads(done.stdout.split("FOUND", 1)[1].splitlines()[0])


def test_it_gives_what_the_offline_engine_gives(engine, found, requests):
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, extra_args=compression(**fields) if fields else None
        )
        for _, fields in requests
    ]
    offline = engine.tokens([prompt for prompt, _ in requests], params)
    assert [answer["tokens"] for answer in found["answers"]] == offline
    for answer, (prompt, fields) in zip(found["answers"], requests, strict=True):
        if fields is None:
            assert answer["proof"] is None
        else:
            assert answer["proof"]["policy"] == fields["policy"] and answer["proof"]["compressions"] >= 1
            assert answer["proof"]["entries"]["mean"] < len(prompt)


def test_abandoned_requests_leave_nothing(found):
    assert len(found["abandoned"]) == ABANDONED
    assert all(5 <= num_tokens < 2000 for num_tokens in found["abandoned"])
    assert found["is_empty"]


def test_a_mistake_is_raised_to_who_asked(found):
    assert "unknown policy 'nope'; allowed: " in found["refused"]


def test_the_documented_program(tmp_path):
    (code,) = (text for text in blocks(ROOT / "docs/quickstart.md", "python") if "AsyncLLM" in text)
    script = tmp_path / "program.py"
    script.write_text(code)
    plain, compressed, expected = run([str(script)]).stdout.splitlines()[-3:]
    assert plain.removeprefix("plain:").split() and compressed.startswith("kept 300:")
    assert len(expected.removeprefix("expected:").split()) == 4
