"""Norms of projected values on every level, against their definition in float64."""

import pytest
import torch
from torch import Tensor

from vllm_kvmerge.ops import cpu

DTYPES = torch.bfloat16, torch.float16, torch.float32

# heads, values, query heads, hidden size, head size: tiles need multiples of 32 of the last two, others do not.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 2, 5, 7),
    (1, 17, 1, 32, 32),
    (2, 16, 3, 96, 64),
    (2, 33, 2, 64, 96),
    (1, 40, 4, 352, 128),
    (1, 70, 1, 32, 160),
    (2, 31, 2, 160, 256),
    (1, 20, 2, 33, 64),
    (1, 20, 2, 64, 80),
    (1, 1100, 1, 32, 32),
    (3, 0, 1, 32, 32),
]


def exact(values: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("hgod,hnd->hgno", weights.double(), values.double()).abs().sum(-1).mean(1)


def example(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    heads, n, groups, hidden, d = shape
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(heads, groups, hidden, d, generator=generator).to(dtype)
    return torch.randn(heads, n, d, generator=generator), weights


@pytest.mark.parametrize("are_stored", [True, False], ids=["bfloat16-values", "float32-values"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_projected_norms(operators, shape, dtype, are_stored):
    values, weights = example(shape, dtype)
    if are_stored:
        values = values.bfloat16().float()
    norms = operators.projected_norms(values, weights)
    assert norms.dtype == torch.float32 and norms.shape == values.shape[:2]
    # No worse than float32 is: values rounded to bfloat16, or to two of them, would be seen.
    torch.testing.assert_close(norms.double(), exact(values, weights), rtol=2e-6, atol=1e-6)


def test_a_value_alone_shows_its_last_bits(operators):
    """Sums hide what a number's last bits do."""
    weights = torch.eye(32).bfloat16()[None, None]
    values = torch.zeros(1, 32, 32)
    values[0].diagonal().copy_((1 + 2**-23) * torch.where(torch.arange(32) % 2 == 0, 1.0, -3.0))
    assert torch.equal(operators.projected_norms(values, weights)[0], values[0].diagonal().abs())


def test_a_norm_depends_on_its_value_alone(operators):
    values, weights = example((2, 50, 2, 64, 64), torch.bfloat16)
    values[:, ::3] = values[:, ::3].bfloat16().float()
    together = operators.projected_norms(values, weights)
    if operators.__name__.endswith("cpu"):  # matrix products of PyTorch round as their shapes are
        for part in (slice(0, 1), slice(7, 29), slice(48, 50)):
            assert torch.equal(operators.projected_norms(values[:, part], weights), together[:, part])
            assert torch.equal(operators.projected_norms(values[1:, part], weights[1:]), together[1:, part])


@pytest.mark.parametrize(
    "bits", [0x7FC00000, 0x7F800001, 0x7F800000, -0x00800000], ids=["nan", "last-bits", "inf", "-inf"]
)
@pytest.mark.parametrize("are_stored", [True, False])
def test_what_is_not_finite_stays_with_its_value(operators, bits, are_stored):
    """NaN whose last bits alone say so would be infinity if 16 bits were cut off."""
    values, weights = example((1, 20, 1, 64, 64), torch.bfloat16)
    values = values.bfloat16().float() if are_stored else values
    expected = exact(values, weights)
    values.view(torch.int32)[0, 5, 3] = bits
    norms = operators.projected_norms(values, weights)
    assert norms[0, 5].isnan() if values[0, 5, 3].isnan() else norms[0, 5] == torch.inf
    others = torch.arange(20) != 5
    torch.testing.assert_close(norms[0, others].double(), expected[0, others], rtol=2e-6, atol=1e-6)


@pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="native operators are not built")
@pytest.mark.parametrize("shape", [(1, 1, 4, 8), (2, 1, 4, 9), (2, 4, 8)])
def test_wrong_arguments(shape):
    with pytest.raises(ValueError):
        cpu.projected_norms(torch.zeros(2, 3, 8), torch.zeros(shape))
