"""Structured output beside compression, with a real byte-level BPE tokenizer and random weights, and vLLM's own client
for benchmarks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.random_model import write_llama
from tests.server.conftest import Server, serving

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
LOCAL = {"policy": "local", "budget": 64}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fiso", "lume"]}, "count": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
TEXT = " ".join(f"The quick brown fox number {n} jumps over the lazy dog." for n in range(60))


def write_bpe_tokenizer(folder: Path) -> None:
    """Trained on what this repository says of itself."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer.train_from_iterator(texts, vocab_size=800, special_tokens=["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_llama(tmp_path_factory.mktemp("bpe"), bos_token_id=0, eos_token_id=1)
    write_bpe_tokenizer(folder)
    options = "--served-model-name", "demo"
    whitespace = "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'
    with serving(*options, *whitespace, command=("-m", "vllm_kvmerge.cli", "serve", str(folder))) as server:
        yield server


def chat(server: Server, **body) -> dict:
    body = {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "kv_compression": LOCAL} | body
    response = server.post("/v1/chat/completions", {"max_tokens": 100, "temperature": 0} | body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["kv_compression"]["compressions"] >= 1
    return answer["choices"][0]


def test_a_json_schema(bpe):
    schema = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
    found = json.loads(chat(bpe, response_format=schema)["message"]["content"])
    assert found["name"] in ("fiso", "lume") and 10 <= found["count"] <= 99 and len(found) == 2


def test_a_json_object(bpe):
    choice = chat(bpe, response_format={"type": "json_object"}, max_tokens=60)
    assert choice["message"]["content"].startswith("{")  # random weights may never close it
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_vllms_bench_against_a_server_that_compresses(bpe, tmp_path):
    body = json.dumps({"kv_compression": LOCAL})
    command = [
        sys.executable, str(ROOT / "benchmarks/vllm_bench_serve.py"), "--base-url", bpe.url, "--model", "demo",
        "--tokenizer", str(bpe.process.args[bpe.process.args.index("serve") + 1]), "--dataset-name", "random",
        "--random-input-len", "300", "--random-output-len", "8", "--num-prompts", "4", "--extra-body", body,
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
    ]  # fmt: skip
    before = bpe.metric("vllm:kvmerge_compressions_total", policy="local")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads((tmp_path / "result.json").read_text())["completed"] == 4
    assert bpe.metric("vllm:kvmerge_compressions_total", policy="local") - before >= 4
