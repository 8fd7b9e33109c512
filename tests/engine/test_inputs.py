"""What comes with a prompt beside its tokens: an adapter (LoRA), or images. Each request is as if it were alone."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.architectures import POLICIES, arguments
from tests.engine.conftest import Engine, engine_with, in_a_process, run
from tests.engine.test_verification import ask, log_probs
from tests.engine.test_vllm_features import compressed, random_text
from tests.random_model import SIZES, write_llama
from vllm_kvmerge.engine.verification import VERIFY_KEY
from vllm_kvmerge.ops.coded import CODINGS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MAX_TOKENS, RANK = 24, 4
IMAGE_SIZE, PATCH_SIZE = 80, 8
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2 + 3
"""With those that mark where an image begins and ends."""

IMAGE_TOKEN = 804
MARKS = "<image>", "<fake_token_around_image>", "<global-img>"
TEXT = 60
"""Tokens before the first image."""

PROGRAM = "from tests.engine import test_inputs; test_inputs.answer_on_stock_vllm()"

Job = tuple[str | None, dict[str, Any], dict[str, Any]]
"""An adapter's name, a prompt and further sampling parameters."""


def write_model(folder: Path) -> Path:
    """Saves a random Idefics3, a Llama that reads images: of its kind, vLLM reads this one without torchvision."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    from vllm_kvmerge.demo.train import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        vision_config=sizes | {"image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE},
        text_config={"model_type": "llama", **SIZES},
        scale_factor=1,
        image_token_id=tokenizer.convert_tokens_to_ids(MARKS[0]),
        pad_token_id=0,
    )
    assert config.image_token_id == IMAGE_TOKEN
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "text_model" not in name and "lm_head" not in name:
            weight.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    edge = {"longest_edge": IMAGE_SIZE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=NUM_IMAGE_TOKENS - 3).save_pretrained(folder)
    return folder


def with_images(*seeds: int) -> Job:
    """Text, and after it each image with some text behind it; the text is the same for as many images."""
    tokens, images = random_text(0, TEXT), []
    for index, seed in enumerate(seeds):
        tokens += [IMAGE_TOKEN, *random_text(1 + index, 40)]
        pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        images.append(Image.fromarray(pixels))
    return None, {"prompt_token_ids": tokens} | ({"multi_modal_data": {"image": images}} if images else {}), {}


def write_with_adapters(folder: Path) -> Path:
    """Saves a model, and below it two random LoRA adapters of its attention and its output, in PEFT's format."""
    width, size = SIZES["hidden_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * size, SIZES["num_key_value_heads"] * size
    shapes = {"q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys), "o_proj": (queries, width)}
    fields = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [*shapes, "lm_head"],
        "bias": "none",
    }
    layers = range(SIZES["num_hidden_layers"])
    adapted = {f"model.layers.{layer}.self_attn.{name}": shape for layer in layers for name, shape in shapes.items()}
    adapted["lm_head"] = width, SIZES["vocab_size"]
    for seed, adapter in enumerate("ab"):
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for name, (inputs, outputs) in adapted.items():
            for matrix, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = 0.1 * torch.randn(shape, generator=generator)
        (folder / adapter).mkdir()
        save_file(tensors, folder / adapter / "adapter_model.safetensors")
        (folder / adapter / "adapter_config.json").write_text(json.dumps(fields))
    return write_llama(folder)


@dataclass(frozen=True)
class Kind:
    """contexts: lengths of prompts' beginnings that are compressed, which jobs from the ``first`` on have. num_fronts:
    of each."""

    write: Callable[[Path], Path]
    arguments: dict[str, Any]
    jobs: list[Job]
    policies: list[str | None]
    contexts: list[int]
    first: int
    num_fronts: int


KINDS = {
    "adapters": Kind(
        write_with_adapters,
        # One more than there are: vLLM's CPU operators give rows without an adapter the last place's.
        {"max_num_batched_tokens": 512, "enable_lora": True, "max_loras": 3, "max_lora_rank": 8},
        [
            (name, {"prompt_token_ids": random_text(seed, 120 + 60 * seed)}, {})
            for seed in range(3)
            for name in (None, "a", "b")
        ],
        [*POLICIES, None],
        contexts=[200],
        first=6,
        num_fronts=3,
    ),
    "images": Kind(
        write_model,
        {"max_model_len": 1024, "limit_mm_per_prompt": {"image": 2}},  # longer prompts, and images, come in chunks
        [with_images(*seeds) for seeds in ((), (1,), (2,), (1, 2), (2, 1), (3, 3))],
        [policy for policy in POLICIES if policy != "kvzip"],  # which repeats tokens alone
        contexts=[TEXT + NUM_IMAGE_TOKENS + 20, TEXT + NUM_IMAGE_TOKENS // 2],  # behind an image, and in it
        first=1,
        num_fronts=3,  # of the first images
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[kind].write(tmp_path_factory.mktemp(kind))


def engine_arguments(kind: str, folder: Path) -> dict[str, Any]:
    return arguments(folder, kv_cache_memory_bytes=64 << 20, max_num_seqs=64, **KINDS[kind].arguments)


@pytest.fixture(scope="module")
def engine(kind: str, folder: Path) -> Iterator[Engine]:
    with engine_with(**engine_arguments(kind, folder)) as engine:
        yield engine


def adapter(llm: Any, name: str | None) -> LoRARequest | None:
    return name and LoRARequest(name, 1 + "ab".index(name), str(Path(llm.llm_engine.model_config.model) / name))


def generate(llm: Any, jobs: list[Job]) -> list[Any]:
    adapters = [adapter(llm, name) for name, *_ in jobs]
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **more) for *_, more in jobs]
    return llm.generate([prompt for _, prompt, _ in jobs], params, use_tqdm=False, lora_request=adapters)


def tokens(llm: Any, jobs: list[Job]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in generate(llm, jobs)]


def answer_on_stock_vllm() -> None:
    """The program of a process into which no plugin is loaded."""
    from vllm import LLM

    kind, arguments = json.load(sys.stdin)
    print("FOUND", json.dumps(tokens(LLM(**arguments), KINDS[kind].jobs)))


def test_plain_requests_equal_stock_vllm(engine, kind, folder):
    jobs = KINDS[kind].jobs
    expected = in_a_process(["-c", PROGRAM], [kind, engine_arguments(kind, folder)], is_stock=True)
    assert len({*map(tuple, expected)}) == len(jobs)  # or adapters and images would decide nothing
    assert tokens(engine.llm, jobs) == expected
    roomy = compressed("keepkv", budget=500, interval=MAX_TOKENS)
    assert tokens(engine.llm, [(name, prompt, roomy) for name, prompt, _ in jobs]) == expected
    engine.assert_empty()


def test_every_policy_in_one_batch_as_alone(engine, kind):
    plain = KINDS[kind].jobs
    asked = [compressed(policy) if policy else {} for policy in KINDS[kind].policies]
    asked += [compressed("snapkv", front=front) for front in CODINGS]
    jobs = [(*plain[(index + shift) % len(plain)][:2], more) for index, more in enumerate(asked) for shift in (1, 5)]
    assert engine.llm.reset_prefix_cache()
    together = tokens(engine.llm, jobs)
    engine.assert_empty()
    assert [tokens(engine.llm, [job])[0] for job in jobs] == together
    engine.assert_empty()


@pytest.mark.parametrize(
    ("policy", "front"),
    [("snapkv", None), ("h2o", None), ("criticalkv", None), ("keepkv", None), ("snapkv", "int8"), ("snapkv", "int4")],
)
def test_a_compressed_context_is_found_with_its_own_alone(engine, kind, policy, front):
    for context in KINDS[kind].contexts:
        more = compressed(policy, context_tokens=context, front=front)
        jobs = [(name, prompt, more) for name, prompt, _ in KINDS[kind].jobs[KINDS[kind].first :]]
        expected = []
        for job in jobs:
            assert engine.llm.reset_prefix_cache()
            expected += tokens(engine.llm, [job])
        assert engine.llm.reset_prefix_cache()
        with engine.sharing_contexts() as fronts:
            for _ in range(2):
                found = [generate(engine.llm, [job])[0] for job in jobs]
                assert [list(one.outputs[0].token_ids) for one in found] == expected
            assert len(fronts) == KINDS[kind].num_fronts
            assert [one.num_cached_tokens for one in found] == [context] * len(jobs)
    engine.assert_empty()


def test_answers_are_verified(engine, kind):
    """With what comes with their prompts, of which nothing is cached any more, beside a request with something else."""
    first, *others = KINDS[kind].jobs[:4]
    for (name, prompt, _), (other, its_prompt, _) in zip([*others, first], KINDS[kind].jobs, strict=False):
        (output,) = generate(engine.llm, [(name, prompt, {"logprobs": 0, "extra_args": {VERIFY_KEY: "key"}})])
        (answer,) = output.outputs
        assert engine.llm.reset_prefix_cache()
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        engine.llm.llm_engine.add_request("other", its_prompt, params, lora_request=adapter(engine.llm, other))
        engine.llm.llm_engine.step()
        future = ask(engine, list(answer.token_ids))
        run(engine)
        found = json.loads(future.result(0))
        assert all(found["agrees"]) and found["tokens"] > MAX_TOKENS
        assert found["log_probs"] == pytest.approx(log_probs(answer), abs=1e-3)
        engine.assert_empty()


@pytest.mark.parametrize("kind", ["images"], indirect=True, scope="module")
def test_tokens_of_an_image_are_protected(engine):
    start, stop = TEXT + 10, TEXT + 40
    positions = {}

    def watch():
        for request in engine.scheduler.running:
            if (segments := engine.segments.get(request.request_id)) is not None:
                blocks = [one.block_id for one in engine.manager.req_to_blocks[request.request_id]]
                blocks = blocks[: -(-segments.front // 32)]
                planes = [
                    layer.positions[blocks].transpose(0, 1).flatten() for layer in engine.compression.compactor.layers
                ]
                positions[request.request_id.rsplit("-", 1)[0]] = {*torch.cat(planes).tolist()}

    _, prompt, _ = with_images(1)
    for name, fields in (("protected", {"protect": {"tokens": [[start, stop]]}}), ("other", {})):
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **compressed("streaming_llm", **fields))
        engine.llm.llm_engine.add_request(name, prompt, params)
    run(engine, watch)
    assert {*range(start, stop)} <= positions["protected"] and not {*range(start, stop)} & positions["other"]
    engine.assert_empty()
