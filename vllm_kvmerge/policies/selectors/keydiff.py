"""Selector that keeps the entries whose keys are unlike the others'."""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from vllm_kvmerge.policies.base import DEAD, CompressionContext, Entries
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import NewestEntries, RankedSelector


@register
class KeyDiff(RankedSelector):
    """The keys least similar (cosine) to the anchor, the mean of all keys' directions (KeyDiff)."""

    name = "keydiff"
    source = "KeyDiff, Park et al., arXiv:2504.15364"
    needs_scores = False

    recent_window: NewestEntries = 8
    before_rope: bool = Field(False, description="Compare keys as they are before RoPE, wherever they stand.")

    @property
    def needs_rotation(self) -> bool:  # type: ignore[override]
        return self.before_rope

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        def directions(part: Tensor) -> Tensor:
            """``[H, m, d]``: keys of the entries at ``part`` (``[H, m]`` int64), scaled to length 1; dead ones 0."""
            keys = entries.keys_at(part.masked_fill(~entries.is_live.gather(1, part), DEAD))
            if self.before_rope:
                keys = context.known_rotation().turned_back(keys, entries.positions.gather(1, part))
            return normalize(keys, dim=-1)

        # The sum has the mean's direction.
        anchor = normalize(sum(directions(part).sum(1, keepdim=True) for part in entries.parts()), dim=-1)
        return -torch.cat([torch.linalg.vecdot(directions(part), anchor) for part in entries.parts()], dim=1)
