"""Compressed rows as the operators on the CPU take them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvmerge.engine.attention.rows import BatchRow, HeldQueries, QueryReader
from vllm_kvmerge.ops import AttentionBatch, HeadPages, PagedKVCache, ScoreMode, Softmax, paged_attention
from vllm_kvmerge.ops.coded import number_of


def compressed_batch(
    rows: Sequence[BatchRow], block_table: Tensor, query_starts: Tensor, query_lens: Tensor, seq_lens: Tensor
) -> AttentionBatch:
    """A batch of ``rows``, without ``pages``; the tensors are those of ``AttentionBatch``."""
    numbers = [(row.front, row.tail, row.update.mode.code) for row in rows]
    fronts, tails, modes = torch.tensor(numbers, dtype=torch.int32).unbind(1)
    decays = torch.tensor([row.update.decay for row in rows])
    return AttentionBatch(block_table, query_starts, query_lens, seq_lens, fronts, tails, modes, decays)


def rows_of_batch(common: CommonAttentionMetadata, rows: dict[int, BatchRow]) -> AttentionBatch:
    """``compressed_batch`` of ``rows``, by their place in a step's batch."""
    index = torch.tensor(list(rows))
    starts, lens = common.query_start_loc[index], common.query_start_loc.diff()[index]
    tables, seq_lens = common.block_table_tensor[index], common.seq_lens[index]
    return compressed_batch(list(rows.values()), tables, starts, lens, seq_lens)


def head_pages(rows: Sequence[BatchRow]) -> list[HeadPages] | None:
    """The heads' pages of each layer, one row for each of ``rows``; None if all fronts are ordinary ones."""
    pages = [row.pages for row in rows]
    first = next((one for one in pages if one is not None), None)
    if first is None:
        return None
    width = max(one.ids.shape[2] for one in pages if one is not None)
    ids = torch.full((len(pages), *first.ids.shape[:2], width), -1)
    fronts = torch.zeros(len(pages), *first.fronts.shape, dtype=torch.int64)
    for row, one in enumerate(pages):
        if one is not None:
            ids[row, :, :, : one.ids.shape[2]] = one.ids
            fronts[row] = one.fronts
    coded = torch.tensor([0 if one is None else number_of(one.coding(0)) for one in pages], dtype=torch.uint8)
    by_layer = zip(ids.transpose(0, 1).contiguous(), fronts.transpose(0, 1).contiguous(), strict=True)
    return [HeadPages(first.layers, *one, coded if coded.any() else None) for one in by_layer]


def read_verified(
    verified: Sequence[tuple[HeldQueries, QueryReader]],
    layers: Sequence[PagedKVCache],
    scale: float,
    softmax: Callable[[int], Softmax],
) -> None:
    """Has queries that were held back count as their readers' rows ask, in all layers."""
    updated = [one for one in verified if one[1].row.update.mode is not ScoreMode.NONE]
    batch, pages = _batch_of([reader for _, reader in updated])
    for layer, cache in enumerate(layers):
        for held, reader in verified:
            reader.read_own(layer, held.queries(layer, reader.num_queries), cache, scale, softmax(layer))
        if batch is not None:
            # What attention gives is known; again, for the scores of the entries that it goes to.
            queries = torch.cat([held.queries(layer, reader.num_queries) for held, reader in updated])
            of_layer = batch if pages is None else replace(batch, pages=pages[layer])
            output = queries.new_empty(*queries.shape[:2], cache.values.shape[3])
            paged_attention(queries, cache, of_layer, scale, output, softmax(layer))


def _batch_of(readers: Sequence[QueryReader]) -> tuple[AttentionBatch | None, list[HeadPages] | None]:
    """The readers' rows, their queries one after the other, and ``head_pages``."""
    if not readers:
        return None, None
    rows, lens = [one.row for one in readers], torch.tensor([one.num_queries for one in readers], dtype=torch.int32)
    starts = lens.cumsum(0, dtype=torch.int32) - lens
    seq_lens = torch.tensor([one.seq_len for one in readers], dtype=torch.int32)
    tables = torch.stack([one.blocks for one in readers])
    return compressed_batch(rows, tables, starts, lens, seq_lens), head_pages(rows)
