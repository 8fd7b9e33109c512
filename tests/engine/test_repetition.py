"""Contexts that internal requests repeat before they are compressed (``kvzip``)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from tests.engine.conftest import random_prompt, run
from tests.measures import score
from vllm_kvmerge import compression, demo
from vllm_kvmerge.demo import recall
from vllm_kvmerge.engine.repetition import RepeatingRequest
from vllm_kvmerge.engine.worker.compression import Compression
from vllm_kvmerge.request.parameters import parse_compression

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
        states = [self.states[plan.request_id] for plan in self.step.plans if plan.request_id in self.states]
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


REQUESTS = {
    "one chunk": (300, {"budget": 0.5}),
    "chunks": (900, {"budget": 0.25, "chunk_size": 250, **PROMPTS}),
    "question": (700, {"budget": 200, "chunk_size": 300, "context_tokens": 650}),
    "per layer": (500, {"budget": 0.25, "allocator": "adaptive", "chunk_size": 200}),
    "uniform": (450, {"budget": 0.25, "allocator": "uniform"}),
    "threshold": (450, {"budget": {"threshold": 0.2, "max": 0.5}}),
    "normalized": (450, {"budget": 0.25, "normalized": True, "chunk_size": 250}),
    "short": (40, {"budget": 0.5}),
    "within its budget": (100, {"budget": 300}),
}


def add_all(engine, prompts) -> None:
    for name, (_, fields) in REQUESTS.items():
        add(engine, name, prompts[name], params(12, **fields))


@pytest.fixture(scope="module")
def alone(engine):
    """Prompt and tokens of each of the requests, alone and with nothing in the prefix cache."""
    rng = np.random.default_rng(62)
    prompts = {name: random_prompt(rng, length) for name, (length, _) in REQUESTS.items()}
    tokens = {}
    for name, (_, fields) in REQUESTS.items():
        assert engine.llm.reset_prefix_cache()
        (tokens[name],) = engine.tokens([prompts[name]], params(12, **fields))
    engine.assert_empty()
    return prompts, tokens


@pytest.mark.slow
def test_company_changes_nothing(engine, alone):
    """Other policies and plain requests run beside them; none of the internal requests is shown to anybody."""
    prompts, tokens = alone
    assert engine.llm.reset_prefix_cache()
    rng = np.random.default_rng(63)
    for index, policy in enumerate([None, "snapkv", "keepkv"]):
        add(
            engine, f"other {index}", random_prompt(rng, 400), params(30, policy, **({"budget": 100} if policy else {}))
        )
    add_all(engine, prompts)
    seen = []
    found = run(engine, lambda: seen.extend(one.index for one in internal(engine)))
    assert {name: found[name] for name in tokens} == tokens
    assert set(found) == set(tokens) | {f"other {index}" for index in range(3)}
    assert set(seen) == {0, 1, 2, 3}
    engine.assert_empty()


def test_a_hit_in_the_prefix_cache_changes_nothing(engine, alone):
    """Queries of the context are not needed, so all of it may be cached; repetitions leave nothing there."""
    prompts, tokens = alone
    name = "chunks"
    assert engine.llm.reset_prefix_cache()
    engine.tokens([prompts[name]], params(2, policy=None))
    pool = engine.pool.cached_block_hash_to_block
    cached = len(pool)
    (output,) = engine.generate([prompts[name]], params(12, **REQUESTS[name][1]))
    assert output.num_cached_tokens == 896 and list(output.outputs[0].token_ids) == tokens[name]
    assert len(pool) == cached
    engine.assert_empty()


@pytest.mark.thin(2)
@pytest.mark.parametrize("num_blocks", [40, 46])
def test_preemption_changes_nothing(engine, alone, num_blocks):
    """The pool has room for one or two contexts and a repetition: requests and repetitions are preempted."""
    prompts, tokens = alone
    assert engine.llm.reset_prefix_cache()
    preempted: set[str] = set()
    with engine.with_blocks(num_blocks):
        add_all(engine, prompts)
        requests = list(engine.scheduler.requests.values())
        found = run(engine, lambda: preempted.update(one.request_id for one in requests if one.num_preemptions))
    assert found == tokens
    assert preempted
    engine.assert_empty()


def test_few_requests_at_once(engine, alone, monkeypatch):
    """Of two places, one stays free for the repetition."""
    prompts, tokens = alone
    assert engine.llm.reset_prefix_cache()
    monkeypatch.setattr(engine.scheduler, "max_num_active_reqs", 2)
    add_all(engine, prompts)
    assert run(engine) == tokens
    engine.assert_empty()


@pytest.mark.parametrize("when", ["queued", "running", "finished"])
def test_a_request_that_ends_takes_its_repetition_along(engine, when):
    prompt = random_prompt(np.random.default_rng(64), 1500)
    add(engine, "one", prompt, params(1 if when == "finished" else 8, budget=0.25, chunk_size=1100))
    step = engine.llm.llm_engine.step
    while not internal(engine):
        step()
        if when == "finished":  # with its first token, before its context has been repeated
            break
    if when == "running":
        step()
        assert internal(engine)[0].num_computed_tokens > 1500
    if when == "finished":
        step()
    else:
        engine.llm.llm_engine.abort_request(["one"])
    assert not internal(engine) and not engine.scheduler.running and not engine.scheduler.waiting
    step()
    engine.assert_empty()


def test_the_engine_can_be_paused(engine, alone):
    """New requests are not admitted then, repetitions included: what waits for one goes back to the queue."""
    prompts, tokens = alone
    assert engine.llm.reset_prefix_cache()
    add(engine, "chunks", prompts["chunks"], params(12, **REQUESTS["chunks"][1]))
    while not internal(engine):
        engine.llm.llm_engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(3):
        engine.llm.llm_engine.step()
    assert engine.scheduler.get_num_unfinished_requests() == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert run(engine) == {"chunks": tokens["chunks"]}
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


def test_recall_of_facts_when_the_question_is_not_known(engine):
    """At a quarter of the context's entries and at an eighth, nearly all facts can be asked for."""
    rng = np.random.default_rng(67)
    prompts = [recall.draw_prompt(rng, 500, 8) for _ in range(10)]
    tokenizer = engine.llm.get_tokenizer()

    def exact(policy: str, budget: float) -> float:
        asked = [
            params(5, policy, budget=budget, decode="grow", context_tokens=len(tokenizer.encode(prompt.context)))
            for prompt in prompts
        ]
        for one in asked:
            one.ignore_eos = False
        outputs = engine.llm.generate([prompt.text for prompt in prompts], asked, use_tqdm=False)
        return score([output.outputs[0].text for output in outputs], prompts, policy).exact

    known_by_attention, by_keys = exact("snapkv", 0.125), exact("keydiff", 0.125)
    assert exact("kvzip", 0.25) >= 0.9
    assert exact("kvzip", 0.125) >= max(0.8, by_keys - 0.1, known_by_attention + 0.3)
    engine.assert_empty()
