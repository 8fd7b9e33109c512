"""The attention backend on the CPU, over a cache that carries its own metadata.

Requests with a compressed front run on our operator. All others run on one, the same on every server of a kind: ours,
or vLLM's own over strided views of our cache.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_kvmerge.engine.attention.common import MergeableBackend, MergeableImpl
from vllm_kvmerge.engine.attention.compressed import compressed_batch, head_pages, rows_of_batch
from vllm_kvmerge.engine.attention.rows import PLAIN, BatchRow, KeptQueries, QueryReader, newest_in_rings
from vllm_kvmerge.engine.support import QUANTISED, UnsupportedConfigError
from vllm_kvmerge.ops import AttentionBatch, HeadPages, PagedKVCache, is_native, keep_queries, paged_attention


def attends_plain(cache: PagedKVCache) -> bool:
    """Whether plain requests run on our operator unless the server's options name another.

    It takes half of the time of vLLM's with numbers of 16 or 8 bits (docs/performance.md). In float32 it gains less,
    and vLLM's gives stock vLLM's tokens to the bit.
    """
    return cache.keys.dtype != torch.float32 and is_native("paged_attention", cache)


@dataclass
class MergeableAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata for the rows that its operator attends for, and the rows of ours beside it.

    stock_tokens: places in the batch of the tokens of vLLM's rows; None if all rows are. pages: by layer, the heads'
    pages of our rows.
    """

    stock_tokens: Tensor | None = None
    ours: AttentionBatch | None = None
    pages: list[HeadPages] | None = None
    readers: list[QueryReader] = field(default_factory=list)
    kept: KeptQueries | None = None


def select_rows(common: CommonAttentionMetadata, rows: list[int]) -> tuple[CommonAttentionMetadata, Tensor]:
    """The batch's metadata reduced to ``rows``, and the places of their tokens."""
    index = torch.tensor(rows, dtype=torch.int64)
    starts, lengths = common.query_start_loc[:-1][index], common.query_start_loc.diff()[index]
    selected = copy.copy(common)
    selected.num_reqs = len(rows)
    selected.num_actual_tokens = int(lengths.sum())
    selected.max_query_len = int(lengths.max()) if rows else 0
    selected.query_start_loc = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    selected.query_start_loc_cpu = selected.query_start_loc
    selected.seq_lens = common.seq_lens[index]
    if common.seq_lens_cpu_upper_bound is not None:
        selected.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound[index]
    selected.block_table_tensor = common.block_table_tensor[index]
    tokens = torch.cat(
        [torch.arange(0), *(torch.arange(a, a + n) for a, n in zip(starts.tolist(), lengths.tolist(), strict=True))]
    )
    selected.slot_mapping = common.slot_mapping[tokens]
    return selected, tokens


class MergeableAttentionBuilder(CPUAttentionMetadataBuilder):
    """Builds a step's metadata; the runner sets ``rows`` (one per request, in batch order) just before.

    attends_plain: whether rows without a front are ours, too.
    """

    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[BatchRow] = []
        self.attends_plain = False
        self._most = self.vllm_config.scheduler_config.max_num_seqs
        self._one_query_each = torch.ones(self._most, dtype=torch.int32)
        of_plain = compressed_batch([PLAIN] * self._most, *[self._one_query_each] * 4)
        self._of_plain = of_plain.fronts, of_plain.tails, of_plain.score_modes, of_plain.score_decays

    def _set_isa_to_layers(self, layer_names: list[str]) -> None:
        # "amx" packs K in tiles of its own; the cache holds K as "vec" and "vec16" pack it.
        if self.isa == "amx":
            self.isa = "vec"
        if self.isa not in ("vec", "vec16"):
            raise UnsupportedConfigError(f"CPU attention kernel {self.isa!r}: its layout of K is not known; x86 only")
        super()._set_isa_to_layers(layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MergeableAttentionMetadata:
        common = stock_part = common_attn_metadata
        if self._takes_all(common):
            return self._all_ours(common)
        rows = self._our_rows(common)
        batch: AttentionBatch | None = None
        stock_tokens: Tensor | None = None
        if rows:
            batch, stock_tokens = rows_of_batch(common, rows), torch.empty(0, dtype=torch.int64)
            stock_rows = [i for i in range(common.num_reqs) if i not in rows]
            if stock_rows:
                stock_part, stock_tokens = select_rows(common, stock_rows)
        stock = super().build(common_prefix_len, stock_part, fast_build)
        readers = [
            QueryReader.of(common, i, replace(row, ring=None)) for i, row in enumerate(self.rows) if row.needs_python
        ]
        pages = head_pages(list(rows.values()))
        ours = MergeableAttentionMetadata(**vars(stock), stock_tokens=stock_tokens, ours=batch, pages=pages)
        ours.readers = readers
        if any(row.ring is not None for row in self.rows):
            tokens, addresses = map(torch.from_numpy, newest_in_rings(self.rows, common))
            ours.kept = KeptQueries(addresses, tokens)
        return ours

    def _takes_all(self, common: CommonAttentionMetadata) -> bool:
        """Whether a step has plain rows alone, with one query each, and all are ours: most steps of most servers."""
        num_rows = common.num_reqs
        has_one_each = common.max_query_len == 1 and common.num_actual_tokens == num_rows <= self._most
        return self.attends_plain and not self.rows and has_one_each

    def _all_ours(self, common: CommonAttentionMetadata) -> MergeableAttentionMetadata:
        """Metadata of such a step, without what only vLLM's operator reads."""
        num_rows = common.num_reqs
        where = common.query_start_loc[:num_rows], self._one_query_each[:num_rows], common.seq_lens
        batch = AttentionBatch(common.block_table_tensor, *where, *(one[:num_rows] for one in self._of_plain))
        return MergeableAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=1,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            stock_tokens=self._one_query_each[:0],
            ours=batch,
        )

    def _our_rows(self, common: CommonAttentionMetadata) -> dict[int, BatchRow]:
        """Rows that our operator attends for, by their place in the batch."""
        rows = self.rows or [PLAIN] * common.num_reqs
        return {i: row if row.front > 0 else PLAIN for i, row in enumerate(rows) if row.front > 0 or self.attends_plain}


class MergeableAttentionImpl(MergeableImpl, CPUAttentionBackendImpl):
    """Attention over a mergeable cache."""

    row_major_keys = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refuse_features(self.attn_type, alibi=self.alibi_slopes is not None)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        cache = self.paged(layer, kv_cache)
        ops.cpu_attn_reshape_and_cache(
            key, value, cache.stock_keys, cache.stock_values, slot_mapping, layer.isa, **self._cache_format(layer)
        )

    def _cache_format(self, layer: Any) -> dict[str, Any]:
        return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float, "kv_cache_dtype": self.kv_cache_dtype}

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: MergeableAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported by this backend")
        if attn_metadata is None:  # warm-up
            return output
        cache, metadata, softmax = self.paged(layer, kv_cache), attn_metadata, self.softmax
        owns_cache = self.owns_cache
        if owns_cache:
            if metadata.kept is not None:  # copied as they are, whatever their type
                numbers = query.view(torch.int64)
                keep_queries(numbers, metadata.kept.addresses, self.layer_index, metadata.kept.tokens)
            for reader in metadata.readers:
                reader.read(self.layer_index, query, cache, self.scale, softmax)
        if metadata.stock_tokens is None:
            num_tokens = metadata.num_actual_tokens
            self.stock_attention(layer, query[:num_tokens], cache, metadata, output[:num_tokens])
            return output
        if num_tokens := metadata.stock_tokens.numel():  # len() of a tensor takes longer
            stock_output = torch.empty_like(output[:num_tokens])
            self.stock_attention(layer, query[metadata.stock_tokens], cache, metadata, stock_output)
            output[metadata.stock_tokens] = stock_output
        batch = metadata.ours
        assert batch is not None
        if not owns_cache:
            batch = replace(batch, score_modes=torch.zeros_like(batch.score_modes))
        if metadata.pages is not None:
            batch = replace(batch, pages=metadata.pages[self.layer_index])
        paged_attention(query, cache, batch, self.scale, output, softmax)
        return output

    def stock_attention(
        self, layer: Any, query: Tensor, cache: PagedKVCache, metadata: MergeableAttentionMetadata, output: Tensor
    ) -> None:
        """vLLM's own operator over strided views of our cache."""
        sinks = self.sinks
        if sinks is not None and sinks.dtype != torch.bfloat16:  # it takes no other but float32
            sinks = sinks.float()
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=cache.stock_keys,
            value_cache=cache.stock_values,
            output=output,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            scale=self.scale,
            causal=metadata.causal,
            alibi_slopes=None,
            sliding_window=self.sliding_window,
            block_table=metadata.block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=metadata.scheduler_metadata,
            s_aux=sinks,
            dynamic_causal=metadata.dynamic_causal,
            **self._cache_format(layer),
        )


class MergeableAttentionBackend(MergeableBackend, CPUAttentionBackend):
    """Drop-in for vLLM's CPU attention backend, with votes, scores and positions in the cache."""

    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "float32", *QUANTISED]  # type: ignore[list-item]

    @staticmethod
    def get_impl_cls() -> type[MergeableAttentionImpl]:
        return MergeableAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MergeableAttentionBuilder]:
        return MergeableAttentionBuilder
