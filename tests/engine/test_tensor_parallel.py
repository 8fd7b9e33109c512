"""Two tensor-parallel workers, each with half of the heads, give the tokens that one worker gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import random_prompt
from tests.processes import end_with_tests
from tests.random_model import write_llama
from vllm_kvmerge import compression, kvmerge_engine_args
from vllm_kvmerge.policies import PRESETS

pytestmark = pytest.mark.engine

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    arguments, jobs = json.load(sys.stdin)
    llm = LLM(**arguments)
    def run(jobs):
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in jobs],
            [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=extra) for _, extra in jobs],
            use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]
    print("TOKENS", json.dumps([run(jobs), run(jobs)]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Random weights with an even number of KV heads."""
    return write_llama(tmp_path_factory.mktemp("model"))


def generate(model: Path, script: Path, tensor_parallel_size: int, jobs: list) -> list:
    arguments = kvmerge_engine_args(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=8 << 20,
        tensor_parallel_size=tensor_parallel_size,
    )
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tensor_parallel_size == 2 else {}
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps([arguments, jobs]),
        env=os.environ | binding | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        text=True,
        capture_output=True,
        timeout=500,
        preexec_fn=end_with_tests,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("TOKENS", 1)[1].splitlines()[0])


def test_two_workers_equal_one(model, tmp_path):
    rng = np.random.default_rng(4)
    policies = [None, *sorted(PRESETS)]
    jobs = [
        (random_prompt(rng, int(rng.integers(100, 1500))), compression(policy, budget=96) if policy else None)
        for policy in policies
    ] + [(random_prompt(rng, 900), compression(policy, budget=96, context_tokens=700)) for policy in policies[1::4]]
    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    one, two = (generate(model, script, size, jobs) for size in (1, 2))
    assert two == one
    assert one[0] == one[1]  # the second run hits the prefix cache
