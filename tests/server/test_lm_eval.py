"""Requests as lm-evaluation-harness sends them, with the data of its tasks (docs/evaluation.md)."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from vllm_kvmerge import demo

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "data/eval/lm_eval"
ROWS = [json.loads(line) for line in (FOLDER / "recall.jsonl").read_text().splitlines()]
COMPRESSION = {"policy": "snapkv", "budget": 0.1}


def test_the_tasks_data():
    for path in FOLDER.glob("*.yaml"):
        task = yaml.safe_load(path.read_text())
        assert task["task"] == path.stem
        assert Path(task["dataset_kwargs"]["data_files"]["test"]) == Path("tests/data/eval/lm_eval/recall.jsonl")
    assert all(row["choices"][row["right"]] == row["answer"] and len(set(row["choices"])) == 4 for row in ROWS)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.model_path(), local_files_only=True)


def test_loglikelihood_requests_are_not_changed_by_compression(server, tokenizer):
    prompt = tokenizer.encode(f"{ROWS[0]['prompt']} {ROWS[0]['choices'][0]}")
    body = {"max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    logprobs = [
        server.complete([prompt], **body, **more)["choices"][0]["logprobs"]["token_logprobs"][:-1]
        for more in ({}, {"kv_compression": COMPRESSION})
    ]
    assert len(logprobs[0]) == len(prompt) and logprobs[0][0] is None
    assert logprobs[1][1:] == pytest.approx(logprobs[0][1:], abs=1e-4)


def test_generate_until_requests_carry_the_compression(server, tokenizer):
    before = server.metric("vllm:kvmerge_compressions_total", policy="snapkv")
    texts = {}
    for name, more in (("full", {}), ("snapkv", {"kv_compression": COMPRESSION})):
        body = {"max_tokens": 5, "stop": ["</s>"], "seed": 1234, **more}
        answers = [server.complete([tokenizer.encode(row["prompt"])], **body) for row in ROWS]
        texts[name] = [answer["choices"][0]["text"].strip() for answer in answers]
    assert server.metric("vllm:kvmerge_compressions_total", policy="snapkv") == before + len(ROWS)
    right = {name: sum(t == row["answer"] for t, row in zip(texts[name], ROWS, strict=True)) for name in texts}
    assert right["full"] == len(ROWS) and 0 < right["snapkv"] < len(ROWS) / 2
