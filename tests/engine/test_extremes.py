"""Engines whose keys and values are as large as their dtype takes, and requests that generate for a long time."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.conftest import engine_with, random_prompt
from tests.presets import SMALL
from tests.random_model import SIZES, write_llama
from vllm_kvmerge import compression
from vllm_kvmerge.engine.surrogate import Surrogate, SurrogateConfig
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.spec import parse_compression

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTH, BUDGET, INTERVAL = 150, 64, 32


def answer(model: Path, fields: list[dict[str, Any]], num_tokens: int, **arguments: Any) -> list[dict[str, Any]]:
    """Of each request: reason why it finished; tokens; finite, of their log-probabilities; highest, of entries per KV
    head after a step, once it has been compressed; compressions, those that it went through."""
    arguments |= {"model": str(model), "max_num_seqs": 32, "max_num_batched_tokens": 512, "block_size": 32}
    arguments |= {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "skip_tokenizer_init": True, "seed": 0}
    rng = np.random.default_rng(0)
    found = [{"tokens": 0, "finite": 0, "highest": 0, "compressions": 0} for _ in fields]
    changed_at: dict[str, int] = {}
    with engine_with(**arguments) as engine:
        core = engine.llm.llm_engine
        for index, asked in enumerate(fields):
            params = SamplingParams(
                max_tokens=num_tokens,
                seed=index,
                ignore_eos=True,
                logprobs=1,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=compression(**asked),
            )
            engine.add(str(index), random_prompt(rng, LENGTH), params)
        while core.has_unfinished_requests():
            for output in core.step():
                one, new = found[int(output.request_id)], output.outputs[0]
                one["tokens"] += len(new.token_ids)
                for token, logprobs in zip(new.token_ids, new.logprobs, strict=True):
                    one["finite"] += math.isfinite(logprobs[token].logprob)
                one["reason"] = new.finish_reason
            for request in engine.scheduler.running:
                segment = engine.segments.get(request.request_id)
                if segment is not None and segment.are_compressed:
                    one = found[int(request.request_id.partition("-")[0])]  # vLLM appends a random part
                    one["highest"] = max(one["highest"], segment.num_entries(request.num_computed_tokens))
                    one["compressions"] += changed_at.get(request.request_id) != segment.changed_at
                    changed_at[request.request_id] = segment.changed_at
        core.step()  # tells the worker of the last ones that have finished
        engine.assert_empty()
    return found


@pytest.mark.parametrize(("dtype", "of_keys", "of_values"), [("bfloat16", 1e30, 1e15), ("float16", 5e3, 1e3)])
def test_keys_and_values_of_extreme_norm(tmp_path: Path, dtype: str, of_keys: float, of_values: float) -> None:
    """Every policy, and none, in one batch: log-probabilities are finite."""
    file = write_llama(tmp_path) / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        weight.mul_(of_keys if "k_proj" in name else of_values if "v_proj" in name else 1.0)
    save_file(weights, file, {"format": "pt"})
    surrogate = SurrogateConfig(
        input_dim=SIZES["hidden_size"], output_dim=SIZES["num_key_value_heads"], n_modules=SIZES["num_hidden_layers"]
    )
    Surrogate(surrogate, surrogate.modules()).save(tmp_path / "kvzap")
    own = {"kvmerge": {"kvzap": str(tmp_path / "kvzap")}}
    fields = [SMALL.get(name, {}) | {"policy": name, "budget": BUDGET, "interval": 8} for name in sorted(PRESETS)]
    fields.append({"policy": "full"})
    found = answer(tmp_path, fields, 40, dtype=dtype, max_model_len=512, additional_config=own)
    for asked, one in zip(fields, found, strict=True):
        assert (one["tokens"], one["finite"], one["reason"]) == (40, 40, "length"), asked
        assert asked["policy"] == "full" or one["compressions"] >= 1, asked


@pytest.mark.parametrize(
    "num_tokens", [1500, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_long_answers(tmp_path: Path, num_tokens: int) -> None:
    """Every policy that merges, in one batch: finite, within the budget all the time, and nothing remains."""
    model = write_llama(tmp_path, max_position_embeddings=24_000)
    merging = sorted(name for name in PRESETS if PRESETS[name].merger != "drop")
    fields = [{"policy": name, "budget": BUDGET, "interval": INTERVAL, "decode": "bounded"} for name in merging]
    found = answer(model, fields, num_tokens, dtype="bfloat16", max_model_len=24_000)
    for asked, one in zip(fields, found, strict=True):
        assert (one["tokens"], one["finite"], one["reason"]) == (num_tokens, num_tokens, "length"), asked
        assert one["compressions"] >= num_tokens // INTERVAL - 1, asked
        capacity = parse_compression(asked).resolve_capacity(LENGTH)
        # As many as make a compression due, where it waits a few steps for others'.
        assert capacity is not None and BUDGET < one["highest"] <= capacity + INTERVAL, (asked, one)
