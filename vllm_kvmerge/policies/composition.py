"""A compression policy: a tracker, a selector and a merger at work together."""

from dataclasses import replace
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, CompressionResult, Entries, Merger, Selector, Tracker


class CompressionPolicy(BaseModel):
    """Raises ValueError (pydantic's) where the tracker cannot serve the selector or the merger."""

    model_config = ConfigDict(frozen=True)

    tracker: Tracker
    selector: Selector
    merger: Merger

    @model_validator(mode="after")
    def _check_parts_fit(self) -> Self:
        if self.selector.needs_scores and not self.needs_scores:
            raise ValueError(f"selector {self.selector.name!r} needs scores, tracker {self.tracker.name!r} keeps none")
        if self.tracker.mode not in self.merger.tracker_modes:
            raise ValueError(
                f"merger {self.merger.name!r} cannot work from tracker {self.tracker.name!r} (mode "
                f"{self.tracker.mode!r}); allowed modes: {', '.join(sorted(self.merger.tracker_modes))}"
            )
        return self

    @property
    def min_budget(self) -> int:
        """Smallest budget: the selector's, and one entry more for a merger that keeps slots of its own."""
        fewest = self.selector.min_budget
        return fewest + min(1, self.merger.num_slots(fewest))

    @property
    def needs_scores(self) -> bool:
        return self.tracker.mode != "none"

    def compress(self, entries: Entries, context: CompressionContext) -> CompressionResult:
        """Exactly ``context.budget`` entries per head; a plain copy where that leaves nothing to do.

        ``entries`` stay as they are. They may hold dead ones, which are kept only where live ones are too few.
        """
        if context.budget >= len(entries):
            copy = entries.clone()
            copy.kill(~copy.is_live)
            return CompressionResult(copy, num_merged=0, num_evicted=0)
        if context.budget < self.min_budget:
            raise ValueError(f"budget {context.budget} is smaller than this policy's least, {self.min_budget}")
        num_slots = min(self.merger.num_slots(context.budget), context.budget - self.selector.min_budget)
        context = replace(context, num_slots=num_slots)

        candidates, importance, protected = self._rank(entries, context)
        remaining, merged_before = self.merger.before_selection(entries, importance, protected, context)
        if remaining is not entries:
            candidates, importance, protected = self._rank(remaining, context)
        kept = self.selector.select(candidates, importance, protected, context)
        result, merged = self.merger.merge(remaining, kept, importance, protected, context)
        result.kill(~result.is_live)

        num_gone = entries.is_live.sum() - result.is_live.sum()
        num_merged = merged_before + merged
        num_merged, num_evicted = torch.stack([num_merged, num_gone - num_merged]).tolist()
        return CompressionResult(result, num_merged, num_evicted)

    def _rank(self, entries: Entries, context: CompressionContext) -> tuple[Entries, Tensor, Tensor]:
        """What the selector may keep, every entry's importance, and what the selector protects."""
        candidates = entries.without(self.merger.is_slot(entries))
        return candidates, self.tracker.importance(entries), self.selector.protected(candidates, context)
