"""Without ``enforce_eager`` vLLM compiles the model with torch.compile; attention stays an opaque operator in it."""

import numpy as np
import pytest

from tests.engine.conftest import BYTES_PER_BLOCK, NUM_BLOCKS, engine_arguments, in_a_process, random_prompt
from vllm_kvmerge import compression

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COMPILED = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_kvmerge import kvmerge_engine_args

arguments, prompts, extras, max_tokens = json.load(sys.stdin)
llm = LLM(**kvmerge_engine_args(**arguments))
assert llm.llm_engine.vllm_config.compilation_config.mode.name == "DYNAMO_TRACE_ONCE"
params = [SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra) for extra in extras]
outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
print("FOUND", json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
"""
MAX_TOKENS = 40


def test_a_compiled_model_gives_the_tokens_of_an_eager_one(engine):
    from vllm import SamplingParams

    rng = np.random.default_rng(5)
    extras = [None] + [compression(policy, budget=64) for policy in ("h2o", "snapkv", "keepkv", "zsmerge", "morphkv")]
    prompts = [random_prompt(rng, 300) for _ in extras]
    arguments = engine_arguments() | {"enforce_eager": False, "kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK}
    compiled = in_a_process(["-c", COMPILED], [arguments, prompts, extras, MAX_TOKENS], VLLM_DISABLE_COMPILE_CACHE="1")
    params = [
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, extra_args=extra) for extra in extras
    ]
    assert engine.tokens(prompts, params) == compiled
