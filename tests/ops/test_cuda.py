"""CUDA's operators without a GPU: the kernels run by an emulation on the CPU, and compiled for GPUs."""

import json
import re
import subprocess
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.ops.conftest import (
    NUM_BLOCKS,
    SOFTMAXES,
    CacheMaker,
    Watch,
    batch_of,
    cuda_builder,
    cuda_on_gpu,
    longest_chain,
    padded,
)
from tests.ops.on_gpu import OnGPU
from tests.ops.test_cpu import (
    UPDATES,
    check_against_reference,
    relative_error,
    test_huge_logits_do_not_overflow,  # noqa: F401
    test_queries_and_outputs_may_be_strided_and_of_other_types,  # noqa: F401
)
from tests.ops.test_operators import test_attention_over_front_and_tail  # noqa: F401
from vllm_kvmerge import ops
from vllm_kvmerge.engine.arguments import kvmerge_engine_args
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.ops import (
    AttentionBatch,
    PagedKVCache,
    ScoreMode,
    ScoreUpdate,
    cell_bytes,
    choice,
    dispatch,
    reference,
)
from vllm_kvmerge.ops.cuda import backend
from vllm_kvmerge.ops.cuda.plan import LEAST_ENTRIES, AttentionPlan
from vllm_kvmerge.ops.pieces import Division
from vllm_kvmerge.ops.workspace import Workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPERATORS = ["cuda", *(["cuda-gpu"] if torch.cuda.is_available() else [])]
"""What the tests imported above run on."""
PLACES = ["emulated", *(["on-gpu"] if torch.cuda.is_available() else [])]
"""Where the kernels run."""
without_a_gpu = pytest.mark.parametrize("strict", ["emulated"], indirect=True)
"""For tests that look at what the CPU is told."""

SHAPES = [(129, 200, 530, 9), (0, 0, 333, 0), (17, 290, 301, 2)]
"""front, tail, seq_len, dead entries: of two pieces, of two, and of one with hardly any."""


@pytest.fixture(params=PLACES)
def strict(request, monkeypatch):
    """No call may be left to another implementation."""
    refusal = "vllm_kvmerge.ops.cuda.backend.fallback", lambda device: pytest.fail("the kernels did not run")
    if request.param == "emulated":
        cuda = request.getfixturevalue("cuda")
        monkeypatch.setattr(*refusal)
        return cuda
    gpu = cuda_on_gpu()
    monkeypatch.setattr(*refusal)
    return gpu


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "groups", "head_size", "lens"),
    [
        (torch.bfloat16, 1, 128, [1, 1, 1]),
        (torch.float16, 2, 80, [1, 1, 1]),
        (torch.bfloat16, 4, 128, [1, 1, 1]),
        (torch.bfloat16, 7, 64, [2, 1, 1]),
        (torch.float16, 5, 256, [3, 2, 1]),
        (torch.bfloat16, 16, 32, [1, 1, 1]),
        (torch.float16, 1, 96, [5, 1, 16]),
        (torch.float32, 4, 64, [1, 1, 1]),
        (torch.float32, 3, 128, [3, 2, 5]),
        (torch.float32, 1, 256, [1, 8, 3]),
        (torch.float32, 1, 160, [1, 4, 1]),
    ],
)
def test_attention_is_the_references(strict, dtype, groups, head_size, lens, turn):
    """Pieces, holes, dead entries, several queries; statistics that new tokens' places held count for nothing.

    Each case has one of the three ways in which the sequences can take turns with the score updates.
    """
    maker = CacheMaker(head_size + groups, 2, head_size, 16, dtype)
    sequences = [maker.sequence(*shape) for shape in SHAPES]
    first = (groups + turn) % 3
    updates = [UPDATES[1 + (first + i) % 3] for i in range(3)]
    kind = SOFTMAXES[(groups + head_size // 32 + turn) % 4]
    check_against_reference(strict, maker, sequences, lens, updates, groups, kind)


@examples(20)
@given(data=st.data())
def test_any_segments(emulated_library, data):
    from vllm_kvmerge.ops import cuda

    cuda.use(emulated_library)
    block_size, dtype = (
        data.draw(st.sampled_from([16, 24, 32])),
        data.draw(st.sampled_from([torch.float32, torch.half])),
    )
    maker = CacheMaker(data.draw(st.integers(0, 1000)), 1, 64, block_size, dtype)
    sequences, lens = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        front = data.draw(st.integers(0, 150))
        tail = front + data.draw(st.integers(0, 150)) if front else 0
        seq_len = tail + data.draw(st.integers(1, 400))
        sequences.append(maker.sequence(front, tail, seq_len, data.draw(st.integers(0, front))))
        lens.append(data.draw(st.integers(1, min(4, seq_len - tail))))
    theirs, ours = row_major_copies(maker)
    groups = data.draw(st.sampled_from([1, 2, 4]))
    query = maker.randn(sum(lens), groups, 64).to(dtype)
    batch = batch_of(sequences, lens, [data.draw(st.sampled_from(UPDATES)) for _ in sequences])
    outputs = [torch.full_like(query, torch.nan) for _ in range(2)]
    for operators, pages, output in ((reference, theirs, outputs[0]), (cuda, ours, outputs[1])):
        pages.scores.fill_(1.0)
        pages.aux.fill_(2.0)
        operators.paged_attention(query, pages, batch, 0.125, output)
    cuda.use(None)
    assert relative_error(outputs[1], outputs[0]) < (1e-5 if dtype is torch.float32 else 2e-3)
    assert relative_error(ours.scores, theirs.scores) < 1e-4
    assert torch.equal(ours.aux, theirs.aux)


def row_major_copies(maker):
    """Two caches with the same entries; the second one's keys lie as on a GPU."""
    theirs, ours = (
        PagedKVCache.of(maker.cache.clone(), maker.head_size),
        PagedKVCache.of(maker.cache.clone(), maker.head_size, True),
    )
    ours.keys.copy_(maker.pages.keys)
    return theirs, ours


def test_rows_without_queries_are_skipped(strict):
    """As captured graphs are padded; a larger bound on queries than there are changes nothing. TOVA's decay is 0."""
    for bound in (1, 4):
        maker = CacheMaker(3, 2, 64, 16, torch.float32)
        sequences = [maker.sequence(40, 64, 99), maker.sequence(0, 0, 70)]
        batch = batch_of(sequences, [1, 1], [ScoreUpdate(ScoreMode.SUM, 0.0), None])
        maker.pages.scores.fill_(0.5)
        maker.pages.aux.fill_(2.0)
        theirs, ours = row_major_copies(maker)
        query = maker.randn(4, 4, 64)
        expected, output = torch.full((4, 4, 64), torch.nan), torch.full((4, 4, 64), torch.nan)
        reference.paged_attention(query, theirs, batch, 0.2, expected)
        strict.paged_attention(query, ours, padded(batch, bound), 0.2, output)
        assert relative_error(output[:2], expected[:2]) < 1e-5 and output[2:].isnan().all()
        torch.testing.assert_close(ours.scores, theirs.scores, rtol=1e-5, atol=1e-7)
        assert torch.equal(ours.aux, theirs.aux)


def test_what_kernels_cannot_do_is_left_to_others(cuda):
    """Chunks of many queries, and queries of another dtype than the cache's."""
    maker = CacheMaker(4, 2, 64, 32, torch.bfloat16)
    sequence = maker.sequence(40, 64, 160)
    check_against_reference(cuda, maker, [sequence], [30], [ScoreUpdate(ScoreMode.SUM, 0.9)], 4)
    query, outputs = maker.randn(1, 4, 64), [torch.empty(1, 4, 64) for _ in range(2)]
    batch = batch_of([sequence], [1], [None])
    for operators, output in zip((reference, cuda), outputs, strict=True):
        operators.paged_attention(query, maker.pages, batch, 0.1, output)
    assert torch.equal(*outputs)
    cuda.paged_attention(query[:0], maker.pages, batch.map(lambda tensor: tensor[:0], 1), 1.0, query[:0])
    with pytest.raises(ValueError, match="does not suit"):
        cuda.paged_attention(query[..., :32], maker.pages, batch, 1.0, query[..., :32])


@without_a_gpu
def test_blocks_that_a_gpu_has_no_room_for_are_left_to_others(strict, monkeypatch):
    """Many GPUs have 99 KiB for a block: enough for heads of 64, not for 128."""
    left = []
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.attention.shared_memory", lambda device: 99 << 10)
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.backend.fallback", lambda device: left.append(device) or reference)
    for dtype, head_size, fits in (
        (torch.bfloat16, 64, True),
        (torch.bfloat16, 128, False),
        (torch.float32, 80, False),
    ):
        maker = CacheMaker(5, 2, head_size, 16, dtype)
        batch = batch_of([maker.sequence(40, 64, 100)], [1], [None])
        query = maker.randn(1, 8, head_size).to(dtype)
        found, expected = torch.empty_like(query), torch.empty_like(query)
        strict.paged_attention(query, maker.pages, batch, 0.1, found)
        assert len(left) == (not fits)
        reference.paged_attention(query, maker.pages, batch, 0.1, expected)
        assert relative_error(found, expected) < 1e-2
        left.clear()


@without_a_gpu
def test_arguments_are_checked(strict):
    maker = CacheMaker(4, 2, 64, 16, torch.bfloat16)
    batch = batch_of([maker.sequence(40, 64, 100)], [1], [None])
    query = maker.randn(1, 4, 64).bfloat16()
    with pytest.raises(ValueError, match="query_lens is not of the shape"):
        strict.paged_attention(query, maker.pages, replace(batch, query_lens=torch.ones(2)), 1.0, query)
    transposed = PagedKVCache.of(maker.cache, 64, row_major_keys=False)
    with pytest.raises(ValueError, match="row by row"):
        strict.paged_attention(query, transposed, batch, 1.0, query)
    assert strict.obstacle(transposed) == "keys do not lie row by row" and strict.obstacle(maker.pages) is None
    narrow = CacheMaker(0, 1, 20, 16, torch.bfloat16).pages
    assert strict.obstacle(narrow) == "rows do not begin at multiples of 16 bytes"


@without_a_gpu
def test_nothing_is_asked_of_the_gpu(strict):
    """Captured graphs hold for any batch of a shape: values are not looked at, and plans are of shapes alone."""
    maker = CacheMaker(0, 2, 64, 16, torch.bfloat16)
    sequences = [maker.sequence(100, 200, 300), maker.sequence(7, 300, 450)]
    query = maker.randn(2, 8, 64).bfloat16()
    batch = batch_of(sequences, [1, 1], [ScoreUpdate(ScoreMode.SUM, 0.9), ScoreUpdate(ScoreMode.LOG_EMA, 0.9)])
    with Watch(Watch.WAITS):
        strict.paged_attention(query, maker.pages, replace(batch, max_query_len=1), 0.1, query.clone())


@without_a_gpu
def test_a_workspace_that_was_reserved_does_not_grow(strict):
    maker = CacheMaker(0, 2, 64, 16, torch.bfloat16)
    work = Workspace(torch.device("cpu"))
    work.reserve(maker.pages, 8, [(rows, 1) for rows in range(1, 10)], max_blocks=64)
    before = work.num_bytes
    assert before >= NUM_BLOCKS * 2 * 4 * 16 * 4, "logits of 4 query heads for each slot"
    for rows in (1, 2, 9):
        query = maker.randn(rows, 8, 64).bfloat16()
        numbers, table = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 64, dtype=torch.int32)
        maker.pages.keys[0] = 0
        maker.pages.values[0] = 0
        zeros = torch.zeros_like(numbers)
        starts = torch.arange(rows)
        batch = AttentionBatch(table, starts, numbers, numbers, zeros, zeros, zeros, torch.ones(rows), 1)
        strict.paged_attention(query, maker.pages, batch, 0.1, query, workspace=work)
        assert not query.any()
    assert work.num_bytes == before


@pytest.mark.parametrize("rows", [1, 8, 256])
def test_blocks_fill_a_gpu(rows, monkeypatch):
    """132 multiprocessors with 2 blocks each, as on an H200, for 8 heads: 33 of each. No share of less than 256."""
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.plan.multiprocessors", lambda device: 132)
    cache = torch.empty(8, 8, 16, cell_bytes(128, torch.bfloat16) // 2, dtype=torch.bfloat16)
    pages = PagedKVCache.of(cache, 128, row_major_keys=True)
    for entries, most in ((0, 1), (256, 1), (1024, 4), (65536, 33)):
        plan = AttentionPlan.of(pages, 32, 1, rows, entries // 16)
        assert (plan.num_tiles, plan.kept, plan.slots, plan.most) == (rows, 4, 33, most)
        assert plan.num_pieces == min(rows + 33, rows * most)
        assert plan.split_tiles == (0 if most == 1 else min(rows, 16, rows * most // 2))
        levels = 16 * 8
        assert plan.sizes == {"lse": levels * plan.num_pieces, "kept": 8 * 8 * 4 * 16} | (
            {"partial": levels * plan.num_split * 128} if most > 1 else {}
        )
    assert AttentionPlan.obstacle(pages, 32, 4) is None
    assert AttentionPlan.obstacle(pages, 32, 5) == "20 rows of queries of a KV head are not from 1 to 16"


def divided(operators, lengths, slots, most=1 << 20, least=LEAST_ENTRIES):
    """(division, the three lists) that the kernel makes of rows that see so many entries."""
    division = Division(len(lengths), slots, most)
    generator = torch.Generator().manual_seed(len(lengths))
    fronts, gaps, others = torch.randint(0, 5000, (3, len(lengths)), dtype=torch.int32, generator=generator)
    ends = torch.tensor(lengths, dtype=torch.int32)
    query_lens = torch.where(ends > 0, torch.randint(1, 5, ends.shape, generator=generator), 0).int()
    seq_lens = torch.where(ends > 0, ends + gaps, others)  # those of rows without queries may be anything

    def call(*rows):
        sizes = division.num_pieces, 2 * len(lengths), len(lengths)
        lists = [torch.full((size,), 99, dtype=torch.int32, device=rows[0].device) for size in sizes]
        backend.library().divide(*rows, *lists, slots, least, backend.stream(rows[0].device))
        return lists

    on_gpu = operators._call if isinstance(operators, OnGPU) else lambda call, *rows: call(*rows)
    return division, [found.tolist() for found in on_gpu(call, query_lens, seq_lens, fronts, fronts + gaps)]


def by_the_rule(lengths, slots, least=LEAST_ENTRIES):
    """(pieces, parts, order): the share is the smallest number of whole steps with which ``slots`` blocks at a time
    could do all, one for each piece of a row longer than it, and the others for the rest together."""

    def fits(share):
        blocks = sum(-(-length // share) for length in lengths if length > share)
        return sum(length for length in lengths if length <= share) <= (slots - blocks) * share

    share = next(share for share in range(least, 1 << 30, 64) if fits(share))
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    counts = [-(-length // share) for length in lengths]
    pieces = [row for row in order for _ in range(counts[row])]
    firsts = [sum(counts[other] for other in order[: order.index(row)]) for row in range(len(lengths))]
    return pieces, [number for pair in zip(firsts, counts, strict=True) for number in pair], order


@pytest.mark.parametrize(
    ("rows", "longest", "slots", "least"),
    [
        (1, 4000, 1, 256), (1, 100000, 33, 256), (1, 200, 33, 256), (1, 200000, 600, 64), (2, 5000, 3, 128),
        (7, 9000, 33, 256), (40, 3000, 8, 256), (40, 130000, 66, 256), (256, 700, 8, 256), (257, 9000, 264, 64),
        (600, 2000, 33, 256),
    ],
)  # fmt: skip
def test_pieces_are_by_the_rule(strict, rows, longest, slots, least):
    """Of rows of any lengths, of equal ones, of one long one among short ones, without queries, and of more rows than a
    block of the kernel has threads."""
    generator = torch.Generator().manual_seed(rows + slots)
    uneven = (torch.rand(rows, generator=generator) ** 4 * longest).int() + 1
    some = torch.where(torch.rand(rows, generator=generator) < 0.3, 0, uneven)
    one = torch.full((rows,), 60)
    one[rows // 2] = longest
    for lengths in (uneven, some, one, torch.full((rows,), longest), torch.zeros(rows, dtype=torch.int32)):
        lengths = lengths.tolist()
        division, (pieces, parts, order) = divided(strict, lengths, slots, least=least)
        expected, expected_parts, expected_order = by_the_rule(lengths, slots, least)
        assert pieces == expected + [-1] * (division.num_pieces - len(expected))
        assert parts == expected_parts and order == expected_order
        counts = [parts[2 * row + 1] for row in order]
        assert max(counts[division.split_tiles :], default=0) <= 1
        assert sum(count for count in counts if count > 1) <= division.num_split


@pytest.mark.parametrize(
    "lengths",
    [
        [131072] + [1024] * 63, [1024] * 63 + [131072], [65536] * 3 + [700] * 40, [65536], [8192] * 8, [8192] * 33,
        [8192] * 256,
    ],
)  # fmt: skip
def test_work_is_divided_by_length(strict, lengths):
    """A long row among short ones costs what its entries do: of an H200's blocks the busiest has hardly more than if
    all had equally many. With as many pieces as each of the others, one, it would have 44 times as many."""
    division, (pieces, parts, _) = divided(strict, lengths, 33, min(33, -(-max(lengths) // LEAST_ENTRIES)))
    found = []
    for place, row in enumerate(pieces):
        if row >= 0:
            first, count = parts[2 * row : 2 * row + 2]
            size = -(-lengths[row] // (64 * count)) * 64
            found.append((row, min(size, lengths[row] - (place - first) * size)))
    assert sum(size for _, size in found) == sum(lengths) and min(size for _, size in found) > 0
    assert longest_chain(division, found) <= 1.1


SKEWED = [(0, 0, 40), (300, 352, 400), (1500, 1600, 3000), (0, 0, 64), (0, 0, 256), (64, 96, 289), (0, 0, 257)]
"""front, tail, seq_len: one row longer than all others, and lengths about the bounds of steps and pieces."""


@pytest.mark.parametrize(("multiprocessors", "turn"), [(1, 0), (2, 1), (8, 2), (40, 0)])
@pytest.mark.parametrize(
    ("dtype", "groups", "head_size", "lens", "kind"),
    [
        (torch.bfloat16, 4, 64, [1, 2, 4, 1, 0, 3, 1], "capped-sinks"),
        (torch.float16, 1, 128, [1, 1, 1, 0, 1, 1, 1], "sinks"),
        (torch.float32, 2, 64, [1, 0, 2, 1, 1, 2, 2], "plain"),
    ],
)
def test_rows_of_all_lengths_share_a_batch(
    strict, dtype, groups, head_size, lens, kind, multiprocessors, turn, monkeypatch
):
    """In one piece each, in a few large ones and in many; rows without queries stay as they are. Each turn updates the
    scores of the longest row in another way."""
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.plan.multiprocessors", lambda device: multiprocessors)
    maker = CacheMaker(turn, 2, head_size, 32, dtype)
    sequences = [maker.sequence(*shape, num_dead=shape[0] // 10) for shape in SKEWED]
    updates = [UPDATES[1 + (row + turn) % 3] for row in range(len(SKEWED))]
    updates[3 + turn] = None
    check_against_reference(strict, maker, sequences, lens, updates, groups, kind)


@pytest.mark.parametrize(
    ("lengths", "num_pieces", "num_split"), [([1024], 4, 4), ([2048], 8, 8), ([1280] * 2, 8, 8), ([256] * 9, 9, 0)]
)
def test_there_may_be_as_many_pieces_as_there_is_room_for(strict, lengths, num_pieces, num_split, monkeypatch):
    """In the workspace, which has no element more than a call needs, and in the lists."""
    plans = []

    class Work(Workspace):
        def take(self, name, size):
            return torch.full((size,), torch.nan, device=self.device)

    of = AttentionPlan.of
    monkeypatch.setattr(AttentionPlan, "of", lambda *given: plans.append(of(*given)) or plans[-1])
    maker = CacheMaker(0, 2, 64, 16, torch.float16)
    sequences = [maker.sequence(0, 0, length) for length in lengths]
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.attention.workspace_of", Work)
    check_against_reference(strict, maker, sequences, [1] * len(lengths), [UPDATES[1]] * len(lengths), 4, "sinks")
    (plan,) = plans
    _, (pieces, _, _) = divided(strict, lengths, plan.slots, plan.most)
    assert len([row for row in pieces if row >= 0]) == num_pieces
    assert num_pieces <= plan.num_pieces and num_split <= plan.num_split
    assert (num_split == plan.num_split) == (num_split > 0) and (num_split > 0) == (plan.split_tiles > 0)


@without_a_gpu
def test_one_list_of_pieces_serves_all_layers(strict, monkeypatch):
    """It is made once in each forward pass, by its first layer, whatever was made before; and by any batch's own."""
    library, called = backend.library(), []

    def recorded(name, *given):
        called.append((name, given[0 if name == "divide" else 18].data_ptr()))
        return getattr(library, name)(*given)

    names = "attend", "divide"
    monkeypatch.setattr(backend, "library", lambda: SimpleNamespace(**{n: partial(recorded, n) for n in names}))
    maker = CacheMaker(0, 2, 64, 16, torch.bfloat16)
    layers = [maker.pages, *(PagedKVCache.of(maker.cache.clone(), 64) for _ in range(2))]
    query = maker.randn(3, 8, 64).bfloat16()
    batch = batch_of([maker.sequence(0, 0, 300) for _ in range(3)], [1] * 3, [UPDATES[1]] * 3, 1)
    for _ in range(2):
        called.clear()
        for layer in layers:
            strict.paged_attention(query, layer, replace(batch), 0.1, query.clone())
        assert [name for name, _ in called] == ["divide", "attend", "attend", "attend"]
        assert len({lists for name, lists in called if name == "attend"}) == 1
    called.clear()
    strict.paged_attention(query, layers[1], batch.map(lambda tensor: tensor[1:], 1), 0.1, query)
    assert [name for name, _ in called] == ["divide", "attend"]


# The table of choices


def test_nothing_was_measured_so_triton_is_chosen():
    table = json.loads(choice.RULES.read_text())
    assert table == [{"implementation": "triton"}], "say in docs/gpu.md what was measured"
    for gpu in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB"):
        assert {choice.choice(operator, gpu, 128) for operator in ops.OPERATORS} == {"triton"}


def test_a_rule_of_a_gpu_wins(monkeypatch):
    rule = {"operator": "paged_attention", "device": "NVIDIA H200", "head_sizes": [128], "implementation": "cuda"}
    monkeypatch.setattr(choice, "rules", lambda: [{"implementation": "triton"}, rule])
    choice.choice.cache_clear()
    try:
        assert choice.choice("paged_attention", "NVIDIA H200", 128) == "cuda"
        for other in (("merge_entries", "NVIDIA H200", 128), ("paged_attention", "NVIDIA H100", 128),
                      ("paged_attention", "NVIDIA H200", 64)):  # fmt: skip
            assert choice.choice(*other) == "triton"
    finally:
        choice.choice.cache_clear()


def test_cuda_can_be_chosen(cuda):
    maker = CacheMaker(0, 2, 64, 16, torch.float32)
    before = ops.implementations(maker.pages)
    assert set(before) == set(ops.OPERATORS) >= {"paged_attention", "merge_entries", "write_tokens"}
    try:
        ops.choose("cuda")
        chosen = ops.implementations(maker.pages)
        assert {name for name in chosen if chosen[name] == "CUDA C++, emulated"} == {"paged_attention"}
        assert "paged_attention: CUDA C++, emulated" in ops.implementation(maker.pages)
        check_against_reference(ops, maker, [maker.sequence(40, 64, 99)], [1], [UPDATES[1]], 2)
    finally:
        ops.choose(None)
    assert ops.implementations(maker.pages) == before


def test_operators_can_be_overridden(cuda):
    maker = CacheMaker(0, 2, 64, 16, torch.float32)
    try:
        ops.override({"paged_attention": "cuda", "gather_rows": "reference"})
        table = ops.implementations(maker.pages)
        assert table["paged_attention"] == "CUDA C++, emulated" and table["gather_rows"].endswith("it was chosen")
        assert not table["merge_entries"].startswith("CUDA")
        with pytest.raises(
            ValueError, match="there is no operator 'softmax' to choose; allowed: fused_attention, gather"
        ):
            ops.override({"softmax": "cuda"})
    finally:
        ops.override({})


def test_a_server_may_override_operators():
    given = {"kvmerge": {"operators": {"paged_attention": "cuda"}}}
    assert kvmerge_engine_args(additional_config=given)["additional_config"]["kvmerge"]["operators"] == {
        "paged_attention": "cuda"
    }
    for wrong, message in (
        ({"paged_attention": "rocm"}, "no operators called 'rocm'"),
        (["cuda"], "valid dictionary"),
    ):
        with pytest.raises(UnsupportedConfigError, match=f"additional_config.kvmerge.operators=.*{message}"):
            kvmerge_engine_args(additional_config={"kvmerge": {"operators": wrong}})


def test_a_library_that_is_missing_is_said_once(monkeypatch, warned, tmp_path):
    from vllm_kvmerge.ops import cuda

    monkeypatch.setattr(cuda.backend, "_path", tmp_path / "_cuda.so")
    dispatch.forget()
    maker = CacheMaker(0, 2, 64, 16, torch.float32)
    try:
        ops.override({"paged_attention": "cuda"})
        for _ in range(2):
            assert not ops.implementation(maker.pages).startswith("CUDA")
        assert len([message for message in warned if "csrc/cuda/build.py builds it" in message]) == 1
        with pytest.raises(OSError, match="is missing"):
            ops.choose("cuda")
        (tmp_path / "broken.so").write_text("no library")
        with pytest.raises(OSError, match="cannot be loaded"):
            cuda.use(tmp_path / "broken.so")
    finally:
        ops.override({})
        dispatch.forget()


# Compilation

KERNELS = {
    "Attend<MatrixUnits<Bf16, 128>, 4, 3, false>": [
        "LDGSTS.E.BYPASS.LTC128B.128", "HMMA.16816.F32.BF16", "LDSM.16.M",
    ],
    "Attend<MatrixUnits<F16, 256>, 4, 2, false>": ["HMMA.16816.F32", "LDSM.16.M"],
    "Attend<Cores<Bf16, 128, 1>, 4, 3, false>": ["LDGSTS.E.BYPASS.LTC128B.128", "LDS.128"],
    "Finish<128, void>": [],
    "Divide": [],
}  # fmt: skip
"""Some of the ops, and instructions that are meant to be in them."""


def check_compiled(kernels, target, folder):
    """Kernels for ``sm_TARGET``: nothing in a thread's stack, and the instructions that are given."""
    builder = cuda_builder()
    compiler = builder.nvcc()
    if compiler is None:
        pytest.skip("there is no nvcc")
    source, binary = folder / "ops.cu", folder / "ops.cubin"
    includes = [f'#include "{builder.SOURCES / name}.h"' for name in ("attention", "divide")]
    instances = [f"template __global__ void run_kernel<{kernel}>(const __grid_constant__ {kernel}::Params);"
                 for kernel in kernels]  # fmt: skip
    source.write_text("\n".join([*includes, "namespace kvmerge {", *instances, "}"]))
    virtual = target if target in builder.ARCHITECTURES else "80"  # other GPUs get the PTX of this one
    code = f"arch=compute_{virtual},code=sm_{target}"
    said = builder.run([compiler, *builder.NVCC_FLAGS, "-gencode", code, "-cubin", str(source), "-o", str(binary)])
    found = builder.usage(said)
    assert len(found) == len(kernels) and {kernel.target for kernel in found} == {f"sm_{target}"}
    assert all(kernel.stack == 0 and 0 < kernel.registers <= 255 for kernel in found), found
    tools = pytest.importorskip("tests.ops.triton_compiler", reason="there is no disassembler: Triton brings one")
    listing = subprocess.run([tools.CUOBJDUMP, "-sass", binary], capture_output=True, text=True, check=True).stdout
    functions = dict(part.split("\n", 1) for part in listing.split("Function : ")[1:])
    assert len(functions) == len(kernels)
    for kernel, instructions in kernels.items():
        (code,) = [code for name, code in functions.items() if re.search(_mangled(kernel), name)]
        for instruction in instructions:
            assert instruction in code, (kernel, instruction)
        assert not re.search(r"\b(LDL|STL)\b", code), f"{kernel} uses local memory"


def _mangled(kernel):
    """A pattern of a kernel's name in machine code."""
    known = {"true": "Lb1E", "false": "Lb0E", "void": "v", "float": "f", "Bf16": "13__nv_bfloat16", "F16": "6__half"}
    words = re.findall(r"\w+", kernel)
    parts = [known.get(word) or (f"Li{word}E" if word.isdigit() else f"{len(word)}{word}") for word in words]
    return "[INSE_]*".join(parts) + "E"


@pytest.mark.parametrize("target", ["80", "90a"])
def test_kernels_compile_without_spills(target, tmp_path):
    """The loads, copies and products that were meant are in the machine code."""
    check_compiled(KERNELS, target, tmp_path)
