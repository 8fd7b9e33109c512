"""What the plugin does with one model: ``python -m tests.models.probe FOLDER``, which prints it as JSON.

Standard input: arguments of the engine that are the model's own, and the tokens that stock vLLM generates for
``prompts()``, or null. Everything runs in one engine, on the CPU.
"""

import json
import re
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np
from vllm import SamplingParams

from tests.engine.conftest import Engine, engine_with, live_entries, random_prompt
from tests.presets import SMALL
from vllm_kvmerge import compression
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.spec import parse_compression

BUDGET, INTERVAL, NUM_TOKENS, LONGEST = 64, 16, 64, 300

FEATURES: dict[str, dict[str, Any]] = {
    "`context_tokens`": {"policy": "h2o", "context_tokens": 200},
    "`prefill`": {"policy": "snapkv", "prefill": {"chunk": 64}},
    "`refresh`": {"policy": "keepkv", "refresh": {"every": 16}},
    "`protect`": {"policy": "snapkv", "protect": {"tokens": [[10, 20]]}},
    "`reuse`": {"policy": "snapkv", "reuse": "turns"},
    "`trigger: pressure`": {"policy": "snapkv", "trigger": "pressure"},
    "`positions: cache`": {"policy": "streaming_llm", "positions": "cache"},
    "uneven budgets": {"policy": "snapkv", "allocator": "adaptive"},
}
"""Request fields, each with a policy that it goes with."""


def arguments(folder: str, own: dict[str, Any]) -> dict[str, Any]:
    """Of vLLM's engine."""
    return {
        "model": folder,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 27,
        "seed": 0,
        **own,
    }


def prompts() -> list[list[int]]:
    """Of plain requests."""
    rng = np.random.default_rng(1)
    return [random_prompt(rng, int(length)) for length in np.geomspace(10, LONGEST, 6)]


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    extra = compression(**fields) if fields else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def probe(folder: str, own: dict[str, Any], stock: list[list[int]] | None) -> dict[str, Any]:
    """refused: why the server does not start; None: it does. is_plain: plain requests give stock vLLM's tokens.
    policies, features: the reason of a refusal by name; None where it works. Raises AssertionError where a policy
    exceeds its budget, or blocks are lost."""
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(engine_with(**arguments(folder, own)))
        except ValueError as error:
            *_, reason = said = str(error).split("is not supported: ")
            if len(said) == 1 and not isinstance(error, UnsupportedConfigError):
                raise
            return {"refused": reason.split("\n")[0].split("; allowed")[0]}
        plain = engine.tokens(prompts(), greedy(24))
        names = sorted(set(PRESETS) - {"kvzap", "calibrated"})
        policies = {name: refusal(engine, True, policy=name, **SMALL.get(name, {})) for name in names}
        features = {name: refusal(engine, False, **fields) for name, fields in FEATURES.items()}
        assert engine.llm.reset_prefix_cache()
        assert engine.tokens(prompts(), greedy(24)) == plain, "plain requests have changed"
        engine.assert_empty()
    return {"refused": None, "is_plain": plain == stock, "policies": policies, "features": features}


def refusal(engine: Engine, check_budget: bool, **fields: Any) -> str | None:
    """Why a request is refused; None: it generates what it should, and its blocks are free again."""
    fields = {"budget": BUDGET, "interval": INTERVAL, **fields}
    try:
        engine.add("probe", random_prompt(np.random.default_rng(7), LONGEST), greedy(NUM_TOKENS, **fields))
    except ValueError as error:
        return reason_of(str(error))
    most, outputs = 0.0, []
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs += engine.llm.llm_engine.step()
        most = max([most, *live_entries(engine).values()])
    if outputs[-1].outputs[0].finish_reason == "error":
        return reason_of(outputs[-1].kv_transfer_params["kvmerge"]["error"])
    assert len(outputs[-1].outputs[0].token_ids) == NUM_TOKENS, fields
    if check_budget:
        room = INTERVAL if parse_compression(fields).decode == "bounded" else NUM_TOKENS
        assert BUDGET - 1 <= most <= BUDGET + room, (fields, most)
    assert engine.llm.reset_prefix_cache()
    engine.assert_empty()
    return None


def reason_of(message: str) -> str:
    """The reason in a message, without the field's value and what is allowed."""
    message = message.split("; allowed")[0].split("\n")[0]
    return re.sub(r"^kv_compression\.?\w*: ", "", message)


if __name__ == "__main__":
    print("FOUND", json.dumps(probe(sys.argv[1], *json.load(sys.stdin))))
