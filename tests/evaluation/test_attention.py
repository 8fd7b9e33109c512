"""The measured error of attention's output, and that merging makes it smaller."""

import numpy as np
import pytest
import torch

from vllm_kvmerge import demo
from vllm_kvmerge.config import parse_compression
from vllm_kvmerge.demo import recall
from vllm_kvmerge.evaluation.attention import TracedSequence, output_errors, trace

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
    layers = traces[0]
    assert len(layers) == 3
    sequence = TracedSequence(layers, torch.float32)
    outputs = sequence.attend(sequence.write(PROMPT))
    for layer, output in zip(layers, outputs, strict=True):
        assert layer.queries.shape == (PROMPT + QUERIES, 4, 64) and layer.keys.shape == (PROMPT + QUERIES, 2, 64)
        q, k, v = (t[:PROMPT].transpose(0, 1).double() for t in (layer.queries, layer.keys, layer.values))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
        assert (output.transpose(0, 1) - dense).norm() / dense.norm() < 1e-5
        assert layer.output_weights.shape == (2, 2, 192, 64)


def test_no_error_without_compression(traces):
    assert error(traces, "keepkv", budget=PROMPT + QUERIES) < 1e-5


@pytest.mark.parametrize("policy", ["keepkv", "zsmerge", "weightedkv", "grkv"])
def test_merging_moves_the_output_less_than_dropping(traces, policy):
    assert error(traces, policy) < error(traces, policy, merger="drop")


def test_a_smaller_budget_costs_more(traces):
    errors = [error(traces, "snapkv", budget=budget) for budget in (0.1, 0.3, 0.9)]
    assert errors == sorted(errors, reverse=True)
