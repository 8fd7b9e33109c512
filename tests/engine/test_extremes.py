"""Engines whose keys and values are as large as their dtype takes, requests that generate for a long time, and as many
compressions as requests can ask for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.engine.conftest import Engine, random_prompt, run
from tests.engine.spread import AtOnce
from tests.engine.watched import answer
from tests.presets import SMALL
from tests.random_model import SIZES, write_llama
from vllm_kvmerge import compression
from vllm_kvmerge.engine.plan import Kind, attached_step
from vllm_kvmerge.engine.spreading import STEP_SECONDS, Pace
from vllm_kvmerge.engine.surrogate import Surrogate, SurrogateConfig
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.parameters import parse_compression

pytestmark = pytest.mark.slow

MERGING = sorted(name for name in PRESETS if PRESETS[name].merger != "drop")
POLICIES = sorted(PRESETS)
LENGTH, BUDGET, INTERVAL = 150, 64, 32
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}

ARGUMENTS: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [random_prompt(rng, LENGTH) for _ in range(count)]


@pytest.mark.parametrize(
    ("dtype", "of_keys", "of_values"), [("bfloat16", 1e30, 1e15), ("float16", 5e3, 1e3)], ids=["bfloat16", "float16"]
)
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
    fields = [SMALL.get(name, {}) | {"policy": name, "budget": BUDGET, "interval": 8} for name in POLICIES]
    arguments = {"model": str(tmp_path), "dtype": dtype, "max_model_len": 512, "additional_config": own, **ARGUMENTS}
    found = answer(arguments, prompts(len(fields) + 1), [{"policy": "full"}, *fields], 40, timeout=500)
    for name, one in zip(["full", *POLICIES], found, strict=True):
        assert (one["tokens"], one["finite"], one["reason"]) == (40, 40, "length"), name
        assert name == "full" or one["compressions"] >= 1, name


@pytest.mark.parametrize(
    "num_tokens", [1500, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_long_answers(tmp_path: Path, num_tokens: int) -> None:
    """Every policy that merges, in one batch: finite, within the budget all the time, and nothing remains."""
    model = write_llama(tmp_path, max_position_embeddings=24_000)
    fields = [{"policy": name, "budget": BUDGET, "interval": INTERVAL, "decode": "bounded"} for name in MERGING]
    arguments = {"model": str(model), "dtype": "bfloat16", "max_model_len": 24_000, **ARGUMENTS}
    found = answer(arguments, prompts(len(fields)), fields, num_tokens, timeout=7000)
    for asked, one in zip(fields, found, strict=True):
        assert (one["tokens"], one["finite"], one["reason"]) == (num_tokens, num_tokens, "length"), asked
        assert one["compressions"] >= num_tokens // INTERVAL - 1, asked
        capacity = parse_compression(asked).resolve_capacity(LENGTH)
        # As many as make a compression due, where it waits a few steps for others'.
        assert capacity is not None and BUDGET < one["highest"] <= capacity + INTERVAL, (asked, one)


def test_compressions_after_every_token_wait_for_each_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of every policy, each compressed after every token: together they would take many times what a step has
    room for. A plain request beside them gets a token in each step, and no step is planned longer than allowed."""
    names = sorted(set(PRESETS) - {"kvzip"})  # whose context is repeated first
    plain, *texts = prompts(len(PRESETS))

    class Paced(AtOnce):
        """The slowest policy takes almost all of a step."""

        def seconds(self, kind: Kind, num_entries: int) -> float:
            number = names.index(json.loads(kind[0])["policy"])
            return 0.9 * STEP_SECONDS * (number + 1) / len(names)

    steps: list[tuple[float, int, bool]] = []
    pace, schedule = Paced(1), engine.scheduler.schedule

    def noted(*arguments: Any) -> Any:
        output = schedule(*arguments)
        plans = attached_step(output).plans
        seconds = sum(pace.seconds((plan.compression, 0), plan.front) for plan in plans)
        has_plain = any(name.startswith("plain") for name in output.num_scheduled_tokens)
        steps.append((seconds, len(plans), has_plain))
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", noted)
    monkeypatch.setattr(engine.scheduler, "_pace", pace)
    engine.add("plain", plain, SamplingParams(max_tokens=200, **GREEDY))
    for text, name in zip(texts, names, strict=True):
        fields = SMALL.get(name, {}) | {"policy": name, "budget": BUDGET, "interval": 1, "decode": "bounded"}
        engine.add(name, text[: BUDGET + 1], SamplingParams(max_tokens=8, extra_args=compression(**fields), **GREEDY))
    tokens = run(engine)
    assert {name: len(one) for name, one in tokens.items()} == {"plain": 200, **dict.fromkeys(names, 8)}
    assert all(has_plain for *_, has_plain in steps[:200]), "the plain request had to wait for a step"
    assert sum(one for one, *_ in steps) > 5 * STEP_SECONDS and max(count for _, count, _ in steps) > 1
    assert max(one for one, *_ in steps) <= STEP_SECONDS
    engine.assert_empty()


HARMFUL: dict[str, dict[str, Any]] = {
    "grkv, 500 queries": {"policy": "grkv", "regression_window": 500, "budget": 0.25},
    "rkv": {"policy": "rkv", "budget": 0.25},
    "rkv, after every token": {"policy": "rkv", "budget": 3_700, "interval": 1, "decode": "bounded"},
    "cam, 4,096 receivers": {"policy": "cam", "num_receivers": 4096, "budget": 0.6, "merge_prompt": True},
    "zsmerge, behind 100 tokens": {"policy": "zsmerge", "context_tokens": 100, "budget": 40},
}
"""The worst that is known. What they do to others' throughput: ``benchmarks/step_latency.py --harmful``."""


@pytest.mark.parametrize("case", HARMFUL)
def test_sixteen_of_the_worst_are_answered_and_others_are_as_ever(engine: Engine, monkeypatch, case: str) -> None:
    """With the pace that workers have, so that compressions are spread as in a server."""
    rng = np.random.default_rng(11)
    plain, long = [random_prompt(rng, 40) for _ in range(2)], [random_prompt(rng, 3_900) for _ in range(16)]
    some = SamplingParams(max_tokens=100, **GREEDY)
    expected = engine.tokens(plain, some)
    monkeypatch.setattr(engine.scheduler, "_pace", Pace(engine.scheduler._limits.num_heads))
    asked = SamplingParams(max_tokens=6, extra_args=compression(**HARMFUL[case]), **GREEDY)
    tokens = engine.tokens(plain + long, [some] * 2 + [asked] * 16)
    assert tokens[:2] == expected and all(len(one) == 6 for one in tokens[2:])
    engine.assert_empty()
