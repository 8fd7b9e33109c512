"""Writes of compactions to the cache: moved entries, changed rows and metadata, with counts of each."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.engine.attention.rows import QueryRing
from vllm_kvmerge.engine.worker.cache_positions import moves
from vllm_kvmerge.engine.worker.compaction import FEWEST, MOST, Batch, SequenceLayer
from vllm_kvmerge.engine.worker.gather import CachedLayers
from vllm_kvmerge.engine.worker.paged_entries import PagedEntries
from vllm_kvmerge.ops import ROW_PLANES, HeadPages, PlaneName, Rows, SequenceLayers
from vllm_kvmerge.ops.types import Destination, sent
from vllm_kvmerge.policies import CacheUpdate, CompressionResult

NO_COUNT = 1 << 40
"""More entries than any head has: the fewest of none."""


class WrittenLayers(CachedLayers):
    """A worker's layers, as compactions write to them."""

    def write(
        self, seq_layers: list[SequenceLayer], batch: Batch, result: CompressionResult, rounds: tuple[bool, ...]
    ) -> None:
        """Writes what has become of the entries of sequence layers. rounds: of heads that take pages of others, and of
        those that do not, in the order that ``PageAssignment`` asks for."""
        assert isinstance(result.source, PagedEntries)
        update = result.update
        by_head = torch.stack([update.merged, result.evicted, result.as_before, result.kept], 1)
        source, rows = result.source.seq_layers, Rows(update.changed, update.keys, update.values)
        index = sent(self.numbers(seq_layers).by_head, self.device)
        blocks = sent(self.new_blocks(seq_layers, batch), self.device)
        written: Iterable[tuple[Destination, Tensor | None]] = [(blocks, None)]
        if batch.assignments:
            written = self._destinations(seq_layers, batch, rounds)
        entries = _new_rows(source, update.kept, rows) if batch.coding else None
        for destination, heads in written:
            count(batch.counts, index, by_head, heads)
            if entries is not None:
                assert isinstance(destination, HeadPages)
                ops.write_codes(self.layers_of(seq_layers, blocks), destination, *entries, update.metadata[0])
            elif batch.complete is None:
                ops.merge_entries(source, destination, update.kept, update.metadata, rows)
            else:
                self._restore(source, self.layers_of(seq_layers, blocks), destination, update, rows)
            if batch.moves_keys and self.rotation is not None:
                places = update.positions.contiguous()
                where = moves(result.source.positions, places, batch.plan.new_front)
                layers = self.layers_of(seq_layers, blocks)
                ops.turn_keys(layers, destination, *where, self.rotation.table, self.rotation.is_neox)

    def _destinations(
        self, seq_layers: list[SequenceLayer], batch: Batch, rounds: tuple[bool, ...]
    ) -> Iterator[tuple[HeadPages, Tensor]]:
        """Where heads with pages of their own are written, and which (``[H]`` bool); rounds: of heads that take pages
        of others, and of those that do not, in the order that ``PageAssignment`` asks for."""
        pages = self.head_pages([batch.assignments[one.request].pages for one in seq_layers], seq_layers)
        grows = torch.stack([batch.assignments[one.request].grows[one.layer] for one in seq_layers])
        for round_grows in rounds:
            heads = grows == round_grows
            if heads.any():
                yield pages.of_heads(heads), sent(heads.flatten(), self.device)

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


def _new_rows(source: SequenceLayers, kept: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Keys and values of the places ``[0, C)``, ``[H, C, d]`` float32: those of ``kept`` entries (``[H, C]``), or new
    ones."""
    count = kept.shape[1]

    def of_places(plane: PlaneName, new: Tensor | None) -> Tensor:
        found = ops.gather_rows(source, plane, kept)
        if new is None:
            return found
        index = rows.places.where(rows.places >= 0, count).unsqueeze(-1).expand_as(new)
        return torch.nn.functional.pad(found, (0, 0, 0, 1)).scatter_(1, index, new)[:, :count]

    return of_places("keys", rows.keys), of_places("values", rows.values)


def count(counts: Tensor, index: Tensor, by_head: Tensor, heads: Tensor | None) -> None:
    """Adds what heads came to. counts: ``Execution.counts``. index: ``[H]`` plans. by_head: ``[H, 4]``. heads: ``[H]``
    bool, those that count; None: all."""
    fewest = most = by_head[:, -1]
    if heads is not None:
        by_head, fewest, most = by_head * heads.unsqueeze(1), fewest.where(heads, NO_COUNT), most.where(heads, 0)
    counts[:, :FEWEST].index_add_(0, index, by_head)
    counts[:, FEWEST].scatter_reduce_(0, index, fewest, "amin")
    counts[:, MOST].scatter_reduce_(0, index, most, "amax")
