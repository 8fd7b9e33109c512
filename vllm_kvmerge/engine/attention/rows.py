"""Rows of a batch, as the worker describes requests to attention, and the statistics and queries kept for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm_kvmerge.ops import (
    NO_UPDATE,
    HeadPages,
    PagedKVCache,
    ScoreMode,
    ScoreUpdate,
    Softmax,
    score_prompt_queries,
    score_repetition,
)
from vllm_kvmerge.policies.rotation import Rotation
from vllm_kvmerge.policies.trackers import LookaheadTracker

if TYPE_CHECKING:  # compactions run without vLLM too
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_kvmerge.engine.attention.hidden_states import HiddenStates

Positions = TypeVar("Positions", int, np.ndarray)


@dataclass
class PromptScores:
    """Statistics of a prompt while it is computed: ``[layers, H, capacity]`` float32 each."""

    scores: Tensor
    aux: Tensor

    @classmethod
    def empty(
        cls, num_layers: int, num_kv_heads: int, capacity: int, device: torch.device | None = None
    ) -> "PromptScores":
        return cls(*torch.zeros(2, num_layers, num_kv_heads, capacity, device=device).unbind())

    def copy(self, device: torch.device) -> "PromptScores":
        return PromptScores(self.scores.to(device, copy=True), self.aux.to(device, copy=True))

    def grow(self, capacity: int) -> None:
        missing = capacity - self.scores.shape[2]
        if missing > 0:
            self.scores = torch.nn.functional.pad(self.scores, (0, missing))
            self.aux = torch.nn.functional.pad(self.aux, (0, missing))


class QueryRing:
    """The newest queries of a request, in every layer: ``[layers, window, H * G, d]`` in the model's dtype.

    The query of the token at position ``p`` lies in place ``p % window``.
    """

    def __init__(self, ring: Tensor) -> None:
        self.window, self.num_heads = ring.shape[1:3]
        self.start = 0
        """Position of the first query that was written."""
        self._ring = ring
        self._address, self._place_bytes = ring.data_ptr(), ring.stride(1) * ring.element_size()

    @classmethod
    def empty(
        cls,
        num_layers: int,
        window: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> "QueryRing":
        # Layer by layer within a place: ``keep_queries`` finds any layer's query by the place's address.
        places = torch.zeros(window, num_layers, num_heads, head_size, dtype=dtype, device=device)
        return cls(places.transpose(0, 1))

    def write(self, layer: int, query: Tensor, seq_len: int) -> None:
        """``query``: ``[q, H * G, d]``, ``q <= window``, of the tokens up to position ``seq_len - 1``."""
        places = torch.arange(seq_len - query.shape[0], seq_len, device=query.device) % self.window
        self._ring[layer, places] = query

    def fill(self, queries: Tensor, seq_len: int) -> None:
        """``queries``: as returned by another ring's ``queries``, of the tokens up to position ``seq_len - 1``."""
        queries = queries[:, -self.window :]
        places = torch.arange(seq_len - queries.shape[1], seq_len, device=queries.device) % self.window
        self._ring[:, places] = queries

    def address(self, position: Positions) -> Positions:
        """Where ``keep_queries`` is to put the query of the token at a position; of several, int64."""
        return self._address + position % self.window * self._place_bytes

    def move(self, rotation: Rotation, seq_len: int, before: int, after: int) -> None:
        """Turns the queries kept after ``seq_len`` tokens from RoPE positions that differ from those of their tokens by
        ``before`` to some that differ by ``after``."""
        positions = self.positions(seq_len)
        shifted = (positions.unsqueeze(1) + shift for shift in (before, after))
        moved = rotation.moved(self.queries(seq_len).float(), *shifted)
        self._ring[:, positions % self.window] = moved.to(self._ring.dtype)

    @property
    def device(self) -> torch.device:
        return self._ring.device

    def positions(self, seq_len: int, count: int | None = None) -> Tensor:
        """``[w]`` int64: positions of the queries kept after ``seq_len`` tokens. count: of the newest alone."""
        kept = self.window if count is None else min(count, self.window)
        return torch.arange(max(self.start, seq_len - kept), seq_len, device=self.device)

    @property
    def kept(self) -> Tensor:
        """``[layers, window, H * G, d]``, by place."""
        return self._ring

    def queries(self, seq_len: int, layers: slice = slice(None), count: int | None = None) -> Tensor:
        """``[layers, w, H * G, d]`` in the model's dtype, in the order of ``positions``."""
        return self._ring[layers].index_select(1, self.positions(seq_len, count) % self.window)


@dataclass(frozen=True)
class ScoreWindow:
    """Scores the queries of the last ``num_queries`` tokens of a request's share of the batch."""

    num_queries: int
    update: ScoreUpdate
    prompt_scores: PromptScores

    def score(
        self,
        layer: int,
        query: Tensor,
        cache: PagedKVCache,
        where: "QueryReader",
        scale: float,
        softmax: Softmax,
        lse: Tensor | None = None,
    ) -> None:
        """``query``: ``[q, H * G, d]``, of the row's tokens in the batch. lse: theirs, if it is known, as
        ``score_prompt_queries`` takes it."""
        planes = self.prompt_scores.scores, self.prompt_scores.aux
        scores, aux = (plane[layer, :, : where.seq_len] for plane in planes)
        newest = query[-self.num_queries :]
        lse = None if lse is None else lse[:, -self.num_queries :]
        score_prompt_queries(newest, cache, where.blocks, self.update, scale, scores, aux, softmax, lse)


@dataclass(frozen=True)
class LookaheadWindow:
    """Scores the row's tokens before ``end`` by their own queries, as ``tracker`` says, and keeps these in ``ring``."""

    end: int
    tracker: LookaheadTracker
    ring: QueryRing
    rotation: Rotation
    prompt_scores: PromptScores

    def score(
        self,
        layer: int,
        query: Tensor,
        cache: PagedKVCache,
        where: "QueryReader",
        scale: float,
        softmax: Softmax,
        lse: Tensor | None = None,
    ) -> None:
        """As ``ScoreWindow.score``."""
        block, sinks = self.tracker.lookahead, self.tracker.num_prefix_tokens
        computed = where.seq_len - len(query)
        before = self.ring.queries(computed, slice(layer, layer + 1), computed % block)[0]
        begin, own = computed - len(before), torch.cat([before, query])
        # A turn by so many positions is the same from everywhere.
        distances = 0, min(self.end, self.tracker.chunk_size)
        here, there = (torch.full((), position, device=query.device) for position in distances)
        turned = self.rotation.moved(own.float(), here, there).to(query.dtype)
        for first in range(begin, self.end, block):
            end = min(first + block, self.end)
            start = max(sinks, min(first, end - self.tracker.chunk_size))
            if end > where.seq_len:
                break
            if start < end:
                some = slice(max(first, start) - begin, end - begin)  # not the first tokens', which are outliers
                place = end, end, start, sinks, self.prompt_scores.scores[layer, :, start:end]
                score_repetition(turned[some], cache, where.blocks, scale, *place, softmax=softmax, own=own[some])
        self.ring.write(layer, query[-self.ring.window :], where.seq_len)


@dataclass(frozen=True)
class RepetitionWindow:
    """Scores tokens ``[start, end)`` of another request's context, the row's first ``context`` tokens, by the queries
    that repeat them: those of the last ``num_queries`` tokens of the row's share of the batch.

    sinks: first tokens whose keys attention is shared with. prompt_scores: of the other request. normalization: how
    probabilities are weighed, if they are.
    """

    num_queries: int
    context: int
    start: int
    end: int
    sinks: int
    prompt_scores: PromptScores
    normalization: "Normalization | None" = None

    def score(
        self,
        layer: int,
        query: Tensor,
        cache: PagedKVCache,
        where: "QueryReader",
        scale: float,
        softmax: Softmax,
        lse: Tensor | None = None,
    ) -> None:
        """As ``ScoreWindow.score``."""
        query, scores = query[-self.num_queries :], self.prompt_scores.scores[layer, :, self.start : self.end]
        chunk = where.seq_len, self.context, self.start, self.sinks
        if self.normalization is None:
            score_repetition(query, cache, where.blocks, scale, *chunk, scores, softmax=softmax)
            return
        # Of each query head by itself: what a value adds to the output is the head's own.
        norms = self.normalization.hidden_states.norms[layer, where.tokens][-self.num_queries :]
        by_head = scores.new_zeros(query.shape[1], scores.shape[1])
        score_repetition(query, cache, where.blocks, scale, *chunk, by_head, norms.reciprocal(), softmax)
        slots = torch.arange(self.start, self.end, device=query.device)
        values = cache.values[where.blocks[slots // cache.block_size].long(), :, slots % cache.block_size]
        if cache.is_quantised:
            values = values.to(query.dtype) * cache.value_scale
        weighed = by_head.unflatten(0, (len(scores), -1)) * self.normalization.output_norms(
            layer, values.transpose(0, 1)
        )
        torch.fmax(scores, weighed.amax(1), out=scores)


@dataclass(frozen=True)
class Normalization:
    """What KVzip+ weighs probabilities by. output_norms: of a layer's index and values ``[H, n, d]`` makes
    ``[H, G, n]``, the lengths of what they add to the output."""

    hidden_states: "HiddenStates"
    output_norms: Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class PredictedScores:
    """Keeps the scores that are predicted of the row's tokens: in ``prompt_scores``; in the cache if there are none."""

    hidden_states: "HiddenStates"
    prompt_scores: PromptScores | None

    def score(
        self,
        layer: int,
        query: Tensor,
        cache: PagedKVCache,
        where: "QueryReader",
        scale: float,
        softmax: Softmax,
        lse: Tensor | None = None,
    ) -> None:
        """As ``ScoreWindow.score``."""
        assert self.hidden_states.scores is not None
        scores = self.hidden_states.scores[layer, where.tokens]
        if self.prompt_scores is not None:
            self.prompt_scores.scores[layer, :, where.seq_len - len(query) : where.seq_len] = scores.T
            return
        slots = torch.arange(where.seq_len - len(query), where.seq_len, device=query.device)
        blocks = where.blocks[slots // cache.block_size].long()
        cache.scores[blocks, :, slots % cache.block_size] = scores


@dataclass(frozen=True)
class BatchRow:
    """A request in the batch.

    front, tail: its segments; ``front == 0``: never compressed, so its entries have no votes. update: the update of
    the scores in the cache. window: the queries to score into a buffer instead, before its first compression, or before
    that of the request whose context it repeats; or scores of its tokens that come from elsewhere. ring: its newest
    queries, if its policy reads them. pages: of its heads, one row per layer, if the front is not an ordinary one.
    table: of these pages, on a GPU. shift: what RoPE adds to the positions of its tokens. held: where its queries go
    if some of its tokens are drafts; it then has no update, window or ring until these have been verified.
    """

    front: int = 0
    tail: int = 0
    update: ScoreUpdate = NO_UPDATE
    window: ScoreWindow | LookaheadWindow | RepetitionWindow | PredictedScores | None = None
    ring: QueryRing | None = None
    pages: HeadPages | None = None
    table: Tensor | None = None
    shift: int = 0
    held: "HeldQueries | None" = None

    @property
    def counts_queries(self) -> bool:
        """True if its queries leave something behind."""
        return self.update.mode is not ScoreMode.NONE or self.reads_queries

    @property
    def reads_queries(self) -> bool:
        """True if a ``QueryReader`` looks at its queries."""
        return self.window is not None or self.ring is not None or self.held is not None

    @property
    def needs_hidden_states(self) -> bool:
        """True if attention's readers look at hidden states."""
        window = self.window
        return isinstance(window, PredictedScores) or (
            isinstance(window, RepetitionWindow) and window.normalization is not None
        )

    @property
    def needs_python(self) -> bool:
        """True if Python code looks at its queries, which no captured graph can have. Rings are no matter of Python's,
        see ``keep_queries``."""
        return self.window is not None or self.held is not None


PLAIN = BatchRow()


def seq_len_of(common: "CommonAttentionMetadata", index: int) -> int:
    """Number of tokens of a row, those of this step included, without waiting for a GPU."""
    # vLLM calls it an upper bound because of drafts under asynchronous scheduling, which are refused.
    assert common.seq_lens_cpu_upper_bound is not None
    return int(common.seq_lens_cpu_upper_bound[index])


@dataclass
class KeptQueries:
    """Queries that are kept in rings, see ``keep_queries``."""

    addresses: Tensor
    tokens: Tensor | None = None


def newest_in_rings(rows: Sequence[BatchRow], common: "CommonAttentionMetadata") -> tuple[np.ndarray, np.ndarray]:
    """Places in the batch of the newest tokens of rows with rings, of which there is one at least, and where in these
    their queries go, both int64."""
    starts, tokens, addresses = common.query_start_loc_cpu.tolist(), [], []
    for index, row in enumerate(rows):
        if row.ring is not None:
            end, seq_len = starts[index + 1], seq_len_of(common, index)
            count = min(end - starts[index], row.ring.window)
            tokens.append(np.arange(end - count, end))
            addresses.append(row.ring.address(np.arange(seq_len - count, seq_len)))
    return np.concatenate(tokens), np.concatenate(addresses)


@dataclass
class QueryReader:
    """Locates a request's queries to store or score them."""

    tokens: slice
    blocks: Tensor
    seq_len: int
    row: BatchRow

    @property
    def num_queries(self) -> int:
        return self.tokens.stop - self.tokens.start

    @classmethod
    def of(cls, common: "CommonAttentionMetadata", index: int, row: BatchRow) -> "QueryReader":
        """``index``: the row's place in the batch."""
        start, end = common.query_start_loc_cpu[index : index + 2].tolist()
        return cls(slice(start, end), common.block_table_tensor[index], seq_len_of(common, index), row)

    def read(
        self,
        layer: int,
        query: Tensor,
        cache: PagedKVCache,
        scale: float,
        softmax: Softmax,
        lse: Tensor | None = None,
    ) -> None:
        """Stores and scores this row's queries as it asks.

        query: ``[tokens of the batch, H * G, d]``. lse: ``[H * G, tokens of the batch]``, see ``ScoreWindow.score``.
        """
        if self.row.held is not None:
            self.row.held.keep(layer, query[self.tokens], self)
        else:
            lse = None if lse is None else lse[:, self.tokens]
            self.read_own(layer, query[self.tokens], cache, scale, softmax, lse)

    def read_own(
        self,
        layer: int,
        query: Tensor,
        cache: PagedKVCache,
        scale: float,
        softmax: Softmax,
        lse: Tensor | None = None,
    ) -> None:
        """``read`` for ``query`` and ``lse`` of the row's tokens alone."""
        ring, window = self.row.ring, self.row.window
        if ring is not None:
            ring.write(layer, query[-ring.window :], self.seq_len)
        if window is not None:
            window.score(layer, query, cache, self, scale, softmax, lse)


class HeldQueries:
    """Queries of a row of whose tokens some are drafts, until it is known which of them are accepted."""

    def __init__(self) -> None:
        self._by_layer: dict[int, Tensor] = {}
        self._reader: QueryReader | None = None

    def keep(self, layer: int, query: Tensor, reader: QueryReader) -> None:
        """``query``: ``[q, H * G, d]``, of the row's tokens in the batch, where ``reader`` has them."""
        self._by_layer[layer], self._reader = query.clone(), reader

    def queries(self, layer: int, count: int) -> Tensor:
        """The first ``count`` queries in a layer."""
        return self._by_layer[layer][:count]

    def reader(self, row: BatchRow, count: int) -> QueryReader:
        """Reads the first ``count`` queries as ``row``, the same request's without the other tokens, asks."""
        assert self._reader is not None, "no layer has kept any"
        start, end = self._reader.tokens.start, self._reader.tokens.stop
        seq_len = self._reader.seq_len - (end - start - count)
        return QueryReader(slice(start, start + count), self._reader.blocks, seq_len, row)
