"""RoPE as models apply it, undone."""

import pytest
import torch
from torch import Tensor

from tests.policies.sampling import rope
from vllm_kvmerge.policies.rotation import Rotation

SHAPES = [(16, True), (16, False), (8, True), (8, False)]
"""Of heads of 16 numbers, how many are turned, and whether halves or neighbours are pairs."""


def turned(vector: Tensor, position: int, size: int, is_neox: bool, factor: float) -> Tensor:
    """One vector in float64, pair by pair, as complex numbers."""
    result = vector.clone()
    for i in range(size // 2):
        one, other = (i, i + size // 2) if is_neox else (2 * i, 2 * i + 1)
        angle = torch.tensor(position * 1e4 ** (-2 * i / size), dtype=torch.float64)
        number = torch.complex(vector[one], vector[other]) * torch.polar(torch.tensor(factor).double(), angle)
        result[one], result[other] = number.real, number.imag
    return result


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize(("size", "is_neox"), SHAPES)
def test_turns_and_turning_back(size, is_neox, factor):
    rotation = rope(size, is_neox, factor=factor)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 3, 5, 16, generator=generator)
    positions = torch.randint(0, 2048, (2, 5), generator=generator)
    found = rotation.turned(vectors, positions.unsqueeze(1))
    for head, group, place in torch.cartesian_prod(*map(torch.arange, vectors.shape[:3])).tolist():
        exact = turned(vectors[head, group, place].double(), int(positions[head, place]), size, is_neox, factor)
        torch.testing.assert_close(found[head, group, place].double(), exact, rtol=0, atol=1e-5)
    assert torch.equal(found[..., size:], vectors[..., size:])
    torch.testing.assert_close(rotation.turned_back(found, positions.unsqueeze(1)), vectors, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("size", "is_neox"), SHAPES)
def test_turning_back_with_a_rounded_table(size, is_neox):
    """What a model in bfloat16 has turned by rounded cosines comes back whole."""
    rotation = Rotation(rope(size, is_neox).table.bfloat16(), is_neox)
    vectors, positions = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)), torch.arange(40) * 50
    back = rotation.turned_back(rotation.turned(vectors, positions), positions)
    torch.testing.assert_close(back, vectors, rtol=0, atol=1e-5)


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize(("size", "is_neox"), SHAPES)
def test_the_mean_of_turns_to_come(size, is_neox, factor):
    rotation = rope(size, is_neox, factor=factor)
    vectors = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))
    starts = torch.tensor([0, 17, 900])
    each = [rotation.turned(vectors, starts + step) for step in range(100)]
    torch.testing.assert_close(
        rotation.turned_ahead(vectors, starts, 100), torch.stack(each).mean(0), rtol=0, atol=1e-5
    )
