"""Contexts that are scored by their own queries, as if they were repeated (``kvzip_once``)."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from tests.engine.conftest import random_prompt
from tests.engine.test_repetition import params, scores
from vllm_kvmerge import compression, demo
from vllm_kvmerge.engine.attention.rows import QueryRing

__all__ = ["scores"]


def dense_scores(context: list[int], chunk_size: int, lookahead: int, num_prefix_tokens: int, monkeypatch):
    """``[layers, H, n]`` float64, by Transformers."""
    model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float64, attn_implementation="eager")
    turned, turn = [], modeling_llama.apply_rotary_pos_emb

    def watched(query, key, cos, sin):
        # Angles of a sum of positions by the addition theorems, from those of the token at the difference.
        ahead_cos, ahead_sin = model.model.rotary_emb(query, torch.tensor([[min(chunk_size, len(context))]]))
        cos_ahead, sin_ahead = cos * ahead_cos - sin * ahead_sin, sin * ahead_cos + cos * ahead_sin
        rotated, keys = turn(query, key, cos, sin)
        turned.append((turn(query, key, cos_ahead, sin_ahead)[0][0], rotated[0], keys[0]))
        return rotated, keys

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", watched)
    with torch.inference_mode():
        model(torch.tensor([context]))
    heads, length = model.config.num_key_value_heads, len(context)
    expected = torch.zeros(len(turned), heads, length, dtype=torch.float64)
    for layer, (ahead, queries, keys) in enumerate(turned):
        scale = keys.shape[-1] ** -0.5
        for token in range(num_prefix_tokens, length):
            first = token // lookahead * lookahead
            end = min(first + lookahead, length)
            start = max(num_prefix_tokens, min(first, end - chunk_size))
            logits = [
                torch.einsum("hgd,hnd->hgn", rows[:, token].unflatten(0, (heads, -1)) * scale, keys[:, tokens])
                for rows, tokens in (
                    (ahead, [*range(num_prefix_tokens), *range(start, end)]),
                    (queries, range(start, token + 1)),
                )
            ]
            given = torch.cat(logits, 2).softmax(-1).amax(1)[:, num_prefix_tokens:][:, : end - start]
            expected[layer, :, start:end] = expected[layer, :, start:end].maximum(given)
    return expected


@pytest.mark.parametrize(
    ("length", "chunk_size", "lookahead", "num_prefix_tokens"),
    [(300, 128, 16, 4), (301, 2048, 64, 0), (130, 50, 130, 7)],
)
def test_scores_are_those_of_a_dense_computation(
    engine, scores, monkeypatch, length, chunk_size, lookahead, num_prefix_tokens
):
    """A question follows the context, which ends within a block of queries."""
    prompt = random_prompt(np.random.default_rng(91), length + 20)
    fields = {"chunk_size": chunk_size, "lookahead": lookahead, "num_prefix_tokens": num_prefix_tokens}
    engine.tokens([prompt], params(policy="kvzip_once", budget=0.5, context_tokens=length, **fields))
    (found,) = scores
    expected = dense_scores(prompt[:length], chunk_size, lookahead, num_prefix_tokens, monkeypatch)
    assert (found - expected).abs().max() < 1e-4 * expected.max()
    assert expected[..., num_prefix_tokens:].min() > 0 and expected.max() > 0.1
    engine.assert_empty()


def test_steps_do_not_matter(engine, scores, monkeypatch):
    """A context that is computed in several steps, which end within blocks of queries, has the scores that it has
    alone. Later queries are not kept."""
    monkeypatch.setattr(QueryRing, "address", lambda *_: pytest.fail("a query is kept"))
    rng = np.random.default_rng(92)
    prompts = [random_prompt(rng, length) for length in (1300, 777, 1110)]
    asked = params(policy="kvzip_once", budget=0.25)
    alone = [engine.tokens([prompt], asked) for prompt in prompts]
    expected = {one.shape[2]: one for one in scores}
    scores.clear()
    together = engine.tokens(prompts, asked)
    assert sorted(one.shape[2] for one in scores) == sorted(expected) and together == [one for (one,) in alone]
    for one in scores:
        assert (one - expected[one.shape[2]]).abs().max() < 1e-4
    engine.assert_empty()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"decode": "bounded"}, r"decode: tracker 'lookahead' scores the context alone, once, got 'bounded'"),
        ({"refresh": {"every": 64}}, r"refresh: tracker 'lookahead' scores the context alone, once"),
        ({"prefill": {"chunk": 256}}, r"prefill: chunks with tracker 'lookahead', which needs the whole context"),
        ({"reuse": "turns"}, r"reuse: 'turns' with tracker 'lookahead', which needs the whole context"),
        ({"trigger": "pressure"}, r"trigger: trigger 'pressure' with tracker 'lookahead', which has no scores then"),
        ({"positions": "cache"}, r"positions: 'cache' with 'lookahead', which turns queries or keys back"),
    ],
)
def test_what_is_refused(fields, said):
    with pytest.raises(ValueError, match=rf"kv_compression\.{said}"):
        compression("kvzip_once", budget=0.5, **fields)
