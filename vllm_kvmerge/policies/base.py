"""What a compression policy is made of: a tracker, a selector and a merger.

Everything here works on one layer's live entries as plain tensors; nothing imports vLLM.
``H`` is the number of KV heads, ``n`` the number of live entries per head, ``d`` the head size.
Heads are independent: every operation is batched over the first dimension.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

DEAD = -1
"""Position of an entry that holds nothing; its ``log_votes`` is ``-inf``, so attention gives it no weight."""

TrackerMode = Literal["none", "sum", "mean", "log_ema"]


@dataclass
class Entries:
    """Live cache entries of one layer, in cache order (front first, then tail).

    keys, values: ``[H, n, d]`` float32. log_votes: ``[H, n]`` float32, what attention adds to the logit (0 for an
    ordinary token). scores: ``[H, n]`` float32, the tracker's statistic. aux: ``[H, n]`` float32, the tracker's or
    merger's second statistic. positions: ``[H, n]`` int64, of the newest token merged in; ``DEAD`` where empty.
    """

    keys: Tensor
    values: Tensor
    log_votes: Tensor
    scores: Tensor
    aux: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return self.positions.shape[1]

    @property
    def is_live(self) -> Tensor:
        """``[H, n]`` bool."""
        return self.positions != DEAD

    def take(self, index: Tensor) -> "Entries":
        """Entries at ``index`` (``[H, m]`` int64), per head."""
        head = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
        return Entries(*(getattr(self, field.name)[head, index] for field in fields(self)))

    def clone(self) -> "Entries":
        return Entries(*(getattr(self, field.name).clone() for field in fields(self)))

    def concatenate(self, other: "Entries") -> "Entries":
        """These entries, then the other ones, per head."""
        return Entries(*(torch.cat([getattr(self, f.name), getattr(other, f.name)], dim=1) for f in fields(self)))

    def without(self, hidden: Tensor) -> "Entries":
        """The same entries, sharing storage, except that those where ``hidden`` (``[H, n]`` bool) count as dead."""
        return replace(
            self,
            log_votes=self.log_votes.masked_fill(hidden, -torch.inf),
            positions=self.positions.masked_fill(hidden, DEAD),
        )

    def heads(self, heads: list[int]) -> "Entries":
        """Some heads' entries."""
        return Entries(*(getattr(self, field.name)[heads] for field in fields(self)))

    @classmethod
    def stack_heads(cls, parts: "list[Entries]") -> "Entries":
        """The heads of several, each with equally many entries."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def padded(self, length: int) -> "Entries":
        """With dead entries behind, ``length`` in all."""
        missing = length - len(self)
        if missing == 0:
            return self
        num_heads, _, head_size = self.keys.shape
        empty = self.keys.new_zeros(num_heads, missing, head_size)
        none = self.scores.new_zeros(num_heads, missing)
        nowhere = self.positions.new_full((num_heads, missing), DEAD)
        return self.concatenate(Entries(empty, empty, none - torch.inf, none, none, nowhere))

    def kill(self, dead: Tensor) -> None:
        """Empties, in place, the entries where ``dead`` (``[H, n]`` bool) is true.

        Everything is overwritten: a NaN left in a dead key would survive ``logit + log_votes``.
        """
        for tensor in (self.keys, self.values):
            tensor.masked_fill_(dead.unsqueeze(-1), 0.0)
        for tensor in (self.scores, self.aux):
            tensor.masked_fill_(dead, 0.0)
        self.log_votes.masked_fill_(dead, -torch.inf)
        self.positions.masked_fill_(dead, DEAD)


@dataclass(frozen=True)
class CompressionContext:
    """What a policy may know besides the entries.

    budget: entries to keep per head, on average over layers and heads; parts see the number for their own.
    min_budget: the fewest entries that any head of any layer can be given.
    capacity: entries to return per head, dead ones included; 0 stands for ``budget``.
    num_tokens: tokens computed so far, so the next token's position.
    at_prompt_end: True for a request's first compression.
    num_slots: how many of the budget's entries the merger fills itself; set by the composition.
    layer, num_layers: which layer this is. scale: of the attention logits.
    queries: ``[H, G, w, d]`` float32, the newest queries (G query heads per KV head) where the policy asks for them
    (``query_window``), and query_positions ``[w]`` int64, of their tokens.
    output_weights: ``[H, G, hidden, d]`` float32, each query head's part of the output projection, where asked for.
    layer_statistics: ``[num_layers]`` float32, the allocator's ``layer_statistic`` of every layer, where it has one.
    all_heads: gathers a tensor ``[H, ...]`` of this worker's KV heads from all tensor-parallel workers, in head order.
    Every worker must call it equally often: trackers, allocators and selectors may, where nothing depends on data.
    head_indices: index of each of these ``H`` heads among all heads of the layer; empty: they are all of them.
    """

    budget: int
    num_tokens: int
    at_prompt_end: bool
    min_budget: int = 0
    capacity: int = 0
    num_slots: int = 0
    layer: int = 0
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


class Part(BaseModel):
    """A part of a policy; its fields are its hyper-parameters, named and defaulted as in its source."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    source: ClassVar[str]

    needs_output_weights: ClassVar[bool] = False
    """Whether the part reads ``context.output_weights``."""

    @property
    def query_window(self) -> int:
        """How many of the newest queries (prompt or generated) the part reads from ``context.queries``."""
        return 0


class Allocator(Part):
    """How the budget is split over layers and heads."""

    has_layer_statistic: ClassVar[bool] = False
    splits_heads: ClassVar[bool] = False
    """Whether heads of one layer may get different budgets."""

    def capacity(self, budget: int) -> int | None:
        """Entries per head that the cache must hold, whatever the data: the largest budget of any layer and head.
        None: every entry there is, because some layer or head keeps them all."""
        return budget

    def layer_statistic(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        """A scalar of one layer that the split depends on; the same on every tensor-parallel worker."""
        raise TypeError(f"allocator {self.name!r} has no layer statistic")

    @abstractmethod
    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> list[int]:
        """Entries that each of this worker's ``H`` heads keeps in this layer, each ``<= capacity(context.budget)``."""


class Tracker(Part):
    """What attention accumulates per entry while the request runs."""

    mode: ClassVar[TrackerMode]

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
    """Whether ``select`` looks at all heads of the layer together (``context.all_heads``)."""

    @property
    @abstractmethod
    def min_budget(self) -> int:
        """Smallest budget with which this selector can work: one more than it protects."""

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]`` bool: live entries that stay whatever their importance (sinks, recent window). Default: none."""
        return torch.zeros_like(entries.is_live)

    @abstractmethod
    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        """``[H, context.num_kept]`` int64: indices of the entries that stay, without repeats, live before dead."""


class Merger(Part):
    """What becomes of the entries that the selector did not keep.

    A merger may keep slots of its own inside the budget (ZSMerge's residual): it says how many and which entries they
    are, the selector ranks the others.

    ``protected`` is the selector's: such entries may take others in, but keep their own position, so that a sink
    remains a sink. Both merging methods return how many live entries went into others, over all heads, as a tensor
    without dimensions: nothing waits for the device.
    """

    tracker_modes: ClassVar[frozenset[TrackerMode]]
    """Tracker modes this merger can work from."""

    def num_slots(self, budget: int) -> int:
        """How many entries of the budget this merger would fill itself; the selector keeps the rest. Default: 0."""
        return 0

    def is_slot(self, entries: Entries) -> Tensor:
        """``[H, n]`` bool: this merger's slots, never candidates of selection. Default: none."""
        return torch.zeros_like(entries.is_live)

    def before_selection(
        self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> tuple[Entries, Tensor]:
        """Merges that come before selection (KeepKV table 3); merged-away entries are killed. Default: none."""
        return entries, torch.zeros((), dtype=torch.int64, device=importance.device)

    @abstractmethod
    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> tuple[Entries, Tensor]:
        """``budget`` entries per head: those at ``kept`` (``[H, context.num_kept]``), with what is merged into them,
        and the merger's slots."""


@dataclass(frozen=True)
class CompressionResult:
    """Exactly ``budget`` entries per head, and what became of the others (counted over all heads)."""

    entries: Entries
    num_merged: int
    num_evicted: int
