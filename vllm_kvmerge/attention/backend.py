"""vLLM's compute side: the attention backend over pages that carry their own metadata.

Requests without a compressed front run on vLLM's own CPU operators over strided views of our pages; the others on ours.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_kvmerge.cache.manager import MergeableAttentionSpec
from vllm_kvmerge.kernels import UPDATE_MODES, Pages, ScoreUpdate, column_scores, paged_attention
from vllm_kvmerge.support import UnsupportedConfigError


@dataclass
class PromptScores:
    """Statistics of a prompt that is being computed: ``[layers, H, capacity]`` float32 each."""

    scores: Tensor
    aux: Tensor

    @classmethod
    def empty(cls, num_layers: int, num_kv_heads: int, capacity: int) -> "PromptScores":
        return cls(*torch.zeros(2, num_layers, num_kv_heads, capacity).unbind())

    def grow(self, capacity: int) -> None:
        missing = capacity - self.scores.shape[2]
        if missing > 0:
            self.scores = torch.nn.functional.pad(self.scores, (0, missing))
            self.aux = torch.nn.functional.pad(self.aux, (0, missing))


class QueryRing:
    """The newest queries of a request, in every layer: ``[layers, window, H * G, d]`` in the model's dtype.

    The query of the token at position ``p`` lies in place ``p % window``.
    """

    def __init__(self, num_layers: int, window: int, num_heads: int, head_size: int, dtype: torch.dtype) -> None:
        self.window = window
        self.num_heads = num_heads
        self._ring = torch.zeros(num_layers, window, num_heads, head_size, dtype=dtype)

    def write(self, layer: int, query: Tensor, seq_len: int) -> None:
        """``query``: ``[q, H * G, d]``, ``q <= window``, of the tokens up to position ``seq_len - 1``."""
        self._ring[layer, torch.arange(seq_len - query.shape[0], seq_len) % self.window] = query

    def positions(self, seq_len: int) -> Tensor:
        """``[w]`` int64: positions of the queries kept once ``seq_len`` tokens have been computed."""
        return torch.arange(max(0, seq_len - self.window), seq_len)

    def queries(self, seq_len: int) -> Tensor:
        """``[layers, w, H * G, d]`` in the model's dtype, in the order of ``positions``."""
        return self._ring.index_select(1, self.positions(seq_len) % self.window)


@dataclass(frozen=True)
class ScoreWindow:
    """The queries of the last ``num_queries`` tokens of a request's share of the batch are scored."""

    num_queries: int
    update: ScoreUpdate
    prompt_scores: PromptScores


@dataclass(frozen=True)
class BatchRow:
    """What is special about a request in the batch.

    front, tail: its segments; with ``front == 0`` it has not been compressed, and vLLM's operator attends to it.
    update: how attention keeps the scores in its pages, if it does. window: which queries to score into a buffer
    instead, before its first compression. ring: where its queries are kept, if its policy reads them.
    """

    front: int = 0
    tail: int = 0
    update: ScoreUpdate | None = None
    window: ScoreWindow | None = None
    ring: QueryRing | None = None


PLAIN = BatchRow()


@dataclass
class CompressedBatch:
    """The compressed rows of a batch, as ``paged_attention`` takes them: ``[rows, max_blocks]`` and ``[rows]``."""

    block_table: Tensor
    query_starts: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    fronts: Tensor
    tails: Tensor
    update_modes: Tensor
    update_decays: Tensor

    @classmethod
    def of(cls, common: CommonAttentionMetadata, rows: dict[int, BatchRow]) -> "CompressedBatch":
        """``rows``: the compressed ones by their place in the batch."""
        index = torch.tensor(list(rows))
        starts = common.query_start_loc
        updates = [row.update for row in rows.values()]
        return cls(
            block_table=common.block_table_tensor[index],
            query_starts=starts[index],
            query_lens=starts[index + 1] - starts[index],
            seq_lens=common.seq_lens[index],
            fronts=torch.tensor([row.front for row in rows.values()], dtype=torch.int32),
            tails=torch.tensor([row.tail for row in rows.values()], dtype=torch.int32),
            update_modes=torch.tensor(
                [UPDATE_MODES.index(update.mode if update else "none") for update in updates], dtype=torch.int32
            ),
            update_decays=torch.tensor([update.decay if update else 1.0 for update in updates]),
        )


@dataclass
class QueryReader:
    """A row of whose queries something is kept: where its tokens are, and what else ``column_scores`` needs of it."""

    tokens: slice
    blocks: Tensor
    seq_len: int
    row: BatchRow


@dataclass
class MergeableAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata for the plain rows, and the others beside it.

    plain_tokens: places of the plain rows' tokens in the batch; None where all rows are plain.
    """

    plain_tokens: Tensor | None = None
    compressed: CompressedBatch | None = None
    readers: list[QueryReader] = field(default_factory=list)


def _select_rows(common: CommonAttentionMetadata, rows: list[int]) -> tuple[CommonAttentionMetadata, Tensor]:
    """The batch's metadata reduced to ``rows``, and the places of their tokens."""
    index = torch.tensor(rows)
    starts, lengths = common.query_start_loc[:-1][index], common.query_start_loc.diff()[index]
    selected = copy.copy(common)
    selected.num_reqs = len(rows)
    selected.num_actual_tokens = int(lengths.sum())
    selected.max_query_len = int(lengths.max())
    selected.query_start_loc = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    selected.seq_lens = common.seq_lens[index]
    selected.block_table_tensor = common.block_table_tensor[index]
    tokens = torch.cat([torch.arange(a, a + n) for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)])
    selected.slot_mapping = common.slot_mapping[tokens]
    return selected, tokens


class MergeableAttentionBuilder(CPUAttentionMetadataBuilder):
    """Builds a step's metadata; the runner sets ``rows`` (one per request, in batch order) just before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[BatchRow] = []

    isa: str

    def _set_isa_to_layers(self, layer_names: list[str]) -> None:
        # "amx" packs K in tiles of its own; the pages hold K as "vec" and "vec16" pack it.
        if self.isa == "amx":
            self.isa = "vec"
        if self.isa not in ("vec", "vec16"):
            raise UnsupportedConfigError(f"CPU attention kernel {self.isa!r}: its layout of K is not known; x86 only")
        super()._set_isa_to_layers(layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MergeableAttentionMetadata:
        common = common_attn_metadata
        compressed = {i: row for i, row in enumerate(self.rows) if row.front > 0}
        plain_tokens = None
        plain = common
        if compressed:
            plain_rows = [i for i in range(common.num_reqs) if i not in compressed]
            if plain_rows:
                plain, plain_tokens = _select_rows(common, plain_rows)
            else:
                plain_tokens = torch.empty(0, dtype=torch.int64)
        stock = super().build(common_prefix_len, plain, fast_build)
        return MergeableAttentionMetadata(
            **vars(stock),
            plain_tokens=plain_tokens,
            compressed=CompressedBatch.of(common, compressed) if compressed else None,
            readers=self._readers(common),
        )

    def _readers(self, common: CommonAttentionMetadata) -> list[QueryReader]:
        starts = common.query_start_loc
        return [
            QueryReader(
                slice(int(starts[i]), int(starts[i + 1])), common.block_table_tensor[i], int(common.seq_lens[i]), row
            )
            for i, row in enumerate(self.rows)
            if row.window is not None or row.ring is not None
        ]


class MergeableAttentionImpl(CPUAttentionBackendImpl):
    """Attention over mergeable pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for feature, value, absent in (
            ("ALiBi", self.alibi_slopes, None),
            ("sliding-window attention", self.sliding_window, -1),
            ("logits soft cap", self.logits_soft_cap, 0),
            ("attention sinks", self.sinks, None),
            ("sharing KV between layers", self.kv_sharing_target_layer_name, None),
        ):
            if value != absent:
                raise UnsupportedConfigError(f"model uses {feature}: not supported with KV cache compression")
        if self.attn_type != AttentionType.DECODER:
            raise UnsupportedConfigError(f"attention type {self.attn_type}: only decoder attention is supported")
        self._pages: tuple[int, Pages] | None = None

    def pages(self, kv_cache: Tensor) -> Pages:
        """Views of this layer's cache; made once per allocation."""
        if self._pages is None or self._pages[0] != kv_cache.data_ptr():
            self._pages = (kv_cache.data_ptr(), Pages.of(kv_cache, self.head_size))
        return self._pages[1]

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        pages = self.pages(kv_cache)
        ops.cpu_attn_reshape_and_cache(
            key,
            value,
            pages.stock_keys,
            pages.values,
            slot_mapping,
            layer.isa,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )

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
        pages, metadata = self.pages(kv_cache), attn_metadata
        for reader in metadata.readers:
            self._read_queries(layer.kvmerge_index, query[reader.tokens], pages, reader)
        if metadata.plain_tokens is None:
            num_tokens = metadata.num_actual_tokens
            self._plain_attention(layer, query[:num_tokens], pages, metadata, output[:num_tokens])
            return output
        if len(metadata.plain_tokens):
            plain_output = torch.empty_like(output[: len(metadata.plain_tokens)])
            self._plain_attention(layer, query[metadata.plain_tokens], pages, metadata, plain_output)
            output[metadata.plain_tokens] = plain_output
        batch = metadata.compressed
        assert batch is not None
        paged_attention(
            query,
            pages,
            batch.block_table,
            batch.query_starts,
            batch.query_lens,
            batch.seq_lens,
            batch.fronts,
            batch.tails,
            batch.update_modes,
            batch.update_decays,
            self.scale,
            output,
        )
        return output

    def _plain_attention(
        self, layer: Any, query: Tensor, pages: Pages, metadata: MergeableAttentionMetadata, output: Tensor
    ) -> None:
        """vLLM's own operator over strided views of our pages."""
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=pages.stock_keys,
            value_cache=pages.values,
            output=output,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            scale=self.scale,
            causal=metadata.causal,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=metadata.block_table,
            softcap=0,
            scheduler_metadata=metadata.scheduler_metadata,
            s_aux=None,
            dynamic_causal=metadata.dynamic_causal,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def _read_queries(self, layer: int, query: Tensor, pages: Pages, reader: QueryReader) -> None:
        row, seq_len = reader.row, reader.seq_len
        if row.ring is not None:
            row.ring.write(layer, query[-row.ring.window :], seq_len)
        if row.window is not None:
            column_scores(
                query[-row.window.num_queries :],
                pages,
                reader.blocks,
                seq_len,
                row.window.update,
                self.scale,
                row.window.prompt_scores.scores[layer, :, :seq_len],
                row.window.prompt_scores.aux[layer, :, :seq_len],
            )


class MergeableAttentionBackend(CPUAttentionBackend):
    """Drop-in for vLLM's CPU attention backend, with votes, scores and positions in the page."""

    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "float32"]  # type: ignore[list-item]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
            raise UnsupportedConfigError(f"attention layer of type {type(spec).__name__}: only full attention works")
        return MergeableAttentionSpec.of(spec)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @staticmethod
    def get_impl_cls() -> type[MergeableAttentionImpl]:
        return MergeableAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MergeableAttentionBuilder]:
        return MergeableAttentionBuilder
