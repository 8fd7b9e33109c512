"""Perplexity through the engine, token by token, against one forward pass of the same model in Transformers."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.measures import continuation_loss
from vllm_kvmerge import demo
from vllm_kvmerge.evaluation.tasks.base import Completion
from vllm_kvmerge.evaluation.tasks.perplexity import Perplexity

pytestmark = pytest.mark.slow


def test_perplexity_is_the_models(engine):
    path = str(Path(__file__).parents[1] / "data/eval/demo-text.txt")
    task = Perplexity(length=200, prompt=30, stride=90, text_file=path)
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path(), local_files_only=True)
    samples = task.samples(6, 1, tokenizer)
    prompts = [tokenizer.encode(sample.prompt) for sample in samples]
    wholes = [tokenizer.encode(sample.prompt + sample.continuation) for sample in samples]

    continuations = [whole[len(prompt) :] for prompt, whole in zip(prompts, wholes, strict=True)]
    measured = {}
    for policy, budget in (("full", 1), ("weightedkv", 400), ("weightedkv", 33), ("local", 4)):
        losses = continuation_loss(engine.llm, prompts, continuations, policy, budget)
        completions = [Completion("", [-value for value in values]) for values in losses]
        scores = [task.score(sample, given) for sample, given in zip(samples, completions, strict=True)]
        measured[f"{policy} {budget}"] = task.summary(scores)

    model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits = model(torch.tensor(wholes)).logits
    targets = torch.tensor(wholes)[:, -90:]
    loss = torch.nn.functional.cross_entropy(logits[:, -91:-1].transpose(1, 2), targets).item()
    assert measured["full 1"] == pytest.approx(math.exp(loss), rel=1e-3)
    # Room for everything compresses nothing; little room costs, and next to none costs more.
    assert measured["weightedkv 400"] == pytest.approx(measured["full 1"], rel=1e-3)
    assert measured["full 1"] * 1.01 < measured["weightedkv 33"] < measured["local 4"]
    engine.assert_empty()
