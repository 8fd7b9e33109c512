"""RoPE undone, and ahead; beside vLLM's own modules: tests/engine/worker/test_rotary.py."""

import pytest
import torch

from tests.policies.sampling import rope
from vllm_kvmerge.policies.rotation import Rotation

SHAPES = [(16, True), (16, False), (8, True), (8, False)]
"""Of heads of 16 numbers, how many are turned, and whether halves or neighbours are pairs."""


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
    ahead = rotation.turned_ahead(vectors, starts, rotation.table[:100])
    torch.testing.assert_close(ahead, torch.stack(each).mean(0), rtol=0, atol=1e-5)
