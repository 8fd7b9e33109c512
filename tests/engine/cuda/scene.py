"""Batches for the CUDA backend on CPU tensors: a cache, buffers that keep their address, what attention should do."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.ops.conftest import TOLERANCE, CacheMaker, Sequence, relative_error
from vllm_kvmerge.engine.attention.common import DTYPES
from vllm_kvmerge.engine.attention.cuda import CUDAAttentionBuilder, CUDAAttentionImpl, CUDAAttentionMetadata
from vllm_kvmerge.engine.attention.rows import BatchRow
from vllm_kvmerge.engine.blocks import MergeableAttentionSpec
from vllm_kvmerge.ops import NO_UPDATE, AttentionBatch, HeadPages, PagedKVCache, ScoreUpdate, SequenceLayers, reference
from vllm_kvmerge.ops.coded import number_of

HEADS, GROUPS, HEAD_SIZE, BLOCK_SIZE = 2, 2, 32, 16
SCALE = HEAD_SIZE**-0.5
MAX_ROWS, MAX_TOKENS, MAX_BLOCKS = 7, 256, 32


@dataclass(frozen=True)
class Request:
    """A row of a batch: its last ``num_tokens`` tokens are computed in this step."""

    sequence: Sequence
    num_tokens: int
    row: BatchRow


class Scene:
    """The same cache twice: ``theirs`` for the reference and ``ours``, in the layout of a GPU, for the backend."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        window: int = 0,
        chunked: bool = False,
        interleaved: bool = False,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.maker = CacheMaker(seed, HEADS, HEAD_SIZE, BLOCK_SIZE, dtype, interleaved)
        self.theirs = self.maker.pages
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=dtype)
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_TOKENS),
            model_config=SimpleNamespace(
                get_num_attention_heads=lambda _: HEADS * GROUPS, dtype=dtype, is_hybrid=False
            ),
            additional_config=None,
            parallel_config=None,
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        self.builder = CUDAAttentionBuilder(MergeableAttentionSpec.of(spec), ["layer"], config, self.device)
        stored_as = next((name for name, one in DTYPES.items() if one == dtype), "auto")
        heads, self.window, self.chunked = (HEADS * GROUPS, HEAD_SIZE, SCALE, HEADS), window, chunked
        self.impl = CUDAAttentionImpl(*heads, sliding_window=window or None, kv_cache_dtype=stored_as)
        self.impl.chunked, self.impl.interleaved = chunked, interleaved
        self.impl.layer_index = 0
        scales = self.theirs.key_scale, self.theirs.value_scale
        self.layer = SimpleNamespace(_k_scale_float=scales[0], _v_scale_float=scales[1])
        numbers = {"dtype": torch.int32, "device": self.device}
        self.starts, self.seq_lens = torch.zeros(MAX_ROWS + 1, **numbers), torch.zeros(MAX_ROWS, **numbers)
        self.block_table = torch.zeros(MAX_ROWS, MAX_BLOCKS, **numbers)
        self.codes: list[tuple[Sequence, HeadPages, tuple[Tensor, ...]]] = []
        shape = MAX_TOKENS, HEADS * GROUPS, HEAD_SIZE
        self.query = torch.zeros(shape, dtype=self.maker.query_dtype, device=self.device)
        self.output = torch.zeros_like(self.query)

    def finish_cache(self) -> None:
        """All sequences have been made: copies the cache, with scores in it."""
        generator = self.maker.generator
        self.theirs.scores.copy_(torch.rand(self.theirs.scores.shape, generator=generator))
        self.theirs.aux.copy_(torch.randint(1, 9, self.theirs.aux.shape, generator=generator))
        self.cache = self.maker.cache.clone()
        options = self.maker.scales | {"interleaved": self.impl.interleaved}
        self.ours = PagedKVCache.of(self.cache, HEAD_SIZE, row_major_keys=True, **options)
        self.ours.keys.copy_(self.theirs.keys)
        if self.ours.is_quantised:
            self.cache = self.cache.view(torch.uint8)  # as vLLM has it
        for cache in (self.theirs, self.ours):
            for sequence, pages, entries in self.codes:
                located = SequenceLayers.of(cache, sequence.blocks, 0, 0, 0)
                reference.write_codes(located, pages, *entries)
        self.builder.use_pages((self.ours,), may_be_coded=not self.ours.is_quantised)

    def plain(self, seq_len: int, num_tokens: int = 1, **row) -> Request:
        return Request(self.maker.sequence(0, 0, seq_len), num_tokens, BatchRow(**row))

    def compressed(
        self, front: int, tail: int, seq_len: int, num_tokens: int = 1, update: ScoreUpdate = NO_UPDATE, **row
    ) -> Request:
        return Request(self.maker.sequence(front, tail, seq_len), num_tokens, BatchRow(front, tail, update, **row))

    def paged(self, front: int, tail: int, seq_len: int, num_tokens: int, update: ScoreUpdate) -> Request:
        """A request whose heads have the pages of a front's blocks in any order, and entries up to somewhere in their
        last one. front: a multiple of the block size, and of the number of heads."""
        sequence, generator = self.maker.sequence(front, tail, seq_len), self.maker.generator
        blocks = sequence.blocks[: front // BLOCK_SIZE]
        lanes = HeadPages.even(1, 0, HEADS, blocks).flatten()
        # The first head has two pages more than the average, the last one as many less.
        counts = torch.full((HEADS,), len(blocks))
        counts[0], counts[-1] = len(blocks) + 2, len(blocks) - 2
        shuffled = lanes[torch.randperm(len(lanes), generator=generator)].split(counts.tolist())
        ids = torch.nn.utils.rnn.pad_sequence(shuffled, batch_first=True)[None]
        fronts = (counts * BLOCK_SIZE - torch.randint(0, BLOCK_SIZE, (HEADS,), generator=generator))[None]
        pages = HeadPages((self.theirs,), ids, fronts)
        return Request(sequence, num_tokens, BatchRow(front, tail, update, pages=pages, table=pages.table()))

    def coded(self, front: int, tail: int, seq_len: int, num_tokens: int = 1) -> Request:
        """A request with a coded front, of which the first head holds all entries and the others fewer."""
        sequence = self.maker.sequence(front, tail, seq_len)
        ids = HeadPages.even(1, 0, HEADS, sequence.blocks[: -(-front // (2 * BLOCK_SIZE))])[None]
        fronts = torch.tensor([[front, *[front // 2] * (HEADS - 1)]])
        pages = HeadPages((self.theirs,), ids, fronts, torch.tensor([number_of("int8")]))
        entries = *(self.maker.randn(HEADS, front, HEAD_SIZE) for _ in range(2)), self.maker.randn(HEADS, front)
        self.codes.append((sequence, pages, entries))
        return Request(sequence, num_tokens, BatchRow(front, tail, pages=pages, table=pages.table()))

    def common(self, requests: list[Request], num_rows: int | None = None) -> CommonAttentionMetadata:
        """Fills the buffers as a runner does; ``num_rows``: with rows that pad the batch to so many."""
        n, lens = len(requests), torch.tensor([request.num_tokens for request in requests], dtype=torch.int32)
        num_rows = num_rows or n
        starts = torch.zeros(num_rows + 1, dtype=torch.int32)
        starts[1 : n + 1] = lens.cumsum(0)
        starts[n + 1 :] = lens.sum()
        seq_lens = torch.zeros(num_rows, dtype=torch.int32)
        seq_lens[:n] = torch.tensor([request.sequence.seq_len for request in requests])
        table = torch.zeros(num_rows, MAX_BLOCKS, dtype=torch.int32)
        for row, request in zip(table, requests, strict=False):
            row[: len(request.sequence.blocks)] = request.sequence.blocks
        self.starts[: num_rows + 1].copy_(starts)
        self.seq_lens[:num_rows].copy_(seq_lens)
        self.block_table[:num_rows].copy_(table)
        query = self.maker.randn(int(lens.sum()), HEADS * GROUPS, HEAD_SIZE).to(self.query.dtype)
        self.query[: len(query)].copy_(query)
        self.output.fill_(torch.nan)
        self.builder.rows = [request.row for request in requests]
        is_padded = num_rows > n
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: num_rows + 1],
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens[:num_rows],
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=num_rows,
            num_actual_tokens=num_rows if is_padded else int(lens.sum()),
            max_query_len=int(lens.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.block_table[:num_rows],
            slot_mapping=torch.zeros(0, dtype=torch.int64),
        )

    def forward(self, metadata, num_tokens: int) -> None:
        query, output = self.query[:num_tokens], self.output[:num_tokens]
        self.impl.forward(self.layer, query, None, None, self.cache, metadata, output)

    def check(self, requests: list[Request], num_rows: int | None = None) -> CUDAAttentionMetadata:
        """Output and scores are the reference's. All sequences have been made."""
        self.finish_cache()
        metadata = self.builder.build(0, self.common(requests, num_rows))
        expected = self.expected(requests)
        self.forward(metadata, len(expected))
        assert expected.isfinite().all() and self.output[len(expected) :].isnan().all()
        assert relative_error(self.output[: len(expected)], expected) < TOLERANCE[self.maker.dtype]
        assert relative_error(self.scores(self.ours, requests), self.scores(self.theirs, requests)) < 1e-4
        return metadata

    def check_window(self, request: Request, query: Tensor) -> None:
        """Its prompt is scored by the last of its queries as by the reference."""
        window, seq_len = request.row.window, request.sequence.seq_len
        statistics, query = torch.zeros(2, HEADS, seq_len), query[-window.num_queries :]
        reference.score_prompt_queries(query, self.theirs, request.sequence.blocks, window.update, SCALE, *statistics)
        assert relative_error(window.prompt_scores.scores[0], statistics[0]) < 1e-4

    def expected(self, requests: list[Request]) -> Tensor:
        """The reference's output, row by row; it updates the scores of ``theirs``."""
        output, start = torch.full_like(self.query, torch.nan), 0
        for request in requests:
            s, row, tokens = request.sequence, request.row, slice(start, start + request.num_tokens)
            batch = AttentionBatch.single(s.blocks, request.num_tokens, s.seq_len, row.front, row.tail, row.update)
            batch = replace(batch, pages=row.pages)  # there is one layer
            query, softmax = self.query[tokens], self.impl.softmax
            reference.paged_attention(
                query, self.theirs, batch, SCALE, output[tokens], softmax, self.window, self.chunked
            )
            start = tokens.stop
        return output[:start]

    def scores(self, pages: PagedKVCache, requests: list[Request]) -> Tensor:
        """Scores and second statistics of all live entries."""
        found = []
        for request in requests:
            s, own = request.sequence, request.row.pages
            if own is not None and own.coding(0):  # it has none
                own, front = None, 0
            else:
                front = s.front if own is None else int(own.fronts.max())
            located = SequenceLayers.of(pages, s.blocks, front, s.tail, s.seq_len)
            if own is not None:
                located = replace(located, pages=HeadPages((pages,), own.ids, own.fronts))
            found += reference.gather_metadata(located)[1:3]
        return torch.cat(found, 1)
