"""A compression policy, composed of a tracker, an allocator, a selector and a merger."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from vllm_kvmerge.policies.entries import Entries
from vllm_kvmerge.policies.errors import blamed_on
from vllm_kvmerge.policies.indexing import in_place, padded_nonzero
from vllm_kvmerge.policies.protection import TokenRanges, count_below, within
from vllm_kvmerge.policies.tiles import in_tiles
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
        members, tracker = self.selector.members, f"tracker {self.tracker.name!r}"
        needing = [f"selector {one.name!r}" for one in members if one.needs_scores and not self.needs_scores]
        if self.allocator.needs_scores and not (self.needs_scores or self.selector.has_mass):
            needing.append(f"allocator {self.allocator.name!r}")
        if needing:
            raise ValueError(f"{needing[0]} needs scores, {tracker} keeps none")
        for one in members:
            if one.needs_probabilities and self.tracker.mode == ScoreMode.LOG_EMA:
                raise ValueError(f"selector {one.name!r} needs probabilities, {tracker} keeps logarithms")
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
        return self.accumulates_scores or self.tracker.predicts_scores or self.tracker.reads_ahead

    @property
    def needs_scores(self) -> bool:
        return self.scores_tokens or self.tracker.repeats_context

    @property
    def takes_shares(self) -> bool:
        """True if heads with different budgets may be compressed together."""
        return self.selector.takes_shares and self.merger.takes_shares

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.tracker, self.allocator, self.selector, self.merger)

    @property
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
        are if there are no more than the budget.

        ``entries`` are not changed, and only the keys and values that a part asks for are read. They may hold dead
        ones, which are kept only if live ones are too few. An entry that stays keeps its place if the result has it.

        num_rows: rows that are compressed at a time, each time a tile (``in_tiles``); None: all that go together. It
        must be None where the selector pools heads.

        Raises:
            PartError: a part raised, returned something that cannot be used, or took too much time or memory.
            ValueError: the budget is too small for this policy.
        """
        if context.budget >= len(entries):
            return CompressionResult.of(entries, CacheUpdate.unchanged(entries))
        if context.budget < self.min_budget:
            raise ValueError(f"budget {context.budget} is smaller than this policy's least, {self.min_budget}")
        found = self.head_budgets(entries, context) if context.budgets is None else context.budgets
        # A GPU is waited for if they follow data.
        budgets = [min(budget, context.capacity) for budget in found.tolist()]
        are_together, groups = context.is_packed and self.takes_shares, dict[int, list[int]]()
        for row, budget in enumerate(budgets):
            groups.setdefault(0 if are_together else budget, []).append(row)
        size = entries.num_rows if num_rows is None else num_rows
        some = [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]

        def compressed(number: int) -> tuple[Entries, CacheUpdate]:
            rows = some[number]
            source = entries.of_rows(rows) if len(rows) < entries.num_rows else entries
            update = self._compress_rows(source, context.of_rows(rows), [budgets[row] for row in rows])
            return source, update.extended(context.capacity) if context.is_packed else update

        sources, parts = zip(*in_tiles(len(some), compressed), strict=True)
        if len(parts) == 1:
            return CompressionResult.of(entries, parts[0])
        update, order = CacheUpdate.stack_rows(list(parts), list(sources)), [row for rows in some for row in rows]
        if order != sorted(order):
            update = update.of_rows([order.index(row) for row in range(len(order))])
        return CompressionResult.of(entries, update)

    def head_budgets(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H]`` int64: the allocator's budget of each row, protected entries included, at least ``min_budget``; on
        the entries' device if they follow data.

        Raises:
            PartError: the tracker, the selector or the allocator failed.
        """
        others, reads_mass = self._of_others(context), self.allocator.reads_attention
        importance = self._mass(entries, others) if reads_mass else entries.scores  # which nobody reads
        if self.protect:
            is_protected = within(self.protect, entries.positions)
            entries, importance = entries.without(is_protected), importance.masked_fill(is_protected, 0.0)
        with _bounded(self.allocator, context):
            return self._whole(self.allocator.head_budgets(entries, importance, others), entries.num_rows)

    def pooled_mass(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]`` float32: what ``pooled_budgets`` takes of some layers; negative for entries that do not compete.

        Raises:
            PartError: the tracker or the selector failed.
        """
        hidden = ~entries.is_live
        if self.protect:
            hidden = hidden | within(self.protect, entries.positions)
        return self._mass(entries, self._of_others(context)).masked_fill(hidden, -1.0)

    def pooled_budgets(self, mass: Tensor, context: CompressionContext) -> Tensor:
        """``head_budgets`` of all layers of a request; only where the allocator ``pools_layers``. mass: of all layers.

        Raises:
            PartError: the allocator failed.
        """
        with _bounded(self.allocator, context):
            return self._whole(self.allocator.pooled_budgets(mass, self._of_others(context)), len(mass))

    def _of_others(self, context: CompressionContext) -> CompressionContext:
        """What allocators see: the budget of the entries that are not protected."""
        return replace(
            context,
            budget=context.budget - self.num_protected,
            min_budget=self.min_unprotected,
            tracker_mode=self.tracker.mode,
        )

    def _whole(self, budgets: Tensor | Sequence[int], num_rows: int) -> Tensor:
        """An allocator's budgets of the entries that are not protected as those of all. Raises ValueError."""
        if len(budgets) != num_rows:
            raise ValueError(f"head_budgets must be {num_rows} numbers, got {len(budgets)}")
        if not isinstance(budgets, Tensor):  # another package's allocator may return a list
            budgets = torch.tensor([int(budget) for budget in budgets], device="cpu")
        budgets = budgets.long()
        return (budgets + self.num_protected if self.protect else budgets).clamp(min=self.min_budget)

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

    def _compress_rows(self, entries: Entries, context: CompressionContext, budgets: list[int]) -> CacheUpdate:
        """``context.capacity`` places for each of these rows, of which ``budgets`` are filled; if they are packed, as
        many as the largest budget, or as there are entries."""
        most, are_together = max(budgets), context.is_packed and self.takes_shares
        if most >= len(entries) and not are_together:
            update = CacheUpdate.unchanged(entries)
            return update if context.is_packed else update.in_place(entries, context.capacity)
        num_places = most if context.is_packed else context.capacity
        num_protected = count_below(self.protect, context.num_covered)
        others_budgets = torch.tensor([budget - num_protected for budget in budgets], device="cpu")
        context = replace(
            context,
            budget=most - num_protected,
            budgets=sent(others_budgets, entries.positions.device),
            num_slots=min(self.merger.num_slots(most - num_protected), most - num_protected - self.selector.min_budget),
            tracker_mode=self.tracker.mode,
        )
        if not num_protected:
            update = self._compress_unprotected(entries, context)
            return update if context.num_kept == num_places else update.in_place(entries, num_places)
        is_protected = within(self.protect, entries.positions)
        others = self._compress_unprotected(entries.without(is_protected), context)
        # A dead entry that is kept for want of others may be one that is only hidden.
        others = others.without(~others.is_live)
        update = others.behind(entries, padded_nonzero(is_protected, num_protected))
        return update if are_together else update.in_place(entries, num_places)

    def _compress_unprotected(self, entries: Entries, context: CompressionContext) -> CacheUpdate:
        """``context.budget`` places for each of these rows, of which ``context.budgets`` are filled."""
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
        with _bounded(self.selector, context):
            selected = self.selector.select(candidates, importance, protected, context)
            if is_foreign(self.selector):
                check_tensor("select", selected, tuple(importance.shape), importance, torch.bool)
                if bool((selected.sum(1) != context.counts).any()):
                    raise ValueError(f"select must choose {context.counts.tolist()} entries of the heads")
        kept = in_place(selected, context.counts, context.num_kept)
        with _bounded(self.merger, context):
            update = self.merger.merge(remaining, kept, importance, protected, context)
            if is_foreign(self.merger):
                check_update(update, context.budget, entries.scores)
        if earlier is not None:
            update = update.after(earlier, remaining)
        return update

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
