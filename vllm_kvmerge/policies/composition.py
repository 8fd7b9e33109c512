"""A compression policy: a tracker, an allocator, a selector and a merger at work together."""

from dataclasses import replace
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.policies.base import (
    Allocator,
    CompressionContext,
    CompressionResult,
    Entries,
    Merger,
    Part,
    Selector,
    Tracker,
)
from vllm_kvmerge.policies.trackers import attention_mass


class CompressionPolicy(BaseModel):
    """Raises ValueError (pydantic's) where the tracker cannot serve the selector or the merger."""

    model_config = ConfigDict(frozen=True)

    tracker: Tracker
    selector: Selector
    merger: Merger
    allocator: Allocator = Uniform()

    @model_validator(mode="after")
    def _check_parts_fit(self) -> Self:
        if self.selector.needs_scores and not self.needs_scores:
            raise ValueError(f"selector {self.selector.name!r} needs scores, tracker {self.tracker.name!r} keeps none")
        if self.selector.needs_probabilities and self.tracker.mode == "log_ema":
            raise ValueError(
                f"selector {self.selector.name!r} needs probabilities, tracker {self.tracker.name!r} keeps logarithms"
            )
        if self.tracker.mode not in self.merger.tracker_modes:
            raise ValueError(
                f"merger {self.merger.name!r} cannot work from tracker {self.tracker.name!r} (mode "
                f"{self.tracker.mode!r}); allowed modes: {', '.join(sorted(self.merger.tracker_modes))}"
            )
        if self.selector.pools_heads and self.allocator.splits_heads:
            raise ValueError(
                f"selector {self.selector.name!r} ranks all heads together, "
                f"allocator {self.allocator.name!r} gives each its own budget"
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

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.tracker, self.allocator, self.selector, self.merger)

    @property
    def query_window(self) -> int:
        """How many of the newest queries the policy reads."""
        return max(part.query_window for part in self.parts)

    @property
    def needs_output_weights(self) -> bool:
        return any(part.needs_output_weights for part in self.parts)

    def layer_statistic(self, entries: Entries, context: CompressionContext) -> Tensor:
        """The allocator's, for ``context.layer_statistics``; only where it has one."""
        return self.allocator.layer_statistic(entries, attention_mass(self.tracker, entries), context)

    def compress(self, entries: Entries, context: CompressionContext) -> CompressionResult:
        """Exactly ``context.capacity`` entries per head, live ones up to the head's budget; a plain copy where there
        are no more entries than the budget.

        ``entries`` stay as they are. They may hold dead ones, which are kept only where live ones are too few.
        """
        capacity = context.capacity or context.budget
        if context.budget >= len(entries):
            copy = entries.clone()
            copy.kill(~copy.is_live)
            return CompressionResult(copy, num_merged=0, num_evicted=0)
        if context.budget < self.min_budget:
            raise ValueError(f"budget {context.budget} is smaller than this policy's least, {self.min_budget}")
        context = replace(context, min_budget=self.min_budget)
        budgets = self.allocator.head_budgets(entries, attention_mass(self.tracker, entries), context)
        budgets = [min(max(budget, self.min_budget), capacity) for budget in budgets]
        results, num_merged = [], torch.zeros((), dtype=torch.int64, device=entries.keys.device)
        heads = range(len(budgets))
        # Heads with one budget go together; in practice that is all of them, or each alone.
        groups = {budget: [head for head in heads if budgets[head] == budget] for budget in budgets}
        for budget, group in groups.items():
            some = entries if len(group) == len(budgets) else entries.heads(group)
            local = replace(_for_heads(context, group, len(budgets)), budget=budget)
            result, merged = self._compress_heads(some, local)
            results.append(result.padded(capacity))
            num_merged += merged
        if len(groups) == 1:
            (combined,) = results
        else:
            order = [head for group in groups.values() for head in group]
            combined = Entries.stack_heads(results).heads([order.index(head) for head in heads])
        num_gone = entries.is_live.sum() - combined.is_live.sum()
        merged_count, evicted_count = torch.stack([num_merged, num_gone - num_merged]).tolist()
        return CompressionResult(combined, merged_count, evicted_count)

    def _compress_heads(self, entries: Entries, context: CompressionContext) -> tuple[Entries, Tensor]:
        """``context.budget`` entries for each of these heads, and how many entries were merged."""
        if context.budget >= len(entries):
            copy = entries.clone()
            copy.kill(~copy.is_live)
            return copy, torch.zeros((), dtype=torch.int64, device=entries.keys.device)
        num_slots = min(self.merger.num_slots(context.budget), context.budget - self.selector.min_budget)
        context = replace(context, num_slots=num_slots)
        candidates, importance, protected = self._rank(entries, context)
        remaining, merged_before = self.merger.before_selection(entries, importance, protected, context)
        if remaining is not entries:
            candidates, importance, protected = self._rank(remaining, context)
        kept = self.selector.select(candidates, importance, protected, context)
        result, merged = self.merger.merge(remaining, kept, importance, protected, context)
        result.kill(~result.is_live)
        return result, merged_before + merged

    def _rank(self, entries: Entries, context: CompressionContext) -> tuple[Entries, Tensor, Tensor]:
        """What the selector may keep, every entry's importance, and what the selector protects."""
        candidates = entries.without(self.merger.is_slot(entries))
        return candidates, self.tracker.importance(entries), self.selector.protected(candidates, context)


def _for_heads(context: CompressionContext, heads: list[int], num_heads: int) -> CompressionContext:
    """The context as some of this worker's heads see it. ``all_heads`` is for the allocator, before heads part."""
    if len(heads) == num_heads:
        return context
    return replace(
        context,
        queries=None if context.queries is None else context.queries[heads],
        output_weights=None if context.output_weights is None else context.output_weights[heads],
        head_indices=[context.head_indices[head] for head in heads] if context.head_indices else heads,
    )
