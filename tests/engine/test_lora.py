"""LoRA adapters beside compression: several in one batch, each as if it were alone."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.architectures import POLICIES, arguments
from tests.engine.conftest import Engine, engine_with, in_a_process
from tests.engine.test_vllm_features import compressed, random_text
from tests.random_model import SIZES, write_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RANK, MAX_TOKENS, CONTEXT = 4, 24, 200
NAMES = None, "a", "b"
"""Of adapters; None: the model without one."""

PROMPTS = [random_text(seed, 120 + 60 * seed) for seed in range(3)]
PROGRAM = "from tests.engine import test_lora; test_lora.answer_on_stock_vllm()"


def write_adapter(folder: Path, seed: int) -> None:
    """A random LoRA adapter of all that attention multiplies by, in PEFT's format."""
    width, size = SIZES["hidden_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * size, SIZES["num_key_value_heads"] * size
    shapes = {"q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys), "o_proj": (queries, width)}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            for matrix, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{matrix}.weight"
                tensors[key] = 0.1 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(shapes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, and below it of two adapters."""
    folder = write_llama(tmp_path_factory.mktemp("model"))
    for seed, name in enumerate(NAMES[1:]):
        write_adapter(folder / str(name), seed)
    return folder


ARGUMENTS = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_lora": True,
    "max_loras": 3,  # one more than there are: vLLM's CPU operators give rows without an adapter the last place's
    "max_lora_rank": 8,
}


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_with(**arguments(folder, **ARGUMENTS)) as engine:
        yield engine


Job = tuple[str | None, list[int], dict[str, Any]]
"""An adapter's name, a prompt and further sampling parameters."""


def generate(llm: Any, jobs: list[Job]) -> list[Any]:
    folder = Path(llm.llm_engine.model_config.model)
    adapters = [name and LoRARequest(name, NAMES.index(name), str(folder / name)) for name, *_ in jobs]
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **more) for *_, more in jobs]
    prompts = [{"prompt_token_ids": prompt} for _, prompt, _ in jobs]
    return llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)


def tokens(llm: Any, jobs: list[Job]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in generate(llm, jobs)]


def plain_jobs() -> list[Job]:
    return [(name, prompt, {}) for prompt in PROMPTS for name in NAMES]


def answer_on_stock_vllm() -> None:
    """The program of a process into which no plugin is loaded."""
    from vllm import LLM

    llm = LLM(**json.load(sys.stdin))
    print("FOUND", json.dumps(tokens(llm, plain_jobs())))


def test_plain_requests_equal_stock_vllm(engine, folder):
    expected = in_a_process(["-c", PROGRAM], arguments(folder, **ARGUMENTS), is_stock=True)
    assert len({*map(tuple, expected)}) == len(expected)  # or adapters would decide nothing
    assert tokens(engine.llm, plain_jobs()) == expected
    roomy = compressed("keepkv", budget=max(map(len, PROMPTS)), interval=MAX_TOKENS)
    assert tokens(engine.llm, [(name, prompt, roomy) for name, prompt, _ in plain_jobs()]) == expected
    engine.assert_empty()


def test_adapters_and_policies_in_one_batch(engine):
    """Each request gives what it gives alone; those of all policies, and without one."""
    jobs = [
        (NAMES[(index + shift) % 3], PROMPTS[index % 3], compressed(policy) if policy else {})
        for index, policy in enumerate([*POLICIES, None])
        for shift in range(2)
    ]
    assert engine.llm.reset_prefix_cache()
    together = tokens(engine.llm, jobs)
    assert {len(one) for one in together} == {MAX_TOKENS}
    engine.assert_empty()
    assert [tokens(engine.llm, [job])[0] for job in jobs] == together
    engine.assert_empty()


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "criticalkv", "keepkv"])
def test_a_compressed_context_is_found_under_its_adapter_alone(engine, policy):
    jobs = {name: (name, PROMPTS[2], compressed(policy, context_tokens=CONTEXT)) for name in NAMES}
    assert engine.llm.reset_prefix_cache()
    expected = {name: tokens(engine.llm, [job])[0] for name, job in jobs.items()}
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts() as fronts:
        for count in (1, 2, 3):
            (first,) = generate(engine.llm, [jobs[NAMES[count - 1]]])
            assert first.num_cached_tokens == 0 and len(fronts) == count
        again = dict(zip(jobs, generate(engine.llm, list(jobs.values())), strict=True))
        assert [one.num_cached_tokens for one in again.values()] == [CONTEXT] * 3
        assert {name: list(one.outputs[0].token_ids) for name, one in again.items()} == expected
    engine.assert_empty()
