"""Execution of compression plans: each request's policy decides what changes, the compactor writes it to the cache."""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.messages import Compress, FrontReport
from vllm_kvmerge.engine.worker.arriving import Arriving
from vllm_kvmerge.engine.worker.cache_positions import moves
from vllm_kvmerge.engine.worker.external import ExternalCache
from vllm_kvmerge.engine.worker.head_pages import Deal
from vllm_kvmerge.engine.worker.paged_entries import PagedEntries
from vllm_kvmerge.engine.worker.timing import Timing, moment
from vllm_kvmerge.ops import (
    PLAIN_SOFTMAX,
    ROW_PLANES,
    HeadPages,
    PagedKVCache,
    Rows,
    ScoreUpdate,
    SequenceLayers,
    Softmax,
)
from vllm_kvmerge.ops.types import Destination, sent
from vllm_kvmerge.policies import CacheUpdate, CompressionContext, CompressionPolicy, CompressionResult, Heads, Queries
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
from vllm_kvmerge.policies.rescoring import newest_scores
from vllm_kvmerge.policies.rotation import Rotation
from vllm_kvmerge.policies.shares import fitted_budgets

MOVED_NUMBERS = 6
"""Numbers held for each number of keys that are turned to other positions where that is not done in place."""

FEWEST, MOST = 4, 5
"""Columns of ``Execution.counts`` that are not sums."""

NO_COUNT = 1 << 40
"""More entries than any head has: the fewest of none."""

EXCESS = 2
"""Times the workspace, or what is assumed of the heads that go together, that another package's part may hold."""

ANALYSIS = 0.25
"""Work of reading all layers once before they are compressed (budgets, statistics), as a share of compressing them."""


@dataclass(frozen=True)
class Rescoring:
    """Statistics made anew by the newest ``window`` queries."""

    update: ScoreUpdate
    window: int


@dataclass(frozen=True)
class Compaction:
    """A compression, with the state of its request before it.

    front, tail: its segments. source_blocks: ids of its blocks. prompt_scores: statistics of its tokens, for a first
    compression by a policy that scores the prompt, or a refresh. ring: its newest queries, if its policy reads them, or
    they score its entries anew (rescoring). complete: the complete cache that a refresh starts from. pages: of the
    request's heads, one row per layer, if its front is not an ordinary one. found: ``Execution.found`` of its last
    compaction, if that is known. moves_keys: RoPE counts entries of the cache, so that keys are turned as these move
    up. has_pages: heads get pages of their own in the plan's blocks, and places that a head has no room for are empty.
    settles_shares: budgets of heads that follow data are found and used by this compaction, which waits for a GPU;
    otherwise it uses what the last one found, and finds them for the next.
    """

    plan: Compress
    policy: CompressionPolicy
    source_blocks: Tensor
    prompt_scores: PromptScores | None = None
    ring: QueryRing | None = None
    complete: ExternalCache | None = None
    pages: HeadPages | None = None
    found: Arriving | None = None
    rescoring: Rescoring | None = None
    moves_keys: bool = False
    front: int = 0
    tail: int = 0
    has_pages: bool = False
    settles_shares: bool = True

    @property
    def may_shrink(self) -> bool:
        """True if what heads hold depends on data: the plan has the most blocks that they can need."""
        return self.has_pages and not self.policy.allocator.fills_budget

    @property
    def segments(self) -> tuple[int, int, int]:
        """Front, tail and end of the entries that it starts from."""
        is_new = self.complete is not None
        return 0 if is_new else self.front, 0 if is_new else self.tail, self.plan.num_tokens

    @property
    def num_entries(self) -> int:
        """Live entries per head before the plan."""
        front, tail, end = self.segments
        return front + end - tail

    @property
    def is_of_tokens(self) -> bool:
        """True if the entries are the tokens themselves, which no compression has changed."""
        return self.segments[0] == 0

    @property
    def num_queries(self) -> int:
        """Number of the newest queries in ``ring`` that are read."""
        if self.ring is None:
            return 0
        window = max(self.policy.query_window, 0 if self.rescoring is None else self.rescoring.window)
        return len(self.ring.positions(self.plan.seq_len, window))

    def filled(self, shares: list[int]) -> list[int]:
        """The shares of the heads, layer by layer, without places that there is no entry for. shares: entries that each
        head may keep."""
        if self.pages is None or self.complete is not None:  # all have equally many
            return shares
        _, tail, end = self.segments
        return [
            min(share, front + end - tail)
            for share, front in zip(shares, self.pages.fronts.flatten().tolist(), strict=True)
        ]


class _SequenceLayer(NamedTuple):
    """One layer of one request; ``request`` is its index in the batch."""

    request: int
    layer: int


class _Numbers(NamedTuple):
    """Those of sequence layers, int64 on the CPU. requests, layers: ``[U]``, of each. by_head: ``[H]``, requests of
    their heads."""

    requests: Tensor
    layers: Tensor
    by_head: Tensor


@lru_cache(maxsize=32)
def _numbers_of(seq_layers: tuple[_SequenceLayer, ...], num_kv_heads: int) -> _Numbers:
    """Remembered, because a step's batch is often like one before it."""
    requests, layers = torch.tensor(seq_layers, device="cpu").unbind(1)
    return _Numbers(requests, layers.contiguous(), requests.repeat_interleave(num_kv_heads))


@dataclass
class _Work:
    """How far a batch has come. total: passes over all layers, as shares of compressing them. is_writing: entries are
    being compressed, no longer looked at. seconds: spent on it, up to ``since`` if that is known."""

    total: float = 1.0
    done: float = 0.0
    is_writing: bool = False
    seconds: float = 0.0
    since: float | None = None

    @property
    def elapsed(self) -> float:
        return self.seconds if self.since is None else self.seconds + time.monotonic() - self.since

    def resume(self) -> None:
        self.since = time.monotonic()

    def pause(self) -> None:
        self.seconds, self.since = self.elapsed, None


@dataclass(frozen=True)
class _Batch:
    """Plans of one shape that go through their policy together.

    plan: the first, for what they have in common. num_entries: of each head. held: bytes of working memory for one KV
    head of one layer, about. time_left: seconds that the policy may still take; None: no limit. work: how far it has
    come. counts: ``Execution.counts``. num_rows: heads that are compressed at once, of one layer; 0: as many layers as
    memory allows. failed: errors of requests, by index. shares: of each request by index, entries of each head, layer
    by layer, where they are rounded to pages. fronts: what they come to, if that depends on data. deals: new pages of
    requests, by index, where heads get some of their own. found: ``Execution.found``, by index. gathered: the entries
    that were read last, by their sequence layers.
    """

    compactions: list[Compaction]
    plan: Compress
    num_entries: int
    held: int
    time_left: Callable[[], float | None]
    work: _Work
    counts: Tensor
    num_rows: int = 0
    failed: dict[int, PartError] = field(default_factory=dict)
    shares: list[list[int]] = field(default_factory=list)
    fronts: list[FrontReport] = field(default_factory=list)
    deals: list[Deal] = field(default_factory=list)
    found: list[Arriving] = field(default_factory=list)
    gathered: "dict[tuple[_SequenceLayer, ...], PagedEntries]" = field(default_factory=dict)

    @property
    def policy(self) -> CompressionPolicy:
        return self.compactions[0].policy

    @property
    def is_of_tokens(self) -> bool:
        return self.compactions[0].is_of_tokens

    @property
    def moves_keys(self) -> bool:
        return self.compactions[0].moves_keys

    @property
    def settles_shares(self) -> bool:
        return self.compactions[0].settles_shares

    @property
    def complete(self) -> ExternalCache | None:
        return self.compactions[0].complete


@dataclass(frozen=True)
class Execution:
    """Results of a step's plans.

    counts: ``[plans, 6]`` int64 on the cache's device, over layers and heads: entries merged, entries evicted,
    entries left unchanged because the merged ones were not finite, entries kept, and the fewest and the most of these
    in one head. failures: errors of policies, by index of the plan.
    The newest entries of such requests were kept, so they must not go on generating. pages: of the new fronts, by index
    of the plan, where heads have some of their own. fronts: what they hold, where that depends on data. found: for the
    requests' next compactions, by index, where budgets of heads depend on data: the allocator's statistic of each
    layer, if it has one, or else its budget of each head, layer by layer. timings: of the batches.
    """

    counts: Tensor
    failures: dict[int, PartError]
    pages: dict[int, HeadPages]
    fronts: dict[int, FrontReport]
    found: dict[int, Arriving]
    timings: list[Timing]


class Course:
    """A batch under way, which can be left to wait after every part of it."""

    def __init__(self, batch: _Batch, parts: Iterator[None]) -> None:
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
class Compactor:
    """Compresses requests' caches.

    Requests whose plans have the same shape go through their policy together, with all their layers. The result of one
    depends neither on the others in the batch nor on the order of plans: a step's plans write only to blocks that are
    their own or were free, so no plan writes what another reads.

    layers: each layer's KV cache. scale: of the attention logits. head_indices: index of each of this worker's KV heads
    among the model's. all_heads: gathers ``[num_kv_heads, ...]`` from all tensor-parallel workers. output_weights:
    returns a layer's output projection, ``[num_kv_heads, G, hidden, d]`` in the model's dtype and the same tensor in
    each call, or None if it is unknown. softmax: returns that of a layer, whose cap all layers share. rotation: the
    model's rotary position embedding, if it is known. group_size: query heads per KV head (G). hidden_size: of the
    model. max_bytes: working memory of a policy for a batch; larger batches are split, down to one KV head of one
    layer. max_seconds: time that another package's parts may take for a batch; None: no limit. is_alone: no other
    worker compresses the same requests. exceeded: how often parts have taken too much time or memory, by label.
    """

    layers: Sequence[PagedKVCache]
    scale: float
    head_indices: list[int]
    all_heads: Callable[[Tensor], Tensor] = field(default=lambda tensor: tensor)
    output_weights: Callable[[int], Tensor | None] = field(default=lambda layer: None)
    softmax: Callable[[int], Softmax] = field(default=lambda layer: PLAIN_SOFTMAX)
    rotation: Rotation | None = None
    group_size: int = 1
    hidden_size: int = 0
    max_bytes: int = 64 << 20
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

    def _batch(self, compactions: list[Compaction], num_rows: int) -> _Batch:
        """num_rows: 0: as many as memory allows."""
        first, work, max_seconds = compactions[0], _Work(), self.max_seconds
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
        counts = self._sent([[NO_COUNT if column == FEWEST else 0 for column in range(6)]] * len(compactions))
        batch = _Batch(compactions, plan, num_entries, held, time_left, work, counts, min(num_rows, self.num_kv_heads))
        return batch

    def _held(self, compaction: Compaction, plan: Compress, num_entries: int) -> int:
        """``_Batch.held``."""
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

    def _run_batch(self, batch: _Batch) -> Iterator[None]:
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

        def compress(seq_layers: list[_SequenceLayer]) -> CompressionResult:
            entries = self._gather(seq_layers, batch)
            context = self._context(seq_layers, batch, statistics)
            if batch.moves_keys:
                context.known_rotation()
            with time_limit(batch.time_left()):
                return batch.policy.compress(entries, context).finite(self.dtype)

        def write(seq_layers: list[_SequenceLayer], result: CompressionResult, rounds: tuple[bool, ...]) -> None:
            assert isinstance(result.source, PagedEntries)
            update = result.update
            by_head = torch.stack([update.merged, result.evicted, result.as_before, result.kept], 1)
            source, rows = result.source.seq_layers, Rows(update.changed, update.keys, update.values)
            index = sent(self._numbers(seq_layers).by_head, self.device)
            blocks = sent(self._new_blocks(seq_layers, batch), self.device)
            written: Iterable[tuple[Destination, Tensor | None]] = [(blocks, None)]
            if batch.deals:
                written = self._destinations(seq_layers, batch, rounds)
            for destination, heads in written:
                _count(batch.counts, index, by_head, heads)
                if batch.complete is None:
                    ops.merge_entries(source, destination, update.kept, update.metadata, rows)
                else:
                    self._restore(source, self._layers_of(seq_layers, blocks), destination, update, rows)
                if batch.moves_keys and self.rotation is not None:
                    places = update.positions.contiguous()
                    where = moves(result.source.positions, places, batch.plan.new_front)
                    layers = self._layers_of(seq_layers, blocks)
                    ops.turn_keys(layers, destination, *where, self.rotation.table, self.rotation.is_neox)

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
                    write(some, result, rounds)
                    del result  # before the next one is computed
                failed: dict[int, list[_SequenceLayer]] = {}
                for one in part:
                    if one.request in batch.failed:
                        failed.setdefault(batch.compactions[one.request].plan.new_front, []).append(one)
                for front, some in failed.items():
                    write(some, _newest(self._gather(some, batch), front).finite(self.dtype), rounds)
                work.done = before + share
                yield

    def _compress_heads(
        self, seq_layer: _SequenceLayer, batch: _Batch, statistics: Tensor | None, share: float
    ) -> Generator[None, None, list[tuple[list[_SequenceLayer], CompressionResult]]]:
        """What ``_contained`` gives for one sequence layer, ``batch.num_rows`` heads at a time. share: of the work, by
        head."""
        if seq_layer.request in batch.failed:
            return []
        try:
            entries, context = self._gather([seq_layer], batch), self._context([seq_layer], batch, statistics)
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

    def _shares(self, batch: _Batch, statistics: Tensor | None) -> Generator[None, None, list[list[int]]]:
        """``_Batch.shares`` by the policy's budgets; equal ones where it failed.

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

    def _analyzed(self, part: list[_SequenceLayer], batch: _Batch) -> Iterator[None]:
        """Counts a part of a pass over all layers before they are compressed."""
        batch.work.done += ANALYSIS * len(part) / (len(batch.compactions) * len(self.layers))
        yield

    def _usable_budgets(self, index: int, found: Tensor, batch: _Batch) -> list[int]:
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

    def _unknown_budgets(self, batch: _Batch, device: torch.device) -> Tensor:
        """``[plans, heads of all layers]`` int64, to be filled with ``found_budgets``."""
        shape = len(batch.compactions), len(self.layers) * self.num_kv_heads
        return torch.full(shape, batch.plan.budget - batch.policy.num_protected, dtype=torch.int64, device=device)

    def _head_budgets(self, batch: _Batch, statistics: Tensor | None) -> Generator[None, None, Tensor]:
        """The policy's ``found_budgets`` of all requests, ``[plans, heads of all layers]``."""
        policy, num_heads = batch.policy, self.num_kv_heads

        def of_heads(seq_layers: list[_SequenceLayer]) -> list[int] | Tensor:
            entries = self._gather(seq_layers, batch)
            with time_limit(batch.time_left()):
                return policy.found_budgets(entries, self._context(seq_layers, batch, statistics))

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

    def _pooled_budgets(self, batch: _Batch) -> Generator[None, None, Tensor]:
        """The same of a policy that compares the heads of all layers."""
        policy, num_heads = batch.policy, self.num_kv_heads
        shape = len(batch.compactions), len(self.layers) * num_heads, batch.num_entries
        masses = torch.empty(shape, device=self.device)

        def mass_of(seq_layers: list[_SequenceLayer]) -> Tensor:
            entries = self._gather(seq_layers, batch)
            with time_limit(batch.time_left()):
                return policy.pooled_mass(entries, self._context(seq_layers, batch, None))

        def split(seq_layers: list[_SequenceLayer]) -> list[int] | Tensor:
            with time_limit(batch.time_left()):
                context = self._context(seq_layers, batch, None)
                return policy.pooled_budgets(masses[seq_layers[0].request], context)

        for part in self._parts(batch):
            for some, found in _contained(part, batch.failed, mass_of):
                for row, (request, layer) in enumerate(some):
                    heads = slice(layer * num_heads, (layer + 1) * num_heads)
                    masses[request, heads] = found[row * num_heads : (row + 1) * num_heads]
            yield from self._analyzed(part, batch)
        budgets = None
        for request in range(len(batch.compactions)):
            layers = [_SequenceLayer(request, layer) for layer in range(len(self.layers))]
            for _, found in _contained(layers, batch.failed, split):
                given = found if isinstance(found, Tensor) else torch.tensor(found, device="cpu")
                if budgets is None:
                    budgets = self._unknown_budgets(batch, given.device)
                budgets[request] = given
        return self._unknown_budgets(batch, torch.device("cpu")) if budgets is None else budgets

    def _fronts(self, batch: _Batch) -> list[FrontReport]:
        """What the shares of each request come to: as many blocks as the tensor-parallel worker takes that needs most,
        and the mean of all workers' entries."""
        num_lanes = len(self.layers) * self.num_kv_heads
        pages = [sum(-(-share // self.block_size) for share in shares) for shares in batch.shares]
        needed = [(-(-count // num_lanes), sum(shares)) for count, shares in zip(pages, batch.shares, strict=True)]
        by_head = torch.tensor([needed], device="cpu")
        if not self.is_alone:
            by_head = self.all_heads(self._sent(needed).repeat(self.num_kv_heads, 1, 1))
        blocks, entries = by_head[..., 0].amax(0).tolist(), by_head[..., 1].double().mean(0).tolist()
        numbers = zip(batch.compactions, blocks, entries, strict=True)
        return [FrontReport(one.plan.seq_len, count, math.ceil(total / num_lanes)) for one, count, total in numbers]

    def _deals(self, batch: _Batch) -> list[Deal]:
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

    def _destinations(
        self, seq_layers: list[_SequenceLayer], batch: _Batch, rounds: tuple[bool, ...]
    ) -> Iterator[tuple[HeadPages, Tensor]]:
        """Where heads with pages of their own are written, and which (``[H]`` bool); rounds: of heads that take pages
        of others, and of those that do not, in the order that ``Deal`` asks for."""
        pages = self._head_pages([batch.deals[one.request].pages for one in seq_layers], seq_layers)
        grows = torch.stack([batch.deals[one.request].grows[one.layer] for one in seq_layers])
        for round_grows in rounds:
            heads = grows == round_grows
            if heads.any():
                yield pages.of_heads(heads), sent(heads.flatten(), self.device)

    def _head_pages(self, requests: list[HeadPages], seq_layers: list[_SequenceLayer]) -> HeadPages:
        """Those of sequence layers; ``requests``: those of each one's request."""
        layers = [one.layer for one in seq_layers]
        ids = torch.stack([pages.ids[layer] for pages, layer in zip(requests, layers, strict=True)])
        fronts = torch.stack([pages.fronts[layer] for pages, layer in zip(requests, layers, strict=True)])
        return HeadPages(self.layers, ids, fronts)

    def _restore(
        self, source: SequenceLayers, pool: SequenceLayers, destination: Destination, update: CacheUpdate, rows: Rows
    ) -> None:
        """Carries out a compaction whose entries lie in another cache; ``pool``: the layers its front will be in."""
        keys, values = (ops.gather_rows(source, plane, update.kept) for plane in ROW_PLANES)
        places = torch.arange(update.kept.shape[1], device=self.device).repeat(len(update.kept), 1)
        ops.write_rows(pool, destination, places, keys, values)
        ops.write_metadata(pool, destination, *update.metadata)
        if rows.keys is not None or rows.values is not None:
            ops.write_rows(pool, destination, rows.places, rows.keys, rows.values)

    def move_queries(self, ring: QueryRing, seq_len: int, before: int, after: int) -> None:
        """Turns a request's newest queries with the keys of its tail, as if these went on in front of it (see
        ``QueryRing.move``)."""
        if self.rotation is not None:
            ring.move(self.rotation, seq_len, before, after)

    def _layer_statistics(self, batch: _Batch) -> Generator[None, None, Tensor]:
        """The allocator's statistics, ``[plans, layers]`` float32; zeros where it failed."""

        def statistic(seq_layers: list[_SequenceLayer]) -> Tensor:
            entries = self._gather(seq_layers, batch)
            with time_limit(batch.time_left()):
                return batch.policy.layer_statistic(entries, self._context(seq_layers, batch, None))

        statistics = torch.zeros(len(batch.compactions), len(self.layers), device=self.device)
        for part in self._parts(batch):
            for some, values in _contained(part, batch.failed, statistic):
                places = self._sent(some)
                statistics[places[:, 0], places[:, 1]] = values.float()
            yield from self._analyzed(part, batch)
        return statistics

    def _parts(self, batch: _Batch) -> Iterator[list[_SequenceLayer]]:
        """The layers of all requests, in parts that fit in memory; one at a time for policies that need output
        projections, which are large, for layers that are copied to a GPU, and where heads go one after the other."""
        num_requests, num_layers = len(batch.compactions), len(self.layers)
        seq_layers = [_SequenceLayer(i, layer) for i in range(num_requests) for layer in range(num_layers)]
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

    @property
    def num_kv_heads(self) -> int:
        return len(self.head_indices)

    @property
    def block_size(self) -> int:
        return self.layers[0].block_size

    @property
    def dtype(self) -> torch.dtype:
        """In which what is written must be finite; in 8 bits everything is that is finite before."""
        cache = self.layers[0]
        return torch.float32 if cache.is_quantised else cache.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device

    def _sent(self, numbers: Sequence[object]) -> Tensor:
        return sent(torch.tensor(numbers), self.device)

    def _context(
        self, seq_layers: list[_SequenceLayer], batch: _Batch, statistics: Tensor | None
    ) -> CompressionContext:
        layers, capacity = [one.layer for one in seq_layers], batch.plan.new_front
        shares = self._shares_of(seq_layers, batch) if batch.shares else None
        if shares is not None and batch.deals:  # other places have no room
            capacity = max(shares)
        window, allocator = batch.policy.query_window, batch.policy.allocator
        budgets = None
        if not batch.settles_shares and allocator.reads_attention and not allocator.has_layer_statistic:
            budgets = [batch.plan.budget] * (len(layers) * self.num_kv_heads)
        return CompressionContext(
            budget=batch.plan.budget,
            capacity=capacity,
            num_tokens=max(one.plan.seq_len for one in batch.compactions),
            at_prompt_end=batch.is_of_tokens,
            heads=Heads.of(layers, self.head_indices, len(self.layers), self.all_heads),
            scale=self.scale,
            softmax=self._softmax(layers),
            queries=self._queries(seq_layers, batch, window) if batch.compactions[0].ring and window else None,
            output_weights=self.output_weights(layers[0]) if batch.policy.needs_output_weights else None,
            rotation=self.rotation,
            layer_statistics=None if statistics is None else statistics[[one.request for one in seq_layers]],
            shares=shares,
            budgets=budgets,
            end=batch.plan.num_tokens if batch.plan.is_refresh else None,
            most_bytes=EXCESS * max(self.max_bytes, len(layers) * self.num_kv_heads * batch.held),
        )

    def _softmax(self, layers: list[int]) -> Softmax:
        """That of the heads of all sequence layers; layers: of each."""
        first = self.softmax(layers[0])
        if first.sinks is None:
            return first
        return Softmax(first.cap, torch.cat([one.sinks for one in map(self.softmax, layers) if one.sinks is not None]))

    def _shares_of(self, seq_layers: list[_SequenceLayer], batch: _Batch) -> list[int]:
        size = self.num_kv_heads
        return [share for one in seq_layers for share in batch.shares[one.request][one.layer * size :][:size]]

    def _queries(self, seq_layers: list[_SequenceLayer], batch: _Batch, window: int) -> Queries:
        requests = {index: row for row, index in enumerate(dict.fromkeys(one.request for one in seq_layers))}
        rings, positions, places = [], [], []
        for index in requests:
            compaction = batch.compactions[index]
            assert compaction.ring is not None
            rings.append(compaction.ring.kept)
            positions.append(compaction.ring.positions(compaction.plan.seq_len, window))
            places.append(positions[-1] % compaction.ring.window)
        where = [_SequenceLayer(requests[one.request], one.layer) for one in seq_layers]
        vectors = ops.read_queries(torch.stack(places), rings, where, self.num_kv_heads)
        rows = sent(self._numbers(where).by_head, self.device)
        return Queries(vectors, torch.stack(positions).index_select(0, rows))

    def _gather(self, seq_layers: list[_SequenceLayer], batch: _Batch) -> PagedEntries:
        if (known := batch.gathered.get(tuple(seq_layers))) is not None:
            return known
        batch.gathered.clear()
        entries = batch.gathered[tuple(seq_layers)] = PagedEntries.gather(self._located(seq_layers, batch))
        if batch.is_of_tokens:
            # Before a request's first compression its KV blocks hold no valid statistics.
            entries.scores = self._prompt_scores(seq_layers, batch, "scores", entries.scores)
            entries.aux = self._prompt_scores(seq_layers, batch, "aux", entries.aux)
        if (rescoring := batch.compactions[0].rescoring) is not None:
            queries = self._queries(seq_layers, batch, rescoring.window)
            softmax = self._softmax([one.layer for one in seq_layers])
            entries.scores, entries.aux = newest_scores(entries, queries, rescoring.update, self.scale, softmax)
        return entries

    def _prompt_scores(
        self, seq_layers: list[_SequenceLayer], batch: _Batch, plane: Literal["scores", "aux"], like: Tensor
    ) -> Tensor:
        """One of the statistics of tokens, ``[H, n]``, in the shape of ``like``; zeros where there are none."""
        parts, is_known = [], False
        for index, some in groupby(seq_layers, key=lambda one: one.request):
            layers, compaction = [one.layer for one in some], batch.compactions[index]
            if (scores := compaction.prompt_scores) is None:
                parts.append(like.new_zeros(len(layers) * self.num_kv_heads, like.shape[1]))
                continue
            of_all, is_known = getattr(scores, plane), True
            first, last = layers[0], layers[-1]
            is_whole = layers == list(range(first, last + 1))
            of_some = of_all[first : last + 1] if is_whole else of_all[layers]
            parts.append(of_some[..., : compaction.num_entries].flatten(0, 1))
        if not is_known:
            return torch.zeros_like(like)
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _located(self, seq_layers: list[_SequenceLayer], batch: _Batch) -> SequenceLayers:
        if batch.complete is not None:
            caches = batch.complete.on(self.device, [one.layer for one in seq_layers])
            blocks = sent(batch.complete.blocks.repeat(len(seq_layers), 1), self.device)
            segments = torch.tensor([batch.compactions[0].segments] * len(seq_layers))
            return SequenceLayers(caches, torch.arange(len(seq_layers)), blocks, segments)
        requests = self._numbers(seq_layers).requests
        padded = _padded([one.source_blocks for one in batch.compactions])
        segments = torch.tensor([one.segments for one in batch.compactions]).index_select(0, requests)
        blocks = sent(padded, self.device).index_select(0, sent(requests, self.device))
        located = self._layers_of(seq_layers, blocks, segments)
        of_requests = [some for one in seq_layers if (some := batch.compactions[one.request].pages) is not None]
        return replace(located, pages=self._head_pages(of_requests, seq_layers)) if of_requests else located

    def _new_blocks(self, seq_layers: list[_SequenceLayer], batch: _Batch) -> Tensor:
        """``[U, blocks]`` on the CPU, those that plans write to."""
        return torch.tensor([one.plan.blocks for one in batch.compactions]).index_select(
            0, self._numbers(seq_layers).requests
        )

    def _layers_of(
        self, seq_layers: list[_SequenceLayer], blocks: Tensor, segments: Tensor | None = None
    ) -> SequenceLayers:
        """The sequence layers in the pool. segments: of their live entries; None: none, they are only written to."""
        if segments is None:
            segments = torch.zeros(len(seq_layers), 3, dtype=torch.int64)
        return SequenceLayers(self.layers, self._numbers(seq_layers).layers, blocks, segments)

    def _numbers(self, seq_layers: list[_SequenceLayer]) -> _Numbers:
        return _numbers_of(tuple(seq_layers), self.num_kv_heads)


R = TypeVar("R")


def _padded(tables: list[Tensor]) -> Tensor:
    """``[plans, blocks]``: block tables ``[blocks]``; the last number of the shorter ones is repeated."""
    lengths = torch.tensor([len(table) for table in tables], device="cpu").unsqueeze(1)
    longest = int(lengths.max())
    if longest == int(lengths.min()):
        return torch.stack(tables)
    # On a GPU equally many launches for any number of tables.
    places = lengths.cumsum(0) - lengths + torch.arange(longest, device="cpu").minimum(lengths - 1)
    return torch.cat(tables).index_select(0, sent(places.flatten(), tables[0].device)).view(-1, longest)


def _count(counts: Tensor, index: Tensor, by_head: Tensor, heads: Tensor | None) -> None:
    """Adds what heads came to. counts: ``Execution.counts``. index: ``[H]`` plans. by_head: ``[H, 4]``. heads: ``[H]``
    bool, those that count; None: all."""
    fewest = most = by_head[:, -1]
    if heads is not None:
        by_head, fewest, most = by_head * heads.unsqueeze(1), fewest.where(heads, NO_COUNT), most.where(heads, 0)
    counts[:, :FEWEST].index_add_(0, index, by_head)
    counts[:, FEWEST].scatter_reduce_(0, index, fewest, "amin")
    counts[:, MOST].scatter_reduce_(0, index, most, "amax")


def _may_exchange(compaction: Compaction) -> bool:
    """True if tensor-parallel workers may wait for each other while they compress. Another package's trackers and
    allocators need not say that they make them."""
    plan, policy = compaction.plan, compaction.policy
    compares = policy.selector.pools_heads or policy.allocator.splits_heads or policy.allocator.has_layer_statistic
    return compares or bool(plan.share_blocks) or is_foreign(policy.tracker) or is_foreign(policy.allocator)


def _contained(
    seq_layers: list[_SequenceLayer], failed: dict[int, PartError], run: Callable[[list[_SequenceLayer]], R]
) -> Iterator[tuple[list[_SequenceLayer], R]]:
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
