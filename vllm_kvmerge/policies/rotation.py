"""A model's rotary position embedding (RoPE), undone and redone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvmerge.ops import turns


@dataclass(frozen=True)
class Rotation:
    """The turns that a model gives to queries and keys: r of a head's d numbers, in pairs, by angles that are
    proportional to the position.

    table: ``[positions, r]`` floating point, as the model applies it, rounding included: cosines of each position's r/2
    angles, then their sines, both times the model's attention factor (YaRN). is_neox: numbers i and i + r/2 are a pair;
    otherwise 2i and 2i + 1 are. The last d - r numbers stay as they are.

    Methods take ``vectors``, ``[..., d]`` floating point, and positions that broadcast to ``[...]``, int64. Positions
    outside the table count as its nearest.
    """

    table: Tensor
    is_neox: bool = True

    def turned(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Vectors as the model turns them at these positions."""
        return self._apply(vectors, *self._at(positions, vectors.dtype))

    def turned_back(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """The vectors that ``turned`` makes into these: without RoPE, and without the attention factor."""
        cos, sin = self._at(positions, vectors.dtype)
        size = cos.square() + sin.square()  # 1, but for rounding and the attention factor
        return self._apply(vectors, cos / size, -sin / size)

    def moved(self, vectors: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Vectors that the model has turned at positions ``before`` as it turns them at ``after``."""
        return turns.moved(vectors, self.table, self.is_neox, before, after)

    def turned_ahead(self, vectors: Tensor, starts: Tensor, steps: Tensor) -> Tensor:
        """The mean of vectors turned at the positions that are some steps from each start on.

        steps: ``[m, r]``, the table's rows of so many positions. A turn by s and one by t are a turn by s + t, so the
        mean turn of the steps serves all starts.
        """
        steps = steps.to(vectors.dtype).mean(0)
        mean_cos, mean_sin = (steps / self.table[0].to(vectors.dtype).chunk(2)[0].repeat(2)).chunk(2)
        cos, sin = self._at(starts, vectors.dtype)
        return self._apply(vectors, cos * mean_cos - sin * mean_sin, sin * mean_cos + cos * mean_sin)

    def lengths(self, vectors: Tensor) -> Tensor:
        """``[..., r/2]``: the length of each pair, which ``turned`` changes by the attention factor alone."""
        return torch.hypot(*turns.pairs(vectors, self.table.shape[1], self.is_neox))

    def _at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, ``[..., r/2]`` each."""
        return turns.rows_at(self.table, positions, dtype)

    def _apply(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turns.turn(vectors, cos, sin, self.is_neox)
