"""Executes compression plans: asks each request's policy what changes, and changes that in the pages."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_kvmerge import ops
from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.plan import CompressionPlan
from vllm_kvmerge.engine.worker.paged_entries import PagedEntries
from vllm_kvmerge.ops import PagedKVCache, Rows, SequenceLayers
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies import CacheUpdate, CompressionContext, CompressionPolicy, CompressionResult
from vllm_kvmerge.policies.cost import Cost, CostShape, Rates
from vllm_kvmerge.policies.failure import (
    OutOfTime,
    PartError,
    PartTimeout,
    as_part_error,
    is_foreign,
    time_limit,
)
from vllm_kvmerge.policies.indexing import in_place, largest

SLACK = 4
"""How many times as long as expected a policy may take besides: estimates and machines vary."""


@dataclass(frozen=True)
class Compaction:
    """A plan, and what its execution needs to know of the request.

    source_blocks: ids of the blocks that its slots lie in before the plan. prompt_scores: statistics of its tokens if
    this is its first compression and its policy scores the prompt. ring: its newest queries if its policy reads them.
    """

    plan: CompressionPlan
    policy: CompressionPolicy
    source_blocks: Tensor
    prompt_scores: PromptScores | None = None
    ring: QueryRing | None = None

    @property
    def num_entries(self) -> int:
        """Live entries per head before the plan."""
        return self.plan.front + self.plan.num_tokens - self.plan.tail

    @property
    def num_queries(self) -> int:
        """How many of the newest queries are known."""
        return 0 if self.ring is None else len(self.ring.positions(self.plan.num_tokens))

    def newest_queries(self, layers: slice) -> tuple[Tensor, Tensor]:
        """``[layers, w, H * G, d]`` in the model's dtype, and ``[w]`` int64, their positions."""
        assert self.ring is not None
        return self.ring.queries(self.plan.num_tokens, layers), self.ring.positions(self.plan.num_tokens)


@dataclass(frozen=True)
class _Unit:
    """One layer of one request; ``index`` is the request's place in its batch."""

    index: int
    compaction: Compaction
    layer: int


@dataclass(frozen=True)
class _Change:
    """What is to be written to some units. counts: ``[H, 3]`` int64, per head ``Execution.counts``."""

    located: SequenceLayers
    outcome: CacheUpdate
    counts: Tensor


@dataclass(frozen=True)
class Execution:
    """What became of a step's plans.

    counts: ``[plans, 3]`` int64 on the cache's device, over layers and heads: entries that were merged, those that were
    evicted, and places that hold an entry as it was because what was to be merged into it is not finite. failures:
    plans, by their index, whose policy failed: their newest entries were kept, so what their requests generate from
    then on is not what they asked for.
    """

    counts: Tensor
    failures: dict[int, PartError]


@dataclass(frozen=True)
class Compactor:
    """Compresses requests' caches.

    Requests whose plans have the same shape go through their policy together, with all their layers. What becomes of
    one does not depend on which others are in the batch, nor on the order of plans: blocks that a step's plans write to
    are their own or were free, so no plan writes what another reads.

    layers: each layer's pages. scale: of the attention logits. head_indices: index of each of this worker's KV heads
    among all of them. all_heads: gathers ``[H, ...]`` from all tensor-parallel workers. output_weights: gives a layer's
    output projection as ``[H, G, hidden, d]`` float32, or None where it is not known. group_size: query heads per KV
    head. hidden_size: of the model. max_bytes: of working memory that a policy may need for a batch; larger ones are
    split, down to one layer of one request. max_seconds: how much longer a policy may work on a batch than ``SLACK``
    times what ``rates`` let expect; None: as long as it takes.
    """

    layers: Sequence[PagedKVCache]
    scale: float
    head_indices: list[int]
    all_heads: Callable[[Tensor], Tensor] = field(default=lambda tensor: tensor)
    output_weights: Callable[[int], Tensor | None] = field(default=lambda layer: None)
    group_size: int = 1
    hidden_size: int = 0
    max_bytes: int = 256 << 20
    max_seconds: float | None = None
    rates: Rates | None = None

    def run(self, compactions: Sequence[Compaction]) -> list[tuple[int, int]]:
        """Executes a step's plans; the numbers of merged and evicted entries of each, over layers and heads.

        Raises:
            PartError: a policy failed.
        """
        done = self.execute(compactions)
        for error in done.failures.values():
            raise error
        return [(merged, evicted) for merged, evicted, _ in done.counts.tolist()]

    def execute(self, compactions: Sequence[Compaction]) -> Execution:
        """Executes a step's plans without waiting for a GPU. A policy that fails harms its own request alone."""
        batches: dict[tuple[object, ...], list[int]] = {}
        for index, compaction in enumerate(compactions):
            plan = compaction.plan
            shape = (plan.front == 0, compaction.num_entries, plan.budget, plan.new_front, compaction.num_queries)
            # Its text says what the policy is, and need not be hashable as another package's parameters may not be.
            batches.setdefault((plan.compression, id(compaction.policy), *shape), []).append(index)
        counts, failures = [], {}
        for indices in batches.values():
            failed: dict[int, PartError] = {}
            counts.append(self._run_batch([compactions[index] for index in indices], failed))
            failures.update({indices[index]: error for index, error in failed.items()})
        order = torch.tensor([index for indices in batches.values() for index in indices], dtype=torch.int64)
        return Execution(torch.cat(counts).index_select(0, sent(order.argsort(), self.device)), failures)

    def _run_batch(self, batch: list[Compaction], failed: dict[int, PartError]) -> Tensor:
        """Executes plans of one shape; ``Execution.counts`` of them. Adds to ``failed``, by index in the batch."""
        policy = batch[0].policy
        time_left = self._clock(batch)
        statistics = None
        if policy.allocator.has_layer_statistic:
            statistics = self._layer_statistics(batch, failed, time_left)
        counts = torch.zeros(len(batch), 3, dtype=torch.int64, device=self.device)

        def compress(units: list[_Unit]) -> _Change:
            entries = self._gather(units)
            with time_limit(time_left()):
                return self._change(entries, policy.compress(entries, self._context(units, batch, statistics)))

        def write(units: list[_Unit], change: _Change) -> None:
            index = sent(torch.tensor([unit.index for unit in units]), self.device)
            counts.index_add_(0, index, change.counts.unflatten(0, (-1, self.num_heads)).sum(1))
            self._write(units, change.located, change.outcome)

        for units in self._parts(batch):
            for some, change in _contained(units, failed, compress):
                write(some, change)
                del change  # before the next one is made
            if failed_units := [unit for unit in units if unit.index in failed]:
                entries = self._gather(failed_units)
                write(failed_units, self._change(entries, _newest(entries, batch[0].plan.new_front)))
        return counts

    def _change(self, entries: PagedEntries, result: CompressionResult) -> "_Change":
        outcome, as_before = result.outcome.finite(result.source, self.layers[0].keys.dtype)
        return _Change(entries.units, outcome, torch.stack([outcome.merged, result.evicted, as_before], 1))

    def _layer_statistics(
        self, batch: list[Compaction], failed: dict[int, PartError], time_left: Callable[[], float | None]
    ) -> Tensor:
        """``[plans, layers]`` float32, the allocator's; zeros where it failed."""

        def statistic(units: list[_Unit]) -> Tensor:
            entries = self._gather(units)
            with time_limit(time_left()):
                return batch[0].policy.layer_statistic(entries, self._context(units, batch, None))

        statistics = torch.zeros(len(batch), len(self.layers), device=self.device)
        for units in self._parts(batch):
            for some, values in _contained(units, failed, statistic):
                places = sent(torch.tensor([(unit.index, unit.layer) for unit in some]), self.device)
                statistics[places[:, 0], places[:, 1]] = values.float()
        return statistics

    def _parts(self, batch: list[Compaction]) -> Iterator[list[_Unit]]:
        """The layers of all requests, in parts that fit in memory."""
        units = [_Unit(i, one, layer) for i, one in enumerate(batch) for layer in range(len(self.layers))]
        size = 1
        if not batch[0].policy.needs_output_weights:  # which are too large to repeat
            try:
                unit_bytes = 4 * self.num_heads * self._cost(batch[0]).numbers
            except PartError:
                unit_bytes = self.max_bytes  # it fails again where that is contained
            size = max(1, self.max_bytes // max(1, unit_bytes))
        for start in range(0, len(units), size):
            yield units[start : start + size]

    def _cost(self, compaction: Compaction) -> Cost:
        """Of one head of one layer."""
        return compaction.policy.cost(
            CostShape(
                num_entries=compaction.num_entries,
                budget=compaction.plan.budget,
                head_size=self.layers[0].head_size,
                group_size=self.group_size,
                hidden_size=self.hidden_size,
                at_prompt_end=compaction.plan.front == 0,
            )
        )

    def _clock(self, batch: list[Compaction]) -> Callable[[], float | None]:
        """Tells how long the batch's policy may still work, counted from now; None: as long as it takes.

        On a GPU our own parts are not hurried: what they wait for there is a kernel's compilation.
        """
        max_seconds = self.max_seconds
        if max_seconds is None or not (self.device.type == "cpu" or any(map(is_foreign, batch[0].policy.parts))):
            return lambda: None
        started = time.monotonic()

        def time_left() -> float:
            expected = 0.0
            if self.rates is not None:
                heads = len(batch) * len(self.layers) * self.num_heads
                expected = heads * self._cost(batch[0]).seconds(self.rates)
            return max_seconds + SLACK * expected - (time.monotonic() - started)

        return time_left

    @property
    def num_heads(self) -> int:
        return len(self.head_indices)

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device

    def _context(self, units: list[_Unit], batch: list[Compaction], statistics: Tensor | None) -> CompressionContext:
        plan, policy = batch[0].plan, batch[0].policy
        context = CompressionContext(
            budget=plan.budget,
            capacity=plan.new_front,
            num_tokens=max(one.plan.num_tokens for one in batch),
            at_prompt_end=plan.front == 0,
            num_heads=self.num_heads,
            layers=[unit.layer for unit in units for _ in self.head_indices],
            num_layers=len(self.layers),
            scale=self.scale,
            output_weights=self.output_weights(units[0].layer) if policy.needs_output_weights else None,
            layer_statistics=None if statistics is None else statistics[[unit.index for unit in units]],
            all_heads=self.all_heads,
            head_indices=self.head_indices * len(units),
        )
        if batch[0].ring is None:
            return context
        layers = slice(min(unit.layer for unit in units), max(unit.layer for unit in units) + 1)
        newest = {index: batch[index].newest_queries(layers) for index in {unit.index for unit in units}}
        # [units, w, H * G, d]
        queries = torch.stack([newest[unit.index][0][unit.layer - layers.start] for unit in units])
        by_head = queries.unflatten(2, (self.num_heads, -1)).permute(0, 2, 3, 1, 4)
        positions = torch.stack([newest[unit.index][1] for unit in units])
        return replace(
            context,
            queries=by_head.float().flatten(0, 1),
            query_positions=positions.repeat_interleave(self.num_heads, dim=0),
        )

    def _gather(self, units: list[_Unit]) -> PagedEntries:
        entries = PagedEntries.gather(self._located(units))
        if units[0].compaction.plan.front == 0:
            # Before its first compression a request's pages hold no statistics of its own.
            entries.scores.zero_()
            entries.aux.zero_()
            for row, unit in enumerate(units):
                scores = unit.compaction.prompt_scores
                if scores is not None:
                    heads = slice(row * self.num_heads, (row + 1) * self.num_heads)
                    entries.scores[heads] = scores.scores[unit.layer, :, : len(entries)]
                    entries.aux[heads] = scores.aux[unit.layer, :, : len(entries)]
        return entries

    def _write(self, units: list[_Unit], located: SequenceLayers, outcome: CacheUpdate) -> None:
        destination = sent(torch.tensor([unit.compaction.plan.blocks for unit in units]), self.device)
        metadata = outcome.log_votes, outcome.scores, outcome.aux, outcome.positions
        rows = Rows(outcome.changed, outcome.keys, outcome.values)
        ops.merge_entries(located, destination, outcome.kept, metadata, rows)

    def _located(self, units: list[_Unit]) -> SequenceLayers:
        plans = [unit.compaction.plan for unit in units]
        sources = {unit.index: unit.compaction.source_blocks for unit in units}
        requests = list(sources)
        blocks = sent(pad_sequence(list(sources.values()), batch_first=True), self.device)
        rows = sent(torch.tensor([requests.index(unit.index) for unit in units]), self.device)
        return SequenceLayers(
            self.layers,
            torch.tensor([unit.layer for unit in units]),
            blocks.index_select(0, rows),
            torch.tensor([(plan.front, plan.tail, plan.num_tokens) for plan in plans]),
        )


R = TypeVar("R")


def _contained(
    units: list[_Unit], failed: dict[int, PartError], run: Callable[[list[_Unit]], R]
) -> Iterator[tuple[list[_Unit], R]]:
    """What ``run`` makes of the units of requests that have not failed; ``run`` changes nothing.

    Where it raises, it runs again for one request at a time, and what then raises has failed. A policy that ran out of
    time has failed for all of them: another turn each would keep everybody waiting.
    """
    requests: dict[int, list[_Unit]] = {}
    for unit in units:
        if unit.index not in failed:
            requests.setdefault(unit.index, []).append(unit)
    if not requests:
        return
    sound = [unit for unit in units if unit.index in requests]
    try:
        result = run(sound)
    except (Exception, OutOfTime) as error:
        fault = as_part_error(error)
        if len(requests) == 1 or isinstance(fault, PartTimeout):
            failed.update(dict.fromkeys(requests, fault))
            return
    else:
        yield sound, result
        return
    for one in requests.values():
        yield from _contained(one, failed, run)


def _newest(entries: PagedEntries, capacity: int) -> CompressionResult:
    """The newest entries as they are: what a request is left with whose policy failed."""
    if capacity >= len(entries):
        outcome = CacheUpdate.unchanged(entries)
    else:
        outcome = CacheUpdate.of(entries, in_place(largest(entries.positions, capacity), capacity))
    outcome = outcome.emptied()
    return CompressionResult(entries, outcome, entries.is_live.sum(1) - outcome.is_live.sum(1))
