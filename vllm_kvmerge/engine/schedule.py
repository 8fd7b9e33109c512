"""Schedule of a request's compressions: when each one is due, the queries that it needs, and the resulting size.

Decisions depend on counts alone, never on data, so that they hold for every tensor-parallel worker and under
asynchronous scheduling. Where a front's size depends on data, it is counted at its most; what workers report is used to
return blocks, and to repeat a compression, but never to decide when. This module does not depend on vLLM.
"""

from dataclasses import dataclass
from typing import Literal

from vllm_kvmerge.engine.messages import FrontReport
from vllm_kvmerge.ops.coded import Coding, slots_of
from vllm_kvmerge.request.limits import Limits
from vllm_kvmerge.request.spec import CompressionSpec


def cdiv(number: int, unit: int) -> int:
    return -(-number // unit)


@dataclass(frozen=True)
class Segments:
    """A sequence's slots in use: compressed entries in ``[0, front)``, ordinary tokens from ``tail`` on.

    changed_at: tokens computed when the front was made. uneven_places: entries of each KV head that a compression reads
    in the front, dead ones included, where heads hold different numbers of them, ``front`` on average; 0: all hold
    ``front``.
    """

    front: int = 0
    tail: int = 0
    changed_at: int = 0
    uneven_places: int = 0

    @property
    def are_compressed(self) -> bool:
        return self.tail > 0

    @property
    def num_places(self) -> int:
        """Entries of each KV head that a compression reads in the front."""
        return self.uneven_places or self.front

    def num_entries(self, num_tokens: int) -> int:
        """Live entries per KV head of a sequence of ``num_tokens``."""
        return self.front + num_tokens - self.tail


UNCOMPRESSED = Segments()


@dataclass(frozen=True)
class FrontSize:
    """Size of a front that is to be made. entries: per KV head, on average. places: of each head, including those that
    stay empty. share_blocks: blocks whose pages heads with different budgets share; 0: there are none such.
    has_pages: heads hold their entries in these pages; otherwise each in as many places as any of them needs.
    may_shrink: what they hold depends on data: ``entries`` and blocks are the most."""

    entries: int
    places: int
    num_blocks: int
    share_blocks: int = 0
    has_pages: bool = False
    may_shrink: bool = False

    @classmethod
    def even(cls, entries: int, size: int) -> "FrontSize":
        """That of a front whose heads have equally many places, each ``size`` in every block."""
        return cls(entries, entries, -(-entries // size))


@dataclass(frozen=True)
class RequestCompression:
    """The compression of one request.

    context: tokens of its prompt that are compressed before the rest is computed, usually all of them. chunk:
    entries beyond the budget at which the context is compressed while it is being computed; None: it is not.
    budget: live entries per KV head, on average. capacity: entries per KV head that its front may hold; None: all.
    interval: live entries beyond those that trigger a compression. window, query_window: of the newest queries, how
    many its first compression scores (0: none), and how many are kept. ring_bytes, score_bytes: memory outside the
    pool for the newest queries and, up to the first compression, for the context's scores. total: tokens that the
    request can come to. external_bytes: memory outside the pool for the complete cache of so many; 0: none is kept.
    num_layers: of the model. block_size: in tokens. front_size: entries of a head in a block of the front, which are
    stored as ``coding`` says.
    is_uneven: heads have different budgets. has_pages: and pages of their own for what they hold. may_shrink: and
    what they hold depends on data.

    The policy's parts are queried once, in ``of``, so that none of them can raise during a step.
    """

    config: CompressionSpec
    num_prompt_tokens: int
    context: int
    chunk: int | None
    budget: int
    capacity: int | None
    interval: int
    window: int | Literal["all"]
    query_window: int
    ring_bytes: int
    score_bytes: int
    total: int
    external_bytes: int
    num_layers: int
    block_size: int
    front_size: int
    coding: Coding | None
    is_uneven: bool
    has_pages: bool
    may_shrink: bool

    @classmethod
    def of(
        cls, config: CompressionSpec, num_prompt_tokens: int, max_tokens: int, limits: Limits
    ) -> "RequestCompression":
        context = config.resolve_context(num_prompt_tokens)
        max_tokens = limits.possible_tokens(num_prompt_tokens, max_tokens)
        total = num_prompt_tokens + max_tokens
        query_window = min(config.query_window, total)
        budget, capacity = config.resolve_budget(context), config.resolve_capacity(context)
        fills_budget = config.policy.allocator.fills_budget
        chunk = None if config.prefill is None else config.prefill.chunk
        coding = config.coding(context, limits.block_size)
        window = 0 if coding and context <= budget else config.prompt_window  # nothing is ranked
        num_scored = context if chunk is None else min(context, budget + chunk)
        is_uneven = capacity != budget or not fills_budget
        scores_prompt = (window or config.policy.tracker.repeats_context) and not config.awaits_pressure
        return cls(
            config=config,
            num_prompt_tokens=num_prompt_tokens,
            context=context,
            chunk=chunk,
            budget=budget,
            capacity=capacity,
            interval=config.resolve_interval(budget, limits.block_size),
            window=window,
            query_window=query_window,
            ring_bytes=limits.ring_bytes(query_window, total),
            score_bytes=limits.prompt_score_bytes(num_scored) if scores_prompt else 0,
            total=total,
            external_bytes=limits.external_bytes(total) if config.is_refreshed(num_prompt_tokens) else 0,
            num_layers=limits.shape.num_layers,
            block_size=limits.block_size,
            front_size=limits.block_size * slots_of(coding),
            coding=coding,
            is_uneven=is_uneven,
            has_pages=is_uneven and limits.head_pages,
            may_shrink=is_uneven and limits.head_pages and not fills_budget,
        )

    @property
    def shares_context(self) -> bool:
        """True if its compressed context may serve other requests: nothing else is needed to go on from there."""
        is_compressed = self.context > self.budget or self.coding is not None
        return is_compressed and self.config.refresh is None and not self.config.awaits_pressure

    def shared_bytes(self, num_tokens: int) -> int:
        """Memory outside the pool that workers keep for its first tokens, compressed, while others may need them."""
        return self.ring_bytes if self.config.decode == "bounded" or num_tokens < self.context else 0

    @property
    def repeats_context(self) -> bool:
        """True if the context is repeated by internal requests before it is compressed."""
        return self.config.policy.tracker.repeats_context and self.context > self.budget

    @property
    def takes_drafts(self) -> bool:
        """True if drafts of the request's tokens may be verified.

        Not while it waits for pressure, since it may be compressed after any step, for which its tokens must be known.
        And not if its turn is kept with scores: verified tokens behind a stop are dropped, but have been counted.
        """
        keeps_scores = self.config.reuse == "turns" and self.config.tracks_decode
        return not self.config.awaits_pressure and not keeps_scores

    def is_in_context(self, segments: Segments) -> bool:
        """True if the next compression is one of the context, or of a part of it."""
        if self.config.awaits_pressure:
            return False
        # Attention writes scores into the blocks it reads, so a request whose policy tracks them moves to blocks of its
        # own at the end of the context, even if it is within its budget.
        if self.context <= self.budget and not (self.config.tracks_decode or self.coding):
            return False
        return not segments.are_compressed if self.chunk is None else segments.tail < self.context

    def parts_of_context(self) -> list[int]:
        """Numbers of computed tokens at which the context is compressed before its end. Raises PartError."""
        counts, segments = list[int](), UNCOMPRESSED
        while self.chunk is not None and self.is_in_context(segments):
            count = self.next_compression(segments)
            if count is None or count >= self.context:
                break
            counts.append(count)
            _, segments = self.compressed(segments, count)
        return counts

    def compressed(self, segments: Segments, num_tokens: int) -> tuple[FrontSize, Segments]:
        """What a compression at ``num_tokens`` leaves, as far as counts tell. Raises PartError."""
        front = self.new_front(segments, num_tokens)
        places = front.places if front.share_blocks else 0
        return front, Segments(front.entries, self.covered(segments, num_tokens), num_tokens, places)

    def next_compression(self, segments: Segments) -> int | None:
        """Number of computed tokens at which a cache of these segments is compressed next; None: never."""
        if self.is_in_context(segments):
            if self.chunk is None:
                return self.context
            return min(self.context, self._count_at(segments, self.budget + self.chunk))
        counts = self._next_over_budget(segments), self._next_refresh(segments)
        return min((count for count in counts if count is not None), default=None)

    def _next_over_budget(self, segments: Segments) -> int | None:
        """Number of computed tokens at which the cache exceeds the budget by the interval; None: never."""
        if self.config.decode != "bounded" or self.config.awaits_pressure:
            return None
        # What follows the context stays whole until the prompt has been computed.
        return max(self._count_at(segments, self.budget + self.interval), self.num_prompt_tokens)

    def _count_at(self, segments: Segments, num_entries: int) -> int:
        """Number of computed tokens at which the cache comes to so many entries, more than the budget."""
        front = segments.front
        if segments.are_compressed:
            # If some layers keep everything, the others decide.
            front = self.budget if self.may_shrink else min(front, self.budget)
        return num_entries + segments.tail - front

    def _next_refresh(self, segments: Segments) -> int | None:
        """Number of computed tokens at which the front is made anew from the complete cache; None: never."""
        if self.config.refresh is None or not segments.are_compressed:
            return None
        every = self.config.refresh.every
        num_refreshes = (segments.changed_at - self.context) // every + 1
        return max(self.context + num_refreshes * every, self.num_prompt_tokens)

    def may_relieve(self, segments: Segments, num_tokens: int) -> bool:
        """True if a request that waits for pressure may be compressed at ``num_tokens``: its prompt has been computed,
        and it exceeds its budget or, once compressed, has grown by the interval since."""
        if not self.config.awaits_pressure or num_tokens < self.num_prompt_tokens:
            return False
        if not segments.are_compressed:
            return num_tokens > self.budget
        return self.config.decode == "bounded" and num_tokens - segments.tail >= self.interval

    def is_refresh(self, segments: Segments, num_tokens: int) -> bool:
        """True if the compression at ``num_tokens`` is a refresh."""
        due_at = self._next_refresh(segments)
        return due_at is not None and num_tokens >= due_at

    def covered(self, segments: Segments, num_tokens: int) -> int:
        """Tokens that the front stands for after a compression at ``num_tokens``: all, but those that a refresh leaves
        where generated tokens are kept whole."""
        is_whole = self.config.decode == "bounded" or not segments.are_compressed or self.is_in_context(segments)
        return num_tokens if is_whole else segments.tail

    def window_start(self, compression: int) -> int | None:
        """Position of the first query needed for a first compression at ``compression`` tokens; None: none is."""
        if self.window == "all":
            return 0
        newest = max(self.window, self.query_window)
        return max(0, compression - newest) if newest else None

    def longest_prefix(self, compression: int) -> int:
        """Tokens of the prefix cache that may be used before a compression at ``compression`` tokens, which follows a
        step that computes something; the queries of cached tokens are gone."""
        start = self.window_start(compression)
        return compression - 1 if start is None else min(compression - 1, start)

    def new_front(self, segments: Segments, num_tokens: int, reported: FrontReport | None = None) -> FrontSize:
        """Size of the front after a compression at ``num_tokens``. reported: what the same compression came to before
        the request was preempted. Raises PartError."""
        num_entries = self.num_entries(segments, num_tokens)
        places = num_entries if self.capacity is None else min(num_entries, self.capacity)
        even = FrontSize.even(places, self.front_size)
        if not self.is_uneven or num_entries <= self.budget:
            return even
        budgets = self.config.policy.layer_budgets(self.budget, num_entries, self.num_layers)
        entries, num_blocks = self.budget, cdiv(self.budget, self.front_size)
        if self.may_shrink:  # no head gets more entries than it has, each with at most one page that is not full
            most = cdiv(segments.num_entries(num_tokens), self.front_size) + 1
            num_blocks = min(num_blocks, max(most, cdiv(self.config.policy.min_budget, self.front_size)))
        if budgets is not None:
            entries = cdiv(sum(budgets), self.num_layers)
            num_blocks = cdiv(entries, self.front_size)
        if budgets is not None and self.capacity is None:  # layers that keep everything, to the last entry
            num_blocks = cdiv(sum(cdiv(one, self.front_size) for one in budgets), self.num_layers)
        # Pages of other heads must not lie where ordinary tokens go. With as few tokens, there is nothing to save.
        room = self.covered(segments, num_tokens) // self.block_size
        if num_blocks > room and not segments.uneven_places:
            return even
        share_blocks = min(num_blocks, room)
        if reported is not None:
            return FrontSize(reported.entries, places, reported.num_blocks, reported.num_blocks, has_pages=True)
        held = share_blocks if self.has_pages else even.num_blocks
        return FrontSize(entries, places, held, share_blocks, self.has_pages, self.may_shrink)

    def num_entries(self, segments: Segments, num_tokens: int) -> int:
        """Entries per KV head that a compression at ``num_tokens`` reads."""
        if self.is_refresh(segments, num_tokens):
            return self.covered(segments, num_tokens)
        return segments.num_places + num_tokens - segments.tail
