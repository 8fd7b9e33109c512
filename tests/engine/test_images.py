"""A model that reads images: compression is over their tokens as over others."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm import SamplingParams

from tests.engine.architectures import POLICIES, arguments
from tests.engine.conftest import Engine, engine_with, in_a_process, run
from tests.engine.test_vllm_features import BUDGET, INTERVAL, compressed, random_text
from tests.random_model import SIZES
from vllm_kvmerge.engine.usage import REPORT_KEY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

IMAGE_SIZE, PATCH_SIZE, MAX_TOKENS = 80, 8, 24
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2 + 3
"""With those that mark where an image begins and ends."""

IMAGE_TOKEN = 804
MARKS = "<image>", "<fake_token_around_image>", "<global-img>"
PROGRAM = "from tests.engine import test_images; test_images.answer_on_stock_vllm()"


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
    length = (IMAGE_SIZE // PATCH_SIZE) ** 2
    Idefics3Processor(images, tokenizer, image_seq_len=length).save_pretrained(folder)
    return folder


ARGUMENTS = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "limit_mm_per_prompt": {"image": 2}}
"""Longer prompts are computed in chunks, images in pieces too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_with(**arguments(folder, **ARGUMENTS)) as engine:
        yield engine


TEXT = 60
"""Tokens before the first image."""


def prompt_of(*seeds: int) -> dict[str, Any]:
    """Text, and after it each image with some text behind it; the text is the same for as many images."""
    tokens, images = random_text(0, TEXT), []
    for index, seed in enumerate(seeds):
        tokens += [IMAGE_TOKEN, *random_text(1 + index, 40)]
        pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        images.append(Image.fromarray(pixels))
    return {"prompt_token_ids": tokens} | ({"multi_modal_data": {"image": images}} if images else {})


PROMPTS = (), (1,), (2,), (1, 2), (2, 1), (3, 3)
"""Seeds of the images of a prompt."""


Job = tuple[tuple[int, ...], dict[str, Any]]
"""Seeds of a prompt's images, and further sampling parameters."""


def generate(llm: Any, jobs: list[Job]) -> list[Any]:
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **more) for _, more in jobs]
    return llm.generate([prompt_of(*seeds) for seeds, _ in jobs], params, use_tqdm=False)


PLAIN: list[Job] = [(seeds, {}) for seeds in PROMPTS]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def answer_on_stock_vllm() -> None:
    """The program of a process into which no plugin is loaded."""
    from vllm import LLM

    llm = LLM(**json.load(sys.stdin))
    print("FOUND", json.dumps(tokens(generate(llm, PLAIN))))


def test_plain_requests_equal_stock_vllm(engine, folder):
    expected = in_a_process(["-c", PROGRAM], arguments(folder, **ARGUMENTS), is_stock=True)
    assert len({*map(tuple, expected)}) == len(PROMPTS)  # or images would decide nothing
    assert tokens(generate(engine.llm, PLAIN)) == expected
    roomy = compressed("keepkv", budget=500, interval=MAX_TOKENS)
    assert tokens(generate(engine.llm, [(seeds, roomy) for seeds in PROMPTS])) == expected
    engine.assert_empty()


def test_every_policy_over_tokens_of_images(engine):
    """In one batch as alone, within the budget."""
    jobs = [
        (PROMPTS[1 + index % 5], compressed(policy, decode="bounded"))
        for index, policy in enumerate(sorted(set(POLICIES) - {"kvzip"}))  # which repeats tokens alone
    ]
    assert engine.llm.reset_prefix_cache()
    outputs = generate(engine.llm, jobs)
    engine.assert_empty()
    for job, output in zip(jobs, outputs, strict=True):
        report = output.kv_transfer_params[REPORT_KEY]
        assert report["peak_entries"] > NUM_IMAGE_TOKENS and report["mean_entries"] <= BUDGET + INTERVAL
        assert tokens(generate(engine.llm, [job])) == tokens([output])
    engine.assert_empty()


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "keepkv"])
def test_a_compressed_context_is_found_with_its_images_alone(engine, policy):
    """Its end lies behind an image, and in it."""
    for context in (TEXT + NUM_IMAGE_TOKENS + 20, TEXT + NUM_IMAGE_TOKENS // 2):
        jobs = [(seeds, compressed(policy, context_tokens=context)) for seeds in PROMPTS[1:]]
        expected = []
        for job in jobs:
            assert engine.llm.reset_prefix_cache()
            expected += tokens(generate(engine.llm, [job]))
        assert engine.llm.reset_prefix_cache()
        with engine.sharing_contexts() as fronts:
            for _ in range(2):
                found = [generate(engine.llm, [job])[0] for job in jobs]
                assert tokens(found) == expected
            assert len(fronts) == len({seeds[0] for seeds, _ in jobs})
            assert [one.num_cached_tokens for one in found] == [context] * len(jobs)
    engine.assert_empty()


def test_tokens_of_an_image_are_protected(engine):
    start, stop = TEXT + 10, TEXT + 40
    positions = {}

    def watch():
        for request in engine.scheduler.running:
            if (segments := engine.manager.segments.get(request.request_id)) is not None:
                blocks = [one.block_id for one in engine.manager.req_to_blocks[request.request_id]]
                blocks = blocks[: -(-segments.front // 32)]
                planes = [
                    layer.positions[blocks].transpose(0, 1).flatten() for layer in engine.compression.compactor.layers
                ]
                positions[request.request_id.rsplit("-", 1)[0]] = {*torch.cat(planes).tolist()}

    for name, fields in (("protected", {"protect": {"tokens": [[start, stop]]}}), ("other", {})):
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **compressed("streaming_llm", **fields))
        engine.llm.llm_engine.add_request(name, prompt_of(1), params)
    run(engine, watch)
    assert {*range(start, stop)} <= positions["protected"] and not {*range(start, stop)} & positions["other"]
    engine.assert_empty()
