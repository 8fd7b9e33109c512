"""The tokens that compressed entries are made of, learnt from policies and mergers as they are.

For given keys, scores and decisions a merged value is a linear combination of values. So a compression is run again on
values to which an identity matrix has been appended: what comes out there are the combination's weights. That matrix is
scaled by ``TAG_SIZE``, whose square vanishes beside any value, so that a merger that weighs values (GRKV) decides as it
would without it, while weights keep all their digits. The second run keeps the entries that the first one chose, so
selectors never see it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import PrivateAttr
from torch import Tensor
from torch.nn.functional import pad

from vllm_kvmerge.ops import PLAIN_SOFTMAX, Changes, Fusion, Softmax
from vllm_kvmerge.policies import DEAD, CompressionContext, CompressionPolicy, CompressionResult, Entries, Selector
from vllm_kvmerge.policies.entries import LazyEntries
from vllm_kvmerge.policies.indexing import inverse, select

TAG_SIZE = 2.0**-40
"""A power of 2, so that dividing by it is exact."""

MAX_TAG_BYTES = 256 << 20
"""Size of all entries' tags above which they go through the policy in several runs."""


@dataclass(frozen=True)
class Mixture:
    """One compression of one layer's ``n`` entries per head: ``C`` places per head, in the cache's order.

    kept: ``[H, C]`` int64, the entry that each place holds; negative: none of them. log_votes: ``[H, C]``, positions:
    ``[H, C]`` int64, as in ``CacheUpdate``. changed: ``[H, r]`` int64, places with a new value; negative: none.
    weights: ``[H, r, n]``, of each entry's value in theirs. residual: ||W v - v'|| / ||v'|| over the new values v'.
    """

    layer: int
    kept: Tensor
    log_votes: Tensor
    positions: Tensor
    changed: Tensor
    weights: Tensor
    residual: float


class RecordedPolicy(CompressionPolicy):
    """A policy that does the same, and says what each layer's entries were made of."""

    _record: Callable[[Mixture], None] = PrivateAttr()

    @classmethod
    def of(cls, policy: CompressionPolicy, record: Callable[[Mixture], None]) -> "RecordedPolicy":
        recorded = cls(**{name: getattr(policy, name) for name in CompressionPolicy.model_fields})
        recorded._record = record
        return recorded

    def compress(self, entries: Entries, context: CompressionContext, num_rows: int | None = None) -> CompressionResult:
        selections = _Selections(inner=self.selector)
        parts: dict[str, Any] = {name: getattr(self, name) for name in CompressionPolicy.model_fields}
        # Neither is checked again: the selection stands in for a selector that was.
        policy = CompressionPolicy.model_construct(**(parts | {"selector": selections}))
        result = policy.compress(entries, context)
        update = result.update
        if update.values is None:  # keys may have changed all the same; values are whole
            changed, weights = update.changed[:, :0], update.scores.new_zeros(len(update.kept), 0, len(entries))
        else:
            changed = update.changed
            weights = torch.cat(
                [
                    self._weights(policy, selections.again(), entries, context, result, columns)
                    for columns in _column_groups(entries)
                ],
                dim=2,
            )
        for heads in context.heads.by_sequence_layer(torch.arange(entries.num_rows)):
            self._record(
                Mixture(
                    context.heads.layers[int(heads[0])],
                    update.kept[heads].masked_fill(update.positions[heads] == DEAD, DEAD),
                    update.log_votes[heads],
                    update.positions[heads],
                    changed[heads],
                    weights[heads],
                    _residual(entries, result, weights, heads),
                )
            )
        return result

    def _weights(
        self,
        policy: CompressionPolicy,
        selections: "_Selections",
        entries: Entries,
        context: CompressionContext,
        result: CompressionResult,
        columns: range,
    ) -> Tensor:
        """``[H, r, columns]``: of the values at ``columns``, in the values that the result's compression changed."""
        # A merger that reads queries may expect keys, queries and values of one size.
        pads_keys = self.merger.query_window_with(self.tracker.mode) > 0
        if pads_keys and context.queries is not None:
            vectors = pad(context.queries.vectors, (0, len(columns)))
            context = replace(context, queries=replace(context.queries, kept=vectors))
        if self.merger.needs_output_weights and context.output_weights is not None:
            context = replace(context, output_weights=pad(context.output_weights, (0, len(columns))))
        tagged = policy.model_copy(update={"selector": selections}).compress(
            _Tagged(entries, columns, pads_keys), context
        )
        kept, changed, num_places = result.update.kept, result.update.changed, result.update.kept.shape[1]
        assert torch.equal(tagged.update.kept, kept) and tagged.update.values is not None
        rows = tagged.update.values[..., -len(columns) :] / TAG_SIZE
        row = select(inverse(tagged.update.changed, num_places), changed)
        found = rows.gather(1, row.clamp(min=0).unsqueeze(-1).expand(-1, -1, rows.shape[2]))
        # Where the value turned out to be the old one the second time, it is the kept entry's alone.
        own = _one_hot(select(kept, changed), columns)
        found = torch.where((row >= 0).unsqueeze(-1), found, own)
        return found.masked_fill((changed < 0).unsqueeze(-1), 0.0)


def _column_groups(entries: Entries) -> Iterator[range]:
    n = len(entries)
    size = max(1, MAX_TAG_BYTES // (4 * entries.positions.numel()))
    for start in range(0, n, size):
        yield range(start, min(start + size, n))


def _residual(entries: Entries, result: CompressionResult, weights: Tensor, heads: Tensor) -> float:
    """||W v - v'|| / ||v'|| over these heads' new values; 0 where there are none."""
    update = result.update
    is_new = update.changed[heads] >= 0
    if update.values is None or not is_new.any():
        return 0.0
    sources = entries.values.masked_fill(~entries.is_live.unsqueeze(-1), 0.0)[heads]
    values = update.values[heads][is_new]
    distance = (weights[heads] @ sources)[is_new] - values
    return float(distance.norm() / values.norm().clamp(min=torch.finfo(torch.float32).tiny))


def _one_hot(index: Tensor, columns: range) -> Tensor:
    """``[H, m, columns]`` float32: 1 where a column is the entry at ``index`` (``[H, m]`` int64)."""
    numbers = torch.arange(columns.start, columns.stop, device=index.device)
    return (index.unsqueeze(-1) == numbers).float()


class _Tagged(LazyEntries):
    """Entries to whose values the columns of an identity matrix have been appended, scaled by ``TAG_SIZE``.

    Nothing else differs, except that keys grow by as many zeros if ``pads_keys``.
    """

    def __init__(self, base: Entries, columns: range, pads_keys: bool) -> None:
        super().__init__(base.log_votes, base.scores, base.aux, base.positions)
        self._base, self._columns, self._pads_keys = base, columns, pads_keys

    def keys_at(self, index: Tensor) -> Tensor:
        keys = self._base.keys_at(index)
        return pad(keys, (0, len(self._columns))) if self._pads_keys else keys

    def values_at(self, index: Tensor) -> Tensor:
        return torch.cat([self._base.values_at(index), TAG_SIZE * _one_hot(index, self._columns)], dim=2)

    def most_similar(self, sources: Tensor, targets: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        return self._base.most_similar(sources, targets, usable)

    def fused_attention(
        self,
        queries: Tensor,
        query_positions: Tensor,
        scale: float,
        fusion: Fusion,
        softmax: Softmax = PLAIN_SOFTMAX,
    ) -> Tensor:
        if self._pads_keys:
            queries = queries[..., : -len(self._columns)]
        return self._base.fused_attention(queries, query_positions, scale, fusion, softmax)

    def without(self, hidden: Tensor) -> "_Tagged":
        return _Tagged(self._base.without(hidden), self._columns, self._pads_keys)

    def of_rows(self, rows: list[int]) -> "_Tagged":
        return _Tagged(self._base.of_rows(rows), self._columns, self._pads_keys)

    def changed(self, changes: Changes, *metadata: Tensor) -> Entries:
        keys = changes.keys
        if self._pads_keys and keys is not None:
            keys = keys[..., : -len(self._columns)]
        compared = self._base.changed(replace(changes, keys=keys), *metadata)
        return _TaggedPlaces(super().changed(changes, *metadata), compared)


class _TaggedPlaces(LazyEntries):
    """Places for tagged entries, compared as those that are not tagged: an operator on these may round new keys."""

    def __init__(self, places: Entries, compared: Entries) -> None:
        super().__init__(*places.metadata)
        self._places, self._compared = places, compared

    def keys_at(self, index: Tensor) -> Tensor:
        return self._places.keys_at(index)

    def values_at(self, index: Tensor) -> Tensor:
        return self._places.values_at(index)

    def most_similar(self, sources: Tensor, targets: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        return self._compared.most_similar(sources, targets, usable)


class _Selections(Selector):
    """A selector whose answers are remembered; ``again`` gives them once more, in the same order."""

    name: ClassVar[str] = "recorded"
    source: ClassVar[str] = "another selector"
    needs_scores: ClassVar[bool] = False

    inner: Selector
    _answers: list[Tensor] = PrivateAttr(default_factory=list)
    _next: int | None = PrivateAttr(default=None)

    def again(self) -> "_Selections":
        other = _Selections(inner=self.inner)
        other._answers, other._next = self._answers, 0
        return other

    @property
    def min_budget(self) -> int:
        return self.inner.min_budget

    @property
    def query_window(self) -> int:
        return self.inner.query_window

    @property
    def has_mass(self) -> bool:  # type: ignore[override]
        return self.inner.has_mass

    def mass(self, entries: Entries, context: CompressionContext) -> Tensor:
        return self._answer(lambda: self.inner.mass(entries, context))

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        return self._answer(lambda: self.inner.protected(entries, context))

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        return self._answer(lambda: self.inner.select(entries, importance, protected, context))

    def _answer(self, ask: Callable[[], Tensor]) -> Tensor:
        if self._next is None:
            self._answers.append(ask())
            return self._answers[-1]
        self._next += 1
        return self._answers[self._next - 1]


class Provenance:
    """Tokens that each live entry of one layer consists of, while its cache is compressed again and again.

    shares: ``[H, entries, T]`` float32, the weight of each token's value in each entry's. origins: ``[H, entries]``
    int64, the token whose own entry it is; ``DEAD`` where it is nobody's: an empty place, or a new one such as a slot
    of ZSMerge. log_votes: ``[H, entries]``. positions: ``[H, entries]`` int64, ``DEAD`` where empty.
    """

    def __init__(self, num_heads: int) -> None:
        self.shares = torch.zeros(num_heads, 0, 0)
        self.origins = torch.zeros(num_heads, 0, dtype=torch.int64)
        self.log_votes = torch.zeros(num_heads, 0)
        self.positions = torch.zeros(num_heads, 0, dtype=torch.int64)
        self._is_new = True  # each entry is its token

    def extend(self, num_tokens: int) -> None:
        """Ordinary tokens follow, up to ``num_tokens`` in all."""
        num_heads, _, known = self.shares.shape
        new = torch.arange(known, num_tokens).expand(num_heads, -1)
        own = torch.eye(num_tokens)[known:].expand(num_heads, -1, -1)
        # Heads share one matrix until the first compression: of a long prompt each head's would be large.
        self.shares = torch.cat([pad(self.shares, (0, num_tokens - known)), own], dim=1) if known else own
        self.origins = torch.cat([self.origins, new], dim=1)
        self.positions = torch.cat([self.positions, new], dim=1)
        self.log_votes = pad(self.log_votes, (0, num_tokens - known))

    def compress(self, mixture: Mixture) -> None:
        """The entries become the mixture's."""
        shares = self.shares.gather(1, _expanded(mixture.kept.clamp(min=0), self.shares.shape[2]))
        shares = shares.masked_fill_((mixture.kept < 0).unsqueeze(-1), 0.0)
        head, row = (mixture.changed >= 0).nonzero(as_tuple=True)
        mixed = mixture.weights if self._is_new else mixture.weights @ self.shares
        shares[head, mixture.changed[head, row]] = mixed[head, row]
        self.shares, self.origins = shares, select(self.origins, mixture.kept)
        self.log_votes, self.positions = mixture.log_votes, mixture.positions
        self._is_new = False

    @property
    def is_live(self) -> Tensor:
        """``[H, entries]`` bool."""
        return self.positions != DEAD

    @property
    def survives(self) -> Tensor:
        """``[H, T]`` bool: tokens whose own entry is still there, whatever has been merged into it."""
        num_heads, _, num_tokens = self.shares.shape
        mask = torch.zeros(num_heads, num_tokens + 1, dtype=torch.bool)
        return mask.scatter_(1, self.origins.masked_fill(self.origins < 0, num_tokens), True)[:, :num_tokens]

    @property
    def is_represented(self) -> Tensor:
        """``[H, T]`` bool: tokens that survive, or of whose value a live entry holds a part."""
        return self.survives | (self.shares != 0).any(1)

    @property
    def num_tokens_of_each(self) -> Tensor:
        """``[H, entries]`` int64: of how many tokens' values each entry holds a part."""
        return (self.shares != 0).sum(2)

    def snapshot(self) -> "Provenance":
        """As it is now; what happens next replaces its tensors and changes none."""
        other = Provenance(len(self.shares))
        vars(other).update(vars(self))
        return other


def _expanded(index: Tensor, size: int) -> Tensor:
    return index.unsqueeze(-1).expand(-1, -1, size)


class Ledger:
    """The provenance of some layers, and the largest residual of their mixtures. ``record`` goes to a policy."""

    def __init__(self, layers: Sequence[int], num_heads: int) -> None:
        self.layers = {layer: Provenance(num_heads) for layer in layers}
        self.residual = 0.0

    def extend(self, num_tokens: int) -> None:
        for provenance in self.layers.values():
            provenance.extend(num_tokens)

    def record(self, mixture: Mixture) -> None:
        if mixture.layer in self.layers:
            self.layers[mixture.layer].compress(mixture)
            self.residual = max(self.residual, mixture.residual)

    def snapshot(self) -> dict[int, Provenance]:
        return {layer: provenance.snapshot() for layer, provenance in self.layers.items()}
