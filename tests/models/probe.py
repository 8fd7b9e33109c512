"""What the plugin does with one model: ``python -m tests.models.probe FOLDER``, which prints a ``Found`` as JSON.

Standard input: arguments of the engine that are the model's own, and the tokens that stock vLLM generates for
``prompts()``, or null. Everything runs in one engine, on the CPU.
"""

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tests.presets import SMALL

BLOCK_SIZE, BUDGET, INTERVAL, NUM_TOKENS = 32, 64, 16, 64
LONGEST = 300

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
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": 1 << 27,
        "seed": 0,
        **own,
    }


def prompts() -> list[list[int]]:
    """Of plain requests."""
    rng = np.random.default_rng(1)
    return [[2, *rng.integers(19, 780, int(length) - 1).tolist()] for length in np.geomspace(10, LONGEST, 6)]


@dataclass
class Found:
    """What works, and why the rest does not.

    refused: why the server does not start; None: it does. is_plain: plain requests give stock vLLM's tokens. policies,
    features: the reason of a refusal by name; None where it works.
    """

    refused: str | None = None
    is_plain: bool = False
    policies: dict[str, str | None] = field(default_factory=dict)
    features: dict[str, str | None] = field(default_factory=dict)


def probe(folder: str, own: dict[str, Any], stock: list[list[int]] | None) -> Found:
    """Raises AssertionError where a policy exceeds its budget, or blocks are lost."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from tests.engine.conftest import Engine
    from vllm_kvmerge import kvmerge_engine_args
    from vllm_kvmerge.engine.support import UnsupportedConfigError
    from vllm_kvmerge.policies import PRESETS

    try:
        llm = LLM(**kvmerge_engine_args(**arguments(folder, own)))
    except ValueError as error:
        reason = str(error).split("is not supported: ")[-1] if "is not supported" in str(error) else None
        if reason is None and not isinstance(error, UnsupportedConfigError):
            raise
        return Found(refused=(reason or str(error)).split("\n")[0].split("; allowed")[0])
    engine = Engine(llm)
    found = Found(is_plain=plain_tokens(engine) == stock)
    for policy in sorted(set(PRESETS) - {"kvzap"}):
        fields = {"policy": policy, **SMALL.get(policy, {})}
        found.policies[policy] = refusal(engine, fields, check_budget=True)
    for name, fields in FEATURES.items():
        found.features[name] = refusal(engine, fields, check_budget=False)
    assert llm.reset_prefix_cache()
    assert plain_tokens(engine) == (stock if found.is_plain else plain_tokens(engine)), "plain requests have changed"
    engine.assert_empty()
    llm.llm_engine.engine_core.shutdown()
    return found


def plain_tokens(engine: Any) -> list[list[int]]:
    from vllm import SamplingParams

    return engine.tokens(prompts(), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))


def refusal(engine: Any, fields: dict[str, Any], check_budget: bool) -> str | None:
    """Why a request is refused; None: it generates what it should, and its blocks are free again."""
    from vllm import SamplingParams

    from tests.engine.conftest import live_entries
    from vllm_kvmerge import compression
    from vllm_kvmerge.request.parameters import parse_compression

    rng = np.random.default_rng(7)
    prompt = [2, *rng.integers(19, 780, LONGEST - 1).tolist()]
    fields = {"budget": BUDGET, "interval": INTERVAL, **fields}
    config = parse_compression(fields)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=compression(**fields))
    try:
        engine.llm.llm_engine.add_request("probe", {"prompt_token_ids": prompt}, params)
    except ValueError as error:
        return reason_of(str(error))
    most, num_tokens = 0, 0
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            if output.outputs[0].finish_reason == "error":
                return reason_of(output.kv_transfer_params["kvmerge"]["error"])
            num_tokens = len(output.outputs[0].token_ids)
        most = max([most, *live_entries(engine).values()])
    assert num_tokens == NUM_TOKENS, fields
    if check_budget:
        assert BUDGET - 1 <= most <= BUDGET + (INTERVAL if config.decode == "bounded" else NUM_TOKENS), (fields, most)
    assert engine.llm.reset_prefix_cache()
    engine.assert_empty()
    return None


def reason_of(message: str) -> str:
    """The reason in a message, without the field's value and what is allowed."""
    message = message.split("; allowed")[0].split("\n")[0]
    return re.sub(r"^kv_compression\.?\w*: ", "", message)


if __name__ == "__main__":
    print("FOUND", json.dumps(asdict(probe(sys.argv[1], *json.load(sys.stdin)))))
