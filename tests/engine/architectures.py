"""Models of each kind of layers, the engines that run them, and what must hold of all: see ``test_architectures``."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests import random_model
from tests.engine.conftest import (
    Engine,
    engine_with,
    greedy,
    in_a_process,
    live_entries,
    preempting,
    random_prompt,
    run,
)
from tests.engine.test_plain import STOCK
from tests.models.architectures import write_model
from tests.presets import SMALL
from tests.random_model import CHUNK, WINDOW
from tests.vllm_library import needs_avx512_bf16
from vllm_kvmerge.engine.arguments import request_limits
from vllm_kvmerge.evaluation.continuation import ForcedContinuation
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.limits import Limits
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, CompressionError, parse_compression

BLOCK_SIZE, NUM_BLOCKS, NUM_FULL, MAX_TOKENS = 32, 400, 2, 24
BYTES_PER_BLOCK = NUM_FULL * 2 * BLOCK_SIZE * (2 * 32 * 4 + 16)
"""Of as many layers as a group has, in float32."""

POLICIES = sorted(set(PRESETS) - {"kvzap", "calibrated"})
"""But for one that needs a model of its own."""

Job = tuple[list[int], SamplingParams]


class Masked:
    """The model in Transformers, whose full-attention layers let generated tokens see some of the prompt alone."""

    def __init__(self, folder: Path, chunk: int | None) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.chunk = chunk

    def generate(self, prompt: list[int], seen: list[int], num_tokens: int) -> list[int]:
        """Tokens after the prompt; seen: its positions that they see."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            places = torch.arange(len(tokens))
            full = places[:, None] >= places
            near = full & (places[:, None] - places < WINDOW)
            if self.chunk is not None:
                near = full & (places[:, None] // self.chunk == places // self.chunk)
            hidden = torch.ones(len(prompt), dtype=torch.bool)
            hidden[seen] = False
            full[len(prompt) :, : len(prompt)] &= ~hidden
            kinds = {"full_attention": full, "sliding_attention": near, "chunked_attention": near}
            masks = {
                kind: torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
                for kind, mask in kinds.items()
            }
            with torch.no_grad():
                logits = self.logits(torch.tensor([tokens]), masks)
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    def logits(self, tokens: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        is_hybrid = bool(getattr(self.model.config, "layer_types", None))
        return self.model(tokens, attention_mask=masks if is_hybrid else masks["full_attention"]).logits


class MaskedAttention(Masked):
    """A model in Transformers that takes no masks: its attention layers are given them."""

    def logits(self, tokens: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = masks["full_attention"]
        hooks = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
            )
            for name, module in self.model.named_modules()
            if name.endswith("self_attn")
        ]
        try:
            return self.model(tokens, use_cache=False).logits
        finally:
            assert len(hooks) == NUM_FULL
            for hook in hooks:
                hook.remove()


@dataclass(frozen=True)
class Architecture:
    """A kind of models.

    write: saves one. arguments: of the engine. masked: the same model in Transformers, None where it has none; chunk:
    in which layers attend that are neither full nor have a window. magnifies: policies whose answers magnify how
    products round beside other requests. is_exact: whether what is computed again is rounded as before. thin: of how
    many requests one runs, where requests of every kind run alone.
    """

    write: Callable[[Path], Path]
    arguments: dict[str, Any] = field(default_factory=dict)
    masked: type[Masked] | None = Masked
    chunk: int | None = None
    magnifies: tuple[str, ...] = ()
    is_exact: bool = True
    thin: int = 3
    marks: tuple[pytest.MarkDecorator, ...] = ()


GEMMA4 = {"kv_cache_memory_bytes": NUM_BLOCKS * NUM_FULL * 2 * 32 * (2 * 64 * 4 + 16)}

ARCHITECTURES = {
    "windows": Architecture(random_model.write_gemma, thin=1),
    "chunks": Architecture(random_model.write_llama4, chunk=CHUNK),
    "shared caches": Architecture(random_model.write_gemma3n),
    # As in Gemma 4 E2B: as many KV heads. Blocks of the layers with a window hold more tokens; the last layers read
    # others' caches.
    "larger heads": Architecture(
        lambda folder: random_model.write_gemma4(
            folder,
            num_hidden_layers=8,
            layer_types=["sliding_attention", "full_attention"] * 4,
            num_kv_shared_layers=4,
        ),
        GEMMA4,
    ),
    # As in Gemma 4 31B: a quarter of the KV heads, whose values are their keys. Blocks of full attention hold more.
    "fewer heads": Architecture(
        lambda folder: random_model.write_gemma4(
            folder, num_key_value_heads=4, num_global_key_value_heads=1, attention_k_eq_v=True
        ),
        GEMMA4,
    ),
    "Mamba": Architecture(
        random_model.write_granite,
        {"enable_prefix_caching": False},  # with it, vLLM's CPU build fails
        MaskedAttention,
        magnifies=("grkv",),
        thin=1,
    ),
    # vLLM's CPU build has linear attention in bfloat16 alone, in which our operator of attention rounds otherwise.
    "linear attention": Architecture(
        random_model.write_qwen3_next,
        {
            "dtype": "bfloat16",
            "kv_cache_memory_bytes": 1 << 26,
            "additional_config": {"kvmerge": {"plain_attention": "vllm"}},
        },
        masked=None,
        is_exact=False,
        marks=(needs_avx512_bf16,),
    ),
    # Without experts, which Transformers does not compute in float64.
    "latents": Architecture(lambda folder: write_model(folder, "DeepSeek-V3", first_k_dense_replace=2), thin=1),
}


def architectures(*fast: str, but: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Runs a test with the engine of each, one process for each. fast: those of the fast layer."""
    names = only or [name for name in ARCHITECTURES if name not in but]
    cases = [
        pytest.param(
            name,
            marks=(
                pytest.mark.xdist_group(f"architecture {name}"),
                *ARCHITECTURES[name].marks,
                *(() if name in fast else (pytest.mark.slow,)),
            ),
            id=name,
        )
        for name in names
    ]
    return pytest.mark.parametrize("name", cases, indirect=True, scope="module")


def arguments(folder: Path, **others: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,  # so that blocks leave the window between chunks of a prompt
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK,
        "seed": 0,
        **others,
    }


@contextmanager
def running(folder: Path, **others: Any) -> Iterator[Engine]:
    with engine_with(**arguments(folder, **{"logits_processors": [ForcedContinuation]} | others)) as engine:
        yield engine


def prompts_of_many_lengths() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [random_prompt(rng, int(length)) for length in np.geomspace(10, 1500, 12)]


def stock(folder: Path, **others: Any) -> list[list[int]]:
    """Tokens from stock vLLM."""
    job = [arguments(folder, **others), prompts_of_many_lengths(), MAX_TOKENS]
    return in_a_process(["-c", STOCK], job, is_stock=True)[0]


def num_taken(engine: Engine) -> int:
    return engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()


def hit(engine: Engine, num_tokens: int) -> int:
    """How many of so many tokens that have been computed are found in the prefix cache, if there is one: those of the
    longest blocks that they fill."""
    if not limits_of(engine).has_prefix_cache:
        return 0
    size = max(manager.block_size for manager in engine.scheduler._managers)
    return num_tokens // size * size


def limits_of(engine: Engine) -> Limits:
    return request_limits(engine.llm.llm_engine.vllm_config)


def asked() -> list[dict[str, Any]]:
    """Fields of requests of every kind."""
    variants: list[dict[str, Any]] = [
        {},
        {"context_tokens": 120},
        {"prefill": {"chunk": 70}},
        {"decode": "bounded"},
        {"refresh": {"every": 20}},
    ]
    return [
        *({"policy": policy} | variants[index % 5] for index, policy in enumerate(POLICIES)),
        {"policy": "snapkv", "allocator": "adaptive"},
        {"policy": "h2o", "allocator": "global", "decode": "bounded"},
        {"policy": "h2o", "score_window": "all", "context_tokens": 200},
        {"policy": "morphkv", "skip_layers": 1, "prefill": {"chunk": 100}},
        {"policy": "snapkv", "protect": {"tokens": [[10, 20]]}},
        {"policy": "h2o", "decode": "bounded", "positions": "cache"},
        {"policy": "snapkv", "budget": {"threshold": 0.01, "max": 0.8}, "decode": "bounded"},
        {"policy": "snapkv", "front": "int8"},
        {"policy": "expected_attention", "decode": "grow", "front": "int4", "budget": 1.0},
    ]


def jobs(engine: Engine) -> list[Job]:
    """Plain requests, and requests of every kind that the model is not refused."""
    limits = limits_of(engine)
    rng = np.random.default_rng(3)
    shared = random_prompt(rng, 400)
    told = [(random_prompt(rng, length), greedy(max_tokens=40)) for length in (200, 60, 330)]
    for one in asked():
        length = int(rng.integers(210, 600))
        prompt = [*shared[: length // 2], *random_prompt(rng, length)[length // 2 :]]
        common = {"budget": 64, "interval": 8}
        for fields in (one, {"policy": one["policy"]}):
            try:
                limits.check(parse_compression(common | SMALL.get(one["policy"], {}) | fields), length, 40)
            except (CompressionError, ValueError):  # the policy does not go with these fields
                continue
            told.append((prompt, greedy(max_tokens=40, **common | fields)))
            break
    assert len(told) > 15
    return told


def policies_of(told: list[Job]) -> list[str]:
    """Of each, ``""`` without one."""
    return [json.loads(params.extra_args[EXTRA_ARGS_KEY])["policy"] if params.extra_args else "" for _, params in told]


def check_company_and_preemption(engine: Engine, told: list[Job], when: int | None = 20) -> list[list[int]]:
    """Each request gives the same tokens beside the others, alone and preempted; returns them.

    when: after how many steps all are preempted; None: never.
    """
    assert engine.llm.reset_prefix_cache()
    together = engine.tokens([prompt for prompt, _ in told], [params for _, params in told])
    engine.assert_empty()
    assert together == [engine.tokens([prompt], params)[0] for prompt, params in told]
    if when is not None:
        for index, (prompt, params) in enumerate(told):
            engine.add(str(index), prompt, params)
        preempted = run(engine, preempting(engine, when))
        assert [preempted[str(index)] for index in range(len(told))] == together
        engine.assert_empty()
    return together


def check_budgets(engine: Engine, policies: list[str], num_tokens: int) -> None:
    """No step sees more than budget + interval entries per head, on average over layers and heads; counted in the
    cache, all policies at once."""
    budget, interval = 64, 16
    rng = np.random.default_rng(12)
    for policy in policies:
        params = greedy(policy, num_tokens, budget=budget, interval=interval, decode="bounded")
        engine.add(policy, random_prompt(rng, 300), params)
    sizes: dict[str, list[float]] = {policy: [] for policy in policies}

    def watch() -> None:
        for request_id, size in live_entries(engine).items():
            sizes[request_id.rsplit("-", 1)[0]].append(size)
        for request in engine.scheduler.running:
            if segments := engine.segments.get(request.request_id):
                assert segments.front <= engine.scheduler._states[request.request_id].schedule.capacity

    run(engine, watch)
    for policy, seen in sizes.items():
        assert len(seen) >= num_tokens - 1, policy
        assert budget - 1 <= max(seen) <= budget + interval, policy
    engine.assert_empty()
