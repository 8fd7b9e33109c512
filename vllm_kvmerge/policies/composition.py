"""A compression policy, composed of a tracker, an allocator, a selector and a merger."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from vllm_kvmerge.ops import ScoreMode
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.policies.base import Allocator, CompressionContext, HeadShape, Merger, Part, Selector, Tracker
from vllm_kvmerge.policies.bounds import memory_limit
from vllm_kvmerge.policies.checks import check_count, check_tensor, check_update, is_foreign
from vllm_kvmerge.policies.context import RowBudgets
from vllm_kvmerge.policies.entries import Entries
from vllm_kvmerge.policies.errors import blamed_on
from vllm_kvmerge.policies.indexing import in_place, padded_nonzero
from vllm_kvmerge.policies.pausing import may_pause
from vllm_kvmerge.policies.protection import TokenRanges, count_below, within
from vllm_kvmerge.policies.trackers import attention_mass
from vllm_kvmerge.policies.update import CacheUpdate, CompressionResult

HELD_OF_ENTRY = 32
"""4-byte numbers that are held for each entry, whatever the parts do: metadata, rankings, indices."""


def held_by(part: Part, shape: HeadShape) -> int:
    """``Part.held``; of another package's parts, which are not asked, two copies of all keys and values."""
    return 4 * shape.num_entries * shape.head_size if is_foreign(part) else part.held(shape)


class CompressionPolicy(BaseModel):
    """Four parts that work together. Raises ValueError (pydantic's) for parts that do not fit.

    protect: tokens of the prompt whose entries stay as they are. They are set aside before any part sees the entries,
    and put back afterwards: the parts have the others, and what the protected ones leave of the budget. So they stay
    bit for bit whatever the parts do, those of other packages included.
    """

    model_config = ConfigDict(frozen=True)

    tracker: Tracker
    selector: Selector
    merger: Merger
    allocator: Allocator = Uniform()
    protect: TokenRanges = ()

    @model_validator(mode="after")
    def _check_parts_fit(self) -> Self:
        for kind, part, has_scores in (
            ("selector", self.selector, self.needs_scores),
            ("allocator", self.allocator, self.needs_scores or self.selector.has_mass),
        ):
            if part.needs_scores and not has_scores:
                raise ValueError(f"{kind} {part.name!r} needs scores, tracker {self.tracker.name!r} keeps none")
        if self.selector.needs_probabilities and self.tracker.mode == ScoreMode.LOG_EMA:
            raise ValueError(
                f"selector {self.selector.name!r} needs probabilities, tracker {self.tracker.name!r} keeps logarithms"
            )
        if self.tracker.mode not in self.merger.tracker_modes:
            raise ValueError(
                f"merger {self.merger.name!r} cannot work from tracker {self.tracker.name!r} (mode "
                f"'{self.tracker.mode}'); allowed modes: {', '.join(sorted(self.merger.tracker_modes))}"
            )
        if self.selector.pools_heads and self.allocator.splits_heads:
            raise ValueError(
                f"selector {self.selector.name!r} ranks all heads together, "
                f"allocator {self.allocator.name!r} gives each its own budget"
            )
        return self

    def __copy__(self) -> Self:
        # What is cached need not hold for the copy: ``model_copy`` changes it.
        copied = super().__copy__()
        for name in vars(self).keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @property
    def min_budget(self) -> int:
        """Smallest budget: that of the parts, and all protected tokens."""
        return self.min_unprotected + self.num_protected

    @property
    def min_unprotected(self) -> int:
        """Smallest budget of the parts: the selector's, and one entry more for a merger that keeps slots of its own."""
        fewest = self.selector.min_budget
        return fewest + min(1, self.merger.num_slots(fewest))

    @property
    def num_protected(self) -> int:
        """Number of protected tokens."""
        return sum(end - start for start, end in self.protect)

    def capacity(self, budget: int) -> int | None:
        """Entries per head that the cache must hold for any data; None: all."""
        capacity = self.allocator.capacity(budget - self.num_protected)
        return None if capacity is None else capacity + self.num_protected

    @property
    def accumulates_scores(self) -> bool:
        """True if attention accumulates scores, of the prompt and perhaps of generated tokens."""
        return self.tracker.mode != ScoreMode.NONE

    @property
    def scores_tokens(self) -> bool:
        """True if every token of the prompt, and perhaps each generated one, gets a score as it is computed."""
        return self.accumulates_scores or self.tracker.predicts_scores

    @property
    def needs_scores(self) -> bool:
        return self.scores_tokens or self.tracker.repeats_context

    @property
    def takes_shares(self) -> bool:
        """True if heads with different budgets are compressed together."""
        return self.selector.takes_shares and self.merger.takes_shares

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.tracker, self.allocator, self.selector, self.merger)

    @cached_property
    def query_window(self) -> int:
        """Number of the newest queries that the policy reads."""
        return max(self._query_window_of(part) for part in self.parts)

    def _query_window_of(self, part: Part) -> int:
        return part.query_window_with(self.tracker.mode) if isinstance(part, Merger) else part.query_window

    @property
    def needs_output_weights(self) -> bool:
        return any(part.needs_output_weights for part in self.parts)

    @property
    def needs_rotation(self) -> bool:
        return any(part.needs_rotation for part in self.parts)

    def check_constants(self) -> None:
        """Asks the parts for everything that depends on their parameters alone, so that none of it raises later.

        Raises:
            PartError: a part raised, or returned an impossible value.
        """
        with blamed_on(self.tracker):
            if not 0.0 <= float(self.tracker.update_decay) <= 1.0:
                raise ValueError(f"update_decay must be from 0 to 1, got {self.tracker.update_decay}")
            check_count("prompt_window", 0 if self.tracker.prompt_window == "all" else self.tracker.prompt_window)
        with blamed_on(self.selector):
            fewest = check_count("min_budget", self.selector.min_budget)
        with blamed_on(self.merger):
            check_count("num_slots", self.merger.num_slots(fewest))
        with blamed_on(self.allocator):
            check_count("capacity", self.allocator.capacity(fewest) or 0)
        for part in self.parts:
            with blamed_on(part):
                check_count("query_window", self._query_window_of(part))

    def layer_statistic(self, entries: Entries, context: CompressionContext) -> Tensor:
        """The allocator's, ``[sequence layers]``, for ``context.layer_statistics``; only where it has one.

        Raises:
            PartError: the tracker, the selector or the allocator failed.
        """
        mass = self._mass(entries, context)
        with blamed_on(self.allocator):
            statistic = self.allocator.layer_statistic(entries, mass, context)
            num_layers = entries.num_rows // context.heads.num_kv_heads
            return check_tensor("layer_statistic", statistic, (num_layers,), mass, None)

    def held(self, shape: HeadShape) -> int:
        """4-byte numbers that a compression holds at once for one KV head of one layer, about."""
        held = sum(held_by(part, shape) for part in self.parts)
        queries = min(self.query_window, shape.num_entries) * shape.group_size * shape.head_size
        # Metadata of entries and places, and the queries in float32.
        return held + HELD_OF_ENTRY * shape.num_entries + 2 * queries

    def compress(self, entries: Entries, context: CompressionContext, num_rows: int | None = None) -> CompressionResult:
        """Returns exactly ``context.capacity`` entries per head, live ones up to the head's budget; the entries as they
        are if there are no more than the budget. Where ``context.shares`` are given, live ones come first.

        ``entries`` are not changed, and only the keys and values that a part asks for are read. They may hold dead
        ones, which are kept only if live ones are too few. An entry that stays keeps its place if the result has it.

        num_rows: rows that are compressed at a time, so that others need not wait long (``may_pause``); None: all that
        go together. It must be None where the selector pools heads.

        Raises:
            PartError: a part raised, returned something that cannot be used, or took too much time or memory.
            ValueError: the budget is too small for this policy.
        """
        if context.budget >= len(entries):
            return CompressionResult.of(entries, CacheUpdate.unchanged(entries))
        if context.budget < self.min_budget:
            raise ValueError(f"budget {context.budget} is smaller than this policy's least, {self.min_budget}")
        context = replace(context, min_budget=self.min_unprotected, tracker_mode=self.tracker.mode)
        by_row = self._goes_by_row(context)
        budgets = context.budgets if context.shares is None else context.shares
        if budgets is None:
            budgets = self.head_budgets(entries, context)
        groups: dict[int, list[int]] = {}
        if by_row or len(set(budgets)) == 1:
            groups[0] = [*range(len(budgets))]
        else:
            for row, budget in enumerate(budgets):
                groups.setdefault(budget, []).append(row)
        size = entries.num_rows if num_rows is None else num_rows
        parts, sources, order = [], [], []
        for group in groups.values():
            for rows in (group[start : start + size] for start in range(0, len(group), size)):
                order += rows
                sources.append(entries.of_rows(rows) if len(rows) < entries.num_rows else entries)
                some, budget = context.of_rows(rows), max(budgets[row] for row in rows)
                if budget != some.budget:
                    some = replace(some, budget=budget)
                update = self._compress_rows(sources[-1], some)
                parts.append(update if context.shares is None else update.extended(context.capacity))
                may_pause(len(rows))
        if len(parts) == 1:
            return CompressionResult.of(entries, parts[0])
        update = CacheUpdate.stack_rows(parts, sources)
        may_pause()
        if order != sorted(order):
            update = update.of_rows([order.index(row) for row in range(len(order))])
        return CompressionResult.of(entries, update)

    def head_budgets(self, entries: Entries, context: CompressionContext) -> list[int]:
        """The allocator's budget of each row, for which a GPU is waited for if they follow data.

        Raises:
            PartError: the tracker, the selector or the allocator failed.
        """
        found = self.found_budgets(entries, context)
        return self.whole_budgets(found.tolist() if isinstance(found, Tensor) else found, context.capacity)

    def found_budgets(self, entries: Entries, context: CompressionContext) -> list[int] | Tensor:
        """The allocator's budgets of rows, as ``whole_budgets`` takes them; a tensor, ``[H]`` int64, if they are on the
        GPU.

        Raises:
            PartError: the tracker, the selector or the allocator failed.
        """
        others, reads_mass = self._of_others(context), self.allocator.reads_attention
        importance = self._mass(entries, others) if reads_mass else entries.scores  # which nobody reads
        if self.protect:
            is_protected = within(self.protect, entries.positions)
            entries, importance = entries.without(is_protected), importance.masked_fill(is_protected, 0.0)
        with _bounded(self.allocator, context):
            return _checked_budgets(self.allocator.head_budgets(entries, importance, others), entries.num_rows)

    def pooled_mass(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]`` float32: what ``pooled_budgets`` takes of some layers; negative for entries that do not compete.

        Raises:
            PartError: the tracker or the selector failed.
        """
        hidden = ~entries.is_live
        if self.protect:
            hidden = hidden | within(self.protect, entries.positions)
        return self._mass(entries, self._of_others(context)).masked_fill(hidden, -1.0)

    def pooled_budgets(self, mass: Tensor, context: CompressionContext) -> list[int] | Tensor:
        """``found_budgets`` of all layers of a request; only where the allocator ``pools_layers``. mass: of all layers.

        Raises:
            PartError: the allocator failed.
        """
        with _bounded(self.allocator, context):
            return _checked_budgets(self.allocator.pooled_budgets(mass, self._of_others(context)), len(mass))

    def _of_others(self, context: CompressionContext) -> CompressionContext:
        """What allocators see: the budget of the entries that are not protected."""
        return replace(
            context,
            budget=context.budget - self.num_protected,
            min_budget=self.min_unprotected,
            tracker_mode=self.tracker.mode,
        )

    def whole_budgets(self, found: Sequence[int], capacity: int) -> list[int]:
        """Budgets that rows can have, protected entries included. found: ``found_budgets`` of any rows."""
        protected, least = self.num_protected, self.min_budget
        usable = {budget: min(max(budget + protected, least), capacity) for budget in set(found)}
        return [usable[budget] for budget in found]

    def _mass(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]`` float32: what allocators compare, 0 for dead entries: shares of each head's attention, or the
        selector's ``mass``, scaled so that the heads of a layer, on all workers, have 1 on average."""
        if not self.selector.has_mass:
            with _bounded(self.tracker, context):
                return attention_mass(self.tracker, entries)
        with _bounded(self.selector, context):
            mass = self.selector.mass(entries, context)
            if is_foreign(self.selector):
                check_tensor("mass", mass, tuple(entries.positions.shape), entries.scores, None)
        mass = mass.masked_fill(~entries.is_live, 0.0).nan_to_num(0.0, 0.0, 0.0)
        totals = context.heads.of_all_workers(mass.sum(1)).mean(1).clamp(min=torch.finfo(mass.dtype).tiny)
        return mass / totals.repeat_interleave(context.heads.num_kv_heads).unsqueeze(1)

    def layer_budgets(self, budget: int, num_entries: int, num_layers: int) -> list[int] | None:
        """The allocator's, checked: a budget of each layer, where they do not depend on data.

        Raises:
            PartError: the allocator failed.
        """
        with blamed_on(self.allocator):
            others = budget - self.num_protected, num_entries - self.num_protected
            budgets = self.allocator.layer_budgets(*others, num_layers, self.min_unprotected)
            if budgets is None:
                return None
            if len(budgets) != num_layers:
                raise ValueError(f"layer_budgets must be {num_layers} numbers, got {len(budgets)}")
            return [min(max(int(one) + self.num_protected, self.min_budget), num_entries) for one in budgets]

    def _compress_rows(self, entries: Entries, context: CompressionContext) -> CacheUpdate:
        """``context.capacity`` places for each of these rows, ``context.budget`` of them filled; only these, or as many
        as there are entries, where budgets are ``context.shares``."""
        num_places = context.capacity if context.shares is None else context.budget
        by_row = self._goes_by_row(context)
        if context.budget >= len(entries) and not by_row:
            update = CacheUpdate.unchanged(entries)
            return update if context.shares is not None else update.in_place(entries, num_places)
        num_protected = count_below(self.protect, context.num_covered)
        if not num_protected:
            context = self._with_slots(context, entries)
            update = self._compress_unprotected(entries, context)
            if by_row or context.num_kept == num_places:
                return update
            return update.in_place(entries, num_places)
        is_protected = within(self.protect, entries.positions)
        context = self._with_slots(context.beside(num_protected), entries)
        others = self._compress_unprotected(entries.without(is_protected), context)
        # A dead entry that is kept for want of others may be one that is only hidden.
        others = others.without(~others.is_live)
        update = others.behind(entries, padded_nonzero(is_protected, num_protected))
        return update if by_row else update.in_place(entries, num_places)

    def _with_slots(self, context: CompressionContext, entries: Entries) -> CompressionContext:
        """The same with the merger's part of the budget, and of those of rows."""
        num_slots = self._num_slots(context.budget)
        if context.shares is None or not self._goes_by_row(context):
            return context if num_slots == context.num_slots else replace(context, num_slots=num_slots)
        slots_of = {share: self._num_slots(share) for share in set(context.shares)}
        budgets = torch.tensor(context.shares, device="cpu")
        slots = torch.tensor([slots_of[share] for share in context.shares], device="cpu")
        rows = RowBudgets(budgets, slots, sent(budgets - slots, entries.positions.device))
        return replace(context, num_slots=num_slots, rows=rows)

    def _goes_by_row(self, context: CompressionContext) -> bool:
        """True if rows with different budgets are compressed together."""
        return context.shares is not None and self.takes_shares

    def _num_slots(self, budget: int) -> int:
        return min(self.merger.num_slots(budget), budget - self.selector.min_budget)

    def _compress_unprotected(self, entries: Entries, context: CompressionContext) -> CacheUpdate:
        """``context.budget`` places for each of these rows, filled as far as ``context.counts`` says."""
        has_slots = context.num_slots > 0 and not context.at_prompt_end  # tokens are none
        candidates, importance, protected = self._rank(entries, context, has_slots)
        with _bounded(self.merger, context):
            earlier = self.merger.before_selection(entries, importance, protected, context)
            if earlier is not None and is_foreign(self.merger):
                check_update(earlier, len(entries), entries.scores)
        remaining = entries
        if earlier is not None:
            remaining = earlier.view(entries)
            candidates, importance, protected = self._rank(remaining, context, context.num_slots > 0)
        kept = in_place(self._select(candidates, importance, protected, context), context.counts, context.num_kept)
        with _bounded(self.merger, context):
            update = self.merger.merge(remaining, kept, importance, protected, context)
            if is_foreign(self.merger):
                check_update(update, context.budget, entries.scores)
        if earlier is not None:
            update = update.after(earlier, remaining)
        return update

    def _select(
        self, candidates: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> Tensor:
        """``[H, n]`` bool: the entries that stay, ``context.num_kept`` per head."""
        with _bounded(self.selector, context):
            selected = self.selector.select(candidates, importance, protected, context)
            if is_foreign(self.selector):
                check_tensor("select", selected, tuple(importance.shape), importance, torch.bool)
                if bool((selected.sum(1) != context.counts).any()):
                    raise ValueError(f"select must choose {context.counts} entries of each head")
            return selected

    def _rank(self, entries: Entries, context: CompressionContext, has_slots: bool) -> tuple[Entries, Tensor, Tensor]:
        """The entries that the selector may keep, the importance of all entries, and the mask of protected ones."""
        with _bounded(self.merger, context):
            candidates = entries.without(self.merger.is_slot(entries)) if has_slots else entries
        with _bounded(self.tracker, context):
            importance = self.tracker.importance(entries)
            if is_foreign(self.tracker):
                check_tensor("importance", importance, tuple(entries.positions.shape), entries.positions, None)
                # NaN statistics are the model's doing: its keys or queries overflowed.
                if bool((importance.isnan() & entries.is_live & ~entries.scores.isnan()).any()):
                    raise ValueError("importance must be numbers, got NaN")
        with _bounded(self.selector, context):
            protected = self.selector.protected(candidates, context)
            if is_foreign(self.selector):
                check_tensor("protected", protected, tuple(importance.shape), importance, torch.bool)
        return candidates, importance, protected


@contextmanager
def _bounded(part: Part, context: CompressionContext) -> Iterator[None]:
    """What goes wrong inside is the part's doing. Another package's holds no more than it may."""
    with blamed_on(part), memory_limit(context.most_bytes if is_foreign(part) else None):
        yield


def _checked_budgets(budgets: Sequence[int] | Tensor, num_rows: int) -> list[int] | Tensor:
    """An allocator's budgets of rows, in whole numbers. Raises ValueError."""
    if len(budgets) != num_rows:
        raise ValueError(f"head_budgets must be {num_rows} numbers, got {len(budgets)}")
    return budgets.long() if isinstance(budgets, Tensor) else [int(budget) for budget in budgets]
