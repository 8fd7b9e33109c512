"""A worker's state of one compression: before, during and after it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.messages import Compress, FrontReport
from vllm_kvmerge.engine.worker.arriving import Arriving
from vllm_kvmerge.engine.worker.external import ExternalCache
from vllm_kvmerge.engine.worker.head_pages import PageAssignment
from vllm_kvmerge.engine.worker.paged_entries import PagedEntries
from vllm_kvmerge.engine.worker.timing import Timing, moment
from vllm_kvmerge.engine.worker.units import Work
from vllm_kvmerge.ops import HeadPages, ScoreUpdate
from vllm_kvmerge.ops.coded import Coding
from vllm_kvmerge.policies import CompressionPolicy
from vllm_kvmerge.policies.errors import PartError

FEWEST, MOST = 4, 5
"""Columns of ``Execution.counts`` that are not sums."""


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
    request's heads, one row per layer, if its front is not an ordinary one. budget_data: ``Execution.budget_data`` of
    its last compaction, if that is known. moves_keys: RoPE counts entries of the cache, so that keys are turned as
    these move up. has_pages: heads get pages of their own in the plan's blocks, and places that a head has no room for
    are empty. settles_shares: budgets of heads that follow data are computed and used by this compaction, which waits
    for a GPU; otherwise it uses what the last one has computed, and computes them for the next. coding: of the new
    front; None: it is in the dtype of the cache."""

    plan: Compress
    policy: CompressionPolicy
    source_blocks: Tensor
    prompt_scores: PromptScores | None = None
    ring: QueryRing | None = None
    complete: ExternalCache | None = None
    pages: HeadPages | None = None
    budget_data: Arriving | None = None
    rescoring: Rescoring | None = None
    moves_keys: bool = False
    front: int = 0
    tail: int = 0
    has_pages: bool = False
    settles_shares: bool = True
    coding: Coding | None = None

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


class SequenceLayer(NamedTuple):
    """One layer of one request; ``request`` is its index in the batch."""

    request: int
    layer: int


class Numbers(NamedTuple):
    """Those of sequence layers, int64 on the CPU. requests, layers: ``[U]``, of each. by_head: ``[H]``, requests of
    their heads."""

    requests: Tensor
    layers: Tensor
    by_head: Tensor


@lru_cache(maxsize=32)
def numbers_of(seq_layers: tuple[SequenceLayer, ...], num_kv_heads: int) -> Numbers:
    """Remembered, because a step's batch is often like one before it."""
    requests, layers = torch.tensor(seq_layers, device="cpu").unbind(1)
    return Numbers(requests, layers.contiguous(), requests.repeat_interleave(num_kv_heads))


@dataclass
class Batch:
    """Plans of one shape that go through their policy together.

    plan: the first, for what they have in common. num_entries: of each head. held: bytes of working memory for one KV
    head of one layer, about. time_left: seconds that the policy may still take; None: no limit. work: how far it has
    come. counts: ``Execution.counts``. num_rows: heads that are compressed at once, of one layer; 0: as many layers as
    memory allows. num_tiles: that these take, about. failed: errors of requests, by index. shares: of each request by
    index, entries of each head, layer by layer, where they are rounded to pages. fronts: what they come to, if that
    depends on data. assignments: new pages of requests, by index, where heads get some of their own. budget_data:
    ``Execution.budget_data``, by index. gathered: the entries that were read last, by their sequence layers.

    layer_budgets: of each layer; None: they follow data.

    What looking at all layers before they are compressed comes to: statistics: the allocator's, ``[plans, layers]``
    float32, zeros where it failed; None: not known yet, or there are none. masses: of a policy that compares the heads
    of all layers, ``[plans, heads of all layers, n]``. budgets: the policy's ``head_budgets``, ``[plans, heads of all
    layers]``.
    """

    compactions: list[Compaction]
    plan: Compress
    num_entries: int
    held: int
    time_left: Callable[[], float | None]
    work: Work
    counts: Tensor
    num_rows: int = 0
    num_tiles: int = 1
    failed: dict[int, PartError] = field(default_factory=dict)
    shares: list[list[int]] = field(default_factory=list)
    fronts: list[FrontReport] = field(default_factory=list)
    assignments: list[PageAssignment] = field(default_factory=list)
    budget_data: list[Arriving] = field(default_factory=list)
    gathered: dict[tuple[SequenceLayer, ...], PagedEntries] = field(default_factory=dict)
    layer_budgets: list[int] | None = None
    statistics: Tensor | None = None
    masses: Tensor | None = None
    budgets: Tensor | None = None

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
    def coding(self) -> Coding | None:
        return self.compactions[0].coding

    @property
    def settles_shares(self) -> bool:
        return self.compactions[0].settles_shares

    @property
    def complete(self) -> ExternalCache | None:
        return self.compactions[0].complete

    def advance(self, until: float, max_seconds: float = math.inf) -> Timing:
        """``Work.advance``; returns what was done."""
        first, before, begun = self.compactions[0], self.work.progress, moment(self.counts.device)
        self.work.advance(until, max_seconds)
        amount = sum(one.num_entries for one in self.compactions) * (self.work.progress - before)
        kind = first.plan.compression, first.num_entries.bit_length()
        return Timing(kind, amount, begun, moment(self.counts.device))


@dataclass(frozen=True)
class Execution:
    """Results of a step's plans.

    counts: ``[plans, 6]`` int64 on the cache's device, over layers and heads: entries merged, entries evicted, entries
    left unchanged because the merged ones were not finite, entries kept, and the fewest and the most of these in one
    head. failures: errors of policies, by index of the plan. The newest entries of such requests were kept, so they
    must not go on generating. pages: of the new fronts, by index of the plan, where heads have some of their own.
    fronts: what they hold, where that depends on data. budget_data: for the requests' next compactions, by index, where
    budgets of heads depend on data: the allocator's statistic of each layer, if it has one, or else its budget of each
    head, layer by layer. timings: of the batches."""

    counts: Tensor
    failures: dict[int, PartError]
    pages: dict[int, HeadPages]
    fronts: dict[int, FrontReport]
    budget_data: dict[int, Arriving]
    timings: list[Timing]
