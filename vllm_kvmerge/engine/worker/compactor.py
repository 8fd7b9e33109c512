"""Execution of compression plans: each request's policy decides what changes, the compactor writes it to the cache."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.worker.budgets import ANALYSIS, BudgetedLayers, contained
from vllm_kvmerge.engine.worker.compaction import FEWEST, Batch, Compaction, Execution, SequenceLayer
from vllm_kvmerge.engine.worker.paged_entries import PagedEntries
from vllm_kvmerge.engine.worker.timing import Timing
from vllm_kvmerge.engine.worker.units import Unit, Work
from vllm_kvmerge.engine.worker.write import NO_COUNT
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies import CacheUpdate, CompressionContext, CompressionResult, tiles
from vllm_kvmerge.policies.base import HeadShape
from vllm_kvmerge.policies.bounds import time_limit
from vllm_kvmerge.policies.checks import is_foreign
from vllm_kvmerge.policies.errors import (
    OutOfMemory,
    OutOfTime,
    PartTimeout,
    PartTooLarge,
    as_part_error,
)
from vllm_kvmerge.policies.indexing import in_place, largest
from vllm_kvmerge.policies.protection import count_below
from vllm_kvmerge.policies.tiles import Memory

MOVED_NUMBERS = 6
"""Numbers held for each number of keys that are turned to other positions where that is not done in place."""


LATE = 0.95
"""Most of heads that has been done as long as tiles of them follow, more than of the heads before."""


@dataclass(frozen=True)
class Compactor(BudgetedLayers):
    """Compresses requests' caches.

    Requests whose plans have the same shape go through their policy together, with all their layers. The result of one
    depends neither on the others in the batch nor on the order of plans: a step's plans write only to blocks that are
    their own or were free, so no plan writes what another reads.

    max_seconds: time that another package's parts may take for a batch; None: no limit. exceeded: how often parts have
    taken too much time or memory, by label.
    """

    max_seconds: float | None = None
    exceeded: Counter[str] = field(default_factory=Counter)

    def run(self, compactions: Sequence[Compaction]) -> list[tuple[int, int]]:
        """Executes a step's plans; returns each one's numbers of merged and evicted entries. Raises PartError."""
        done = self.execute(compactions)
        for error in done.failures.values():
            raise error
        return [(merged, evicted) for merged, evicted, *_ in done.counts.tolist()]

    def execute(self, compactions: Sequence[Compaction], begun: Mapping[int, Batch] | None = None) -> Execution:
        """Executes a step's plans without waiting for a GPU. A policy that fails affects its own request alone.

        begun: by index, what earlier steps have begun, and is brought to an end.
        """
        batches: dict[tuple[object, ...], list[int]] = {}
        run = [([index], batch) for index, batch in (begun or {}).items()]
        for index, compaction in enumerate(compactions):
            if begun is not None and index in begun:
                continue
            plan = compaction.plan
            shape = *self._shape(compaction), compaction.num_queries
            # Each complete cache is an allocation of its own, so refreshes go one by one.
            source = compaction.is_of_tokens, None if compaction.complete is None else id(compaction.complete)
            layout = compaction.pages is None, compaction.has_pages, plan.share_blocks, compaction.settles_shares
            batches.setdefault((*shape, *source, *layout, compaction.rescoring is not None), []).append(index)
        for indices in batches.values():
            run.append((indices, self._batch([compactions[index] for index in indices])))
        counts, failures, pages, fronts, budget_data, timings = [], {}, {}, {}, {}, list[Timing]()
        for indices, batch in run:
            timings.append(batch.advance(1.0))
            counts.append(batch.counts)
            failures.update({indices[index]: error for index, error in batch.failed.items()})
            pages.update({indices[index]: one.pages for index, one in enumerate(batch.assignments)})
            fronts.update({indices[index]: front for index, front in enumerate(batch.fronts)})
            budget_data.update({indices[index]: one for index, one in enumerate(batch.budget_data)})
        for error in {id(one): one for one in failures.values()}.values():
            if isinstance(error, PartTimeout | PartTooLarge):
                self.exceeded[error.part] += 1
                error.is_last = self.exceeded[error.part] > 1
        in_order, order = counts[0] if len(counts) == 1 else torch.cat(counts), [i for some, _ in run for i in some]
        if order != [*range(len(order))]:
            places = torch.tensor(order, dtype=torch.int64).argsort()
            in_order = in_order.index_select(0, sent(places, self.device))
        return Execution(in_order, failures, pages, fronts, budget_data, timings)

    def _shape(self, compaction: Compaction) -> tuple[object, ...]:
        """Equal for compactions that can be one batch, as far as policy and sizes count."""
        plan, policy = compaction.plan, compaction.policy
        num_protected = count_below(policy.protect, plan.num_tokens if plan.is_refresh else plan.seq_len)
        # By the request's text: parameters of another package's policy may not be hashable.
        sizes = compaction.num_entries, plan.budget, plan.new_front
        return plan.compression, id(policy), num_protected, *sizes

    def begin(self, compaction: Compaction, num_parts: int) -> Batch:
        """A compaction that is to be executed in about ``num_parts`` parts, down to one KV head of one layer."""
        return self._batch([compaction], max(1, len(self.layers) * self.num_kv_heads // num_parts))

    def _batch(self, compactions: list[Compaction], num_rows: int = 0) -> Batch:
        """num_rows: 0: as many as memory allows."""
        first, max_seconds, policy = compactions[0], self.max_seconds, compactions[0].policy
        num_looks = policy.allocator.has_layer_statistic + bool(first.plan.share_blocks)
        work = Work(1.0 + ANALYSIS * num_looks)
        plan, num_entries = first.plan, first.num_entries
        is_foreign_part = any(map(is_foreign, first.policy.parts))
        # Others would wait forever for a worker that is interrupted.
        has_limit = max_seconds is not None and is_foreign_part and (self.is_alone or not _may_exchange(first))

        def time_left() -> float | None:
            return max_seconds - work.seconds if has_limit and max_seconds is not None else None

        held = self._held(first, plan, num_entries)
        if held * self.num_kv_heads > self.max_bytes and not first.policy.selector.pools_heads:
            most = max(1, self.max_bytes // held)
            num_rows = min(num_rows or most, most)
        counts = self.sent([[NO_COUNT if column == FEWEST else 0 for column in range(6)]] * len(compactions))
        num_rows = min(num_rows, self.num_kv_heads)
        products = (num_entries - plan.budget) * plan.budget * self.layers[0].head_size  # if all are compared
        count = max(1, num_rows * products // tiles.TILE_PRODUCTS)
        batch = Batch(compactions, plan, num_entries, held, time_left, work, counts, num_rows, count)
        work.add(self._units(batch))
        return batch

    def _held(self, compaction: Compaction, plan: Compress, num_entries: int) -> int:
        """``Batch.held``."""
        size = self.layers[0].head_size
        shape = HeadShape(num_entries, min(plan.budget, num_entries), size, self.group_size, self.hidden_size)
        numbers = compaction.policy.held(shape)
        if compaction.complete is not None or compaction.coding:
            numbers += 2 * plan.new_front * size
        if compaction.rescoring is not None:
            numbers += num_entries * size
        if compaction.moves_keys:
            numbers += MOVED_NUMBERS * plan.new_front * size
        return max(1, 4 * numbers)

    def _units(self, batch: Batch) -> Iterator[Unit]:
        """All that is to be done for a batch."""
        yield from self.analysis(batch)
        yield Unit(partial(self._writing, batch), 1.0)

    def _writing(self, batch: Batch) -> Iterator[Unit]:
        """Units that compress what has been looked at, and write it."""
        self.settle(batch)
        parts = list(self.parts(batch))
        needs_passes = len(parts) > 1 and any(one.needs_passes for one in batch.assignments)
        passes = ((False,), (True,)) if needs_passes else ((False, True),)
        # Where workers exchange something, none may have come further than another when it waits.
        batch.work.may_stop = not batch.policy.selector.pools_heads
        num_seq_layers = len(passes) * sum(map(len, parts))
        compress = self._by_heads if batch.num_rows and batch.work.may_stop else self._compress_part
        for rounds in passes:
            for part in parts:
                share = len(part) / num_seq_layers
                yield Unit(partial(compress, batch, part, rounds, share), share)

    def _compress_part(self, batch: Batch, part: list[SequenceLayer], rounds: tuple[bool, ...], share: float) -> None:
        """Compresses some sequence layers, with all their heads."""

        def compress(seq_layers: list[SequenceLayer]) -> CompressionResult:
            entries, context = self._read(seq_layers, batch)
            with time_limit(batch.time_left()):
                return batch.policy.compress(entries, context).finite(self.dtype)

        for some, result in contained(part, batch.failed, compress):
            self.write(some, batch, result, rounds)
            del result  # before the next one is computed
        self._write_failed(batch, part, rounds)

    def _by_heads(
        self, batch: Batch, part: list[SequenceLayer], rounds: tuple[bool, ...], share: float
    ) -> Iterable[Unit]:
        """Begins to compress one sequence layer, ``batch.num_rows`` heads at a time."""
        (seq_layer,) = part
        if seq_layer.request not in batch.failed:
            try:
                entries, context = self._read(part, batch)
            except (Exception, OutOfTime, OutOfMemory) as error:
                batch.failed[seq_layer.request] = as_part_error(error)
            else:
                # Putting heads together and writing them count as one more.
                heads = _Heads(entries, context, share / (self.num_kv_heads + 1), left=share)
                return [Unit(partial(self._go_on, batch, part, rounds, heads), share)]
        return self._write_failed(batch, part, rounds)

    def _go_on(
        self, batch: Batch, part: list[SequenceLayer], rounds: tuple[bool, ...], heads: "_Heads"
    ) -> Iterable[Unit]:
        """Goes on with the heads of a sequence layer."""
        try:
            with time_limit(batch.time_left()):
                result = heads.go_on(batch)
                if result is not None:
                    result = result.finite(self.dtype)
                    return [Unit(partial(self.write, part, batch, result, rounds), heads.share / 3)]
        except (Exception, OutOfTime, OutOfMemory) as error:
            batch.failed[part[0].request] = as_part_error(error)
            return self._write_failed(batch, part, rounds)
        return [Unit(partial(self._go_on, batch, part, rounds, heads), heads.left)]

    def _read(self, seq_layers: list[SequenceLayer], batch: Batch) -> tuple[PagedEntries, CompressionContext]:
        """What a policy compresses."""
        context = self.context(seq_layers, batch)
        if batch.moves_keys:
            context.known_rotation()
        return self.gather(seq_layers, batch), context

    def _write_failed(self, batch: Batch, part: list[SequenceLayer], rounds: tuple[bool, ...]) -> tuple[()]:
        """Writes the newest entries of those whose policy failed."""
        failed: dict[int, list[SequenceLayer]] = {}
        for one in part:
            if one.request in batch.failed:
                failed.setdefault(batch.compactions[one.request].plan.new_front, []).append(one)
        for front, some in failed.items():
            self.write(some, batch, _newest(self.gather(some, batch), front).finite(self.dtype), rounds)
        return ()


@dataclass
class _Heads:
    """Heads of a sequence layer that are compressed some at a time, tile by tile. share: of the work, what a head
    takes. left: what the layer still takes. num_tiles: of the heads that are under way. done: what counts for these."""

    entries: PagedEntries
    context: CompressionContext
    share: float
    left: float
    memory: Memory = field(default_factory=Memory)
    num_tiles: int = 0
    done: float = 0.0

    def go_on(self, batch: Batch) -> CompressionResult | None:
        """The result, once it has come to that; None: one more tile has been completed. Until their heads are complete,
        tiles count alike, by how many there were of the heads before."""
        before = self.memory.num_completed
        result = self.memory.go_on(lambda: batch.policy.compress(self.entries, self.context, batch.num_rows))
        most = min(self.share * batch.num_rows, self.left + self.done)
        self.left, self.num_tiles = self.left + self.done, self.num_tiles + 1
        if self.memory.num_completed > before:
            batch.num_tiles, self.num_tiles, self.done = self.num_tiles, 0, 0.0
            self.left -= most
        else:
            self.done = most * min(self.num_tiles / batch.num_tiles, LATE)
            self.left -= self.done
        return result


def _may_exchange(compaction: Compaction) -> bool:
    """True if tensor-parallel workers may wait for each other while they compress. Another package's trackers and
    allocators need not say that they make them."""
    plan, policy = compaction.plan, compaction.policy
    compares = policy.selector.pools_heads or policy.allocator.splits_heads or policy.allocator.has_layer_statistic
    return compares or bool(plan.share_blocks) or is_foreign(policy.tracker) or is_foreign(policy.allocator)


def _newest(entries: PagedEntries, capacity: int) -> CompressionResult:
    """The newest entries, unchanged, for a request whose policy failed."""
    if capacity >= len(entries):
        return CompressionResult.of(entries, CacheUpdate.unchanged(entries))
    kept = in_place(largest(entries.positions, capacity), capacity)
    return CompressionResult.of(entries, CacheUpdate.of(entries, kept))
