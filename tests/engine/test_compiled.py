"""Without ``enforce_eager`` vLLM compiles the model with torch.compile; attention stays an opaque operator in it."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import BYTES_PER_BLOCK, NUM_BLOCKS, engine_arguments, in_a_process, random_prompt
from vllm_kvmerge import compression

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COMPILED = """
import json, sys
from tests.engine import test_compiled
from vllm import LLM
from vllm_kvmerge import kvmerge_engine_args

llm = LLM(**kvmerge_engine_args(**json.load(sys.stdin)))
assert llm.llm_engine.vllm_config.compilation_config.mode.name == "DYNAMO_TRACE_ONCE"
outputs = llm.generate(*test_compiled.jobs(), use_tqdm=False)
print("FOUND", json.dumps([list(one.outputs[0].token_ids) for one in outputs]))
"""


def jobs() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    rng = np.random.default_rng(5)
    extras = [None] + [compression(policy, budget=64) for policy in ("h2o", "snapkv", "keepkv", "zsmerge", "morphkv")]
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=extra) for extra in extras]
    return [{"prompt_token_ids": random_prompt(rng, 300)} for _ in extras], params


def test_a_compiled_model_gives_the_tokens_of_an_eager_one(engine):
    arguments = engine_arguments() | {"enforce_eager": False, "kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK}
    compiled = in_a_process(["-c", COMPILED], arguments, VLLM_DISABLE_COMPILE_CACHE="1")
    assert [list(one.outputs[0].token_ids) for one in engine.llm.generate(*jobs(), use_tqdm=False)] == compiled
