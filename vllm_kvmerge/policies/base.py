"""Base classes of the parts of a compression policy, and everything needed to write one.

A policy is a tracker, an allocator, a selector and a merger. Parts work on live entries as tensors ``[H, n, ...]``:
``n`` entries in each of ``H`` rows. Rows are sequence layers x KV heads (see ``Heads``) and independent of each other:
every operation is batched over the first dimension. ``d`` is the head size.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from vllm_kvmerge.ops import ScoreMode
from vllm_kvmerge.policies.context import CompressionContext, Heads, Queries
from vllm_kvmerge.policies.entries import DEAD, Entries
from vllm_kvmerge.policies.update import CacheUpdate

# fmt: off
__all__ = [
    "DEAD", "MAX_QUERIES", "MAX_TOKENS", "Allocator", "CacheUpdate", "CompressionContext", "Entries", "HeadShape",
    "Heads", "Merger", "Part", "Queries", "Repetition", "ScoreMode", "Selector", "ServedModel", "Tracker",
]
# fmt: on

MAX_TOKENS = 1 << 24
"""Upper bound of hyper-parameters that count tokens or entries: above any model's context, yet small enough for sums
and products to be exact everywhere."""

MAX_QUERIES = 4096
"""Upper bound of the number of queries that a part reads: each is kept, in every layer."""


class ServedModel:
    """What defaults may depend on. model_type: the name of the model's type, such as ``llama`` or ``qwen3``.
    is_calibrated: the server knows what its heads need, and requests may make use of that."""

    def __init__(self, model_type: str = "", is_calibrated: bool = False) -> None:
        self.model_type, self.is_calibrated = model_type, is_calibrated

    @property
    def answer_prefix(self) -> str | None:
        """Text that the chat template puts between what a user says and the model's answer; None without a template."""
        return None

    def encode(self, text: str) -> list[int] | None:
        """Token ids of a text, without special tokens; None if there is no tokenizer, or it lacks some of the words."""
        return None


@dataclass(frozen=True)
class HeadShape:
    """Sizes of the work on one KV head of one layer. num_entries: before it. num_kept: entries that stay. group_size:
    query heads. hidden_size: of the model."""

    num_entries: int
    num_kept: int
    head_size: int
    group_size: int
    hidden_size: int

    @property
    def num_leaving(self) -> int:
        """Entries that the selector does not keep."""
        return max(0, self.num_entries - self.num_kept)


class Part(BaseModel):
    """A part of a policy; its fields are its hyper-parameters, named and defaulted as in its source.

    A request may set any value that a field allows, so numbers need a lower and an upper bound (``Field(ge=...,
    le=...)``, or ``gt`` and ``lt``) between which the part's arithmetic is finite.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: ClassVar[str]
    source: ClassVar[str]

    needs_output_weights: ClassVar[bool] = False
    """True if the part reads ``context.output_weights``."""

    needs_rotation: ClassVar[bool] = False
    """True if the part turns queries or keys back to what they were before RoPE (``context.known_rotation``)."""

    @property
    def takes_cap(self) -> bool:
        """True if the part is right for a model that caps its logits (``context.softmax``). Default: it reads no
        queries."""
        return self.query_window == 0

    @property
    def takes_sinks(self) -> bool:
        """True if the part is right for a model with attention sinks (``context.softmax``). Default: it reads no
        queries."""
        return self.query_window == 0

    @property
    def takes_latents(self) -> bool:
        """True if the part is right for a model whose entries are single vectors, key and value at once (MLA).
        Default: it reads no output projections, which take values of heads."""
        return not self.needs_output_weights

    token_fields: ClassVar[tuple[str, ...]] = ()
    """Names of parameters that are token ids, and for which a request may give a text."""

    @classmethod
    def model_defaults(cls, model: ServedModel) -> dict[str, Any]:
        """Values, by name, of parameters whose default depends on the model: they replace None, the default of such a
        field, before a request is scheduled."""
        return {}

    @property
    def query_window(self) -> int:
        """Number of the newest queries (prompt or generated) that the part reads from ``context.queries``."""
        return 0

    def held(self, shape: HeadShape) -> int:
        """About how many 4-byte numbers its methods hold at once for one KV head of one layer, beside a few for each
        entry: as many heads are compressed together as fit into the workspace. Default: 0. Of other packages' parts
        two copies of all keys and values are assumed instead."""
        return 0


class Allocator(Part):
    """Splits the budget over layers and heads."""

    reads_attention: ClassVar[bool] = True
    """True if ``head_budgets`` reads ``importance``, which is not computed otherwise."""

    needs_scores: ClassVar[bool] = False
    """True if ``head_budgets`` means nothing where neither the tracker nor the selector scores entries."""

    needs_head_budgets: ClassVar[bool] = False
    """True if it divides a budget as the server's file of head budgets says."""

    has_layer_statistic: ClassVar[bool] = False
    splits_heads: ClassVar[bool] = False
    """True if heads of one layer may get different budgets."""

    pools_layers: ClassVar[bool] = False
    """True if heads of all layers of a request share the budget (``pooled_budgets``)."""

    fills_budget: ClassVar[bool] = True
    """False if the heads' budgets may add up to less; the budget is then the most that they hold on average."""

    def capacity(self, budget: int) -> int | None:
        """Entries per head that the cache must hold for any data: the largest budget of any layer and head. None: all
        entries, because some layer or head keeps them."""
        return budget

    def layer_budgets(self, budget: int, num_entries: int, num_layers: int, least: int) -> list[int] | None:
        """Entries that each head of each layer of the model keeps of ``num_entries``, at least ``least``, where that
        does not depend on data; otherwise None."""
        return None

    def layer_statistic(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        """``[sequence layers]``: the scalar that the split depends on, equal on all tensor-parallel workers."""
        raise TypeError(f"allocator {self.name!r} has no layer statistic")

    def head_budgets(self, entries: Entries, importance: Tensor, context: CompressionContext) -> Tensor:
        """``[H]`` int64: entries that each row keeps, each ``<= capacity(context.budget)``; on average over the layers
        and heads of this worker the budget, or as ``fills_budget`` says. Where heads have pages of their own, they are
        rounded to pages. A tensor of the entries' device is not waited for while a request generates: its next
        compression takes these budgets then."""
        layers = context.heads.num_layers
        budgets = self.layer_budgets(context.budget, len(entries), layers, context.min_budget)
        if budgets is None:
            raise TypeError(f"allocator {self.name!r} has neither layer_budgets nor head_budgets")
        return torch.tensor([budgets[layer] for layer in context.heads.layers], device="cpu")

    def pooled_budgets(self, importance: Tensor, context: CompressionContext) -> Tensor:
        """``head_budgets`` where ``pools_layers``, all layers of one request at once. importance: ``[H, n]`` float32,
        negative for dead entries."""
        raise TypeError(f"allocator {self.name!r} does not compare layers")


@dataclass(frozen=True)
class Repetition:
    """A chunk of a context that the model repeats while attention to it is observed.

    start, end: its tokens. sinks: first tokens of the sequence whose keys attention is shared with. tokens: ids that
    follow the context: prompts, then the chunk.
    """

    start: int
    end: int
    sinks: int
    tokens: list[int]


class Tracker(Part):
    """Ranks entries by the statistics that attention accumulates while the request runs."""

    mode: ClassVar[ScoreMode]

    repeats_context: ClassVar[bool] = False
    """True if scores come from queries of tokens that repeat the context after it (``repetition``), and from no others:
    ``mode`` is then ``none``."""

    reads_ahead: ClassVar[bool] = False
    """True if scores come from the context's own queries, turned as if it were repeated (``lookahead``), and from no
    others: ``mode`` is then ``none``."""

    predicts_scores: ClassVar[bool] = False
    """True if scores come from a model of the tokens' hidden states, as logarithms: ``mode`` is then ``none``."""

    @property
    def takes_latents(self) -> bool:
        """As of any part, and scores are not predicted: models of hidden states predict those of heads."""
        return super().takes_latents and not self.predicts_scores

    @property
    def normalizes(self) -> bool:
        """True if the scores of a repetition weigh queries by their hidden states and entries by their values (KVzip+).
        Default: False."""
        return False

    def repetition(self, context: Sequence[int], index: int) -> Repetition | None:
        """The chunk ``index`` of a context of these token ids; None: there are not so many. Default: none."""
        return None

    def num_repeated(self, context: int) -> int:
        """Most tokens of any repetition of a context of so many tokens. Default: 0."""
        return 0

    @property
    def prompt_window(self) -> int | Literal["all"]:
        """Number of the prompt's last tokens that are scored as queries before the first compression (default: 0); more
        than 0 unless ``mode`` is ``none``."""
        return 0

    @property
    def update_decay(self) -> float:
        """Weight of the past when attention updates the statistic (see ``ops.ScoreUpdate``)."""
        return 1.0

    @abstractmethod
    def importance(self, entries: Entries) -> Tensor:
        """``[H, n]`` float32: larger means more worth keeping. Comparable within a row only."""


class Selector(Part):
    """Chooses the entries that stay, alone or as targets of others."""

    needs_scores: ClassVar[bool]

    needs_probabilities: ClassVar[bool] = False
    """True if importance must be made of probabilities, not of logits (``log_ema``)."""

    takes_shares: ClassVar[bool] = False
    """True if the number that stays of each row is read from ``context.budgets`` and ``context.counts`` alone: then
    heads with different budgets are compressed together."""

    pools_heads: ClassVar[bool] = False
    """True if ``select`` looks at all heads of a layer together (``context.heads.of_all_workers``)."""

    has_mass: ClassVar[bool] = False
    """True if allocators compare the selector's ``mass`` instead of the tracker's attention."""

    @property
    def members(self) -> "tuple[Selector, ...]":
        """The selectors that have to suit the tracker: itself, or those whose rankings it combines."""
        return (self,)

    @property
    @abstractmethod
    def min_budget(self) -> int:
        """Smallest budget that this selector can work with: one more than it protects."""

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]`` bool: live entries that stay whatever their importance (sinks, recent window). Default: none."""
        return torch.zeros_like(entries.is_live)

    def mass(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]`` float32, not negative: the worth of each entry, in a unit that the heads of a layer share."""
        raise TypeError(f"selector {self.name!r} has no mass of its own")

    @abstractmethod
    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        """``[H, n]`` bool: the entries that stay, ``context.counts`` of them; dead ones only if live ones are few."""


class Merger(Part):
    """Merges the entries that the selector did not keep (sources) into others (targets), or drops them.

    A merger may keep slots of its own inside the budget (ZSMerge's residual); the selector ranks the other entries.
    ``protected`` is the selector's: such entries may be targets, but keep their own position, so that a sink remains a
    sink. Both merging methods return what changes and leave ``entries`` as they are. The number of merged entries is a
    tensor, so that nothing waits for the device.
    """

    tracker_modes: ClassVar[frozenset[ScoreMode]]
    """Modes of the trackers that this merger works with."""

    takes_shares: ClassVar[bool] = False
    """True if the merger leaves entries as they are, whatever number of them, and fills no slots; the last of ``kept``
    are then negative where a row has fewer."""

    @property
    def takes_latents(self) -> bool:
        """Default: the merger leaves entries as they are."""
        return super().takes_latents and self.takes_shares

    def query_window_with(self, mode: ScoreMode) -> int:
        """``query_window`` beside a tracker of this mode, for a merger that reads queries where the tracker's statistic
        is not what it needs. Default: the same with every tracker."""
        return self.query_window

    def held(self, shape: HeadShape) -> int:
        """Default: copies of what is merged, and keys that it is compared with; 0 of mergers that leave entries as they
        are."""
        return 0 if self.takes_shares else (shape.num_kept + 4 * shape.num_leaving) * shape.head_size

    def num_slots(self, budget: int) -> int:
        """Entries of the budget that this merger fills itself; the selector keeps the rest. Default: 0."""
        return 0

    def is_slot(self, entries: Entries) -> Tensor:
        """``[H, n]`` bool: this merger's slots, never candidates of selection. Default: none. It is not asked about
        tokens that nothing has been done to."""
        return torch.zeros_like(entries.is_live)

    def before_selection(
        self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate | None:
        """Merges before selection (KeepKV table 3): a place for each of the ``n`` entries, empty where one was merged
        away; None (the default) if there are none."""
        return None

    @abstractmethod
    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        """``budget`` places per row: the entries at ``kept`` (``[H, context.num_kept]`` int64) in that order, with
        what is merged into them, then the merger's slots."""
