"""A model with multi-head latent attention: an entry is one vector, key and value at once, that all heads share."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.architectures import ARCHITECTURES, MAX_TOKENS, greedy, running
from tests.engine.conftest import Engine, random_prompt, run
from tests.engine.test_repetition import PROMPTS, dense_scores, scores
from tests.presets import SMALL
from vllm_kvmerge.engine.arguments import request_limits
from vllm_kvmerge.engine.attention import cpu_latent
from vllm_kvmerge.policies import MERGERS, PRESETS
from vllm_kvmerge.request.spec import CompressionError, parse_compression

pytestmark = pytest.mark.engine

__all__ = ["scores"]  # a fixture

LATENT, BLOCK_SIZE = 576, 16
ELSEWHERE = dict.fromkeys(("criticalkv", "expected_attention", "triattention", "compactor", "calibrated"), "selector")
ELSEWHERE |= dict.fromkeys(("kvzap", "kvzip_once"), "tracker")
"""Policies that evict, but need what latents do not have, and the part that does."""

MERGING = sorted(name for name, preset in PRESETS.items() if preset.merger != "drop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return ARCHITECTURES["latents"].write(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder) as engine:
        yield engine


class Dense:
    """The model in Transformers, in float64, each of whose layers sees the entries that a cache holds."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        self.hidden: torch.Tensor | None = None
        """``[layers, context]`` bool: the context's tokens that later ones do not see."""
        for number, layer in enumerate(self.model.model.layers):
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs, n=number: self._mask(n, args, kwargs), with_kwargs=True
            )

    def _mask(self, layer: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        num_tokens = kwargs["hidden_states"].shape[1]
        seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        if self.hidden is not None:
            context = self.hidden.shape[1]
            seen[context:, :context] &= ~self.hidden[layer]
        mask = torch.zeros(num_tokens, num_tokens, dtype=torch.float64).masked_fill(~seen, float("-inf"))
        return args, kwargs | {"attention_mask": mask[None, None]}

    def __call__(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[tokens, vocab]``, and probabilities summed over heads, ``[layers, tokens, tokens]``."""
        with torch.inference_mode():
            output = self.model(torch.tensor([tokens]), output_attentions=True)
        return output.logits[0], torch.stack([one[0].sum(0) for one in output.attentions])


def entries_of(engine: Engine) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Of each layer of the only request: positions in its front, and ``[tokens]`` scores in the cache, by position."""
    (request,), (state,) = engine.scheduler.running, engine.compression.states.values()
    segments, layers = engine.segments[request.request_id], engine.compression.compactor.layers
    blocks = torch.tensor([block.block_id for block in engine.manager.req_to_blocks[request.request_id]])
    tail = torch.arange(segments.tail, request.num_computed_tokens)
    for number, layer in enumerate(layers):
        if state.pages is None:
            slots = torch.arange(segments.front)
            lanes = [(number, block) for block in blocks[slots // BLOCK_SIZE].tolist()]
        else:
            slots = torch.arange(int(state.pages.fronts[number, 0]))
            of_layer, block, _ = state.pages.places(state.pages.ids[number, 0, slots // BLOCK_SIZE])
            lanes = list(zip(of_layer.tolist(), block.tolist(), strict=True))
        places = [(layers[one], block, 0, slot % BLOCK_SIZE) for (one, block), slot in zip(lanes, slots, strict=True)]
        positions = [int(cache.positions[tuple(index)]) for cache, *index in places]
        scores = torch.zeros(request.num_computed_tokens)
        for position, (cache, *index) in zip(positions, places, strict=True):
            scores[position] = cache.scores[tuple(index)]
        scores[tail] = layer.scores[blocks[tail // BLOCK_SIZE], 0, tail % BLOCK_SIZE]
        yield positions, scores


@pytest.fixture(scope="module")
def dense(folder) -> Dense:
    return Dense(folder)


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("snapkv", {}),
        ("snapkv", {"context_tokens": 200}),
        ("h2o", {"decode": "bounded", "interval": 60}),
        ("h2o", {"decode": "bounded", "interval": 60, "score_window": "all", "context_tokens": 280}),
        ("tova", {"decode": "bounded", "interval": 60}),
        ("keydiff", {"interval": 60}),
        ("snapkv", {"allocator": "global"}),
    ],
)
def test_eviction_is_a_mask_and_scores_are_attention(engine, dense, scores, monkeypatch, policy, fields):
    """Tokens, the prompt's scores, and those that attention adds while the request generates; queries are absorbed a
    few at a time, and a question of 100 tokens attends in parts."""
    monkeypatch.setattr(cpu_latent, "MAX_ABSORBED", 10 * LATENT * 4)
    prompt = random_prompt(np.random.default_rng(21), 300)
    context, num_tokens = fields.get("context_tokens", len(prompt)), 30
    config = parse_compression({"policy": policy, "budget": 64, **fields})
    tracker, layers = config.policy.tracker, engine.compression.compactor.layers
    engine.add("one", prompt, greedy(policy, num_tokens, budget=64, **fields))
    kept: list[list[int]] = []
    found: list[torch.Tensor] = []

    def watch():
        if engine.scheduler.running and engine.segments:
            kept[:], found[:] = zip(*entries_of(engine), strict=True)

    tokens = run(engine, watch)["one"]
    dense.hidden = torch.ones(len(layers), context, dtype=torch.bool)
    for layer, positions in enumerate(kept):
        dense.hidden[layer, positions] = False
    assert abs(sum(map(len, kept)) / len(kept) - 64) <= 1
    logits, attention = dense([*prompt, *tokens[:-1]])
    assert logits[len(prompt) - 1 :].argmax(1).tolist() == tokens
    engine.assert_empty()
    if not config.policy.accumulates_scores:
        return
    window = context if tracker.prompt_window == "all" else tracker.prompt_window
    (prompt_scores,) = scores
    age = torch.arange(window - 1, -1, -1, dtype=torch.float64)
    weighed = attention[:, context - window : context] * (tracker.update_decay**age)[None, :, None]
    expected = weighed.sum(1)[:, :context]
    assert (prompt_scores[:, 0, :context] - expected).abs().max() < 1e-4 * expected.max()
    if not config.tracks_decode:
        return
    # From the context's end up to the last token but one, whose successor has not been computed.
    for layer, plane in enumerate(found):
        total = torch.cat([expected[layer], torch.zeros(len(plane) - context)])
        for query in range(context, len(plane)):
            total = total * tracker.update_decay + attention[layer, query, : len(plane)]
        seen = [*kept[layer], *range(context, len(plane))]
        assert (plane[seen] - total[seen]).abs().max() < 1e-4 * total.max()


def test_scores_of_a_repeated_context_are_those_of_a_dense_computation(engine, folder, scores):
    """The repetition is a chunk behind its parent's tokens, which vLLM's operators for latents cannot run."""
    prompt = random_prompt(np.random.default_rng(61), 320)
    fields = {"chunk_size": 150, "num_prefix_tokens": 4, **PROMPTS}
    engine.add("one", prompt, greedy("kvzip", budget=0.5, context_tokens=300, **fields))
    run(engine)
    (found,) = scores
    expected = dense_scores(prompt[:300], 150, 4, PROMPTS, path=folder).amax(1, keepdim=True)
    assert (found - expected).abs().max() < 1e-4 * expected.max()
    engine.assert_empty()


REFUSED = [
    *((name, {}, "merger", PRESETS[name].merger) for name in MERGING),
    *((name, {}, kind, getattr(PRESETS[name], kind)) for name, kind in ELSEWHERE.items()),
    *(("snapkv", {"merger": name}, "merger", name) for name in sorted(set(MERGERS) - {"drop"})),
    ("snapkv", {"refresh": {"every": 16}, "decode": "bounded"}, "refresh", "a refresh"),
    ("kvzip", {"normalized": True}, "normalized", "reconstruction"),
    ("streaming_llm", {"positions": "cache"}, "positions", "cache"),
    ("snapkv", {"reuse": "turns"}, "reuse", "turns"),
]


@pytest.mark.parametrize(("policy", "fields", "field", "said"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_needs_keys_and_values_is_refused_by_name(engine, policy, fields, field, said):
    limits = request_limits(engine.llm.llm_engine.vllm_config)
    config = parse_compression({"policy": policy, "budget": 64, **SMALL.get(policy, {}), **fields})
    with pytest.raises(CompressionError, match=rf"{said}.*allowed: ") as refusal:
        limits.check(config, 300, MAX_TOKENS)
    assert (refusal.value.status, refusal.value.param) == (400, f"kv_compression.{field}")
    assert field != "merger" or policy in str(refusal.value)
