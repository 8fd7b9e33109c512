"""Scores that are predicted from hidden states (``kvzap``): what is seen, when, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from tests.engine.conftest import random_prompt, run
from tests.engine.test_repetition import add, params, scores
from vllm_kvmerge import compression, demo
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.engine.surrogate import Surrogate, SurrogateConfig, check_surrogate
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
    assert [one.shape[2] for one in scores] == [300, 1300] or [one.shape[2] for one in scores] == [1300, 300]
    for found in scores:
        (prompt,) = (one for one in prompts if len(one) == found.shape[2])
        assert (found - predicted(prompt)).abs().max() < 1e-3
    assert scores[0].std() > 0.1
    engine.assert_empty()


def test_scores_of_generated_tokens_are_the_surrogates(engine, monkeypatch):
    """Each entry of later compressions, old and new, has the score of its token; generated ones, whose hidden states
    follow from a compressed cache, nearly."""
    rng = np.random.default_rng(72)
    prompt, continuation = random_prompt(rng, 400), rng.integers(19, 780, 120).tolist()
    found, gather = [], Compactor._gather

    def watched(self, seq_layers, batch):
        entries = gather(self, seq_layers, batch)
        found.append(
            ([one.layer for one in seq_layers], entries.positions.clone(), entries.scores.clone(), entries.is_live)
        )
        return entries

    monkeypatch.setattr(Compactor, "_gather", watched)
    extra = {**compression("kvzap", budget=200, window_size=32, interval=32), CONTINUATION: continuation}
    engine.tokens([prompt], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, extra_args=extra))
    expected, last = predicted(prompt + continuation), 0
    for layers, positions, observed, is_live in found:
        by_row = expected[layers].flatten(0, 1)
        wanted = by_row.gather(1, positions.clamp(min=0))
        generated = is_live & (positions >= 400)
        assert (observed - wanted)[is_live & ~generated].abs().max() < 1e-3
        if generated.any():
            assert (observed - wanted)[generated].abs().mean() < 0.05 * wanted[generated].std()
        last = max(last, int(positions.max()))
    assert last > 450
    engine.assert_empty()


REQUESTS = {
    "all heads": (700, {"budget": 0.3, "window_size": 32}),
    "threshold": (600, {"budget": {"threshold": 0.01, "max": 0.6}, "window_size": 32}),
    "uniform": (500, {"budget": 0.3, "window_size": 32, "allocator": "uniform", "interval": 16}),
    "within its budget": (150, {"budget": 200}),
    "question": (500, {"budget": 200, "context_tokens": 450}),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [200, 34])
def test_company_preemption_and_the_prefix_cache_change_nothing(engine, num_blocks):
    rng = np.random.default_rng(73)
    prompts = {name: random_prompt(rng, length) for name, (length, _) in REQUESTS.items()}
    alone = {}
    for name, (_, fields) in REQUESTS.items():
        assert engine.llm.reset_prefix_cache()
        (alone[name],) = engine.tokens([prompts[name]], params(80, "kvzap", **fields))
    preempted: set[str] = set()
    with engine.with_blocks(num_blocks):
        for index in range(3):  # they came first, and grow
            add(engine, f"plain {index}", random_prompt(rng, 40), params(250, policy=None))
        for name, (_, fields) in REQUESTS.items():
            add(engine, name, prompts[name], params(80, "kvzap", **fields))
        requests = list(engine.scheduler.requests.values())
        found = run(engine, lambda: preempted.update(one.request_id for one in requests if one.num_preemptions))
    assert {name: found[name] for name in alone} == alone
    assert bool(preempted) == (num_blocks < 100)
    engine.assert_empty()


def test_a_policy_may_keep_what_a_model_predicts_to_matter(engine):
    """Half of the demo's facts and more survive at a quarter, when the question is not known."""
    from tests.measures import score
    from vllm_kvmerge.demo import recall

    rng = np.random.default_rng(74)
    prompts = [recall.draw_prompt(rng, 800, 8) for _ in range(10)]
    tokenizer = engine.llm.get_tokenizer()
    exact = {}
    for policy, fields in (("kvzap", {"window_size": 32, "decode": "grow"}), ("snapkv", {})):
        asked = [
            params(5, policy, budget=0.25, context_tokens=len(tokenizer.encode(one.context)), **fields)
            for one in prompts
        ]
        for one in asked:
            one.ignore_eos = False
        outputs = engine.llm.generate([one.text for one in prompts], asked, use_tqdm=False)
        exact[policy] = score([output.outputs[0].text for output in outputs], prompts, policy).exact
    assert exact["kvzap"] >= exact["snapkv"] + 0.3
    engine.assert_empty()


def test_what_is_refused(engine):
    with pytest.raises(
        ValueError, match=r"kv_compression\.refresh: tracker 'predicted' scores tokens once; allowed: null"
    ):
        compression("kvzap", budget=0.5, refresh={"every": 64})
    assert engine.scheduler._limits.shape.has_surrogate


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json: input_dim: Field required"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"torn"), "model.safetensors cannot be read"),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps({"input_dim": 256, "output_dim": 8, "n_modules": 4, "hidden_dim": None})
            ),
            "its output_dim is 8, the model's 2",
        ),
    ],
)
def test_a_model_that_cannot_be_used_is_refused(tmp_path, change, message):
    config = SurrogateConfig(input_dim=256, output_dim=2, n_modules=4)
    Surrogate(config, config.modules()).save(tmp_path)
    change(tmp_path)
    with pytest.raises(UnsupportedConfigError, match=f"kvzap=.*{message}.*; allowed: a KVzap model"):
        check_surrogate(str(tmp_path), SHAPE)
        Surrogate.load(str(tmp_path))
