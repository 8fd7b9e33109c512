"""Training can be interrupted, and starts from a circuit that already finds what was said."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_kvmerge.demo import language, train
from vllm_kvmerge.demo.documents import KIND_NAMES, draw_prompt
from vllm_kvmerge.demo.scores import SETTINGS, is_right, share_right, text_loss

pytestmark = pytest.mark.engine

TINY = train.Size(
    layers=3, width=256, intermediate=64, kv_heads=2, tokens_per_step=256, learning_rate=1e-3,
    stages=(train.Stage(64, 3), train.Stage(128, 3)),
)  # fmt: skip


def trained(folder, stop_after=()) -> dict[str, torch.Tensor]:
    """Weights after a run that is interrupted after each of ``stop_after`` steps."""
    for stop in (*stop_after, None):
        (trainer := train.Trainer(TINY, folder, 0, "cpu", stop)).run()
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
    words = range(4, len(language.VOCABULARY))
    assert tokenizer.encode(language.words_of(words)) == [language.BOS, *words]
    text = draw_prompt(np.random.default_rng(), "recall", 100, 3).text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).split() == text.split()


def test_the_planted_circuit_copies_without_training():
    torch.manual_seed(0)
    model = train.build_model(train.SHIPPED)
    rng = np.random.default_rng(0)
    documents = [[language.BOS, *language.plain_text(rng, 20)] for _ in range(4)]
    tokens = torch.tensor([document + document[1:] for document in documents])
    with torch.no_grad():
        losses, hits, _ = train.losses_and_hits(model, tokens, tokens)
    assert hits[:, 24:].float().mean() > 0.7
    assert hits[:, :20].float().mean() < 0.2


@pytest.mark.parametrize("right", [True, False])
def test_scores(monkeypatch, right):
    """Of what stands in for a model: always certain of the next token of the document it is shown, or of none."""
    shown, tensor = [], torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *given, **options: shown.append(tensor(*given, **options)) or shown[-1])

    def oracle(tokens, use_cache, logits_to_keep):
        following = shown[-1][0, -logits_to_keep:] if right else torch.zeros(logits_to_keep, dtype=torch.int64)
        return SimpleNamespace(logits=20.0 * one_hot(following, len(language.VOCABULARY))[None])

    oracle.device = "cpu"
    rng = np.random.default_rng()
    prompt = draw_prompt(rng, "recall", 100, 3)
    assert is_right(oracle, prompt.text, prompt.answer) == right
    for setting in SETTINGS:
        assert share_right(oracle, rng, setting, 512, 3) == right
    assert (text_loss(oracle, rng, 400) < 0.01) == right
    assert {setting.kind for setting in SETTINGS} == set(KIND_NAMES)
