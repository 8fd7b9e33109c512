"""The measured error of attention's output, and that merging makes it smaller."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from vllm_kvmerge import demo
from vllm_kvmerge.demo import recall
from vllm_kvmerge.evaluation import attention
from vllm_kvmerge.evaluation.attention import TracedSequence, output_errors, trace
from vllm_kvmerge.request.parameters import parse_compression

PROMPT, QUERIES = 400, 64


@pytest.fixture(scope="module")
def traces():
    rng = np.random.default_rng()
    documents = [recall.training_sample(rng, PROMPT + QUERIES, 8, 5)[0].tolist() for _ in range(3)]
    return trace(demo.model_path(), documents)


def error(traces, policy, **parameters):
    config = parse_compression({"policy": policy, "budget": 0.2, "interval": 16, **parameters})
    return np.mean([e for layers in traces for e in output_errors(layers, config, PROMPT, QUERIES, torch.float32)])


def test_a_trace_is_what_the_model_attended_to(traces):
    config, layers = AutoConfig.from_pretrained(demo.model_path()), traces[0]
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert len(layers) == config.num_hidden_layers
    sequence = TracedSequence(layers, torch.float32)
    outputs = sequence.attend(sequence.write(PROMPT))
    for layer, output in zip(layers, outputs, strict=True):
        assert layer.queries.shape == (PROMPT + QUERIES, heads, size)
        assert layer.keys.shape == (PROMPT + QUERIES, kv_heads, size)
        q, k, v = (t[:PROMPT].transpose(0, 1).double() for t in (layer.queries, layer.keys, layer.values))
        k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
        assert (output.transpose(0, 1) - dense).norm() / dense.norm() < 1e-5
        assert layer.output_weights.shape == (kv_heads, heads // kv_heads, config.hidden_size, size)


def test_a_trace_knows_the_rotation(traces):
    """In the first layer, a token's key before RoPE does not depend on where it stands."""
    rng = np.random.default_rng()
    (layers,) = trace(demo.model_path(), [[2, *rng.integers(19, 780, 40).tolist() * 5]])
    first = layers[0]
    back = first.rotation.turned_back(first.keys, torch.arange(len(first.keys)).unsqueeze(1))
    repeats = back[1:].unflatten(0, (5, 40))
    torch.testing.assert_close(repeats[1:], repeats[:1].expand(4, -1, -1, -1), rtol=1e-4, atol=1e-4)
    assert (first.keys[41:81] - first.keys[1:41]).abs().max() > 0.1
    assert error(traces, "expected_attention") < 1.5 and error(traces, "compactor") < 1.5


def test_no_error_without_compression(traces):
    assert error(traces, "keepkv", budget=PROMPT + QUERIES) < 1e-5


@pytest.mark.parametrize("policy", ["keepkv", "zsmerge", "weightedkv", "grkv"])
def test_merging_moves_the_output_less_than_dropping(traces, policy):
    assert error(traces, policy) < error(traces, policy, merger="drop")


def test_a_smaller_budget_costs_more(traces):
    errors = [error(traces, "snapkv", budget=budget) for budget in (0.1, 0.3, 0.9)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("kvzip", "'kvzip' has a model repeat the context"),
        ("kvzap", "'kvzap' reads hidden states, which traces do not"),
    ],
)
def test_what_would_have_to_run_the_model_is_not_replayed(capsys, policy, said):
    assert policy not in attention._parser().parse_args([]).policies
    with pytest.raises(SystemExit):
        attention.main(["--policies", policy, "--documents", "1", "--questions", "1"])
    assert said in capsys.readouterr().err
