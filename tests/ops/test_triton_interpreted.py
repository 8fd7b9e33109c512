"""Triton's operators in its interpreter: what the tests of all operators leave open. Run by ``test_triton``."""

import itertools
import os
from dataclasses import replace

import pytest
import torch

from tests.ops import test_rows
from tests.ops.conftest import (
    TOLERANCE,
    UPDATES,
    CacheMaker,
    batch_of,
    by_the_rule,
    complete,
    first_in_window,
    padded,
    relative_error,
    row_major_caches,
    row_major_copies,
    softmax_of,
)
from tests.ops.test_cpu import check_against_reference, check_tokens
from tests.ops.test_operators import check_repetition
from tests.ops.test_rows import SHAPES
from vllm_kvmerge import ops
from vllm_kvmerge.ops import PagedKVCache, cell_bytes, reference

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)
triton = pytest.importorskip("vllm_kvmerge.ops.triton", reason="Triton is not installed")
from vllm_kvmerge.ops.triton import attention_kernels  # noqa: E402
from vllm_kvmerge.ops.triton.plan import AttentionPlan  # noqa: E402
from vllm_kvmerge.ops.types import QUANTISED, ScoreMode, ScoreUpdate  # noqa: E402

EVERY = complete(triton)


@pytest.fixture(autouse=True)
def on_row_major_keys():
    with row_major_caches():
        yield


@pytest.mark.parametrize(
    ("dtype", "groups", "head_size", "lens"),
    [
        (torch.float32, 4, 64, [1, 1, 1]),
        (torch.float32, 1, 96, [1, 2, 7]),
        (torch.float32, 3, 40, [2, 3, 30]),
        (torch.bfloat16, 8, 128, [1, 1, 1]),
        (torch.bfloat16, 2, 80, [1, 3, 20]),
        (torch.float16, 4, 256, [1, 1, 1]),
        (torch.float16, 40, 32, [1, 1, 1]),
        (torch.float8_e4m3fn, 4, 128, [1, 1, 1]),
        (torch.float8_e5m2, 2, 80, [1, 3, 20]),
    ],
)
def test_triton_attention_on_row_major_keys(dtype, groups, head_size, lens):
    """Pieces, kept logits, many queries; statistics that new tokens' places held count for nothing."""
    maker = CacheMaker(head_size, 2, head_size, 16, dtype)
    shapes = [(129, 200, 530, 9), (0, 0, 333, 0), (17, 290, 290 + lens[2], 2)]
    sequences = [maker.sequence(*shape) for shape in shapes]
    assert AttentionPlan.of(maker.pages, 2 * groups, max(lens), 3, 34).most > 1
    updates = [UPDATES[1 + (i + groups) % 3] for i in range(3)]
    check_against_reference(triton, maker, sequences, lens, updates, groups, bound=max(lens))


@pytest.mark.parametrize(("window", "chunked"), [(1, False), (100, False), (1000, False), (20, True), (1024, True)])
@pytest.mark.parametrize(("dtype", "lens"), [(torch.float32, [1, 1]), (torch.float8_e4m3fn, [3, 40])], ids=str)
def test_triton_attends_in_a_window(dtype, lens, window, chunked):
    """In pieces and tiles that begin with it, as captured graphs are padded."""
    maker = CacheMaker(window, 2, 64, 16, dtype)
    sequences = [
        maker.sequence(0, first_in_window(n - length, window, chunked), n)
        for n, length in zip((1800, 45), lens, strict=True)
    ]
    batch = batch_of(sequences, lens, [None, None])
    batch = replace(batch, tails=torch.zeros_like(batch.tails))
    theirs, ours = row_major_copies(maker)
    query = maker.randn(sum(lens), 8, 64).to(maker.query_dtype)
    expected, actual = torch.full((2, *query.shape), torch.nan)
    softmax = softmax_of(maker, "capped-sinks", 2, 4)
    reference.paged_attention(query, theirs, batch, 0.2, expected, softmax, window, chunked)
    triton.paged_attention(query, ours, padded(batch, max(lens)), 0.2, actual, softmax, window, chunked)
    assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("lengths", "queries", "window", "at_once"),
    [
        ([131072] + [1024] * 63, 1, 0, 1024),
        ([65536] * 3 + [700] * 40, 1, 0, 1024),
        ([300 + 797 * row % 19000 for row in range(22)] + [0, 700, 0], 1, 0, 16),
        ([9000, 0, 17000, 300, 0], 100, 512, 16),
    ],
)
def test_triton_divides_work_by_length(lengths, queries, window, at_once, monkeypatch):
    """As CUDA's kernel does, on a GPU of 132 multiprocessors; rows without queries have no pieces. at_once: tiles that
    the kernel looks at together."""
    monkeypatch.setattr("vllm_kvmerge.ops.triton.plan.multiprocessors", lambda device: 132)
    pages = PagedKVCache.of(torch.zeros(2, 8, 16, cell_bytes(128, torch.bfloat16) // 2).bfloat16(), 128, True)
    plan = AttentionPlan.of(pages, 32, queries, len(lengths), -(-max(lengths) // 16))
    sizes = plan.num_pieces, 2 * plan.num_tiles, plan.num_tiles
    pieces, parts, order = (torch.full((size,), 99, dtype=torch.int32) for size in sizes)
    ends, none = torch.tensor(lengths, dtype=torch.int32), torch.zeros(len(lengths), dtype=torch.int32)
    per_tile, block_n = plan.block_m // 4, plan.settings.block_n
    attention_kernels.divide[(plan.num_tiles,)](
        torch.where(ends > 0, queries, 0).int(), ends, none, none, pieces, parts, order, plan.num_tiles, plan.tiles,
        plan.num_pieces, plan.slots, plan.settings.least, per_tile, window, 0, block_n, BLOCK=at_once,
    )  # fmt: skip
    entries = []
    for length, tile in itertools.product(lengths, range(plan.tiles)):
        query = length - queries + tile * per_tile  # the entry of the tile's first query
        skipped = max(0, query - window + 1) if window else 0
        entries.append(min(length, query + per_tile) - skipped if length else 0)
    expected, *others = by_the_rule(entries, plan.slots, plan.settings.least, block_n)
    assert pieces.tolist() == expected + [-1] * (plan.num_pieces - len(expected))
    assert [parts.tolist(), order.tolist()] == others
    split = [row for row in expected if expected.count(row) > 1]
    assert len(split) <= plan.num_split and len(set(split)) <= plan.split_tiles


@pytest.mark.parametrize("bound", [1, 40])
def test_triton_skips_rows_without_queries(bound):
    maker = CacheMaker(3, 2, 32, 32, torch.float32)
    sequences = [maker.sequence(40, 64, 99), maker.sequence(0, 0, 70)]
    tova = ScoreUpdate(ScoreMode.SUM, 0.0)
    check_against_reference(triton, maker, sequences, [1, 1], [tova, None], 2, bound=bound)


def test_triton_scores_of_rows_of_all_lengths():
    """Long chunks among many rows, more than are looked at together, of which most update nothing."""
    maker = CacheMaker(3, 1, 32, 16, torch.float32)
    sequences, lens, updates = [maker.sequence(0, 0, 5)] * 140, [1] * 140, [None] * 140
    scored = [(0, 330, 40), (61, 100, 1), (70, 40, 0), (129, 230, 33), (139, 64, 1)]
    for (row, length, queries), update in zip(scored, UPDATES[1:] * 2, strict=False):
        sequences[row], lens[row], updates[row] = maker.sequence(0, 0, length), queries, update
    check_against_reference(triton, maker, sequences, lens, updates, 2, bound=40)


def test_triton_entries_on_row_major_keys():
    """All that reads and writes keys."""
    shape, dtype = SHAPES[1], torch.bfloat16
    for where in ("same", "shuffled", "fresh"):
        test_rows.test_moves_are_as_if_everything_had_been_read_first(EVERY, dtype, shape, where)
    test_rows.test_rows_of_places_are_new_or_those_of_entries(EVERY, dtype, shape)
    test_rows.test_most_similar_against_a_loop(EVERY, dtype, shape, 9, True)
    for fusion in ("sum", "max"):
        test_rows.test_fused_attention_is_the_softmax_of_dense_keys(EVERY, dtype, shape, 4, 13, fusion, "plain", True)
    test_rows.test_units_together_are_as_each_alone(EVERY, dtype)


@pytest.mark.parametrize(
    ("groups", "kind", "update"), [*zip([3, 4, 20], ["plain", "capped-sinks", "plain"], UPDATES[1:], strict=True)]
)
@pytest.mark.parametrize("is_known", [False, True])
def test_triton_prompt_scores_on_row_major_keys(groups, kind, update, is_known, monkeypatch):
    """Of one query, of some and of several tiles. With a known log-sum-exp keys are gone through once."""
    maker = CacheMaker(6, 2, 48, 16, torch.float32)
    s, softmax = maker.sequence(0, 0, 200), softmax_of(maker, kind, 2, groups)
    theirs, ours = row_major_copies(maker)
    if is_known:
        monkeypatch.setattr(triton.attention._Call, "attend", lambda *_, **__: pytest.fail("the log-sum-exp is known"))
    found = torch.zeros(2, 2, 2, 200)
    for num_queries in (1, 5, 90):
        query, lse = maker.randn(num_queries, 2 * groups, 48), None
        if is_known:
            logits = torch.einsum("qhgd,hnd->hgqn", query.unflatten(1, (2, groups)), s.keys.float()) * 0.1
            hidden = torch.arange(200) > torch.arange(200 - num_queries, 200).unsqueeze(1)
            lse = softmax.log_norms(softmax.capped(logits).masked_fill(hidden, -torch.inf)).squeeze(-1).flatten(0, 1)
        reference.score_prompt_queries(query, theirs, s.blocks, update, 0.1, *found[0], softmax)
        triton.score_prompt_queries(query, ours, s.blocks, update, 0.1, *found[1], softmax, lse)
        assert relative_error(found[1], found[0]) < 1e-5


def test_triton_can_be_chosen():
    pages = CacheMaker(0, 2, 32, 32, torch.float32).pages
    before = ops.implementation(pages)
    try:
        ops.choose("triton")
        assert ops.implementation(pages).startswith("Triton") and "interpreted" in ops.implementation()
        small = CacheMaker(0, 1, 8, 16, torch.float32).pages
        assert ops.implementation(small).startswith("PyTorch reference: head size 8 is not from 16 to 256")
        ops.choose("reference")
        assert ops.implementation().startswith("PyTorch reference")
    finally:
        ops.choose(None)
    assert ops.implementation(pages) == before
    with pytest.raises(ValueError, match="no operators called 'rocm'"):
        ops.choose("rocm")


@pytest.mark.parametrize(
    ("dtype", "groups", "head_size", "start", "stop", "sinks", "weighted", "per_head"),
    [
        (torch.float32, 3, 40, 4, 75, 4, False, False),
        (torch.bfloat16, 7, 80, 33, 100, 50, True, True),
        (torch.float16, 2, 128, 0, 1, 9, True, False),
        (torch.float32, 1, 96, 100, 101, 0, False, True),
    ],
)
def test_triton_scores_of_a_repetition_on_row_major_keys(
    dtype, groups, head_size, start, stop, sinks, weighted, per_head
):
    check_repetition(triton, dtype, start, stop, sinks, weighted, per_head, groups=groups, head_size=head_size)


@pytest.mark.parametrize("row_major", [True, False])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_triton_stores_quantised_tokens_as_the_reference(dtype, given, row_major):
    check_tokens(triton, dtype, given, row_major)
