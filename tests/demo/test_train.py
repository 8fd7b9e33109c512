"""Training can be interrupted, and starts from a circuit that already finds what was said."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_kvmerge.demo import language, train, training
from vllm_kvmerge.demo.documents import KIND_NAMES, draw_prompt
from vllm_kvmerge.demo.scores import SETTINGS, is_right, share_right, text_loss

pytestmark = pytest.mark.engine

TINY = train.Size(
    layers=3, width=256, intermediate=64, kv_heads=2, tokens_per_step=256, learning_rate=1e-3,
    stages=(training.Stage(64, 3), training.Stage(128, 3)),
)  # fmt: skip


def trained(folder, stop_after=()) -> dict[str, torch.Tensor]:
    """Weights after a run that is interrupted after each of ``stop_after`` steps."""
    for stop in (*stop_after, None):
        trainer = train.Trainer(TINY, folder, 0, "cpu", stop)
        trainer.run()
    return trainer.model.state_dict()


def test_an_interrupted_run_gets_to_the_same_weights(tmp_path):
    whole, parts = trained(tmp_path / "whole"), trained(tmp_path / "parts", (2, 5))
    untrained = train.Trainer(TINY, tmp_path / "untrained", 0, "cpu").model.state_dict()
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
    assert not torch.equal(whole["lm_head.weight"], untrained["lm_head.weight"])


def test_the_exported_folder_loads(tmp_path):
    weights = trained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert model.dtype == torch.bfloat16
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name].bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tokenizer.encode(language.words_of(range(4, len(language.VOCABULARY)))) == [
        language.BOS,
        *range(4, len(language.VOCABULARY)),
    ]
    prompt = draw_prompt(np.random.default_rng(), "recall", 100, 3)
    assert len(tokenizer.encode(prompt.text)) == 100
    assert tokenizer.decode(tokenizer.encode(prompt.text, add_special_tokens=False)).split() == prompt.text.split()


def test_batches_have_the_stages_lengths():
    lengths = set()
    for step in range(30):
        tokens, marks = train.draw_batch(0, step, TINY, 1)
        assert tokens.shape == marks.shape and tokens.numel() == TINY.tokens_per_step
        assert torch.equal(tokens, train.draw_batch(0, step, TINY, 1)[0])
        lengths.add(tokens.shape[1])
    assert lengths == {64, 128}
    assert train.draw_batch(0, 0, TINY, 0)[0].shape[1] == 64


@pytest.mark.parametrize("size", train.SIZES.values(), ids=train.SIZES)
def test_the_planted_circuit_copies_without_training(size):
    torch.manual_seed(0)
    model = train.build_model(size)
    rng = np.random.default_rng(0)
    documents = [[language.BOS, *language.plain_text(rng, 20)] for _ in range(4)]
    tokens = torch.tensor([document + document[1:] for document in documents])
    with torch.no_grad():
        losses, hits, _ = train.losses_and_hits(model, tokens, tokens)
    assert hits[:, 24:].float().mean() > 0.7
    assert hits[:, :20].float().mean() < 0.2


def test_the_small_model_is_small():
    parameters = sum(p.numel() for p in train.build_model(train.SIZES["small"]).parameters())
    assert 3e6 < parameters < 6e6 and 2 * parameters < 20e6


def test_the_learning_rate_rises_and_falls():
    rates = [training.learning_rate(step, 400) for step in range(400)]
    peak = training.WARMUP_STEPS - 1
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0.95 < rates[peak] <= 1 and abs(rates[-1] - training.FINAL_LEARNING_RATE) < 0.001


@pytest.mark.slow
def test_training_needs_no_vllm():
    modules = ", ".join(f"vllm_kvmerge.demo.{name}" for name in ("train", "scores"))
    check = f"import sys; import {modules}; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


class Oracle:
    """Stands in for a model: always certain of the next token of the document it is shown, or of none."""

    device = "cpu"

    def __init__(self, right: bool) -> None:
        self.right, self.whole = right, None

    def __call__(self, tokens, use_cache, logits_to_keep):
        class Output:
            logits = torch.zeros(1, logits_to_keep, len(language.VOCABULARY))

        following = self.whole[0, -logits_to_keep:] if self.right else torch.zeros(logits_to_keep, dtype=torch.int64)
        Output.logits[0, torch.arange(logits_to_keep), following] = 20.0
        return Output


@pytest.mark.parametrize("right", [True, False])
def test_scores(monkeypatch, right):
    oracle, tensor = Oracle(right), torch.tensor

    def remember(*args, **kwargs):
        oracle.whole = tensor(*args, **kwargs)
        return oracle.whole

    monkeypatch.setattr(torch, "tensor", remember)
    rng = np.random.default_rng()
    prompt = draw_prompt(rng, "recall", 100, 3)
    assert is_right(oracle, prompt.text, prompt.answer) == right
    for setting in SETTINGS:
        assert share_right(oracle, rng, setting, 512, 3) == right
    assert (text_loss(oracle, rng, 400) < 0.01) == right
    assert {setting.kind for setting in SETTINGS} == set(KIND_NAMES)
