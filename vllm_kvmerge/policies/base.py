"""What a compression policy is made of: a tracker, a selector and a merger.

Everything here works on live entries as tensors; nothing imports vLLM. ``H`` is the number of heads, ``n`` the number
of live entries per head, ``d`` the head size. Heads are independent: every operation is batched over the first
dimension, which may hold the KV heads of one layer, or those of several layers and requests, one unit after the other.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from vllm_kvmerge.ops import ScoreMode
from vllm_kvmerge.policies.cost import Cost, CostShape
from vllm_kvmerge.policies.entries import DEAD, Entries
from vllm_kvmerge.policies.outcome import CacheUpdate

__all__ = ["DEAD", "Entries", "CacheUpdate", "ScoreMode"]

MAX_TOKENS = 1 << 24
"""Upper bound of hyper-parameters that count tokens or entries: more than any model's context, and small enough that
sums and products of them are exact everywhere."""

MAX_QUERIES = 4096
"""Upper bound of hyper-parameters that say how many queries a part reads: each is kept, in every layer."""


@dataclass(frozen=True)
class CompressionContext:
    """What a policy may know besides the entries.

    budget: entries to keep per head, on average over layers and heads; parts see the number for their own.
    min_budget: the fewest entries that any head of any layer can be given.
    capacity: entries to return per head, dead ones included; 0 stands for ``budget``.
    num_tokens: tokens computed so far, so the next token's position; of several requests the longest one's.
    at_prompt_end: True for a request's first compression.
    num_slots: how many of the budget's entries the merger fills itself; set by the composition.
    num_heads: KV heads of a unit, which is one layer of one request, on this worker; 0: all ``H`` are of one unit.
    layer: which layer this is; layers: where there are several, that of each of the ``H`` heads. num_layers: of the
    model.
    scale: of the attention logits.
    queries: ``[H, G, w, d]`` float32, the newest queries (G query heads per KV head) where the policy asks for them
    (``query_window``), and query_positions, ``[w]`` or ``[H, w]`` int64, of their tokens.
    output_weights: ``[H, G, hidden, d]`` float32, each query head's part of the output projection, where asked for.
    layer_statistics: ``[num_layers]`` float32, or ``[units, num_layers]``, the allocator's ``layer_statistic`` of every
    layer of the request, where it has one.
    all_heads: gathers a tensor ``[num_heads, ...]`` from all tensor-parallel workers, in head order.
    head_indices: index of each of these ``H`` heads among all heads of its layer; empty: a unit has them all.
    """

    budget: int
    num_tokens: int
    at_prompt_end: bool
    min_budget: int = 0
    capacity: int = 0
    num_slots: int = 0
    num_heads: int = 0
    layer: int = 0
    layers: list[int] = field(default_factory=list)
    num_layers: int = 1
    scale: float = 1.0
    queries: Tensor | None = None
    query_positions: Tensor | None = None
    output_weights: Tensor | None = None
    layer_statistics: Tensor | None = None
    all_heads: Callable[[Tensor], Tensor] = field(default=lambda tensor: tensor)
    head_indices: list[int] = field(default_factory=list)

    @property
    def num_kept(self) -> int:
        """Entries that the selector keeps."""
        return self.budget - self.num_slots

    def layer_of_each(self, num_rows: int) -> list[int]:
        """The layer of each of the ``num_rows`` heads."""
        return self.layers or [self.layer] * num_rows

    def head_of_each(self, num_rows: int) -> list[int]:
        """The index, among all heads of its layer, of each of the ``num_rows`` heads."""
        size = self.num_heads or num_rows
        return self.head_indices or [row % size for row in range(num_rows)]

    def by_unit(self, tensor: Tensor) -> Tensor:
        """``[H, ...]`` as ``[units, num_heads, ...]``."""
        return tensor.unflatten(0, (-1, self.num_heads or len(tensor)))

    def heads_of_layers(self, tensor: Tensor) -> Tensor:
        """``[H, ...]`` to ``[units, heads, ...]``, with the heads of all tensor-parallel workers.

        Every worker must call it equally often: trackers, allocators and selectors may, where nothing depends on data.
        """
        return self.all_heads(self.by_unit(tensor).transpose(0, 1)).transpose(0, 1)

    def of_heads(self, heads: list[int], num_rows: int) -> "CompressionContext":
        """The context as some of the ``num_rows`` heads see it.

        Where that breaks up units, ``heads_of_layers`` means nothing any more: it was for the allocator, before.
        """
        if len(heads) == num_rows:
            return self
        size, layers, indices = self.num_heads or num_rows, self.layer_of_each(num_rows), self.head_of_each(num_rows)
        positions, statistics = self.query_positions, self.layer_statistics
        return replace(
            self,
            num_heads=size if len(heads) % size == 0 else len(heads),
            layers=[layers[head] for head in heads],
            head_indices=[indices[head] for head in heads],
            queries=None if self.queries is None else self.queries[heads],
            query_positions=positions[heads] if positions is not None and positions.ndim == 2 else positions,
            output_weights=None if self.output_weights is None else self.output_weights[heads],
            layer_statistics=None if statistics is not None and statistics.ndim == 2 else statistics,
        )


class Part(BaseModel):
    """A part of a policy; its fields are its hyper-parameters, named and defaulted as in its source.

    A request may give every value that a field allows, so numbers have a lower and an upper bound (``Field(ge=...,
    le=...)``, or ``gt`` and ``lt``), between which the part's arithmetic is finite.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: ClassVar[str]
    source: ClassVar[str]

    needs_output_weights: ClassVar[bool] = False
    """Whether the part reads ``context.output_weights``."""

    @property
    def query_window(self) -> int:
        """How many of the newest queries (prompt or generated) the part reads from ``context.queries``."""
        return 0

    def cost(self, shape: CostShape) -> Cost:
        """What the part's work takes for one KV head of one layer.

        A part's author counts, as functions of ``shape`` and of hyper-parameters: the tensors that its methods make,
        all that exist at once, with what they return (``numbers``); its matrix products (``products``); and what its
        other operations read and write (``touches``), sorts and rows of keys or values with their factors
        (``cost.sorting``, ``cost.gathering``). Where that depends on data, the most that it can be. Batches are made as
        large as memory allows by it, and requests that would keep all others waiting are refused.

        Default: a part that reads all keys and values, with copies, once.
        """
        return Cost(numbers=4 * shape.row_numbers, touches=16 * shape.row_numbers)


class Allocator(Part):
    """How the budget is split over layers and heads."""

    reads_attention: ClassVar[bool] = True
    """Whether ``head_budgets`` reads ``importance``; otherwise that is not worked out."""

    has_layer_statistic: ClassVar[bool] = False
    splits_heads: ClassVar[bool] = False
    """Whether heads of one layer may get different budgets."""

    def capacity(self, budget: int) -> int | None:
        """Entries per head that the cache must hold, whatever the data: the largest budget of any layer and head.
        None: every entry there is, because some layer or head keeps them all."""
        return budget

    def layer_statistic(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        """``[units]``: a scalar of each layer that the split depends on; the same on every tensor-parallel worker."""
        raise TypeError(f"allocator {self.name!r} has no layer statistic")

    @abstractmethod
    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> list[int]:
        """Entries that each of the ``H`` heads keeps, each ``<= capacity(context.budget)``."""


class Tracker(Part):
    """What attention accumulates per entry while the request runs."""

    mode: ClassVar[ScoreMode]

    @property
    def prompt_window(self) -> int | Literal["all"]:
        """How many of the prompt's last tokens are scored as queries before the first compression; more than 0 unless
        ``mode`` is ``none``. Default: 0."""
        return 0

    @property
    def update_decay(self) -> float:
        """Weight of the past when attention updates the statistic (see ``kernels.ScoreUpdate``)."""
        return 1.0

    @abstractmethod
    def importance(self, entries: Entries) -> Tensor:
        """``[H, n]`` float32: larger means more worth keeping. Comparable within a head only."""


class Selector(Part):
    """Which entries stay, alone or as carriers of others."""

    needs_scores: ClassVar[bool]

    needs_probabilities: ClassVar[bool] = False
    """Whether importance must be made of probabilities: a moving average of logits (``log_ema``) will not do."""

    pools_heads: ClassVar[bool] = False
    """Whether ``select`` looks at all heads of a layer together (``context.heads_of_layers``)."""

    @property
    @abstractmethod
    def min_budget(self) -> int:
        """Smallest budget with which this selector can work: one more than it protects."""

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]`` bool: live entries that stay whatever their importance (sinks, recent window). Default: none."""
        return torch.zeros_like(entries.is_live)

    @abstractmethod
    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        """``[H, n]`` bool: the entries that stay, ``context.num_kept`` per head; dead ones only where live ones are
        too few."""


class Merger(Part):
    """What becomes of the entries that the selector did not keep.

    A merger may keep slots of its own inside the budget (ZSMerge's residual): it says how many and which entries they
    are, the selector ranks the others.

    ``protected`` is the selector's: such entries may take others in, but keep their own position, so that a sink
    remains a sink. Both merging methods say what changes, as a ``CacheUpdate``; entries themselves stay as they are. How
    many went into others it counts as a tensor: nothing waits for the device.
    """

    tracker_modes: ClassVar[frozenset[ScoreMode]]
    """Tracker modes this merger can work from."""

    def num_slots(self, budget: int) -> int:
        """How many entries of the budget this merger would fill itself; the selector keeps the rest. Default: 0."""
        return 0

    def is_slot(self, entries: Entries) -> Tensor:
        """``[H, n]`` bool: this merger's slots, never candidates of selection. Default: none."""
        return torch.zeros_like(entries.is_live)

    def before_selection(
        self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate | None:
        """Merges that come before selection (KeepKV table 3): an outcome with a place for each of the ``n`` entries,
        empty where one was merged away; None where there are none, which is the default."""
        return None

    @abstractmethod
    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        """``budget`` places per head: the entries at ``kept`` (``[H, context.num_kept]`` int64) in that order, with
        what is merged into them, then the merger's slots."""


@dataclass
class CompressionResult:
    """What became of ``source``, the entries that a policy was given.

    evicted: ``[H]`` int64, live entries that were dropped; those that went into others are ``outcome.merged``.
    """

    source: Entries
    outcome: CacheUpdate
    evicted: Tensor

    @cached_property
    def entries(self) -> Entries:
        """The result, dense: exactly ``capacity`` entries per head."""
        return self.outcome.apply(self.source)

    @property
    def num_merged(self) -> int:
        return int(self.outcome.merged.sum())

    @property
    def num_evicted(self) -> int:
        return int(self.evicted.sum())
