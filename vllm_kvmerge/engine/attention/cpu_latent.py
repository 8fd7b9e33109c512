"""Multi-head latent attention (MLA) on the CPU, over a cache of latents that carries its own metadata.

vLLM's operators run what they can: prompts from their first token on, and decoding of requests without a compressed
front. Ours run the rest, a front's decoding and chunks behind other tokens, with absorbed queries over the latents.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

from vllm_kvmerge.engine.attention.common import MergeableImpl
from vllm_kvmerge.engine.attention.compressed import head_pages, rows_of_batch
from vllm_kvmerge.engine.attention.cpu import select_rows
from vllm_kvmerge.engine.attention.rows import PLAIN, BatchRow, QueryReader, RepetitionWindow, ScoreWindow
from vllm_kvmerge.engine.blocks import MergeableLatentSpec
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.ops import AttentionBatch, HeadPages, LatentKVCache, paged_attention

MAX_ABSORBED = 1 << 22
"""Numbers of absorbed queries that are held at once where a row has many: each is as long as a latent."""

MAX_CHUNK = 64
"""Queries of a row that attend at once: operators hold their logits over all entries."""


@dataclass
class OwnRows:
    """Rows that our operators run, and the places of all others' tokens (``plain``).

    plain, tokens: ``[n]`` int64 places of the others' and of these rows' tokens, counted from the first token of a kind
    (decodes, or chunks). batch: of the rows, whose queries are those at ``tokens``. pages: by layer, of their heads.
    """

    plain: Tensor
    tokens: Tensor
    batch: AttentionBatch
    pages: list[HeadPages] | None

    @classmethod
    def of(cls, common: CommonAttentionMetadata, rows: dict[int, BatchRow], plain: Tensor, first: int) -> "OwnRows":
        """rows: by place in the batch. plain: places of others' tokens in the batch; first: of the kind's first."""
        batch = rows_of_batch(common, rows)
        bounds = zip(batch.query_starts.tolist(), batch.query_lens.tolist(), strict=True)
        tokens = torch.cat([torch.arange(start - first, start - first + length) for start, length in bounds])
        packed = batch.query_lens.cumsum(0, dtype=torch.int32) - batch.query_lens
        return cls(
            plain - first, tokens, replace(batch, query_starts=packed), head_pages(list(rows.values()))
        ).in_chunks()

    def in_chunks(self) -> "OwnRows":
        """The same with rows of up to ``MAX_CHUNK`` queries: longer ones as several, one after the other."""
        lengths = self.batch.query_lens.tolist()
        if max(lengths) <= MAX_CHUNK:
            return self
        parts = [(row, at) for row, length in enumerate(lengths) for at in range(0, length, MAX_CHUNK)]
        index, offsets = (torch.tensor(numbers) for numbers in zip(*parts, strict=True))
        ends = torch.minimum(offsets + MAX_CHUNK, self.batch.query_lens[index]).int()
        batch = self.batch.map(lambda tensor: tensor[index], None)
        pages = self.pages and [HeadPages(one.layers, one.ids[index], one.fronts[index]) for one in self.pages]
        return OwnRows(
            self.plain,
            self.tokens,
            replace(
                batch,
                query_starts=batch.query_starts + offsets.int(),
                query_lens=ends - offsets.int(),
                seq_lens=batch.seq_lens - self.batch.query_lens[index] + ends,
            ),
            pages,
        )

    def of_layer(self, layer: int) -> AttentionBatch:
        return self.batch if self.pages is None else replace(self.batch, pages=self.pages[layer])


@dataclass
class LatentMetadata(MLACommonMetadata[Any]):
    """vLLM's metadata, with ``decode`` and ``prefill`` of the rows that its operators run, but numbers of all rows.

    decodes, chunks: the rows of one token, or of several, that ours run; None: none. readers: of these rows' queries
    and of others'; those of rows of one token come first, ``num_decode_readers`` of them.
    """

    decodes: OwnRows | None = None
    chunks: OwnRows | None = None
    readers: list[QueryReader] = field(default_factory=list)
    num_decode_readers: int = 0


class LatentBuilder(MLACommonMetadataBuilder[LatentMetadata]):
    """Builds a step's metadata; the runner sets ``rows`` (one per request, in batch order) just before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, metadata_cls=LatentMetadata)
        self.rows: list[BatchRow] = []

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LatentMetadata:
        common = common_attn_metadata
        rows = self.rows or [PLAIN] * common.num_reqs
        lengths = common.query_start_loc_cpu.diff().tolist()
        # The runner puts rows of one token first.
        num_decodes = next((index for index, length in enumerate(lengths) if length > 1), common.num_reqs)
        computed = (common.seq_lens - torch.tensor(lengths)).tolist()
        own = {
            index: row
            for index, row in enumerate(rows)
            if row.front > 0 or (index >= num_decodes and computed[index] > 0)
        }
        plain_rows = [index for index in range(common.num_reqs) if index not in own]
        plain, plain_tokens = select_rows(common, plain_rows) if own else (common, torch.empty(0, dtype=torch.int64))
        metadata = super().build(common_prefix_len, plain, fast_build)
        first = int(common.query_start_loc_cpu[num_decodes])
        if decodes := {index: row for index, row in own.items() if index < num_decodes}:
            metadata.decodes = OwnRows.of(common, decodes, plain_tokens[plain_tokens < first], 0)
        if chunks := {index: row for index, row in own.items() if index >= num_decodes}:
            metadata.chunks = OwnRows.of(common, chunks, plain_tokens[plain_tokens >= first], first)
        metadata.num_reqs, metadata.num_actual_tokens = common.num_reqs, common.num_actual_tokens
        metadata.num_decodes, metadata.num_prefills = num_decodes, common.num_reqs - num_decodes
        metadata.num_decode_tokens = first
        if first and metadata.decode is None:  # vLLM wants to see one, though it has nothing to run
            none = plain.block_table_tensor[:0], plain.seq_lens[:0]
            metadata.decode = MLACommonDecodeMetadata(*none, dcp_tot_seq_lens=None)
        watched = [index for index, row in enumerate(self.rows) if row.reads_queries]
        metadata.readers = [QueryReader.of(common, index, rows[index]) for index in watched]
        metadata.num_decode_readers = sum(index < num_decodes for index in watched)
        return metadata


class LatentAttentionImpl(MergeableImpl, CPUMLAImpl):
    """Attention over a mergeable cache of latents."""

    logits_soft_cap = 0.0
    sinks = None
    layer: MLAAttention
    """Whose attention this is; ``attach`` sets it."""

    _latents: tuple[tuple[int, int], LatentKVCache] | None = None

    def attach(self, layer: MLAAttention, index: int) -> None:
        super().attach(layer, index)
        self.layer = layer

    def paged(self, layer: Any, kv_cache: Tensor) -> LatentKVCache:
        """Views of the cache of ``layer``, ``[B, bs, cell]``, made once per allocation."""
        allocation = (kv_cache.data_ptr(), kv_cache.numel())
        if self._latents is None or self._latents[0] != allocation:
            self._latents = allocation, LatentKVCache.of_latents(kv_cache.unsqueeze(1), self.kv_lora_rank)
        return self._latents[1]

    def forget_cache(self) -> None:
        self._latents = None

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        **kwargs: Any,
    ) -> None:
        if kv_cache.numel() > 0:
            latents = self.paged(None, kv_cache).latents
            super().do_kv_cache_update(kv_c_normed, k_pe, latents, slot_mapping, kv_cache_dtype, k_scale, **kwargs)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: LatentMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        cache, own = self.paged(layer, kv_c_and_k_pe_cache), attn_metadata.decodes
        for reader in attn_metadata.readers[: attn_metadata.num_decode_readers]:
            reader.read(self.layer_index, query, cache, self.scale, self.softmax)
        if own is None:
            return super().forward_mqa(query, cache.latents, attn_metadata, layer)
        output = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        if len(own.plain):
            output[own.plain], _ = super().forward_mqa(query[own.plain], cache.latents, attn_metadata, layer)
        output[own.tokens] = self._attended(query[own.tokens], cache, own)
        return output, None

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: LatentMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        if output_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported by this backend")
        cache, own = self.paged(None, kv_c_and_k_pe_cache), attn_metadata.chunks
        for reader in attn_metadata.readers[attn_metadata.num_decode_readers :]:
            self._read(reader, q, attn_metadata.num_decode_tokens, cache)
        if own is None:
            super().forward_mha(q, kv_c_normed, k_pe, cache.latents, attn_metadata, k_scale, output)
            return
        if len(plain := own.plain):
            plain_output = torch.empty_like(output[plain])
            rows = q[plain], kv_c_normed[plain], k_pe[plain]
            super().forward_mha(*rows, cache.latents, attn_metadata, k_scale, plain_output)
            output[plain] = plain_output
        attended = self._attended(self._absorbed(q[own.tokens]), cache, own)
        own_output = torch.empty_like(output[own.tokens])
        self.layer._v_up_proj(attended, out=own_output)
        output[own.tokens] = own_output

    def _attended(self, query: Tensor, cache: LatentKVCache, own: OwnRows) -> Tensor:
        """``[n, heads, value size]`` of absorbed queries ``[n, heads, latent size]``."""
        attended = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        paged_attention(query, cache, own.of_layer(self.layer_index), self.scale, attended, self.softmax)
        return attended

    def _absorbed(self, query: Tensor) -> Tensor:
        """Queries ``[n, heads, nope + rope]`` as they multiply latents, ``[n, heads, latent size]``."""
        nope, rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        weights = self.layer.W_UK_T
        assert weights is not None
        return torch.cat([torch.bmm(nope.transpose(0, 1), weights).transpose(0, 1), rope], dim=-1)

    def _read(self, reader: QueryReader, query: Tensor, first: int, cache: LatentKVCache) -> None:
        """Has a chunk's queries stored and scored; only as many as are asked for are absorbed. query: ``[n, heads,
        nope + rope]``, of all chunks; first: place of the first in the batch."""
        tokens, row = reader.tokens, reader.row
        query = query[tokens.start - first : tokens.stop - first]
        if row.held is not None:  # a token and its drafts
            row.held.keep(self.layer_index, self._absorbed(query), reader)
            return
        if row.ring is not None:
            row.ring.write(self.layer_index, self._absorbed(query[-row.ring.window :]), reader.seq_len)
        if row.window is not None:
            assert isinstance(row.window, ScoreWindow | RepetitionWindow), "latents have no other scores"
            newest = query[-row.window.num_queries :]
            for end, part in self._parts(newest, reader.seq_len):
                where = replace(reader, seq_len=end)
                row.window.score(self.layer_index, self._absorbed(part), cache, where, self.scale, self.softmax)

    def _parts(self, query: Tensor, seq_len: int) -> Iterator[tuple[int, Tensor]]:
        """Queries of the tokens before ``seq_len`` in parts that may be absorbed at once, each with its end."""
        end = seq_len - len(query)
        for part in query.split(max(1, MAX_ABSORBED // (self.num_heads * self.head_size))):
            end += len(part)
            yield end, part


class LatentAttentionBackend(CPUMLABackend):
    """Drop-in for vLLM's reference of MLA on the CPU, with votes, scores and positions in the cache."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if type(spec) is not MLAAttentionSpec:
            raise UnsupportedConfigError(f"attention layer of type {type(spec).__name__}: only latent attention works")
        return MergeableLatentSpec.of(spec)

    @staticmethod
    def get_impl_cls() -> type[LatentAttentionImpl]:
        return LatentAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        return LatentBuilder
