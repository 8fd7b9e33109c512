"""Which operator attends for requests without a front on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from vllm_kvmerge.engine.attention import faster
from vllm_kvmerge.engine.attention.cpu import MergeableAttentionBuilder
from vllm_kvmerge.engine.attention.faster import ALWAYS, CHUNK, LENGTHS, NEVER, Faster, measure
from vllm_kvmerge.engine.worker.runner import CompressionCPUModelRunner, CompressionRunnerMixin


class Clock:
    """Time passes only while operators run."""

    def __init__(self, ours, stock, longest: int) -> None:
        self.now, self.costs, self.longest = 0.0, (ours, stock), longest

    def sides(self, num_queries: int, seq_len: int):
        if seq_len > self.longest:
            return None
        return tuple(lambda cost=cost: self.run(cost(num_queries, seq_len)) for cost in self.costs)

    def run(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("ours", "longest", "expected"),
    [
        (lambda queries, length: 0.5 * length, 1 << 20, Faster(LENGTHS[0], LENGTHS[0] - CHUNK // 2)),
        (lambda queries, length: 0.97 * length, 1 << 20, Faster()),  # no more than measurements differ
        (lambda queries, length: 300.0 + 0.5 * length, 1 << 20, Faster(1024, 1024 - CHUNK // 2)),
        (lambda queries, length: 300.0 + 0.5 * length, 512, Faster()),
        (lambda queries, length: (0.5 if queries == 1 else 2.0) * length, 1 << 20, Faster(decode=LENGTHS[0])),
        # Faster at some length, but not from there on.
        (lambda queries, length: (0.5 if length <= 256 else 2.0) * length, 1 << 20, Faster()),
        (lambda queries, length: 0.5 * length, 16, Faster()),
    ],
)
def test_ours_is_taken_from_where_it_is_faster_on(ours, longest, expected, monkeypatch):
    clock = Clock(ours, lambda queries, length: float(length), longest)
    monkeypatch.setattr(faster, "perf_counter", lambda: clock.now)
    assert measure(clock.sides) == expected


def test_rows_by_their_own_numbers_alone():
    both = Faster(decode=100, chunk=300)
    assert [both.takes(1, length) for length in (99, 100)] == [False, True]
    # Of a chunk as long as the text, a query sees half.
    assert [both.takes(400, length) for length in (400, 499, 500)] == [False, False, True]
    assert both.is_ever and Faster(chunk=5).is_ever and not Faster().is_ever
    assert not Faster().takes(1, NEVER - 1)
    assert str(Faster()) == "vLLM's operator" and "one query over 100" in str(both) and "chunk over 300" in str(both)


@pytest.mark.parametrize(
    ("choice", "expected"), [("vllm", Faster()), ("ours", ALWAYS), ("faster", Faster(decode=7, chunk=9))]
)
def test_operators_by_name_are_not_measured(choice, expected, monkeypatch):
    monkeypatch.setattr(CompressionRunnerMixin, "initialize_kv_cache", lambda self: None)
    builder = object.__new__(MergeableAttentionBuilder)
    builder.faster, builder.measure = Faster(), lambda layer: Faster(decode=7, chunk=9)
    runner = object.__new__(CompressionCPUModelRunner)
    runner.vllm_config = SimpleNamespace(additional_config={"kvmerge": {"plain_attention": choice}})
    runner.compression = SimpleNamespace(group=0, layers={"layer": None})
    runner.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda: builder, layer_names=["layer"])]]
    runner.initialize_kv_cache()
    assert builder.faster == expected
    assert ALWAYS.takes(1, 1) and ALWAYS.takes(5, 5)


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
    [([40, 33, 32], 1, True), ([40, 31], 1, False), ([40, 33], 2, False), ([64] * 5, 1, False)],  # more than may run
)
def test_a_step_of_our_rows_alone_is_described_as_any_other(lengths, num_queries, takes_all, monkeypatch):
    """But for what vLLM's operator would need."""
    common, built = common_metadata(lengths, num_queries), []
    monkeypatch.setattr(
        CPUAttentionMetadataBuilder, "__init__", lambda self, config: vars(self).update(vllm_config=config)
    )
    stock = CPUAttentionMetadata(
        len(lengths), num_queries, common.query_start_loc, 0, common.seq_lens, None, None, None
    )
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", lambda *args: built.append(args) or stock)
    builder = MergeableAttentionBuilder(SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4)))
    builder.faster = Faster(decode=32, chunk=1)
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
