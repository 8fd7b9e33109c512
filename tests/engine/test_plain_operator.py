"""Which operator attends for requests without a front on the CPU: decided once, by facts."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from vllm_kvmerge import ops
from vllm_kvmerge.engine.attention.cpu import MergeableAttentionBuilder
from vllm_kvmerge.engine.worker.runner import CompressionCPUModelRunner, CompressionRunnerMixin
from vllm_kvmerge.ops import PagedKVCache, cell_bytes


@pytest.mark.parametrize(
    ("choice", "dtype", "head_size", "overrides", "is_ours"),
    [
        ("auto", torch.bfloat16, 64, {}, True),
        ("auto", torch.float16, 80, {}, True),
        ("auto", torch.float8_e4m3fn, 128, {}, True),
        ("auto", torch.float32, 64, {}, False),
        ("auto", torch.bfloat16, 24, {}, False),  # a size that our native operators do not take
        ("auto", torch.bfloat16, 64, {"paged_attention": "reference"}, False),
        ("vllm", torch.bfloat16, 64, {}, False),
        ("ours", torch.float32, 64, {}, True),
    ],
)
def test_the_operator_follows_from_facts(choice, dtype, head_size, overrides, is_ours, monkeypatch):
    cache = torch.zeros(1, 2, 32, cell_bytes(head_size, dtype) // dtype.itemsize, dtype=dtype)
    monkeypatch.setattr(CompressionRunnerMixin, "initialize_kv_cache", lambda self: None)
    builder = object.__new__(MergeableAttentionBuilder)
    runner = object.__new__(CompressionCPUModelRunner)
    runner.vllm_config = SimpleNamespace(additional_config={"kvmerge": {"plain_attention": choice}})
    compactor = SimpleNamespace(layers=[PagedKVCache.of(cache, head_size)])
    runner.compression = SimpleNamespace(group=0, compactor=compactor)
    runner.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda: builder)]]
    ops.override(overrides)
    try:
        runner.initialize_kv_cache()
    finally:
        ops.override({})
    assert builder.attends_plain == is_ours


def common_metadata(lengths, num_queries=1):
    rows = len(lengths)
    starts = torch.arange(0, (rows + 1) * num_queries, num_queries, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=rows,
        num_actual_tokens=rows * num_queries,
        max_query_len=num_queries,
        max_seq_len=max(lengths),
        block_table_tensor=torch.randint(0, 9, (rows, 8), dtype=torch.int32),
        slot_mapping=torch.arange(rows * num_queries),
    )


@pytest.mark.parametrize(
    ("lengths", "num_queries", "takes_all"),
    [([40, 33, 32], 1, True), ([40, 33], 2, False), ([64] * 5, 1, False)],  # more than may run
)
def test_a_step_of_our_rows_alone_is_described_as_any_other(lengths, num_queries, takes_all, monkeypatch):
    """But for what vLLM's operator would need."""
    common, built = common_metadata(lengths, num_queries), []
    monkeypatch.setattr(
        CPUAttentionMetadataBuilder, "__init__", lambda self, config: vars(self).update(vllm_config=config)
    )
    stock = CPUAttentionMetadata(len(lengths), num_queries, common.query_start_loc, 0, common.seq_lens, *[None] * 3)
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", lambda *args: built.append(args) or stock)
    builder = MergeableAttentionBuilder(SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4)))
    builder.attends_plain = True
    found = builder.build(0, common)
    assert bool(built) == (not takes_all)
    if not takes_all:
        return
    monkeypatch.setattr(builder, "_takes_all", lambda common: False)
    expected = builder.build(0, common)
    assert len(built) == 1 and len(found.stock_tokens) == len(expected.stock_tokens) == 0
    for mine, other in zip(found.ours.tensors, expected.ours.tensors, strict=True):
        assert torch.equal(mine, other) and mine.dtype == other.dtype
    assert (found.pages, found.readers, found.kept) == (expected.pages, expected.readers, expected.kept)
