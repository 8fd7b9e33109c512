"""Selector that keeps a random sample, the baseline of all others."""

from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries
from vllm_kvmerge.policies.noise import uniform
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector


@register
class RandomKeep(RankedSelector):
    """A uniformly random sample of all tokens so far, drawn for each layer and head.

    Each entry draws one number, from ``seed``, layer, head and position, and the largest stay. As an entry never draws
    again, what is left after many compressions is still a uniform sample of all tokens. A request repeats with the same
    sample, on any number of tensor-parallel workers.
    """

    name = "random"
    source = "control"
    needs_scores = False

    seed: int = Field(0, ge=0, lt=2**32, description="Random seed.")

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return uniform(self.seed, entries, context)
