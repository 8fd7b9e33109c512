"""A compression policy, composed of a tracker, an allocator, a selector and a merger."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from vllm_kvmerge.ops import ScoreMode
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.policies.base import Allocator, CompressionContext, Merger, Part, Selector, Tracker
from vllm_kvmerge.policies.checks import check_count, check_tensor, check_update, is_foreign
from vllm_kvmerge.policies.cost import Cost, CostShape
from vllm_kvmerge.policies.entries import Entries
from vllm_kvmerge.policies.errors import blamed_on
from vllm_kvmerge.policies.indexing import in_place
from vllm_kvmerge.policies.trackers import attention_mass
from vllm_kvmerge.policies.update import CacheUpdate, CompressionResult

CALLS = 40_000
"""Touches that some hundred calls of operators on small tensors cost, per head."""


class CompressionPolicy(BaseModel):
    """Four parts that work together. Raises ValueError (pydantic's) for parts that do not fit."""

    model_config = ConfigDict(frozen=True)

    tracker: Tracker
    selector: Selector
    merger: Merger
    allocator: Allocator = Uniform()

    @model_validator(mode="after")
    def _check_parts_fit(self) -> Self:
        for kind, part in (("selector", self.selector), ("allocator", self.allocator)):
            if part.needs_scores and not self.needs_scores:
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

    @property
    def min_budget(self) -> int:
        """Smallest budget: the selector's, and one entry more for a merger that keeps slots of its own."""
        fewest = self.selector.min_budget
        return fewest + min(1, self.merger.num_slots(fewest))

    @property
    def accumulates_scores(self) -> bool:
        """True if attention accumulates scores, of the prompt and perhaps of generated tokens."""
        return self.tracker.mode != ScoreMode.NONE

    @property
    def needs_scores(self) -> bool:
        return self.accumulates_scores or self.tracker.repeats_context

    @property
    def takes_shares(self) -> bool:
        """True if heads with different budgets are compressed together."""
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
            PartError: the tracker or the allocator failed.
        """
        with blamed_on(self.tracker):
            mass = attention_mass(self.tracker, entries)
        with blamed_on(self.allocator):
            statistic = self.allocator.layer_statistic(entries, mass, context)
            num_layers = entries.num_rows // context.heads.num_kv_heads
            return check_tensor("layer_statistic", statistic, (num_layers,), mass, None)

    @cached_property
    def _costs(self) -> Callable[[CostShape], Cost]:
        # A request asks at every compression, most of which are of one shape.
        return lru_cache(maxsize=16)(self._cost)

    def cost(self, shape: CostShape) -> Cost:
        """Work of a compression for one KV head of one layer: the parts', as they state it, and the composition's own.

        Raises:
            PartError: a part cannot say what it costs.
        """
        return self._costs(shape)

    def _cost(self, shape: CostShape) -> Cost:
        n, d, group = shape.num_entries, shape.head_size, shape.group_size
        with blamed_on(self.allocator):
            capacity = self.allocator.capacity(shape.budget)
        largest = n if capacity is None else min(capacity, n)
        budgets = {shape.budget}
        if largest > shape.budget:
            # A small budget leaves much to merge, a large one much to merge into.
            budgets |= {min(n, self.min_budget), largest}
        parts = Cost()
        for budget in budgets:
            local = replace(shape, budget=budget)
            parts = parts.largest(sum((self.part_cost(part, local) for part in self.parts), Cost()))
        num_queries = min(self.query_window, n)
        weights = group * shape.hidden_size * d if self.needs_output_weights else 0
        # Metadata of all entries and places, queries as they are kept and in float32, the output projection.
        own = Cost(
            numbers=8 * n + 14 * largest + 3 * num_queries * group * d + weights,
            touches=60 * n + 60 * largest + 8 * num_queries * group * d + weights + CALLS,
        )
        if largest > shape.budget:
            # Heads with different budgets go one after the other; rows are read for all and taken for some. Keys are
            # multiplied where they lie only for all heads together.
            keys = shape.row_numbers if num_queries else 0
            own += Cost(parts.numbers + 2 * keys + 6 * n + 12 * largest, 0, 40 * (n + largest))
        return own + parts

    def part_cost(self, part: Part, shape: CostShape) -> Cost:
        """What one of the parts states, in whole numbers. Raises PartError if that is not a possible cost."""
        with blamed_on(part):
            cost = part.cost(replace(shape, tracker_mode=self.tracker.mode))
            if not is_foreign(part):
                return cost
            numbers = [int(number) for number in (cost.numbers, cost.products, cost.touches)]
            if min(numbers) < 0:
                raise ValueError(f"cost must not be negative, got {cost}")
            return Cost(*numbers)

    def compress(self, entries: Entries, context: CompressionContext) -> CompressionResult:
        """Returns exactly ``context.capacity`` entries per head, live ones up to the head's budget; the entries as they
        are if there are no more than the budget. Where ``context.shares`` are given, live ones come first.

        ``entries`` are not changed, and only the keys and values that a part asks for are read. They may hold dead
        ones, which are kept only if live ones are too few. An entry that stays keeps its place if the result has it.

        Raises:
            PartError: a part raised, returned something that cannot be used, or ran out of time.
            ValueError: the budget is too small for this policy.
        """
        if context.budget >= len(entries):
            return CompressionResult.of(entries, CacheUpdate.unchanged(entries))
        if context.budget < self.min_budget:
            raise ValueError(f"budget {context.budget} is smaller than this policy's least, {self.min_budget}")
        context = replace(context, min_budget=self.min_budget, tracker_mode=self.tracker.mode)
        if context.shares is not None and self.takes_shares:
            counts = torch.tensor(context.shares)
            together = replace(context, budget=int(counts.max()), row_counts=sent(counts, entries.positions.device))
            update = self._compress_rows(entries, together).extended(context.capacity)
            return CompressionResult.of(entries, update)
        parts, sources, order = [], [], []
        budgets = self.head_budgets(entries, context) if context.shares is None else context.shares
        groups: dict[int, list[int]] = {}
        for row, budget in enumerate(budgets):
            groups.setdefault(budget, []).append(row)
        for budget, rows in groups.items():
            order += rows
            sources.append(entries.of_rows(rows) if len(rows) < entries.num_rows else entries)
            update = self._compress_rows(sources[-1], replace(context.of_rows(rows), budget=budget))
            parts.append(update if context.shares is None else update.extended(context.capacity))
        if len(parts) == 1:
            return CompressionResult.of(entries, parts[0])
        update = CacheUpdate.stack_rows(parts, sources).of_rows([order.index(row) for row in range(len(order))])
        return CompressionResult.of(entries, update)

    def head_budgets(self, entries: Entries, context: CompressionContext) -> list[int]:
        """The allocator's budget of each row.

        Raises:
            PartError: the tracker or the allocator failed.
        """
        context = replace(context, min_budget=self.min_budget, tracker_mode=self.tracker.mode)
        if self.allocator.reads_attention:
            with blamed_on(self.tracker):
                importance = attention_mass(self.tracker, entries)
        else:
            importance = torch.zeros_like(entries.scores)
        with blamed_on(self.allocator):
            return self._checked(self.allocator.head_budgets(entries, importance, context), entries.num_rows, context)

    @staticmethod
    def _checked(budgets: Sequence[int], num_rows: int, context: CompressionContext) -> list[int]:
        """An allocator's budgets of rows, in whole numbers that rows can have. Raises ValueError."""
        whole = [int(budget) for budget in budgets]
        if len(whole) != num_rows:
            raise ValueError(f"head_budgets must be {num_rows} numbers, got {len(whole)}")
        return [min(max(budget, context.min_budget), context.capacity) for budget in whole]

    def attention_mass(self, entries: Entries) -> Tensor:
        """``[H, n]`` float32: what ``pooled_budgets`` takes of some layers; negative for dead entries.

        Raises:
            PartError: the tracker failed.
        """
        with blamed_on(self.tracker):
            return attention_mass(self.tracker, entries).masked_fill(~entries.is_live, -1.0)

    def pooled_budgets(self, mass: Tensor, context: CompressionContext) -> list[int]:
        """``head_budgets`` of all layers of a request; only where the allocator ``pools_layers``. mass: of all layers.

        Raises:
            PartError: the allocator failed.
        """
        context = replace(context, min_budget=self.min_budget, tracker_mode=self.tracker.mode)
        with blamed_on(self.allocator):
            return self._checked(self.allocator.pooled_budgets(mass, context), len(mass), context)

    def layer_budgets(self, budget: int, num_entries: int, num_layers: int) -> list[int] | None:
        """The allocator's, checked: a budget of each layer, where they do not depend on data.

        Raises:
            PartError: the allocator failed.
        """
        with blamed_on(self.allocator):
            budgets = self.allocator.layer_budgets(budget, num_entries, num_layers, self.min_budget)
            if budgets is None:
                return None
            if len(budgets) != num_layers:
                raise ValueError(f"layer_budgets must be {num_layers} numbers, got {len(budgets)}")
            return [min(max(int(one), self.min_budget), num_entries) for one in budgets]

    def _compress_rows(self, entries: Entries, context: CompressionContext) -> CacheUpdate:
        """``context.capacity`` places for each of these rows, ``context.budget`` of them filled; only these, or as many
        as there are entries, where budgets are ``context.shares``."""
        num_places = context.capacity if context.shares is None else context.budget
        by_row = context.row_counts is not None
        if context.budget >= len(entries) and not by_row:
            update = CacheUpdate.unchanged(entries)
            return update if context.shares is not None else update.in_place(entries, num_places)
        num_slots = min(self.merger.num_slots(context.budget), context.budget - self.selector.min_budget)
        context = replace(context, num_slots=num_slots)
        candidates, importance, protected = self._rank(entries, context)
        with blamed_on(self.merger):
            earlier = self.merger.before_selection(entries, importance, protected, context)
            if earlier is not None and is_foreign(self.merger):
                check_update(earlier, len(entries), entries.scores)
        remaining = entries
        if earlier is not None:
            remaining = earlier.view(entries)
            candidates, importance, protected = self._rank(remaining, context)
        kept = in_place(self._select(candidates, importance, protected, context), context.counts, context.num_kept)
        with blamed_on(self.merger):
            update = self.merger.merge(remaining, kept, importance, protected, context)
            if is_foreign(self.merger):
                check_update(update, context.budget, entries.scores)
        if earlier is not None:
            update = update.after(earlier, remaining)
        # Otherwise it is in place already.
        return update.in_place(entries, num_places) if not by_row and context.num_kept != num_places else update

    def _select(
        self, candidates: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> Tensor:
        """``[H, n]`` bool: the entries that stay, ``context.num_kept`` per head."""
        with blamed_on(self.selector):
            selected = self.selector.select(candidates, importance, protected, context)
            if is_foreign(self.selector):
                check_tensor("select", selected, tuple(importance.shape), importance, torch.bool)
                if bool((selected.sum(1) != context.counts).any()):
                    raise ValueError(f"select must choose {context.counts} entries of each head")
            return selected

    def _rank(self, entries: Entries, context: CompressionContext) -> tuple[Entries, Tensor, Tensor]:
        """The entries that the selector may keep, the importance of all entries, and the mask of protected ones."""
        with blamed_on(self.merger):
            candidates = entries.without(self.merger.is_slot(entries)) if context.num_slots else entries
        with blamed_on(self.tracker):
            importance = self.tracker.importance(entries)
            if is_foreign(self.tracker):
                check_tensor("importance", importance, tuple(entries.positions.shape), entries.positions, None)
                # NaN statistics are the model's doing: its keys or queries overflowed.
                if bool((importance.isnan() & entries.is_live & ~entries.scores.isnan()).any()):
                    raise ValueError("importance must be numbers, got NaN")
        with blamed_on(self.selector):
            protected = self.selector.protected(candidates, context)
            if is_foreign(self.selector):
                check_tensor("protected", protected, tuple(importance.shape), importance, torch.bool)
        return candidates, importance, protected
