"""The native operators against the reference, on every level of instructions that this machine runs."""

from dataclasses import replace
from unittest import TestCase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.ops.conftest import (
    NUM_BLOCKS,
    SOFTMAXES,
    TOLERANCE,
    UPDATES,
    CacheMaker,
    batch_of,
    padded,
    relative_error,
    row_major_copies,
    softmax_of,
    statistics,
)
from vllm_kvmerge import ops
from vllm_kvmerge.ops import AttentionBatch, ScoreMode, ScoreUpdate, SequenceLayers, cpu, dispatch, reference
from vllm_kvmerge.ops.types import PLAIN_SOFTMAX, PLANES, QUANTISED, Changes, stored

needs_library = pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="the native operators are not built")


def attend(module, maker, query, sequences, lens, updates, scale, softmax=PLAIN_SOFTMAX, bound=None):
    """(output, scores, aux) of all live entries, whose statistics were other ones for each slot before. bound: on a GPU
    also with rows without queries, and told of at most so many queries of a row."""
    pages = maker.views(maker.cache.clone())
    before = 1.0 + torch.arange(maker.block_size) % 7
    pages.scores.copy_(before)
    pages.aux.copy_(before)
    output = torch.full_like(query, torch.nan)
    batch = batch_of(sequences, lens, updates)
    module.paged_attention(query, pages, padded(batch, bound) if bound else batch, scale, output, softmax)
    is_used = torch.isin(torch.arange(NUM_BLOCKS), torch.cat([s.blocks for s in sequences]))
    assert (pages.scores[~is_used] == before).all(), "scores outside of the sequences were changed"
    return output, *statistics(pages, sequences)


def assert_equal_enough(actual, expected, dtype):
    """actual, expected: as ``attend`` returns them."""
    assert relative_error(actual[0], expected[0]) < TOLERANCE[dtype]
    assert relative_error(actual[1], expected[1]) < 1e-4
    assert torch.equal(actual[2], expected[2])


def check_against_reference(module, maker, sequences, lens, updates, groups, kind="plain", **more):
    query = maker.randn(sum(lens), maker.num_kv_heads * groups, maker.head_size).to(maker.query_dtype)
    case = maker, query, sequences, lens, updates, maker.head_size**-0.5
    case += (softmax_of(maker, kind, maker.num_kv_heads, groups),)
    assert_equal_enough(attend(module, *case, **more), attend(reference, *case), maker.dtype)


def random_segments(data, maker, most_behind, most_queries):
    """One to three sequences of ``maker`` with fronts and holes of any length, and how many queries each has."""
    sequences, lens = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        front = data.draw(st.integers(0, 150))
        tail = front + data.draw(st.integers(0, 150)) if front else 0
        seq_len = tail + data.draw(st.integers(1, most_behind))
        sequences.append(maker.sequence(front, tail, seq_len, data.draw(st.integers(0, front))))
        lens.append(data.draw(st.integers(1, min(most_queries, seq_len - tail))))
    return sequences, lens, [data.draw(st.sampled_from(UPDATES)) for _ in sequences]


@examples(25)
@given(data=st.data())
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_any_segments(block_size, data):
    maker = CacheMaker(data.draw(st.integers(0, 1000)), 2, 32, block_size, torch.float32)
    sequences, lens, updates = random_segments(data, maker, 200, 9)
    groups, kind = data.draw(st.sampled_from([1, 3, 4])), data.draw(st.sampled_from(SOFTMAXES))
    check_against_reference(ops, maker, sequences, lens, updates, groups, kind)


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update and update.mode)
@pytest.mark.parametrize("lens", [[1, 1], [1, 70], [70, 1]])
def test_rounding_depends_on_neither_threads_nor_company(lens, update):
    """A long sequence is spread over threads where there are several and others take less."""
    maker = CacheMaker(5, 1, 64, 32, torch.bfloat16)
    sequences = [maker.sequence(900, 1000, 3300, num_dead=2), maker.sequence(5, 40, 160)]
    query = maker.randn(sum(lens), 4, 64).bfloat16()
    case = maker, query, sequences, lens, [update, UPDATES[1]], 0.125
    length, before, first = 900 + 2300, torch.get_num_threads(), None
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            both = attend(ops, *case)
            alone = attend(ops, maker, query[: lens[0]], sequences[:1], lens[:1], [update], 0.125)
            for company, own in zip((both[0][: lens[0]], both[1][:, :length], both[2][:, :length]), alone, strict=True):
                assert torch.equal(company, own)
            first = first or both
            assert all(map(torch.equal, both, first))
    finally:
        torch.set_num_threads(before)
    assert_equal_enough(first, attend(reference, *case), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_logits_do_not_overflow(operators, dtype):
    maker = CacheMaker(1, 1, 64, 32, dtype)
    sequence = maker.sequence(70, 100, 150)
    query = (1e4 * maker.randn(1, 4, 64)).to(dtype)
    for update in UPDATES:
        case = maker, query, [sequence], [1], [update], 1.0
        actual = attend(operators, *case)
        assert all(tensor.isfinite().all() for tensor in actual)
        assert_equal_enough(actual, attend(reference, *case), dtype)


def test_queries_and_outputs_may_be_strided_and_of_other_types(operators):
    maker = CacheMaker(2, 2, 64, 32, torch.bfloat16)
    sequence = maker.sequence(40, 64, 99)
    query, output = maker.randn(3, 12, 64)[:, :8], torch.empty(3, 9, 64, dtype=torch.float16)[:, 1:]
    expected = torch.empty(3, 8, 64)
    batch = batch_of([sequence], [3], [None])
    operators.paged_attention(query, maker.pages, batch, 0.125, output)
    reference.paged_attention(query, maker.pages, batch, 0.125, expected)
    assert relative_error(output, expected) < 2e-3


def check_tokens(operators, dtype, given, row_major=False):
    """Quantised ones over both scales, to the nearest; what is beyond the largest number becomes that."""
    maker = CacheMaker(3, 2, 48, 32, dtype)
    slots = torch.randperm(NUM_BLOCKS * 32, generator=maker.generator)[:300]
    slots[::9] = -1
    sizes = 10.0 ** torch.randint(-4, 5, (300, 1, 1), generator=maker.generator)
    key, value = (sizes * maker.randn(300, 2, 48)).to(given), (sizes * maker.randn(300, 3, 48)).to(given)[:, 1:]
    theirs, ours = row_major_copies(maker, row_major)
    operators.write_tokens(ours, slots, key, value)
    reference.write_tokens(theirs, slots, key, value)
    for name in PLANES:
        one, other = (getattr(pages, name).contiguous().view(torch.uint8) for pages in (ours, theirs))
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *QUANTISED], ids=str)
def test_tokens_are_written_as_the_reference_does(operators, dtype):
    check_tokens(operators, dtype, torch.bfloat16 if dtype in QUANTISED else dtype)


def test_float32_is_rounded_as_pytorch_does(operators):
    special = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e-8, 2.0**-25, 6e-8, 1e-5, -3e38, torch.inf])
    ties = torch.randint(0, 2**31 - 2**24, (48 * 40 - len(special),)).to(torch.int32).view(torch.float32)
    ties[:600] = torch.randn(600) * 2.0 ** torch.randint(-18, 17, (600,))
    ties[600:900] = ties[600:900].bfloat16().float()
    rows = torch.cat([special, ties]).view(1, 40, 48)
    for dtype in (torch.bfloat16, torch.float16, *QUANTISED):
        maker = CacheMaker(3, 1, 48, 32, dtype)
        places, blocks = torch.arange(40)[None], torch.tensor([4, 9])
        seq_layers = SequenceLayers.of(maker.pages, blocks, 40, 40, 40)
        operators.write_rows(seq_layers, blocks[None], places, rows, rows)
        for plane in ("keys", "values"):
            back = operators.gather_rows(seq_layers, plane, places)
            scale = maker.pages.scale_of(plane)
            assert torch.equal(back, stored(rows / scale, dtype).float() * scale)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_attention_reads_every_number_of_8_bits(operators, dtype, groups):
    """As keys, with a query of one dimension, which makes logits of them; and as the values of single tokens."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    # vLLM and we read as 480 what PyTorch takes for NaN; Triton's interpreter knows neither NaN nor infinity.
    known = numbers.float().isfinite()
    if dtype == torch.float8_e5m2 and getattr(operators, "INTERPRETED", False) is False:
        known[:] = True
    maker = CacheMaker(0, 1, 32, 32, dtype)
    pages, own = maker.pages, maker.sequence(0, 0, 257)
    slots = torch.arange(256)
    where = own.blocks[slots // 32].long(), 0, slots % 32
    row = torch.zeros(256, 32)
    row[:, 5] = numbers.float().nan_to_num(0.0, 0.0, 0.0)
    keys = pages.keys.transpose(2, 3)
    keys[where] = row.to(dtype)
    pages.scores.fill_(0.0)
    pages.aux.fill_(0.0)
    query = torch.zeros(1, groups, 32, dtype=torch.bfloat16)
    query[..., 5] = 1.0
    batch = AttentionBatch.single(own.blocks, 1, 257, update=ScoreUpdate(ScoreMode.LOG_EMA, 0.5))
    operators.paged_attention(query, pages, batch, 2.0**20, query.clone())
    expected = row[:, 5].double() * pages.key_scale * 2.0**20 + torch.tensor(0.5).double().log()
    torch.testing.assert_close(pages.scores[where].double(), expected, rtol=1e-6, atol=1e-6)

    tokens = [maker.sequence(0, 0, 1) for _ in range(8)]
    for sequence, part in zip(tokens, numbers.view(torch.uint8).where(known, 0).view(8, 32), strict=True):
        keys[int(sequence.blocks[0]), 0, 0] = torch.zeros(32).to(dtype)
        pages.values.view(torch.uint8)[int(sequence.blocks[0]), 0, 0] = part
    output = torch.full((8, groups, 32), torch.nan, dtype=torch.bfloat16)
    operators.paged_attention(
        query.expand(8, -1, -1).contiguous(), pages, batch_of(tokens, [1] * 8, [None] * 8), 1.0, output
    )
    expected = numbers.float().where(known, 0.0).view(8, 1, 32).expand_as(output) * pages.value_scale
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=0, equal_nan=True)


@needs_library
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(1, 3, 32)}, ValueError, "cannot share"),
        ({"query": torch.zeros(1, 4, 48)}, ValueError, "query must have shape"),
        ({"query": torch.zeros(1, 4, 32, dtype=torch.float64)}, TypeError, "query must be float32"),
        ({"query": torch.zeros(1, 4, 64)[..., ::2]}, ValueError, "contiguous in its last"),
        ({"query": torch.zeros(1, 4, 32, device="meta")}, RuntimeError, "tensors on meta"),
        ({"output": torch.zeros(0, 4, 32)}, ValueError, "fewer tokens"),
        ({"seq_lens": torch.tensor([5000])}, ValueError, "does not fit"),
        ({"seq_lens": torch.tensor([60])}, ValueError, "not in order"),
        ({"query_starts": torch.tensor([-1])}, ValueError, "not in the query"),
        ({"score_modes": torch.tensor([4])}, ValueError, "mode 4"),
        ({"block_table": torch.full((1, 4), NUM_BLOCKS)}, ValueError, f"block {NUM_BLOCKS}"),
    ],
)
def test_bad_arguments_raise(change, error, message):
    maker = CacheMaker(0, 2, 32, 32, torch.float32)
    batch = batch_of([maker.sequence(33, 64, 99)], [1], [None])
    arguments = {"query": torch.zeros(1, 4, 32), "output": torch.zeros(1, 4, 32), "cache": maker.pages, "scale": 1.0}
    cpu.paged_attention(batch=batch, **arguments)
    if change.keys() <= arguments.keys():
        arguments |= change
    else:
        batch = replace(batch, **change)
    with pytest.raises(error, match=message):
        cpu.paged_attention(batch=batch, **arguments)


@needs_library
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_block_ids_are_read_where_they_lie(dtype):
    """In a part of a wider table, in every other column, or columns first; what lies between them is no block's id."""
    maker = CacheMaker(0, 2, 32, 32, torch.float32)
    batch, query = batch_of([maker.sequence(33, 64, 99) for _ in range(2)], [1, 1], [None, None]), maker.randn(2, 4, 32)
    segments = torch.stack([batch.fronts, batch.tails, batch.seq_lens], 1).long()
    ids, found = batch.block_table.to(dtype), []
    wide = torch.stack([ids, torch.full_like(ids, NUM_BLOCKS)], 1)
    tables = wide.flatten(1)[:, : ids.shape[1]], wide.mT.flatten(1)[:, ::2], ids.T.contiguous().T
    for table in (batch.block_table, *tables):
        output, located = torch.empty(2, 4, 32), SequenceLayers([maker.pages], torch.tensor([0, 0]), table, segments)
        cpu.paged_attention(query, maker.pages, replace(batch, block_table=table), 1.0, output)
        found.append(torch.cat([plane.flatten() for plane in (output, *cpu.gather_metadata(located))]))
    assert all(torch.equal(one.nan_to_num(7.0), found[0].nan_to_num(7.0)) for one in found[1:])


@needs_library
def test_bad_entries_and_slots_raise():
    pages = CacheMaker(0, 2, 32, 32, torch.float32).pages
    blocks, index, rows = torch.tensor([3, 4]), torch.tensor([[0], [64]]), torch.zeros(2, 1, 32)
    located, at, usable = SequenceLayers.of(pages, blocks, 0, 0, 64), blocks[None], torch.ones(2, 1, dtype=torch.bool)
    first, places, token = index // 64 * 0, torch.zeros(2, 3).long(), torch.zeros(1, 2, 32)
    uneven = SequenceLayers([pages], torch.tensor([0, 0]), blocks.repeat(2, 1), torch.tensor([[0, 0, 64], [0, 0, 63]]))
    others = [pages, CacheMaker(0, 2, 64, 32, torch.float32).pages]

    def changes(origin, row):
        return Changes(places + origin, places + row, rows, None)

    for message, operator, *arguments in (
        ("index: there is no entry 64 among 64", cpu.gather_rows, located, "keys", index),
        ("no entry 64", cpu.move_entries, located, at, index),
        ("length 65 does not fit in 2 blocks", cpu.move_entries, located, at, torch.zeros(2, 65).long()),
        ("slot 64", cpu.write_rows, located, at, index, rows, None),
        ("no target 1 of 1", cpu.mix_entries, located, "keys", first, first + 1, first + 1.0, first),
        ("targets: -1 is usable", cpu.most_similar, located, first, first - 1, usable),
        ("origin: there is no entry 64", cpu.gather_rows, located, "keys", index, changes(64, 0)),
        ("row: there is no row 1", cpu.gather_rows, located, "keys", index, changes(0, 1)),
        ("no place 64 among 3", cpu.gather_rows, located, "keys", index, changes(0, 0)),
        (f"block {NUM_BLOCKS}", cpu.gather_metadata, SequenceLayers.of(pages, blocks + NUM_BLOCKS - 4, 0, 0, 64)),
        ("not in order", cpu.gather_metadata, SequenceLayers.of(pages, blocks, 9, 7, 64)),
        ("no layer 1", cpu.gather_metadata, replace(located, layer=torch.tensor([1]))),
        ("differ in number of entries", cpu.gather_metadata, uneven),
        ("layers differ", cpu.gather_metadata, replace(located, layers=others)),
        (f"slot {NUM_BLOCKS * 32}", cpu.write_tokens, pages, torch.tensor([NUM_BLOCKS * 32]), token, token),
    ):
        with pytest.raises((IndexError, ValueError, TypeError), match=message):
            operator(*arguments)


def test_pages_that_do_not_suit_run_on_the_reference():
    maker = CacheMaker(0, 2, 40, 32, torch.float32)
    assert "head size 40" in ops.implementation(maker.pages)
    sequence = maker.sequence(0, 0, 70)
    batch = batch_of([sequence], [1], [None])
    output = torch.empty(1, 4, 40)
    ops.paged_attention(query=maker.randn(1, 4, 40), cache=maker.pages, batch=batch, scale=1.0, output=output)
    assert output.isfinite().all()
    suiting = CacheMaker(0, 2, 32, 32, torch.float32).pages
    assert cpu.obstacle(suiting) is None
    scattered = replace(suiting, values=suiting.values.clone())
    assert "plane of values" in cpu.obstacle(scattered)
    seq_layers = SequenceLayers.of(suiting, torch.arange(2), 0, 0, 40)
    assert cpu.obstacle(seq_layers) is None
    assert "plane of values" in cpu.obstacle(replace(seq_layers, layers=[suiting, scattered]))


@pytest.fixture
def unloaded(monkeypatch):
    """Forgets what has been loaded, before the test and after it."""

    def forget():
        cpu.library.cache_clear()
        cpu._function.cache_clear()
        dispatch.forget()

    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("broken", ["missing", "empty"])
def test_without_the_library_the_reference_runs_after_one_warning(broken, unloaded, monkeypatch, tmp_path):
    if broken == "empty":
        (tmp_path / "_native.so").write_bytes(b"")
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "_native.so")
    with TestCase().assertLogs(level="WARNING") as logs:
        maker = CacheMaker(0, 2, 32, 32, torch.float32)
        sequence = maker.sequence(0, 0, 70)
        for _ in range(2):
            seq_layers = SequenceLayers.of(maker.pages, sequence.blocks, 0, 0, 70)
            keys = ops.gather_rows(seq_layers, "keys", torch.arange(70).repeat(2, 1))
            assert torch.equal(keys.double(), sequence.keys)
            assert ops.implementation().startswith("PyTorch reference")
    assert len(logs.output) == 1


on_every_level = pytest.mark.parametrize("operators", cpu.levels() if cpu.LIBRARY.exists() else [], indirect=True)


@on_every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_similarity_does_not_depend_on_how_many_members_there_are(operators, dtype):
    """Padding makes a call's width depend on a request's company, its results must not: bit for bit."""
    maker = CacheMaker(0, 2, 64, 32, dtype)
    s = maker.sequence(front=37, tail=200, seq_len=463)
    seq_layers = maker.layers(s)
    members = torch.stack([torch.randperm(300, generator=maker.generator)[:100] for _ in range(2)])
    carriers = torch.arange(300).expand(2, -1)
    usable = torch.rand(2, 300, generator=maker.generator) < 0.7
    many = operators.most_similar(seq_layers, members, carriers, usable)
    for count in (1, 16, 33, 64, 65):
        few = operators.most_similar(seq_layers, members[:, :count], carriers, usable)
        assert all(torch.equal(a, b[:, :count]) for a, b in zip(few, many, strict=True))


@on_every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *QUANTISED], ids=str)
@pytest.mark.parametrize(("groups", "head_size"), [(4, 64), (3, 80), (1, 128)])
def test_what_queries_get_does_not_depend_on_how_many_there_are(operators, dtype, groups, head_size):
    """Chunks of a prompt end where a step's room does, which its company decides: bit for bit."""
    maker = CacheMaker(1, 2, head_size, 32, dtype)
    s = maker.sequence(front=37, tail=200, seq_len=763)
    count, scale = 301, head_size**-0.5
    query = maker.randn(count, 2 * groups, head_size).to(maker.query_dtype)

    def attended(first: int, stop: int) -> torch.Tensor:
        part, seq_len = query[first:stop], s.seq_len - count + stop
        output = torch.empty_like(part)
        batch = AttentionBatch.single(s.blocks, stop - first, seq_len, s.front, s.tail)
        operators.paged_attention(part, maker.pages, batch, scale, output)
        return output

    whole = attended(0, count)
    assert all(torch.equal(attended(a, b), whole[a:b]) for a, b in ((0, 2), (2, 19), (19, 150), (150, 301)))
