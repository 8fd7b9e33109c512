"""Live entries of sequences in a paged cache; keys and values are read on demand."""

from copy import copy

from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.ops import PLAIN_SOFTMAX, Changes, Fusion, PlaneName, SequenceLayers, Softmax
from vllm_kvmerge.policies.entries import BLANK, Entries, LazyEntries
from vllm_kvmerge.policies.tiles import compared_in_tiles


class PagedEntries(LazyEntries):
    """Live entries of sequence layers, equally many each, concatenated in the first dimension."""

    def __init__(
        self, seq_layers: SequenceLayers, log_votes: Tensor, scores: Tensor, aux: Tensor, positions: Tensor
    ) -> None:
        super().__init__(log_votes, scores, aux, positions)
        self.seq_layers = seq_layers

    @classmethod
    def gather(cls, seq_layers: SequenceLayers) -> "PagedEntries":
        """Reads the metadata, with the statistics that attention left in the cache."""
        return cls(seq_layers, *ops.gather_metadata(seq_layers))

    def of_rows(self, rows: list[int]) -> "PagedEntries":
        """Some rows' entries."""
        part = copy(self)
        for name in BLANK:
            setattr(part, name, getattr(self, name)[rows])
        for name in {"is_live", "keys", "values"} & vars(part).keys():  # cached, of all rows
            delattr(part, name)
        part.seq_layers = self.seq_layers.of_heads(rows)
        return part

    def keys_at(self, index: Tensor) -> Tensor:
        return ops.gather_rows(self.seq_layers, "keys", index)

    def values_at(self, index: Tensor) -> Tensor:
        return ops.gather_rows(self.seq_layers, "values", index)

    def most_similar(self, sources: Tensor, targets: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        return _most_similar(self.seq_layers, sources, targets, usable)

    def changed(self, changes: Changes, *metadata: Tensor) -> Entries:
        return _PagedPlaces(self.seq_layers, changes, *metadata)

    def mixed(self, plane: PlaneName, sources: Tensor, row: Tensor, shares: Tensor, targets: Tensor | None) -> Tensor:
        return ops.mix_entries(self.seq_layers, plane, sources, row, shares, targets)

    def join_slots(
        self, slots: Tensor, sources: Tensor, source_weights: Tensor, slot_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        return ops.join_entries(self.seq_layers, slots, sources, source_weights, slot_weights)

    def fused_attention(
        self,
        queries: Tensor,
        query_positions: Tensor,
        scale: float,
        fusion: Fusion,
        softmax: Softmax = PLAIN_SOFTMAX,
    ) -> Tensor:
        metadata = self.log_votes, self.positions
        return ops.fused_attention(self.seq_layers, queries, query_positions, *metadata, scale, fusion, softmax)


class _PagedPlaces(LazyEntries):
    """Places for live entries of sequence layers."""

    def __init__(self, seq_layers: SequenceLayers, changes: Changes, *metadata: Tensor) -> None:
        super().__init__(*metadata)
        self._seq_layers, self._changes = seq_layers, changes

    def keys_at(self, index: Tensor) -> Tensor:
        return ops.gather_rows(self._seq_layers, "keys", index, self._changes)

    def values_at(self, index: Tensor) -> Tensor:
        return ops.gather_rows(self._seq_layers, "values", index, self._changes)

    def most_similar(self, sources: Tensor, targets: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        return _most_similar(self._seq_layers, sources, targets, usable, self._changes)


def _most_similar(
    seq_layers: SequenceLayers, sources: Tensor, targets: Tensor, usable: Tensor, changes: Changes | None = None
) -> tuple[Tensor, Tensor]:
    def compare(part: Tensor) -> tuple[Tensor, Tensor]:
        return ops.most_similar(seq_layers, part, targets, usable, changes)

    return compared_in_tiles(compare, sources, targets.shape[1], seq_layers.head_size)
