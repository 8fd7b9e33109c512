"""The attention backend on CUDA, over a cache that carries its own metadata.

In a full graph one operator attends to all rows; a plain one has no front. The launches depend on a batch's shape
alone, so a captured graph holds for any mixture of plain and compressed rows; the differences lie in buffers at fixed
addresses. Outside full graphs plain rows are vLLM's FlashAttention's, if it suits the layers (``flash``). Layers with a
window have builders of their own, for which all rows are plain.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from vllm_kvmerge.engine.arguments import plugin_config
from vllm_kvmerge.engine.attention import flash
from vllm_kvmerge.engine.attention.common import MergeableBackend, MergeableImpl
from vllm_kvmerge.engine.attention.flash import FlashBatch
from vllm_kvmerge.engine.attention.rows import BatchRow, KeptQueries, QueryReader, newest_in_rings
from vllm_kvmerge.engine.support import CUDA_HEAD_SIZES, QUANTISED, UnsupportedConfigError, has_states
from vllm_kvmerge.ops import AttentionBatch, PagedKVCache, keep_queries, paged_attention, write_tokens
from vllm_kvmerge.ops.triton.plan import KEPT_ROWS
from vllm_kvmerge.ops.types import PageTables, addresses_on, sent

logger = init_logger(__name__)


def shortest_chunk(groups: int) -> int:
    """The least ``max_query_len`` of a batch of chunks, with ``groups`` query heads per KV head.

    Triton's operator keeps the logits of fewer queries, and memory for that is reserved for one query only.
    """
    return KEPT_ROWS // groups + 1


class GraphBatchBuffers:
    """Numbers of a batch's rows, ``[max_rows]`` each, at the fixed addresses that captured graphs need.

    layers: the caches of all layers, where heads may have pages of their own; None: they have none. may_be_coded:
    these may be coded. kept: where the queries of rows with one token are kept (``keep_queries``). no_updates: score
    modes of rows whose scores are not updated.
    """

    layers: Sequence[PagedKVCache] | None = None
    may_be_coded = False

    def __init__(self, max_rows: int, device: torch.device) -> None:
        # One tensor, for one copy: four numbers of 32 bits, and the addresses of the row's table and of its query.
        self._buffer = torch.zeros(8 * max_rows, dtype=torch.int32, device=device)
        self._numbers = self._buffer[: 4 * max_rows].view(4, max_rows)
        self._tables, self.kept = self._buffer[4 * max_rows :].view(torch.int64).view(2, max_rows)
        self._query_lens, self.no_updates = torch.zeros(2, max_rows, dtype=torch.int32, device=device)
        self._is_clear = True

    def fill(self, rows: list[BatchRow], common: CommonAttentionMetadata) -> AttentionBatch:
        """The whole batch. Rows that only pad it are plain and have no queries."""
        n, starts = common.num_reqs, common.query_start_loc
        lens = torch.sub(starts[1 : n + 1], starts[:n], out=self._query_lens[:n])
        self._write(rows, common)
        fronts, tails, modes, decays = self._numbers[:, :n]
        sequences = common.block_table_tensor[:n], starts[:n], lens, common.seq_lens[:n]
        numbers = fronts, tails, modes, decays.view(torch.float32)
        # Each layer puts its own number there.
        tables = None if self.layers is None else PageTables(self.layers, 0, self._tables[:n], self.may_be_coded)
        return AttentionBatch(*sequences, *numbers, common.max_query_len, tables=tables)

    def _write(self, rows: list[BatchRow], common: CommonAttentionMetadata) -> None:
        # Where rows have more than one token, no graph runs.
        in_rings = common.max_query_len <= 1
        is_clear = all(row.front == 0 and not (in_rings and row.ring is not None) for row in rows)
        if is_clear and self._is_clear:
            return
        self._is_clear = is_clear
        buffer, (count, max_rows) = np.zeros(len(self._buffer), dtype=np.int32), self._numbers.shape
        numbers = buffer[: count * max_rows].reshape(count, -1)
        tables, kept = buffer[count * max_rows :].view(np.int64).reshape(2, -1)
        decays = numbers[3].view(np.float32)
        # Plane by plane: element by element takes a large batch half a millisecond.
        places = [index for index, row in enumerate(rows) if row.front > 0]
        chosen = [rows[index] for index in places]
        updates = [row.update for row in chosen]
        numbers[0, places], numbers[1, places] = [row.front for row in chosen], [row.tail for row in chosen]
        numbers[2, places], decays[places] = [one.mode.code for one in updates], [one.decay for one in updates]
        if any(row.table is not None for row in chosen):
            tables[places] = [0 if row.table is None else row.table.data_ptr() for row in chosen]
        if in_rings and (rings := {index: row.ring for index, row in enumerate(rows) if row.ring is not None}):
            assert common.seq_lens_cpu_upper_bound is not None  # see ``seq_len_of``
            lens = common.seq_lens_cpu_upper_bound.tolist()
            kept[list(rings)] = [ring.address(lens[index] - 1) for index, ring in rings.items()]
        sent(torch.from_numpy(buffer), self._buffer.device, out=self._buffer)


def _select(batch: AttentionBatch, rows: np.ndarray, max_query_len: int) -> AttentionBatch:
    """``rows``: places in the batch, ascending."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        return batch.map(lambda tensor: tensor[first : last + 1], max_query_len)
    index = sent(torch.from_numpy(rows), batch.seq_lens.device)
    return batch.map(lambda tensor: tensor.index_select(0, index), max_query_len)


@dataclass
class CUDAAttentionMetadata(AttentionMetadata):
    """parts: the batches that our operator is called for. flash: that for FlashAttention, before it; None: all rows are
    ours. no_updates: as in ``GraphBatchBuffers``. readers: rows at whose
    queries Python code looks, as no graph can."""

    parts: list[AttentionBatch]
    no_updates: Tensor
    flash: FlashBatch | None = None
    readers: list[QueryReader] = field(default_factory=list)
    kept: KeptQueries | None = None


class CUDAAttentionBuilder(AttentionMetadataBuilder[CUDAAttentionMetadata]):
    """Builds a step's metadata; for compressed layers, the runner sets ``rows`` (one per request, in batch order) just
    before, and ``keeps_queries``, whether rows may have rings, once. Never waits for the GPU."""

    # Full graphs are captured for batches in which every request computes one token. Others have parts and readers
    # that depend on the requests.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        operators = plugin_config(vllm_config).operators
        if "reference" in (operators.get("paged_attention"), operators.get("write_tokens")):
            return AttentionCGSupport.NEVER  # it waits for the GPU
        return cls._cudagraph_support

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        num_heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        num_heads = num_heads or vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self._shortest_chunk = shortest_chunk(num_heads // kv_cache_spec.num_kv_heads)
        self.rows: list[BatchRow] = []
        self.keeps_queries = False
        self._buffers = GraphBatchBuffers(scheduler.max_num_seqs, device)
        impls = [layer.impl for layer in get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()]
        options, model = plugin_config(vllm_config), vllm_config.model_config
        reason: str | None = "plain_attention says so"
        if options.plain_attention != "ours":
            may_hold_nan = options.debug_poison_freed or has_states(model)
            reason = flash.obstacle(impls, kv_cache_spec.dtype, model.dtype, may_hold_nan)
        self.uses_flash = reason is None
        which = "vLLM's FlashAttention" if reason is None else f"ours: {reason}"
        logger.info_once("Attention of plain rows outside full graphs: %s", which)

    def use_pages(self, layers: Sequence[PagedKVCache], may_be_coded: bool) -> None:
        """Lets heads have pages of their own in the caches of all ``layers``, and coded ones."""
        self._buffers.layers, self._buffers.may_be_coded = layers, may_be_coded
        # What graphs read must last as long as they do.
        self._addresses = addresses_on(self.device, tuple(layer.addresses for layer in layers))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CUDAAttentionMetadata:
        return self._build(common_attn_metadata, self.rows, is_captured=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> CUDAAttentionMetadata:
        metadata = self._build(common_attn_metadata, [], is_captured=True)
        # Warm-ups would read the most slots possible, of the null block.
        common_attn_metadata.seq_lens.fill_(1)
        return metadata

    def _build(self, common: CommonAttentionMetadata, rows: list[BatchRow], is_captured: bool) -> CUDAAttentionMetadata:
        batch = self._buffers.fill(rows, common)
        has_front = np.zeros(len(batch), dtype=bool)
        has_front[: len(rows)] = [row.front > 0 for row in rows]
        uses_flash = self.uses_flash and not is_captured and self._suits_flash(has_front, common)
        parts = self._parts(batch, rows, common, has_front if uses_flash else np.ones_like(has_front))
        metadata = CUDAAttentionMetadata(parts, self._buffers.no_updates)
        if uses_flash:
            starts, has_fronts = common.query_start_loc[: len(batch) + 1], bool(has_front.any())
            metadata.flash = FlashBatch.of(batch, starts, common.num_actual_tokens, common.max_seq_len, has_fronts)
        metadata.readers = [
            QueryReader.of(common, index, replace(row, ring=None)) for index, row in enumerate(rows) if row.needs_python
        ]
        if (is_captured and self.keeps_queries) or any(row.ring is not None for row in rows):
            metadata.kept = self._kept(rows, common)
        return metadata

    @staticmethod
    def _suits_flash(has_front: np.ndarray, common: CommonAttentionMetadata) -> bool:
        """Whether it is for the rows without a front. Where each row has one token, a full graph may run, for which
        everything here but the buffers is in vain: so there only if it is for all rows, which costs nothing."""
        if common.max_query_len <= 1:
            # FlashAttention 2 takes it that tokens are rows then.
            return not has_front.any() and common.num_actual_tokens == common.num_reqs
        return not has_front.all()

    def _parts(
        self, batch: AttentionBatch, rows: list[BatchRow], common: CommonAttentionMetadata, is_ours: np.ndarray
    ) -> list[AttentionBatch]:
        """Of the rows that are ours: the whole batch if each row has one query; else rows of similar length together,
        since a part is cut into programs as if all its rows were as long as the longest. Parts in which no row has
        pages, or coded ones, do without what these cost, but for the whole batch, which a captured graph may stand
        for."""
        if not is_ours.any():
            return []
        if common.max_query_len <= 1:
            return [replace(batch, max_query_len=1)]
        paged = {index: row.pages for index, row in enumerate(rows) if row.table is not None}
        lens = np.diff(common.query_start_loc_cpu[: len(batch) + 1].numpy())
        magnitudes = np.ceil(np.log2(np.maximum(lens, 1))).astype(int)
        parts = []
        is_ours = is_ours & (lens > 0)
        for magnitude in np.unique(magnitudes[is_ours]):
            chosen = np.flatnonzero((magnitudes == magnitude) & is_ours)
            longest = int(lens[chosen].max())
            part = _select(batch, chosen, longest if longest == 1 else max(longest, self._shortest_chunk))
            pages = [paged[index] for index in chosen.tolist() if index in paged]
            tables = part.tables if pages else None
            if tables is not None:
                tables = replace(tables, coded=any(one.coding(0) for one in pages if one is not None))
            parts.append(replace(part, tables=tables))
        return parts

    def _kept(self, rows: list[BatchRow], common: CommonAttentionMetadata) -> KeptQueries:
        """Where the newest queries of rows with rings go."""
        if common.max_query_len <= 1:  # a captured graph may run
            return KeptQueries(self._buffers.kept[: common.num_reqs])
        both = sent(torch.from_numpy(np.stack(newest_in_rings(rows, common))), self.device)
        return KeptQueries(both[1], both[0])


class CUDAAttentionImpl(MergeableImpl, AttentionImpl[CUDAAttentionMetadata]):
    """Attention over a mergeable cache.

    window: tokens that a query sees, 0: all. chunked: a chunk of that size, see ``use_chunks``. flash_version: vLLM's
    for such a layer, see ``flash``.
    """

    row_major_keys = True
    chunked = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.logits_soft_cap, self.sinks = kv_cache_dtype, logits_soft_cap or 0.0, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = sliding_window or 0
        self.refuse_features(attn_type, alibi=alibi_slopes is not None)
        if head_size not in CUDA_HEAD_SIZES:
            raise UnsupportedConfigError(f"head size {head_size}: allowed on CUDA: multiples of 8 from 16 to 256")
        self.flash_version = flash.version_for(head_size, self.logits_soft_cap, sinks is not None)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        write_tokens(self.paged(layer, kv_cache), slot_mapping, key, value)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CUDAAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported by this backend")
        if attn_metadata is None:  # memory is being profiled
            return output.fill_(0)
        cache, metadata, softmax = self.paged(layer, kv_cache), attn_metadata, self.softmax
        lse = None
        if metadata.flash is not None:
            assert self.flash_version is not None
            lse = metadata.flash.attend(
                query, cache, self.scale, output, softmax, self.sinks, self.window, self.flash_version
            )
        if self.owns_cache:
            if metadata.kept is not None:
                keep_queries(query, metadata.kept.addresses, self.layer_index, metadata.kept.tokens)
            for reader in metadata.readers:
                reader.read(self.layer_index, query, cache, self.scale, softmax, lse)
        for part in metadata.parts:
            if not self.owns_cache:
                part = replace(part, score_modes=metadata.no_updates[: len(part)])
            if part.tables is not None:
                part = replace(part, tables=replace(part.tables, layer=self.layer_index))
            paged_attention(query, cache, part, self.scale, output, softmax, self.window, self.chunked)
        return output


class CUDAAttentionBackend(MergeableBackend, AttentionBackend):
    """Backend registered as vLLM's ``CUSTOM`` on CUDA."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "float32", *QUANTISED]  # type: ignore[list-item]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(CUDA_HEAD_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Metadata lies behind all keys and values of a layer, so a layer's cache must be contiguous.
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @staticmethod
    def get_impl_cls() -> type[CUDAAttentionImpl]:
        return CUDAAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CUDAAttentionBuilder]:
        return CUDAAttentionBuilder


def use_chunks(layers: Iterable[Any]) -> None:
    """Makes the chunked-local ones of a model's layers attend to chunks by our operator's window.

    vLLM gives them a backend whose builder makes a row of each chunk of a request. It waits for the GPU, rules out full
    graphs, and there may be more such rows than requests. A chunk is known from a query's position, so none of that is
    necessary.
    """
    for layer in layers:
        if isinstance(layer, ChunkedLocalAttention):
            layer.attn_backend = CUDAAttentionBackend
            layer.impl.window, layer.impl.chunked = layer.attention_chunk_size, True
