"""Execution of compression plans: each request's policy decides what changes, the compactor writes it to the cache."""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from vllm_kvmerge.engine.messages import Compress, FrontReport
from vllm_kvmerge.engine.worker.arriving import Arriving
from vllm_kvmerge.engine.worker.compaction import FEWEST, Batch, Compaction, Execution, SequenceLayer, Work
from vllm_kvmerge.engine.worker.head_pages import Deal
from vllm_kvmerge.engine.worker.paged_entries import PagedEntries
from vllm_kvmerge.engine.worker.timing import Timing, moment
from vllm_kvmerge.engine.worker.write import NO_COUNT, WrittenLayers
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies import CacheUpdate, CompressionResult
from vllm_kvmerge.policies.base import HeadShape
from vllm_kvmerge.policies.bounds import time_limit
from vllm_kvmerge.policies.checks import is_foreign
from vllm_kvmerge.policies.errors import (
    OutOfMemory,
    OutOfTime,
    PartError,
    PartTimeout,
    PartTooLarge,
    as_part_error,
)
from vllm_kvmerge.policies.indexing import in_place, largest
from vllm_kvmerge.policies.pausing import in_pieces
from vllm_kvmerge.policies.protection import count_below
from vllm_kvmerge.policies.shares import fitted_budgets

MOVED_NUMBERS = 6
"""Numbers held for each number of keys that are turned to other positions where that is not done in place."""

ANALYSIS = 0.25
"""Work of reading all layers once before they are compressed (budgets, statistics), as a share of compressing them."""


class Course:
    """A batch under way, which can be left to wait after every part of it."""

    def __init__(self, batch: Batch, parts: Iterator[None]) -> None:
        self.batch, self._parts = batch, parts

    @property
    def progress(self) -> float:
        """Share of the work that has been done."""
        return self.batch.work.done / self.batch.work.total

    @property
    def seconds(self) -> float:
        """Time spent so far."""
        return self.batch.work.elapsed

    def advance(self, until: float, max_seconds: float = math.inf) -> Timing:
        """Goes on up to this share of the work, by one part at least unless it has been done; 1: to the end. What would
        take more than ``max_seconds`` is left, where workers need not come equally far. Returns what was done."""
        work, started, before = self.batch.work, self.seconds, self.progress
        first, device = self.batch.compactions[0], self.batch.counts.device
        begun = moment(device)
        work.resume()
        is_free = not self.batch.policy.selector.pools_heads
        last, last_seconds = 0.0, 0.0
        while until >= 1.0 or self.progress + last < until:
            if is_free and work.is_writing and self.seconds + last_seconds > started + max_seconds:
                break
            progress, seconds = self.progress, self.seconds
            try:
                next(self._parts)
            except StopIteration:
                break
            last, last_seconds = self.progress - progress, self.seconds - seconds
        work.pause()
        amount = sum(one.num_entries for one in self.batch.compactions) * (self.progress - before)
        return Timing((first.plan.compression, first.num_entries.bit_length()), amount, begun, moment(device))


@dataclass(frozen=True)
class Compactor(WrittenLayers):
    """Compresses requests' caches.

    Requests whose plans have the same shape go through their policy together, with all their layers. The result of one
    depends neither on the others in the batch nor on the order of plans: a step's plans write only to blocks that are
    their own or were free, so no plan writes what another reads.

    max_seconds: time that another package's parts may take for a batch; None: no limit. is_alone: no other worker
    compresses the same requests. exceeded: how often parts have taken too much time or memory, by label.
    """

    max_seconds: float | None = None
    is_alone: bool = True
    exceeded: Counter[str] = field(default_factory=Counter)

    def run(self, compactions: Sequence[Compaction]) -> list[tuple[int, int]]:
        """Executes a step's plans; returns each one's numbers of merged and evicted entries. Raises PartError."""
        done = self.execute(compactions)
        for error in done.failures.values():
            raise error
        return [(merged, evicted) for merged, evicted, *_ in done.counts.tolist()]

    def execute(self, compactions: Sequence[Compaction], begun: Mapping[int, Course] | None = None) -> Execution:
        """Executes a step's plans without waiting for a GPU. A policy that fails affects its own request alone.

        begun: by index, what earlier steps have begun, and is brought to an end.
        """
        batches: dict[tuple[object, ...], list[int]] = {}
        courses = [([index], course) for index, course in (begun or {}).items()]
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
            courses.append((indices, self._course([compactions[index] for index in indices])))
        counts, failures, pages, fronts, found, timings = [], {}, {}, {}, {}, list[Timing]()
        for indices, course in courses:
            timings.append(course.advance(1.0))
            batch = course.batch
            counts.append(batch.counts)
            failures.update({indices[index]: error for index, error in batch.failed.items()})
            pages.update({indices[index]: deal.pages for index, deal in enumerate(batch.deals)})
            fronts.update({indices[index]: front for index, front in enumerate(batch.fronts)})
            found.update({indices[index]: one for index, one in enumerate(batch.found)})
        for error in {id(one): one for one in failures.values()}.values():
            if isinstance(error, PartTimeout | PartTooLarge):
                self.exceeded[error.part] += 1
                error.is_last = self.exceeded[error.part] > 1
        in_order, order = counts[0] if len(counts) == 1 else torch.cat(counts), [i for some, _ in courses for i in some]
        if order != [*range(len(order))]:
            places = torch.tensor(order, dtype=torch.int64).argsort()
            in_order = in_order.index_select(0, sent(places, self.device))
        return Execution(in_order, failures, pages, fronts, found, timings)

    def _shape(self, compaction: Compaction) -> tuple[object, ...]:
        """Equal for compactions that can be one batch, as far as policy and sizes count."""
        plan, policy = compaction.plan, compaction.policy
        num_protected = count_below(policy.protect, plan.num_tokens if plan.is_refresh else plan.seq_len)
        # By the request's text: parameters of another package's policy may not be hashable.
        sizes = compaction.num_entries, plan.budget, plan.new_front
        return plan.compression, id(policy), num_protected, *sizes

    def begin(self, compaction: Compaction, num_parts: int) -> Course:
        """A compaction that is to be executed in about ``num_parts`` parts, down to one KV head of one layer."""
        return self._course([compaction], max(1, len(self.layers) * self.num_kv_heads // num_parts))

    def _course(self, compactions: list[Compaction], num_rows: int = 0) -> Course:
        batch = self._batch(compactions, num_rows)
        return Course(batch, self._run_batch(batch))

    def _batch(self, compactions: list[Compaction], num_rows: int) -> Batch:
        """num_rows: 0: as many as memory allows."""
        first, work, max_seconds = compactions[0], Work(), self.max_seconds
        plan, num_entries = first.plan, first.num_entries
        is_foreign_part = any(map(is_foreign, first.policy.parts))
        # Others would wait forever for a worker that is interrupted.
        has_limit = max_seconds is not None and is_foreign_part and (self.is_alone or not _may_exchange(first))

        def time_left() -> float | None:
            return max_seconds - work.elapsed if has_limit and max_seconds is not None else None

        held = self._held(first, plan, num_entries)
        if held * self.num_kv_heads > self.max_bytes and not first.policy.selector.pools_heads:
            most = max(1, self.max_bytes // held)
            num_rows = min(num_rows or most, most)
        policy = first.policy
        work.total += ANALYSIS * (policy.allocator.has_layer_statistic + bool(plan.share_blocks))
        counts = self.sent([[NO_COUNT if column == FEWEST else 0 for column in range(6)]] * len(compactions))
        batch = Batch(compactions, plan, num_entries, held, time_left, work, counts, min(num_rows, self.num_kv_heads))
        return batch

    def _held(self, compaction: Compaction, plan: Compress, num_entries: int) -> int:
        """``Batch.held``."""
        size = self.layers[0].head_size
        shape = HeadShape(num_entries, min(plan.budget, num_entries), size, self.group_size, self.hidden_size)
        numbers = compaction.policy.held(shape)
        if compaction.complete is not None:
            numbers += 2 * plan.new_front * size
        if compaction.rescoring is not None:
            numbers += num_entries * size
        if compaction.moves_keys:
            numbers += MOVED_NUMBERS * plan.new_front * size
        return max(1, 4 * numbers)

    def _run_batch(self, batch: Batch) -> Iterator[None]:
        """Executes the plans; may be left to wait where it yields."""
        work, statistics = batch.work, None
        if batch.policy.allocator.has_layer_statistic:
            statistics = yield from self._layer_statistics(batch)
            arriving = Arriving.of(statistics)
            batch.found.extend(arriving[index] for index in range(len(statistics)))
            if not batch.settles_shares:  # all layers are alike where nothing is known
                alike = [1.0] * len(self.layers)
                earlier = [alike if one.found is None else one.found.take() for one in batch.compactions]
                statistics = torch.tensor(earlier, device="cpu")
        if batch.plan.share_blocks:
            before = work.done
            batch.shares.extend((yield from self._shares(batch, statistics)))
            work.done = before + ANALYSIS
        if batch.compactions[0].may_shrink:
            batch.fronts.extend(self._fronts(batch))
        if batch.compactions[0].has_pages:
            batch.deals.extend(self._deals(batch))

        def compress(seq_layers: list[SequenceLayer]) -> CompressionResult:
            entries = self.gather(seq_layers, batch)
            context = self.context(seq_layers, batch, statistics)
            if batch.moves_keys:
                context.known_rotation()
            with time_limit(batch.time_left()):
                return batch.policy.compress(entries, context).finite(self.dtype)

        parts = list(self._parts(batch))
        needs_passes = len(parts) > 1 and any(deal.needs_passes for deal in batch.deals)
        passes = ((False,), (True,)) if needs_passes else ((False, True),)
        work.is_writing = True
        for rounds in passes:
            for part in parts:
                before, share = work.done, len(part) / (len(passes) * sum(map(len, parts)))
                # Where workers exchange something, none may have come further than another when it waits.
                if batch.num_rows and not batch.policy.selector.pools_heads:
                    # Putting heads together and writing them count as one more.
                    by_head = share / (self.num_kv_heads + 1)
                    results = iter((yield from self._compress_heads(part[0], batch, statistics, by_head)))
                else:
                    results = _contained(part, batch.failed, compress)
                for some, result in results:
                    self.write(some, batch, result, rounds)
                    del result  # before the next one is computed
                failed: dict[int, list[SequenceLayer]] = {}
                for one in part:
                    if one.request in batch.failed:
                        failed.setdefault(batch.compactions[one.request].plan.new_front, []).append(one)
                for front, some in failed.items():
                    self.write(some, batch, _newest(self.gather(some, batch), front).finite(self.dtype), rounds)
                work.done = before + share
                yield

    def _compress_heads(
        self, seq_layer: SequenceLayer, batch: Batch, statistics: Tensor | None, share: float
    ) -> Generator[None, None, list[tuple[list[SequenceLayer], CompressionResult]]]:
        """What ``_contained`` gives for one sequence layer, ``batch.num_rows`` heads at a time. share: of the work, by
        head."""
        if seq_layer.request in batch.failed:
            return []
        try:
            entries, context = self.gather([seq_layer], batch), self.context([seq_layer], batch, statistics)
            pieces = in_pieces(lambda: batch.policy.compress(entries, context, batch.num_rows))
            before, num_rows = batch.work.done, 0
            while True:
                with time_limit(batch.time_left()):
                    try:
                        num_rows += next(pieces)
                    except StopIteration as end:
                        result = end.value.finite(self.dtype)
                        break
                batch.work.done = before + share * num_rows
                yield
            batch.work.done = before + share * (self.num_kv_heads + 2 / 3)
            yield
            return [([seq_layer], result)]
        except (Exception, OutOfTime, OutOfMemory) as error:
            batch.failed[seq_layer.request] = as_part_error(error)
            return []

    def _shares(self, batch: Batch, statistics: Tensor | None) -> Generator[None, None, list[list[int]]]:
        """``Batch.shares`` by the policy's budgets; equal ones where it failed.

        A plan that does not settle them takes what the last compaction found, or, where nothing is known, what heads
        hold: it waits for no GPU.
        """
        plan, policy = batch.plan, batch.policy
        num_layers, num_heads = len(self.layers), self.num_kv_heads
        of_layers = None
        try:
            of_layers = policy.layer_budgets(plan.budget, batch.num_entries, num_layers)
        except PartError as error:
            batch.failed.update(dict.fromkeys(range(len(batch.compactions)), error))
        if of_layers is not None:
            budgets = [[one for one in of_layers for _ in range(num_heads)]] * len(batch.compactions)
        else:
            found = yield from (
                self._pooled_budgets(batch) if policy.allocator.pools_layers else self._head_budgets(batch, statistics)
            )
            if not policy.allocator.has_layer_statistic:
                arriving = Arriving.of(found)
                batch.found.extend(arriving[index] for index in range(len(found)))
            budgets = [self._usable_budgets(index, found, batch) for index in range(len(batch.compactions))]

        room = plan.share_blocks, self.block_size, policy.min_budget, plan.new_front
        return [
            compaction.filled(fitted_budgets(policy.allocator, one, num_heads, *room))
            for compaction, one in zip(batch.compactions, budgets, strict=True)
        ]

    def _analyzed(self, part: list[SequenceLayer], batch: Batch) -> Iterator[None]:
        """Counts a part of a pass over all layers before they are compressed."""
        batch.work.done += ANALYSIS * len(part) / (len(batch.compactions) * len(self.layers))
        yield

    def _usable_budgets(self, index: int, found: Tensor, batch: Batch) -> list[int]:
        """Budgets of a request's heads, layer by layer. found: what its policy has just found."""
        compaction, plan = batch.compactions[index], batch.plan
        if index in batch.failed:
            return [plan.budget] * found.shape[1]
        if batch.settles_shares or (batch.policy.allocator.has_layer_statistic and compaction.found is not None):
            numbers = found[index].tolist()
        elif compaction.found is not None:
            numbers = compaction.found.take()
        elif compaction.pages is not None:
            return [int(front) for front in compaction.pages.fronts.flatten().tolist()]
        else:
            return [plan.budget] * found.shape[1]
        return batch.policy.whole_budgets(numbers, plan.new_front)

    def _unknown_budgets(self, batch: Batch, device: torch.device) -> Tensor:
        """``[plans, heads of all layers]`` int64, to be filled with ``found_budgets``."""
        shape = len(batch.compactions), len(self.layers) * self.num_kv_heads
        return torch.full(shape, batch.plan.budget - batch.policy.num_protected, dtype=torch.int64, device=device)

    def _head_budgets(self, batch: Batch, statistics: Tensor | None) -> Generator[None, None, Tensor]:
        """The policy's ``found_budgets`` of all requests, ``[plans, heads of all layers]``."""
        policy, num_heads = batch.policy, self.num_kv_heads

        def of_heads(seq_layers: list[SequenceLayer]) -> list[int] | Tensor:
            entries = self.gather(seq_layers, batch)
            with time_limit(batch.time_left()):
                return policy.found_budgets(entries, self.context(seq_layers, batch, statistics))

        budgets = None
        for part in self._parts(batch):
            for some, found in _contained(part, batch.failed, of_heads):
                given = found if isinstance(found, Tensor) else torch.tensor(found, device="cpu")
                if budgets is None:
                    budgets = self._unknown_budgets(batch, given.device)
                for row, (request, layer) in enumerate(some):
                    heads = slice(layer * num_heads, (layer + 1) * num_heads)
                    budgets[request, heads] = given[row * num_heads : (row + 1) * num_heads]
            yield from self._analyzed(part, batch)
        return self._unknown_budgets(batch, torch.device("cpu")) if budgets is None else budgets

    def _pooled_budgets(self, batch: Batch) -> Generator[None, None, Tensor]:
        """The same of a policy that compares the heads of all layers."""
        policy, num_heads = batch.policy, self.num_kv_heads
        shape = len(batch.compactions), len(self.layers) * num_heads, batch.num_entries
        masses = torch.empty(shape, device=self.device)

        def mass_of(seq_layers: list[SequenceLayer]) -> Tensor:
            entries = self.gather(seq_layers, batch)
            with time_limit(batch.time_left()):
                return policy.pooled_mass(entries, self.context(seq_layers, batch, None))

        def split(seq_layers: list[SequenceLayer]) -> list[int] | Tensor:
            with time_limit(batch.time_left()):
                context = self.context(seq_layers, batch, None)
                return policy.pooled_budgets(masses[seq_layers[0].request], context)

        for part in self._parts(batch):
            for some, found in _contained(part, batch.failed, mass_of):
                for row, (request, layer) in enumerate(some):
                    heads = slice(layer * num_heads, (layer + 1) * num_heads)
                    masses[request, heads] = found[row * num_heads : (row + 1) * num_heads]
            yield from self._analyzed(part, batch)
        budgets = None
        for request in range(len(batch.compactions)):
            layers = [SequenceLayer(request, layer) for layer in range(len(self.layers))]
            for _, found in _contained(layers, batch.failed, split):
                given = found if isinstance(found, Tensor) else torch.tensor(found, device="cpu")
                if budgets is None:
                    budgets = self._unknown_budgets(batch, given.device)
                budgets[request] = given
        return self._unknown_budgets(batch, torch.device("cpu")) if budgets is None else budgets

    def _fronts(self, batch: Batch) -> list[FrontReport]:
        """What the shares of each request come to: as many blocks as the tensor-parallel worker takes that needs most,
        and the mean of all workers' entries."""
        num_lanes = len(self.layers) * self.num_kv_heads
        pages = [sum(-(-share // self.block_size) for share in shares) for shares in batch.shares]
        needed = [(-(-count // num_lanes), sum(shares)) for count, shares in zip(pages, batch.shares, strict=True)]
        by_head = torch.tensor([needed], device="cpu")
        if not self.is_alone:
            by_head = self.all_heads(self.sent(needed).repeat(self.num_kv_heads, 1, 1))
        blocks, entries = by_head[..., 0].amax(0).tolist(), by_head[..., 1].double().mean(0).tolist()
        numbers = zip(batch.compactions, blocks, entries, strict=True)
        return [FrontReport(one.plan.seq_len, count, math.ceil(total / num_lanes)) for one, count, total in numbers]

    def _deals(self, batch: Batch) -> list[Deal]:
        """New pages for the heads of each request."""
        allocator = batch.policy.allocator
        within_layers = allocator.splits_heads and allocator.fills_budget and not allocator.pools_layers
        blocks = [one.plan.blocks for one in batch.compactions]
        if batch.fronts:
            blocks = [some[: front.num_blocks] for some, front in zip(blocks, batch.fronts, strict=True)]
        return [
            Deal.of(self.layers, shares, one.plan.new_front, some, one.pages, within_layers)
            for one, shares, some in zip(batch.compactions, batch.shares, blocks, strict=True)
        ]

    def _layer_statistics(self, batch: Batch) -> Generator[None, None, Tensor]:
        """The allocator's statistics, ``[plans, layers]`` float32; zeros where it failed."""

        def statistic(seq_layers: list[SequenceLayer]) -> Tensor:
            entries = self.gather(seq_layers, batch)
            with time_limit(batch.time_left()):
                return batch.policy.layer_statistic(entries, self.context(seq_layers, batch, None))

        statistics = torch.zeros(len(batch.compactions), len(self.layers), device=self.device)
        for part in self._parts(batch):
            for some, values in _contained(part, batch.failed, statistic):
                places = self.sent(some)
                statistics[places[:, 0], places[:, 1]] = values.float()
            yield from self._analyzed(part, batch)
        return statistics

    def _parts(self, batch: Batch) -> Iterator[list[SequenceLayer]]:
        """The layers of all requests, in parts that fit in memory; one at a time for policies that need output
        projections, which are large, for layers that are copied to a GPU, and where heads go one after the other."""
        num_requests, num_layers = len(batch.compactions), len(self.layers)
        seq_layers = [SequenceLayer(i, layer) for i in range(num_requests) for layer in range(num_layers)]
        if batch.deals:  # layers that take pages of others go last
            seq_layers.sort(key=lambda one: bool(batch.deals[one.request].grows[one.layer].all()))
        is_copied = batch.complete is not None and self.device.type != "cpu"
        is_together = not batch.num_rows and not batch.policy.needs_output_weights and not is_copied
        size = max(1, self.max_bytes // (self.num_kv_heads * batch.held)) if is_together else 1
        for start in range(0, len(seq_layers), size):
            yield seq_layers[start : start + size]

    def num_found(self, numbers: Tensor) -> int:
        """Length of an ``Execution.found`` like ``numbers``: statistics of layers, or whole numbers of heads."""
        return len(self.layers) * (1 if numbers.is_floating_point() else self.num_kv_heads)


R = TypeVar("R")


def _may_exchange(compaction: Compaction) -> bool:
    """True if tensor-parallel workers may wait for each other while they compress. Another package's trackers and
    allocators need not say that they make them."""
    plan, policy = compaction.plan, compaction.policy
    compares = policy.selector.pools_heads or policy.allocator.splits_heads or policy.allocator.has_layer_statistic
    return compares or bool(plan.share_blocks) or is_foreign(policy.tracker) or is_foreign(policy.allocator)


def _contained(
    seq_layers: list[SequenceLayer], failed: dict[int, PartError], run: Callable[[list[SequenceLayer]], R]
) -> Iterator[tuple[list[SequenceLayer], R]]:
    """Calls ``run``, which has no side effects, on the sequence layers of the requests that have not failed.

    If it raises, each request is retried alone, and those that raise again have failed. After a timeout all have
    failed: retrying each would keep everybody waiting.
    """
    sound = [one for one in seq_layers if one.request not in failed]
    if not sound:
        return
    requests = [list(some) for _, some in groupby(sound, key=lambda one: one.request)]
    try:
        result = run(sound)
    except (Exception, OutOfTime, OutOfMemory) as error:
        fault = as_part_error(error)
        if len(requests) == 1 or isinstance(fault, PartTimeout):
            failed.update(dict.fromkeys((some[0].request for some in requests), fault))
            return
    else:
        yield sound, result
        return
    for some in requests:
        yield from _contained(some, failed, run)


def _newest(entries: PagedEntries, capacity: int) -> CompressionResult:
    """The newest entries, unchanged, for a request whose policy failed."""
    if capacity >= len(entries):
        return CompressionResult.of(entries, CacheUpdate.unchanged(entries))
    kept = in_place(largest(entries.positions, capacity), capacity)
    return CompressionResult.of(entries, CacheUpdate.of(entries, kept))
