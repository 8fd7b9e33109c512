"""Turns by a table of rotary position embedding (RoPE).

A table is ``[positions, r]`` floating point: cosines of each position's r/2 angles, then their sines, both times the
model's attention factor. is_neox: numbers i and i + r/2 of a vector are a pair; otherwise 2i and 2i + 1 are.
"""

import torch
from torch import Tensor


def turn(vectors: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """``[..., d]``: the first r numbers of ``vectors`` turned by ``cos`` and ``sin`` (``[..., r/2]``), in pairs."""
    size = 2 * cos.shape[-1]
    one, other = pairs(vectors, size, is_neox)
    turned = vectors.clone()
    to_one, to_other = pairs(turned, size, is_neox)
    to_one.copy_(one * cos - other * sin)
    to_other.copy_(other * cos + one * sin)
    return turned


def pairs(vectors: Tensor, size: int, is_neox: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second numbers of the pairs, ``[..., r/2]`` each; ``size``: r."""
    if is_neox:
        return vectors[..., : size // 2], vectors[..., size // 2 : size]
    return vectors[..., 0:size:2], vectors[..., 1:size:2]


def rows_at(table: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, ``[..., r/2]`` each; positions outside the table count as its nearest."""
    cos, sin = table[positions.clamp(0, len(table) - 1)].to(dtype).chunk(2, dim=-1)
    return cos, sin


def moved(vectors: Tensor, table: Tensor, is_neox: bool, before: Tensor, after: Tensor) -> Tensor:
    """Vectors that have been turned at positions ``before`` (``[...]`` int64) as if it had been at ``after``."""
    (cos, sin), (new_cos, new_sin) = (rows_at(table, positions, vectors.dtype) for positions in (before, after))
    size = cos.square() + sin.square()  # 1, but for rounding and the attention factor
    return turn(vectors, (new_cos * cos + new_sin * sin) / size, (new_sin * cos - new_cos * sin) / size, is_neox)
