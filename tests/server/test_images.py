"""Images in a chat, compressed with the text around them, over HTTP."""

import base64
import io
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.engine.test_inputs import IMAGE_SIZE, NUM_IMAGE_TOKENS, write_model
from tests.server.conftest import Server, check_refused, serving

pytestmark = pytest.mark.engine

BUDGET = 64
TEXT = " ".join(["one two three four five six seven eight nine ten"] * 6)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("images"))
    options = "--served-model-name", "demo", "--limit-mm-per-prompt", '{"image": 2}'
    with serving(*options, command=("-m", "vllm_kvmerge.cli", "serve", str(folder))) as server:
        yield server


def image(seed: int) -> dict:
    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(server: Server, *seeds: int, **body) -> httpx.Response:
    content = [{"type": "text", "text": TEXT}, *map(image, seeds), {"type": "text", "text": "what is it ?"}]
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 24} | body
    return server.post("/v1/chat/completions", {"temperature": 0, "ignore_eos": True} | body)


@pytest.mark.parametrize("policy", ["snapkv", "keepkv"])
def test_they_are_compressed(images, policy):
    """With room for all, or a floor, the answer is the one without compression; images decide it."""
    compression = {"policy": policy, "budget": BUDGET, "interval": 8, "decode": "bounded"}
    usage = chat(images, 1, 2, kv_compression=compression).json()["usage"]
    assert usage["prompt_tokens"] > 2 * NUM_IMAGE_TOKENS > BUDGET
    assert usage["kv_compression"]["compressions"] and usage["kv_compression"]["entries"]["most"] <= BUDGET + 8
    roomy = {"kv_compression": compression | {"budget": usage["prompt_tokens"] + 24, "verify": True}}
    floor = {"kv_compression": compression | {"min_agreement": 1.0}}
    asked = ((1, 2), roomy), ((1, 2), floor), ((1, 2), {}), ((2, 1), {})
    answers = [chat(images, *seeds, **more).json() for seeds, more in asked]
    verified = [answer["usage"]["kv_compression"]["verified"] for answer in answers[:2]]
    assert (verified[0]["tokens"], verified[0]["agreeing"], verified[1]["fallback"]) == (24, 1.0, True)
    roomy, floor, plain, other = (answer["choices"][0]["message"]["content"] for answer in answers)
    assert roomy == floor == plain != other


def test_what_repeats_tokens_alone_refuses_them(images):
    field = {"policy": "kvzip", "budget": BUDGET}
    for stream in (False, True):
        response = chat(images, 1, kv_compression=field, stream=stream)
        check_refused(response, "kv_compression.tracker", "allowed: prompts of tokens alone")
    assert chat(images, kv_compression=field).status_code == 200
