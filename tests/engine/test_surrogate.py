"""Scores that are predicted from hidden states (``kvzap``): what is seen, when, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from tests.engine.conftest import random_prompt
from tests.engine.test_repetition import params, scores
from vllm_kvmerge import compression, demo
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.engine.surrogate import (
    Surrogate,
    SurrogateConfig,
    check_fingerprint,
    check_surrogate,
    fingerprint,
)
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.evaluation.backends import EngineBackend
from vllm_kvmerge.evaluation.config import EngineOptions
from vllm_kvmerge.evaluation.continuation import CONTINUATION

__all__ = ["scores"]


def predicted(tokens: list[int]) -> torch.Tensor:
    """``[layers, H, n]`` float32 of the demo's model by Transformers."""
    model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32)
    seen = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda _, args, output: seen.append(output[0]))
    with torch.inference_mode():
        model(torch.tensor([tokens]))
        layers = Surrogate.load(demo.kvzap_path()).layers
        return torch.stack([module(hidden).T for module, hidden in zip(layers, seen, strict=True)])


def test_scores_of_a_prompt_are_the_surrogates(engine, scores):
    """The prompt is computed in two chunks, beside another."""
    rng = np.random.default_rng(71)
    prompts = [random_prompt(rng, length) for length in (1300, 300)]
    engine.tokens(prompts, params(policy="kvzap", budget=0.5))
    for prompt in prompts:
        (found,) = (one for one in scores if one.shape[2] == len(prompt))
        assert (found - predicted(prompt)).abs().max() < 1e-3 and found.std() > 0.1
    engine.assert_empty()


def test_scores_of_generated_tokens_are_the_surrogates(engine, monkeypatch):
    """Each entry of later compressions, old and new, has the score of its token; generated ones, whose hidden states
    follow from a compressed cache, nearly."""
    rng = np.random.default_rng(72)
    prompt, continuation = random_prompt(rng, 400), rng.integers(19, 780, 120).tolist()
    found, gather = [], Compactor.gather

    def watched(self, seq_layers, batch):
        entries = gather(self, seq_layers, batch)
        layers = [one.layer for one in seq_layers]
        found.append((layers, entries.positions.clone(), entries.scores.clone(), entries.is_live))
        return entries

    monkeypatch.setattr(Compactor, "gather", watched)
    extra = {**compression("kvzap", budget=200, window_size=32, interval=32), CONTINUATION: continuation}
    engine.tokens([prompt], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, extra_args=extra))
    expected, last = predicted(prompt + continuation), 0
    for layers, positions, observed, is_live in found:
        wanted = expected[layers].flatten(0, 1).gather(1, positions.clamp(min=0))
        generated = is_live & (positions >= 400)
        assert (observed - wanted)[is_live & ~generated].abs().max() < 1e-3
        if generated.any():
            assert (observed - wanted)[generated].abs().mean() < 0.05 * wanted[generated].std()
        last = max(last, int(positions.max()))
    assert last > 450
    engine.assert_empty()


def test_what_is_refused():
    said = r"kv_compression\.refresh: tracker 'predicted' scores tokens once; allowed: null"
    with pytest.raises(ValueError, match=said):
        compression("kvzap", budget=0.5, refresh={"every": 64})


SHAPE = SimpleNamespace(
    get_total_num_hidden_layers=lambda: 4, get_hidden_size=lambda: 256, get_total_num_kv_heads=lambda: 2
)


@pytest.mark.parametrize("hidden_dim", [None, 16])
def test_a_saved_model_is_the_published_format(tmp_path, hidden_dim):
    config = SurrogateConfig(input_dim=256, output_dim=2, n_modules=4, hidden_dim=hidden_dim)
    made = Surrogate(config, config.modules())
    made.save(tmp_path)
    check_surrogate(str(tmp_path), SHAPE)
    loaded = Surrogate.load(str(tmp_path))
    hidden = torch.randn(5, 256)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "kvzap"
    for one, other in zip(made.layers, loaded.of_heads([1], torch.float32, torch.device("cpu")), strict=True):
        assert torch.allclose(one(hidden)[:, 1:], other(hidden), atol=1e-6)


def test_an_evaluation_gives_its_engine_the_model(monkeypatch):
    seen = {}
    monkeypatch.setattr("vllm.LLM", lambda model, **given: seen.update(given))
    options = {"dtype": "float32", "kvzap": demo.kvzap_path()}
    EngineBackend(demo.model_path(), EngineOptions(**options)).start(64, with_logprobs=False)
    assert (seen["dtype"], seen["max_model_len"]) == ("float32", 64) and "kvzap" not in seen
    assert seen["additional_config"]["kvmerge"]["kvzap"] == demo.kvzap_path()


OTHER = '{"input_dim": 256, "output_dim": 8, "n_modules": 4, "hidden_dim": null}'


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "it has no config.json"),
        ("config.json", "{}", "config.json: input_dim: Field required"),
        ("config.json", OTHER, "its output_dim is 8, the model's 2"),
        ("model.safetensors", None, "model.safetensors cannot be read"),
        ("model.safetensors", "torn", "model.safetensors cannot be read"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused(tmp_path, file, content, message):
    config = SurrogateConfig(input_dim=256, output_dim=2, n_modules=4)
    Surrogate(config, config.modules()).save(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(UnsupportedConfigError, match=f"kvzap=.*{message}.*; allowed: a KVzap model"):
        check_surrogate(str(tmp_path), SHAPE)
        Surrogate.load(str(tmp_path))


def test_one_that_was_trained_for_another_model_is_refused(engine, tmp_path):
    """vLLM's model has the fingerprint of the checkpoint's in Transformers, whatever the dtype."""
    (served,) = engine.llm.apply_model(fingerprint)
    read = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.bfloat16)
    assert served == fingerprint(read)
    for trained, message in ((None, None), (served, None), ("0" * 16, f"another model .fingerprint {'0' * 16}")):
        config = SurrogateConfig(input_dim=256, output_dim=2, n_modules=4, fingerprint=trained)
        Surrogate(config, config.modules()).save(tmp_path)
        if message is None:
            check_fingerprint(str(tmp_path), read)
            continue
        with pytest.raises(UnsupportedConfigError, match=f"kvzap=.*{message}.*; allowed: a KVzap model"):
            check_fingerprint(str(tmp_path), read)
    read.model.layers[2].input_layernorm.weight.data[5] += 0.5
    assert fingerprint(read) != served
