"""A package of somebody else's: one selector and one preset."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies import MAX_TOKENS, CompressionContext, Entries, Preset, Selector, register, register_preset
from vllm_kvmerge.policies.indexing import newest, top


@register
class Oldest(Selector):
    """The beginning of the text, and its end."""

    name: ClassVar[str] = "oldest"
    source: ClassVar[str] = "a test"
    needs_scores: ClassVar[bool] = False

    end_window: int = Field(8, ge=0, le=MAX_TOKENS, description="Newest entries that are always kept.")

    @property
    def min_budget(self) -> int:
        return self.end_window + 1

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        return newest(entries, self.end_window)

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return top(-entries.positions.float(), protected, entries, context.num_kept)


register_preset(Preset("oldest", "a test", "none", "oldest", "drop", defaults={"end_window": 4}))
