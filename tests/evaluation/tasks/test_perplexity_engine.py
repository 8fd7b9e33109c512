"""Perplexity through the engine, token by token, against one forward pass of the same model in Transformers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.processes import end_with_tests
from vllm_kvmerge import demo
from vllm_kvmerge.evaluation.tasks.base import Completion
from vllm_kvmerge.evaluation.tasks.perplexity import Perplexity

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from vllm import LLM
from vllm_kvmerge import kvmerge_engine_args
from vllm_kvmerge.evaluation.continuation import ForcedContinuation
from vllm_kvmerge.evaluation.loss import continuation_loss

model, prompts, continuations = json.load(open(sys.argv[1]))
llm = LLM(model, **kvmerge_engine_args(
    dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=32 << 20,
    logits_processors=[ForcedContinuation],
))
losses = {
    f"{policy} {budget}": continuation_loss(llm, prompts, continuations, policy, budget)
    for policy, budget in (("full", 1), ("weightedkv", 400), ("weightedkv", 16), ("local", 4))
}
json.dump(losses, open(sys.argv[1], "w"))
"""


def test_perplexity_is_the_models(tmp_path):
    path = str(Path(__file__).parents[2] / "data/eval/demo-text.txt")
    task = Perplexity(length=200, prompt=30, stride=90, text_file=path)
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path(), local_files_only=True)
    samples = task.samples(6, 1, tokenizer)
    prompts = [tokenizer.encode(sample.prompt) for sample in samples]
    wholes = [tokenizer.encode(sample.prompt + sample.continuation) for sample in samples]

    exchange = tmp_path / "exchange.json"
    continuations = [whole[len(prompt) :] for prompt, whole in zip(prompts, wholes, strict=True)]
    exchange.write_text(json.dumps([demo.model_path(), prompts, continuations]))
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(exchange)],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        preexec_fn=end_with_tests,
    )
    assert process.returncode == 0, process.stdout[-4000:]
    measured = {}
    for name, losses in json.loads(exchange.read_text()).items():
        completions = [Completion("", [-value for value in values]) for values in losses]
        scores = [task.score(sample, given) for sample, given in zip(samples, completions, strict=True)]
        measured[name] = task.summary(scores)

    model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits = model(torch.tensor(wholes)).logits
    targets = torch.tensor(wholes)[:, -90:]
    loss = torch.nn.functional.cross_entropy(logits[:, -91:-1].transpose(1, 2), targets).item()
    assert measured["full 1"] == pytest.approx(math.exp(loss), rel=1e-3)
    # Room for everything compresses nothing; little room costs, and next to none costs more.
    assert measured["weightedkv 400"] == pytest.approx(measured["full 1"], rel=1e-3)
    assert measured["full 1"] * 1.01 < measured["weightedkv 16"] < measured["local 4"]
