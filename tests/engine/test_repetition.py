"""Contexts that internal requests repeat before they are compressed (``kvzip``)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request

from tests.engine.conftest import random_prompt, run
from vllm_kvmerge import compression, demo
from vllm_kvmerge.engine.internal_requests import RepeatingRequest
from vllm_kvmerge.engine.worker.compression import Compression
from vllm_kvmerge.request.spec import parse_compression

PROMPTS = {"repeat_prompt": [40, 41, 42], "resume_prompt": [43], "answer_prompt": [44, 45]}


def params(max_tokens: int = 8, policy: str = "kvzip", **fields) -> SamplingParams:
    extra = compression(policy, **fields) if policy else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def add(engine, request_id: str, prompt: list[int], asked: SamplingParams) -> None:
    asked.output_kind = RequestOutputKind.FINAL_ONLY
    engine.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, asked)


def internal(engine) -> list[RepeatingRequest]:
    return [one for one in engine.scheduler.requests.values() if isinstance(one, RepeatingRequest)]


@pytest.fixture
def scores(monkeypatch) -> list[torch.Tensor]:
    """Scores of each context that is compressed, ``[layers, H, n]``, in the order of their compressions."""
    found, run_plans = [], Compression.run_plans

    def watched(self, blocks_of):
        states = [self.states[plan.request_id] for plan in self.step.compress if plan.request_id in self.states]
        found.extend(one.prompt_scores.scores.clone() for one in states if one.prompt_scores is not None)
        return run_plans(self, blocks_of)

    monkeypatch.setattr(Compression, "run_plans", watched)
    return found


def dense_scores(
    context: list[int],
    chunk_size: int,
    num_prefix_tokens: int,
    asked: dict,
    normalized: bool = False,
    path: str | Path | None = None,
) -> torch.Tensor:
    """``[layers, H, n]`` float64 by Transformers, of layers of full attention: attention over all tokens, renormalised
    over those that count. normalized: times ||W_O v|| / ||h||, h being the layer's input after its norm."""
    model = AutoModelForCausalLM.from_pretrained(
        path or demo.model_path(), dtype=torch.float64, attn_implementation="eager"
    )
    config, length = model.config, len(context)
    hidden: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda _, args, output: hidden.append(output[0]))
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = [index for index, one in enumerate(types) if one == "full_attention"]
    shape = len(layers), config.num_key_value_heads
    expected = torch.zeros(*shape, length, dtype=torch.float64)
    for start in range(num_prefix_tokens, length, chunk_size):
        chunk = slice(start, min(start + chunk_size, length))
        first = start == num_prefix_tokens
        tokens = asked["repeat_prompt"] if first else asked["resume_prompt"] + context[max(0, start - 8) : start]
        tokens = context + tokens + asked["answer_prompt"] + context[chunk]
        hidden.clear()
        with torch.inference_mode():
            output = model(torch.tensor([tokens]), output_attentions=True)
        for place, layer in enumerate(layers):
            rows = output.attentions[layer][0, :, length:].unflatten(0, (shape[1], -1))
            counted = rows[..., :num_prefix_tokens].sum(-1) + rows[..., chunk].sum(-1) + rows[..., length:].sum(-1)
            given = rows[..., chunk] / counted.unsqueeze(-1)
            if normalized:
                values = output.past_key_values.layers[layer].values[0, :, chunk]
                heads = model.model.layers[layer].self_attn.o_proj.weight.detach().split(values.shape[2], dim=1)
                for head, weight in enumerate(heads):
                    group, one = divmod(head, config.num_attention_heads // shape[1])
                    given[group, one] *= torch.stack([(weight @ value).norm() for value in values[group]])
                given = given / hidden[layer][length:].norm(dim=-1)[:, None]
            expected[place, :, chunk] = given.amax((1, 2))
    return expected


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("length", "chunk_size", "num_prefix_tokens", "normalized"),
    [(500, 150, 4, False), (130, 2000, 0, False), (500, 150, 4, True), (900, 600, 0, True)],
)
def test_scores_are_those_of_a_dense_computation(engine, scores, length, chunk_size, num_prefix_tokens, normalized):
    """Chunks begin and end within blocks; so does the context, and a question follows it. The longest repetition is
    computed in two steps."""
    prompt = random_prompt(np.random.default_rng(61), length + 20)
    fields = {"chunk_size": chunk_size, "num_prefix_tokens": num_prefix_tokens, **PROMPTS}
    engine.tokens([prompt], params(budget=0.5, context_tokens=length, normalized=normalized, **fields))
    (found,) = scores
    expected = dense_scores(prompt[:length], chunk_size, num_prefix_tokens, PROMPTS, normalized)
    assert (found - expected).abs().max() < 1e-4 * expected.max()
    assert expected[..., num_prefix_tokens:].min() > 0 and expected.max() > (0.05 if normalized else 0.5)
    engine.assert_empty()


def test_an_adapter_repeats_what_it_has_read():
    parent = Request(
        request_id="one",
        prompt_token_ids=list(range(20)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest("a", 1, "/adapters/a"),
    )
    tracker = parse_compression({"policy": "kvzip", "budget": 8}).policy.tracker
    repeating = RepeatingRequest.of(parent, tracker, None, 20, 0)
    assert repeating.lora_request is parent.lora_request


def test_a_hit_in_the_prefix_cache_changes_nothing(engine):
    """Queries of the context are not needed, so all of it may be cached; repetitions leave nothing there."""
    prompt, asked = random_prompt(np.random.default_rng(62), 900), params(12, budget=0.25, chunk_size=250, **PROMPTS)
    assert engine.llm.reset_prefix_cache()
    (expected,) = engine.tokens([prompt], asked)
    assert engine.llm.reset_prefix_cache()
    engine.tokens([prompt], params(2, policy=None))
    cached = len(engine.pool.cached_block_hash_to_block)
    (output,) = engine.generate([prompt], asked)
    assert output.num_cached_tokens == 896 and list(output.outputs[0].token_ids) == expected
    assert len(engine.pool.cached_block_hash_to_block) == cached
    engine.assert_empty()


def test_internal_requests_are_nobodys(engine):
    """Neither requests nor tokens nor lookups in the prefix cache are counted, and reports are of users' alone."""
    add(engine, "one", random_prompt(np.random.default_rng(65), 900), params(8, budget=0.25, chunk_size=300))
    stats = []
    run(engine, lambda: stats.append((engine.scheduler.make_stats(), len(internal(engine)))))
    assert any(count for _, count in stats)
    for one, _ in stats:
        if one is not None:
            assert one.num_running_reqs <= 1 and one.num_waiting_reqs == 0
            assert one.prefix_cache_stats.requests <= 1
    engine.assert_empty()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"decode": "bounded"}, "decode"),
        ({"refresh": {"every": 64}}, "refresh"),
        ({"answer_prompt": [1 << 30]}, "answer_prompt"),
        ({"chunk_size": 3000}, "chunk_size"),
    ],
)
def test_what_is_refused(engine, fields, field):
    prompt = random_prompt(np.random.default_rng(66), 2200)
    with pytest.raises(ValueError, match=rf"kv_compression\.{field}: .*allowed: "):
        (output,) = engine.generate([prompt], params(8, budget=0.25, **fields))
        raise ValueError(output.kv_transfer_params["kvmerge"]["error"])
    engine.assert_empty()
