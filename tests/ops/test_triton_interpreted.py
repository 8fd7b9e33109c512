"""Triton's operators in its interpreter: what the tests of all operators leave open. Run by ``test_triton``."""

import heapq
import math
import os
from dataclasses import replace

import pytest
import torch

from tests.entries import gather_entries
from tests.ops.conftest import (
    TOLERANCE,
    CacheMaker,
    batch_of,
    first_in_window,
    padded,
    relative_error,
    row_major_copies,
    softmax_of,
    statistics,
)
from tests.ops.test_cpu import UPDATES, check_padded
from vllm_kvmerge import ops
from vllm_kvmerge.ops import (
    ROW_PLANES,
    Changes,
    PagedKVCache,
    ScoreMode,
    ScoreUpdate,
    SequenceLayers,
    cell_bytes,
    reference,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)
triton = pytest.importorskip("vllm_kvmerge.ops.triton", reason="Triton is not installed")
from vllm_kvmerge.ops.triton import attention_kernels  # noqa: E402
from vllm_kvmerge.ops.triton.plan import AttentionPlan  # noqa: E402
from vllm_kvmerge.ops.types import QUANTISED, stored  # noqa: E402


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
    """Pieces, kept logits, many queries; new tokens' statistics are poison, and so is all that is not written."""
    maker = CacheMaker(head_size, 2, head_size, 16, dtype)
    shapes = [(129, 200, 530, 9), (0, 0, 333, 0), (17, 290, 290 + lens[2], 2)]
    sequences = [maker.sequence(*shape) for shape in shapes]
    plan = AttentionPlan.of(maker.pages, 2 * groups, max(lens), 3, 34)
    assert plan.most > 1
    theirs, ours = row_major_copies(maker)
    updates = [UPDATES[1 + (i + groups) % 3] for i in range(3)]
    for pages in (theirs, ours):
        for s, length in zip(sequences, lens, strict=True):
            slots = torch.tensor([*range(s.front), *range(s.tail, s.seq_len)])
            block, offset = s.blocks[slots // 16].long(), slots % 16
            values = torch.arange(len(slots)).float().remainder(7) / 7
            values[-length:] = torch.nan
            pages.scores[block, :, offset] = values.unsqueeze(1)
            pages.aux[block, :, offset] = values.unsqueeze(1)
    query = maker.randn(sum(lens), 2 * groups, head_size).to(maker.query_dtype)
    expected, actual = torch.full_like(query, torch.nan), torch.full_like(query, torch.nan)
    batch = batch_of(sequences, lens, updates)
    reference.paged_attention(query, theirs, batch, head_size**-0.5, expected)
    triton.paged_attention(query, ours, replace(batch, max_query_len=max(lens)), head_size**-0.5, actual)
    assert relative_error(actual, expected) < TOLERANCE[dtype]
    (scores, aux), (expected_scores, expected_aux) = statistics(ours, sequences), statistics(theirs, sequences)
    assert relative_error(scores, expected_scores) < 1e-4
    assert torch.equal(aux, expected_aux)


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


def longest_chain(plan, found, num_heads=8):
    """Entries that the busiest of as many programs as run at a time reads, each taking the next piece when it is free,
    over the entries of each if all had equally many. found: pieces of one KV head, pairs of a tile and its entries."""
    programs = [0] * (plan.slots * num_heads)
    for _, size in found:
        for _ in range(num_heads):
            heapq.heapreplace(programs, programs[0] + size)
    return max(programs) / (num_heads * sum(size for _, size in found) / len(programs))


def pieces_of(lengths, monkeypatch, queries=1, window=0, at_once=1024):
    """(plan, pieces of one KV head as pairs of a tile and its entries, in their order) on a GPU of 132 multiprocessors,
    for 8 KV heads."""
    monkeypatch.setattr("vllm_kvmerge.ops.triton.plan.multiprocessors", lambda device: 132)
    pages = PagedKVCache.of(torch.zeros(2, 8, 16, cell_bytes(128, torch.bfloat16) // 2).bfloat16(), 128, True)
    plan = AttentionPlan.of(pages, 32, queries, len(lengths), -(-max(lengths) // 16))
    sizes = plan.num_pieces, 2 * plan.num_tiles, plan.num_tiles
    pieces, parts, order = (torch.full((size,), 99, dtype=torch.int32) for size in sizes)
    ends, none = torch.tensor(lengths, dtype=torch.int32), torch.zeros(len(lengths), dtype=torch.int32)
    counts = torch.where(ends > 0, queries, 0).int()
    per_tile, block_n = plan.block_m // 4, plan.settings.block_n
    attention_kernels.divide[(plan.num_tiles,)](
        counts, ends, none, none, pieces, parts, order, plan.num_tiles, plan.tiles, plan.num_pieces, plan.slots,
        plan.settings.least, per_tile, window, 0, block_n, BLOCK=at_once,
    )  # fmt: skip
    first, count = parts.view(-1, 2).T.tolist()
    entries = []
    for tile in range(plan.num_tiles):
        row, query = tile // plan.tiles, tile % plan.tiles * per_tile
        seen = min(lengths[row], lengths[row] - queries + query + per_tile) if counts[row] else 0
        entries.append(min(seen, window + per_tile - 1) if window else seen)
    found = []
    for place, tile in enumerate(pieces.tolist()):
        if tile >= 0:
            size = math.ceil(math.ceil(entries[tile] / count[tile]) / block_n) * block_n
            found.append((tile, max(0, min(size, entries[tile] - (place - first[tile]) * size))))
    assert [sum(size for tile, size in found if tile == one) for one in range(plan.num_tiles)] == entries
    lens = [entries[tile] for tile in order.tolist()]
    assert sorted(order.tolist()) == list(range(plan.num_tiles)) and lens == sorted(lens, reverse=True)
    is_split = [count[tile] > 1 for tile in order.tolist()]
    assert not any(is_split[plan.split_tiles :]) and sum(number for number in count if number > 1) <= plan.num_split
    assert all(size > 0 for _, size in found[: plan.slots // 2])
    return plan, found


@pytest.mark.parametrize("lengths", [[131072] + [1024] * 63, [1024] * 63 + [131072], [65536] * 3 + [700] * 40])
def test_triton_divides_work_by_length(lengths, monkeypatch):
    """A long row among short ones costs what its entries do. With as many pieces as each of the others, one, its
    program would have 19 to 44 times as many as if all had equally many."""
    plan, found = pieces_of(lengths, monkeypatch)
    assert longest_chain(plan, found) <= 1.3
    longest = lengths.index(max(lengths))
    assert sum(tile == longest for tile, _ in found) >= 8


@pytest.mark.parametrize(("queries", "window"), [(1, 0), (100, 512)])
def test_triton_divides_rows_of_all_lengths(queries, window, monkeypatch):
    """Rows without queries have no pieces; more tiles than the kernel looks at together."""
    lengths = torch.randint(300, 20000, (20 // queries + 4,), generator=torch.Generator().manual_seed(1)).tolist()
    lengths[1] = lengths[-1] = 0
    plan, found = pieces_of(lengths, monkeypatch, queries, window, at_once=16)
    assert {tile // plan.tiles for tile, _ in found} == {row for row, length in enumerate(lengths) if length}


@pytest.mark.parametrize("bound", [1, 40])
def test_triton_skips_rows_without_queries(bound):
    check_padded(triton, CacheMaker(3, 2, 32, 32, torch.float32), bound)


def test_triton_scores_of_rows_of_all_lengths():
    """Long chunks among many rows, more than are looked at together, of which most update nothing."""
    maker = CacheMaker(3, 1, 32, 16, torch.float32)
    plain, empty = maker.sequence(0, 0, 5), maker.sequence(0, 0, 40)
    scored = {0: (330, 40), 61: (100, 1), 129: (230, 33), 139: (64, 1)}
    modes = [ScoreMode.SUM, ScoreMode.LOG_EMA, ScoreMode.MEAN, ScoreMode.SUM]
    sequences, lens, updates = [plain] * 140, [1] * 140, [None] * 140
    for (row, (length, queries)), mode in zip(scored.items(), modes, strict=True):
        sequences[row], lens[row], updates[row] = maker.sequence(0, 0, length), queries, ScoreUpdate(mode, 0.9)
    sequences[70], lens[70], updates[70] = empty, 0, ScoreUpdate(ScoreMode.SUM, 0.9)
    batch, query = batch_of(sequences, lens, updates, 40), maker.randn(sum(lens), 2, 32)
    maker.pages.scores.fill_(0.5)
    maker.pages.aux.fill_(2.0)
    theirs, ours = row_major_copies(maker)
    expected, actual = torch.full((2, *query.shape), torch.nan)
    reference.paged_attention(query, theirs, batch, 0.2, expected)
    triton.paged_attention(query, ours, batch, 0.2, actual)
    assert relative_error(actual, expected) < 1e-5
    own = [sequences[row] for row in (*scored, 70)]
    for one, other in zip(statistics(ours, own), statistics(theirs, own), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_triton_entries_on_row_major_keys():
    """All that reads and writes keys, on two layers in the layout that a GPU has."""
    maker = CacheMaker(5, 2, 48, 16, torch.bfloat16)
    s = maker.sequence(37, 100, 150, 3)
    maker.pages.scores.fill_(0.5)
    maker.pages.aux.fill_(2.0)
    theirs, ours = row_major_copies(maker)
    n, generator = 87, maker.generator
    index = torch.stack([torch.randperm(n, generator=generator) for _ in range(2)])
    results = []
    for module, pages in ((reference, theirs), (triton, ours)):
        seq_layers = SequenceLayers.of(pages, s.blocks, s.front, s.tail, s.seq_len)
        found = [*module.gather_metadata(seq_layers), module.gather_rows(seq_layers, "keys", index)]
        changes = Changes(index, index - 77, found[4][:, :10] * 2, None)
        found += [module.gather_rows(seq_layers, plane, index.flip(1), changes) for plane in ROW_PLANES]
        for some in (None, changes):
            found += module.most_similar(seq_layers, index[:, :20], index[:, 20:], index[:, 20:] % 3 > 0, some)
        queries = torch.randn(2, 3, 5, 48, generator=torch.Generator().manual_seed(1))
        seen = torch.tensor([[150, 140, 90, 20, 10]]).expand(2, -1)
        found.append(module.fused_attention(seq_layers, queries, seen, found[0], found[3], 0.2, "max"))
        kept = index[:, :40].masked_fill(index[:, :40] < 4, -1)
        module.move_entries(seq_layers, s.blocks[None, :3], kept)
        module.write_rows(seq_layers, s.blocks[None, :3], index[:, :1] % 40, found[4][:, :1] + 1, -found[4][:, :1])
        module.write_tokens(pages, torch.tensor([-1, 16 * 40 + 3]), *queries[:, :2].transpose(1, 2).bfloat16()[:, :2])
        after = gather_entries(pages, s.blocks, 40, 100, 150)
        results.append(
            [*found, after.keys, after.values, pages.values[40, :, 3].float(), pages.keys[40, ..., 3].float()]
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [ScoreMode.SUM, ScoreMode.MEAN, ScoreMode.LOG_EMA])
def test_triton_prompt_scores_on_row_major_keys(mode):
    maker = CacheMaker(6, 2, 80, 16, torch.float16)
    s = maker.sequence(0, 0, 200)
    theirs, ours = row_major_copies(maker)
    query = maker.randn(70, 6, 80).half()
    found = []
    for module, pages in ((reference, theirs), (triton, ours)):
        scores, aux = torch.zeros(2, 256), torch.zeros(2, 256)
        for stop in (40, 70):
            part = query[:40] if stop == 40 else query[40:]
            statistics = (scores[:, : 130 + stop], aux[:, : 130 + stop])
            module.score_prompt_queries(part, pages, s.blocks, ScoreUpdate(mode, 0.9), 0.1, *statistics)
        assert not scores[:, 200:].any()
        found.append((scores, aux))
    assert relative_error(found[1][0], found[0][0]) < 1e-5
    assert torch.equal(found[1][1], found[0][1])


@pytest.mark.parametrize(("groups", "kind"), [(3, "plain"), (4, "capped-sinks"), (20, "plain")])
def test_triton_prompt_scores_from_a_known_log_sum_exp(groups, kind, monkeypatch):
    """Of one query, of some and of several tiles: keys are gone through once, to score them."""
    maker = CacheMaker(6, 2, 48, 16, torch.float32)
    s, softmax = maker.sequence(0, 0, 200), softmax_of(maker, kind, 2, groups)
    theirs, ours = row_major_copies(maker)
    monkeypatch.setattr(triton.attention._Call, "attend", lambda *_, **__: pytest.fail("the log-sum-exp is known"))
    keys = s.keys.float()  # of all 200 tokens
    for num_queries in (1, 5, 90):
        query, update = maker.randn(num_queries, 2 * groups, 48), ScoreUpdate(ScoreMode.SUM, 0.9)
        logits = torch.einsum("qhgd,hnd->hgqn", query.unflatten(1, (2, groups)), keys) * 0.1
        hidden = torch.arange(200) > torch.arange(200 - num_queries, 200).unsqueeze(1)
        lse = softmax.log_norms(softmax.capped(logits).masked_fill(hidden, -torch.inf)).squeeze(-1).flatten(0, 1)
        found = torch.zeros(2, 2, 2, 200)
        reference.score_prompt_queries(query, theirs, s.blocks, update, 0.1, *found[0], softmax)
        triton.score_prompt_queries(query, ours, s.blocks, update, 0.1, *found[1], softmax, lse)
        assert relative_error(found[1], found[0]) < 1e-5


def test_triton_can_be_chosen():
    maker = CacheMaker(0, 2, 32, 32, torch.float32)
    before = ops.implementation(maker.pages)
    try:
        ops.choose("triton")
        assert ops.implementation(maker.pages).startswith("Triton") and "interpreted" in ops.implementation()
        sequence = maker.sequence(0, 0, 70)
        seq_layers = SequenceLayers.of(maker.pages, sequence.blocks, 0, 0, 70)
        keys = ops.gather_rows(seq_layers, "keys", torch.arange(70).repeat(2, 1))
        assert torch.equal(keys.double(), sequence.keys)
        small = CacheMaker(0, 1, 8, 16, torch.float32).pages
        assert ops.implementation(small).startswith("PyTorch reference: head size 8 is not from 16 to 256")
        ops.choose("reference")
        assert ops.implementation().startswith("PyTorch reference")
    finally:
        ops.choose(None)
    assert ops.implementation(maker.pages) == before
    with pytest.raises(ValueError, match="no operators called 'rocm'"):
        ops.choose("rocm")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN
def test_triton_join_slots_stays_inside_where_products_are_no_numbers():
    keys, joining = torch.rand(2, 3, 16), torch.rand(2, 5, 16)
    joining[1, 3:] = torch.nan
    joined, weights = triton.join_slots(keys, joining, torch.ones(2, 5), torch.ones(2, 3))
    assert joined.min() >= 0 and joined.max() < 3
    assert weights.sum(1).tolist() == [8.0, 8.0]


@pytest.mark.parametrize(
    ("dtype", "groups", "head_size", "num_queries", "start", "num_scored", "sinks", "weighted", "per_head"),
    [
        (torch.float32, 3, 40, 29, 4, 71, 4, False, False),
        (torch.bfloat16, 7, 80, 1, 33, 67, 50, True, True),
        (torch.float16, 2, 128, 37, 0, 1, 9, True, False),
        (torch.float32, 1, 96, 30, 99, 1, 0, False, True),
    ],
)
def test_triton_scores_of_a_repetition_on_row_major_keys(
    dtype, groups, head_size, num_queries, start, num_scored, sinks, weighted, per_head
):
    """Scores are part of a wider plane, and some are larger already; queries are part of a batch's."""
    maker, context = CacheMaker(head_size, 2, head_size, 16, dtype), 100
    sequence = maker.sequence(0, 0, context + num_queries)
    theirs, ours = row_major_copies(maker)
    query = maker.randn(num_queries + 3, 2 * groups, head_size).to(dtype)[3:]
    weights = maker.randn(num_queries + 1).exp()[1:] if weighted else None
    before = maker.randn(2 * groups if per_head else 2, 140).abs() * 0.02
    where = context + num_queries, context, start, sinks
    found = []
    for module, pages in ((reference, theirs), (triton, ours)):
        scores = before.clone()
        part = scores[:, 5 : 5 + num_scored]
        module.score_repetition(query, pages, sequence.blocks, 0.3, *where, part, weights)
        found.append(scores)
    expected, scores = found
    raised = expected > before
    assert relative_error(scores, expected.double()) < 1e-5 and torch.equal(scores[~raised], before[~raised])
    assert raised[:, 5 : 5 + num_scored].any() and not raised[:, 5 + num_scored :].any()
    unchanged = scores.clone()
    triton.score_repetition(query[:0], ours, sequence.blocks, 0.3, context, *where[1:], unchanged)
    assert torch.equal(unchanged, scores)


@pytest.mark.parametrize("row_major", [True, False])
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_triton_stores_quantised_tokens_as_the_reference(dtype, row_major):
    """Over both scales, to the nearest; what is beyond the largest number becomes that. Nothing else is written."""
    maker = CacheMaker(11, 3, 48, 16, dtype)
    theirs, ours = row_major_copies(maker, row_major)
    key, value = (maker.randn(40, 3, 48) * 10.0 ** torch.randint(-4, 5, (40, 1, 1)) for _ in range(2))
    slots = torch.randperm(900, generator=maker.generator)[:40]
    slots[::9] = -1
    for given in (torch.float32, torch.bfloat16):
        reference.write_tokens(theirs, slots, key.to(given), value.to(given))
        triton.write_tokens(ours, slots, key.to(given), value.to(given))
        for name in ("keys", "values"):
            mine, expected = (getattr(pages, name).contiguous().view(torch.uint8) for pages in (ours, theirs))
            assert torch.equal(mine, expected), name
    block, offset = slots[1] // 16, slots[1] % 16
    assert torch.equal(ours.values[block, :, offset].float(), stored(value[1].bfloat16() / 2.0, dtype).float())
