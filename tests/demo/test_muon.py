"""Muon: what a step does to a matrix."""

import pytest
import torch

from vllm_kvmerge.demo.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_singular_values_become_about_one_along_the_same_directions(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    in_its_directions = u.T @ orthogonalize(1e3 * matrix) @ vh.T
    singular = in_its_directions.diagonal()
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert (in_its_directions - singular.diag()).abs().max() < 1e-3


def test_a_step_follows_the_momentum_and_decays():
    torch.manual_seed(0)
    before = torch.randn(64, 16)
    matrix = torch.nn.Parameter(before.clone())
    optimizer = Muon([matrix], lr=0.1, momentum=0.9, weight_decay=0.5)
    first, second = torch.randn(2, 64, 16)
    expected, momentum = before, torch.zeros(64, 16)
    for gradient in (first, second):
        matrix.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        # Nesterov's look ahead; four times as many rows as columns make a step twice as long.
        update = orthogonalize(0.1 * gradient + 0.9 * momentum)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 2 * update
    torch.testing.assert_close(matrix.detach(), expected)
