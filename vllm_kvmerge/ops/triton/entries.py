"""Single entries of sequence layers in Triton, which compactions read, compare and write."""

import sys
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from vllm_kvmerge.ops import reference
from vllm_kvmerge.ops.attention import Fusion
from vllm_kvmerge.ops.similarity import slot_products
from vllm_kvmerge.ops.triton import entry_kernels, places
from vllm_kvmerge.ops.triton.attention_kernels import LOG2E
from vllm_kvmerge.ops.triton.backend import ELEMENTS, codes_of, layer_addresses, product_type, rounded
from vllm_kvmerge.ops.triton.descriptors import Changed, Located, Strides
from vllm_kvmerge.ops.triton.indexing import mix_in as mix_in  # for mix_entries
from vllm_kvmerge.ops.triton.plan import power_of_two, settings_for
from vllm_kvmerge.ops.types import (
    PLAIN_SOFTMAX,
    Changes,
    Destination,
    HeadPages,
    Metadata,
    PlaneName,
    SequenceLayers,
    Softmax,
    sent,
    stored,
)

STAGING_BYTES = 128 << 20
"""Bytes of keys and values that are moved at a time."""

PLANES = {"keys": places.KEYS.value, "values": places.VALUES.value}


class _KernelArguments:
    """Sequence layers as kernels take them. Raises ValueError if layers differ in more than their addresses."""

    def __init__(self, seq_layers: SequenceLayers) -> None:
        self.cache = cache = seq_layers.layers[0]
        self.device = cache.device
        self.num_heads = seq_layers.num_heads
        self.num_layers = len(seq_layers.layers)
        addresses, layers = layer_addresses(seq_layers.layers), self.on_device(seq_layers.layer)
        self._located = Located(addresses, layers, self.on_device(seq_layers.blocks), None, None, cache.num_kv_heads)
        self.stride_blocks = self._located.blocks.stride(0)
        self._segments = seq_layers.segments
        self._pages = seq_layers.pages

    @cached_property
    def entries(self) -> Located:
        """The live ones."""
        return self._located._replace(segments=self.on_device(self._segments), pages=self._table(self._pages))

    def destination(self, destination: Destination) -> Located:
        """Where to write; blocks are not read where there are pages."""
        addresses, layers, blocks, _, pages, num_heads = self._located
        if isinstance(destination, HeadPages):
            pages = self._table(destination)
        else:
            blocks = self.on_device(destination)
        return Located(addresses, layers, blocks, None, pages, num_heads)

    def _table(self, pages: HeadPages | None) -> Tensor | None:
        return None if pages is None else pages.table_on(self.device)

    def on_device(self, tensor: Tensor) -> Tensor:
        return sent(tensor, self.device).contiguous()

    @cached_property
    def strides(self) -> dict[str, Strides]:
        block, head, slot, dim = self.cache.values.stride()
        return {"keys": Strides(*self.cache.keys.stride()), "values": Strides(block, head, dim, slot)}

    def grid(self, size: int, block: int) -> tuple[int, int]:
        return self.num_heads, -(-size // block)

    @property
    def constants(self) -> dict[str, Any]:
        cache = self.cache
        return {
            "HEAD_SIZE": cache.head_size,
            "BLOCK_SIZE": cache.block_size,
            "BLOCK_D": power_of_two(cache.head_size),
            "ELEMENT": ELEMENTS[cache.keys.dtype],
        }


def _arguments(seq_layers: SequenceLayers) -> _KernelArguments:
    """Those of sequence layers, whose numbers are sent to the GPU once."""
    found: _KernelArguments | None = seq_layers.__dict__.get("_kernel_arguments")
    if found is None:
        found = seq_layers.__dict__["_kernel_arguments"] = _KernelArguments(seq_layers)
    return found


def gather_metadata(seq_layers: SequenceLayers) -> Metadata:
    at, n = _arguments(seq_layers), seq_layers.num_entries
    log_votes, scores, aux = (torch.empty(at.num_heads, n, device=at.device) for _ in range(3))
    metadata = log_votes, scores, aux, torch.empty(at.num_heads, n, dtype=torch.int64, device=at.device)
    chosen = settings_for("metadata", at.cache)
    if log_votes.numel():
        entry_kernels.read_metadata[at.grid(n, chosen.block_n)](
            at.entries, *metadata, at.num_layers, n, at.stride_blocks, *at.cache.log_votes.stride()[:2],
            BLOCK_SIZE=at.cache.block_size, BLOCK_N=chosen.block_n, **chosen.launch,
        )  # fmt: skip
    return metadata


def _changes(changes: Changes | None, plane: PlaneName) -> tuple[Changed, int, int]:
    """(tensors, places, new ones), as kernels take them."""
    if changes is None:
        return Changed(None, None, None), 0, 0
    origin, new = changes.origin.contiguous(), changes.new(plane)
    if new is None:
        return Changed(origin, None, None), origin.shape[1], 0
    return Changed(origin, changes.row.contiguous(), new.contiguous()), origin.shape[1], new.shape[1]


def gather_rows(seq_layers: SequenceLayers, plane: PlaneName, index: Tensor, changes: Changes | None = None) -> Tensor:
    scales = seq_layers.scales(plane)
    if changes is not None and scales is not None:  # new rows are not over a scale
        return changes.read(plane, index, partial(gather_rows, seq_layers, plane))
    at, count = _arguments(seq_layers), index.shape[1]
    rows = torch.empty(at.num_heads, count, at.cache.head_size, device=at.device)
    chosen, (changed, *sizes) = settings_for("rows", at.cache), _changes(changes, plane)
    if rows.numel():
        entry_kernels.read_rows[at.grid(count, chosen.block_n)](
            at.entries, changed, index.contiguous(), rows, at.strides[plane], at.num_layers, count, *sizes,
            at.stride_blocks,
            PLANE=PLANES[plane], BLOCK_N=chosen.block_n, **at.constants, **chosen.launch,
        )  # fmt: skip
    return rows if scales is None else rows.mul_(scales)


def write_rows(
    seq_layers: SequenceLayers, destination: Destination, places: Tensor, keys: Tensor | None, values: Tensor | None
) -> None:
    at = _arguments(seq_layers)
    to, places = at.destination(destination), places.contiguous()
    chosen = settings_for("rows", at.cache)
    for plane, rows in (("keys", keys), ("values", values)):
        if rows is None or rows.numel() == 0:
            continue
        dtype, scales = at.cache.keys.dtype, seq_layers.scales(plane)
        rows = (
            stored(rows if scales is None else rows / scales, dtype) if at.cache.is_quantised else rounded(rows, dtype)
        )
        entry_kernels.write_rows[at.grid(places.shape[1], chosen.block_n)](
            to, places, rows.contiguous(), at.strides[plane], at.num_layers, places.shape[1], to.blocks.stride(0),
            PLANE=PLANES[plane], BLOCK_N=chosen.block_n, **at.constants, **chosen.launch,
        )  # fmt: skip


def write_metadata(
    seq_layers: SequenceLayers,
    destination: Destination,
    log_votes: Tensor,
    scores: Tensor,
    aux: Tensor,
    positions: Tensor,
) -> None:
    at = _arguments(seq_layers)
    to, count = at.destination(destination), log_votes.shape[1]
    chosen = settings_for("metadata", at.cache)
    if count:
        entry_kernels.write_metadata[at.grid(count, chosen.block_n)](
            to, *(plane.contiguous() for plane in (log_votes, scores, aux, positions)), at.num_layers, count,
            to.blocks.stride(0), *at.cache.log_votes.stride()[:2],
            BLOCK_SIZE=at.cache.block_size, BLOCK_N=chosen.block_n, **chosen.launch,
        )  # fmt: skip


def write_codes(
    seq_layers: SequenceLayers, destination: HeadPages, keys: Tensor, values: Tensor, log_votes: Tensor
) -> None:
    if destination.coding(0) != "int8":
        reference.write_codes(seq_layers, destination, keys, values, log_votes)
        return
    at, count = _arguments(seq_layers), log_votes.shape[1]
    to, chosen = at.destination(destination), settings_for("rows", at.cache)
    if count:
        entry_kernels.write_codes[at.grid(count, chosen.block_n)](
            to, keys.contiguous(), values.contiguous(), log_votes.contiguous(), codes_of(at.cache), at.num_layers,
            count, to.blocks.stride(0), *at.cache.log_votes.stride()[:2],
            HEAD_SIZE=at.cache.head_size, BLOCK_SIZE=at.cache.block_size, BLOCK_N=chosen.block_n,
            BLOCK_D=power_of_two(at.cache.head_size), **chosen.launch,
        )  # fmt: skip


def move_entries(seq_layers: SequenceLayers, destination: Destination, kept: Tensor) -> None:
    count = kept.shape[1]
    if count == 0:
        return
    cache = seq_layers.layers[0]
    bytes_each = 2 * cache.num_kv_heads * count * cache.head_size * cache.keys.element_size()
    step = max(1, STAGING_BYTES // bytes_each)
    if step >= len(seq_layers.layer):
        _move_entries(_arguments(seq_layers), destination, kept.contiguous())
        return
    for first in range(0, len(seq_layers.layer), step):
        some = slice(first, first + step)
        heads = slice(first * cache.num_kv_heads, (first + step) * cache.num_kv_heads)
        numbers = (tensor[some] for tensor in (seq_layers.layer, seq_layers.blocks, seq_layers.segments))
        part = SequenceLayers(seq_layers.layers, *numbers)
        if seq_layers.pages is not None:
            part = replace(part, pages=seq_layers.pages[some])
        _move_entries(_KernelArguments(part), destination[some], kept[heads].contiguous())


def _move_entries(at: _KernelArguments, destination: Destination, kept: Tensor) -> None:
    to, count = at.destination(destination), kept.shape[1]
    # Keys and values that lie alike, as a GPU has them, are moved together.
    together = len(set(at.strides.values())) == 1
    shape = 1 + together, at.num_heads, count, at.cache.head_size
    staging = torch.empty(shape, dtype=at.cache.keys.dtype, device=at.device)
    chosen = settings_for("rows", at.cache)
    for plane in ["keys"] if together else PLANES:
        for write in (False, True):
            entry_kernels.move_rows[(*at.grid(count, chosen.block_n), len(staging))](
                at.entries, to.blocks, to.pages, kept, staging, at.strides[plane], at.num_layers, count,
                at.stride_blocks, to.blocks.stride(0),
                FIRST_PLANE=PLANES[plane], WRITE=write, BLOCK_N=chosen.block_n, **at.constants, **chosen.launch,
            )  # fmt: skip


join_entries = partial(reference.join_entries, operators=sys.modules[__name__])
merge_entries = partial(reference.merge_entries, operators=sys.modules[__name__])
mix_entries = partial(reference.mix_entries, operators=sys.modules[__name__])
turn_keys = partial(reference.turn_keys, operators=sys.modules[__name__])


def most_similar(
    seq_layers: SequenceLayers, sources: Tensor, targets: Tensor, usable: Tensor, changes: Changes | None = None
) -> tuple[Tensor, Tensor]:
    at = _arguments(seq_layers)
    similarity = torch.empty(sources.shape, device=at.device)
    best = torch.empty(sources.shape, dtype=torch.int64, device=at.device)
    chosen, (changed, *sizes) = settings_for("similar", at.cache), _changes(changes, "keys")
    block_n = max(16, chosen.block_n // 2) if sizes[1] else chosen.block_n  # new keys need as many registers again
    if best.numel():
        entry_kernels.find_similar[at.grid(sources.shape[1], chosen.block_m)](
            at.entries, changed, sources.contiguous(), targets.contiguous(), usable.contiguous().view(torch.uint8),
            similarity, best, at.strides["keys"], at.num_layers, sources.shape[1], targets.shape[1], *sizes,
            at.stride_blocks,
            COMPUTE=product_type(at.cache.keys.dtype), BLOCK_M=chosen.block_m, BLOCK_N=block_n, **at.constants,
            **chosen.launch,
        )  # fmt: skip
    return similarity, best


def fused_attention(
    seq_layers: SequenceLayers,
    queries: Tensor,
    query_positions: Tensor,
    log_votes: Tensor,
    positions: Tensor,
    scale: float,
    fusion: Fusion,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    at = _arguments(seq_layers)
    num_heads, groups, window, _ = queries.shape
    n = positions.shape[1]
    lse = torch.empty(num_heads, groups, window, device=at.device)
    fused = torch.empty(num_heads, n, device=at.device)
    if fused.numel() == 0 or lse.numel() == 0:
        return fused.zero_()
    chosen = settings_for("newest", at.cache, groups)
    key_scales, queries = seq_layers.scales("keys"), queries.float()
    queries = queries if key_scales is None else queries * key_scales.unsqueeze(1)
    given = (tensor.contiguous() for tensor in (queries, query_positions, log_votes, positions))
    before = at.entries, *given, lse
    after = scale, at.strides["keys"], at.num_layers, n, window, at.stride_blocks
    sinks = None if softmax.sinks is None else softmax.sinks.contiguous()
    tiles = {
        "CAP": softmax.cap * LOG2E.value,
        "G": groups,
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        **at.constants,
        **chosen.launch,
    }
    entry_kernels.newest_lse[(num_heads, groups, -(-window // chosen.block_m))](*before, sinks, *after, **tiles)
    entry_kernels.newest_columns[at.grid(n, chosen.block_n)](*before, fused, *after, MAX=fusion == "max", **tiles)
    return fused


def join_slots(keys: Tensor, joining: Tensor, source_weights: Tensor, slot_weights: Tensor) -> tuple[Tensor, Tensor]:
    joined = torch.empty(source_weights.shape, dtype=torch.int64, device=keys.device)
    products, between = slot_products(keys, joining)
    total = slot_weights.clone(memory_format=torch.contiguous_format)
    if joined.numel():
        # One stage, so that nothing is loaded ahead: each iteration reads what the last one has stored.
        entry_kernels.join[(len(products),)](
            products, between.contiguous(), source_weights.contiguous(), total, joined, *products.shape[1:],
            # One machine code for all budgets, but for enormous ones.
            BLOCK_M=64, BLOCK_S=power_of_two(max(1024, products.shape[2])), num_warps=4, num_stages=1,
        )  # fmt: skip
    return joined, total
