"""The native operators against the reference, on every level of instructions that this machine runs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.ops.conftest import NUM_BLOCKS, SOFTMAXES, CacheMaker, batch_of, softmax_of
from vllm_kvmerge import ops
from vllm_kvmerge.ops import (
    PLAIN_SOFTMAX,
    AttentionBatch,
    Changes,
    PagedKVCache,
    ScoreMode,
    ScoreUpdate,
    SequenceLayers,
    cpu,
    dispatch,
    reference,
)
from vllm_kvmerge.ops.types import QUANTISED, stored

needs_library = pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="the native operators are not built")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3} | dict.fromkeys(QUANTISED, 1e-2)
UPDATES = [None, ScoreUpdate(ScoreMode.SUM, 0.9), ScoreUpdate(ScoreMode.MEAN, 1.0), ScoreUpdate(ScoreMode.LOG_EMA, 0.8)]


def relative_error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def attend(module, maker, query, sequences, lens, updates, scale, softmax=PLAIN_SOFTMAX):
    """(output, scores, aux) of all live entries, statistics before set to 1 and 2."""
    pages = maker.views(maker.cache.clone())
    pages.scores.fill_(1.0)
    pages.aux.fill_(2.0)
    output = torch.full_like(query, torch.nan)
    batch = batch_of(sequences, lens, updates)
    module.paged_attention(query, pages, batch, scale, output, softmax)
    live = [
        reference.gather_metadata(SequenceLayers.of(pages, s.blocks, s.front, s.tail, s.seq_len)) for s in sequences
    ]
    dead = [(pages.scores[b] != 1.0).sum() for b in range(pages.keys.shape[0]) if b not in used_blocks(sequences)]
    assert not any(dead), "scores outside of the sequences were changed"
    return output, torch.cat([m[1] for m in live], 1), torch.cat([m[2] for m in live], 1)


def used_blocks(sequences):
    return set(torch.cat([s.blocks for s in sequences]).tolist())


def assert_equal_enough(actual, expected, dtype):
    """actual, expected: as ``attend`` returns them."""
    assert relative_error(actual[0], expected[0]) < TOLERANCE[dtype]
    assert relative_error(actual[1], expected[1]) < 1e-4
    assert torch.equal(actual[2], expected[2])


def check_against_reference(module, maker, sequences, lens, updates, groups, kind="plain"):
    query = maker.randn(sum(lens), maker.num_kv_heads * groups, maker.head_size).to(maker.query_dtype)
    case = maker, query, sequences, lens, updates, maker.head_size**-0.5
    case += (softmax_of(maker, kind, maker.num_kv_heads, groups),)
    assert_equal_enough(attend(module, *case), attend(reference, *case), maker.dtype)


SIZES = [(32, 128), (64, 64), (80, 48), (128, 128), (256, 16), (512, 32)]
"""Head size and block size."""
CASES = [
    (*sizes, groups, list(TOLERANCE)[(i + j) % 5], SOFTMAXES[(i + 2 * j) % 4])
    for i, sizes in enumerate(SIZES)
    for j, groups in enumerate([1, 2, 4, 7, 8])
]
"""Every pair of sizes and groups, each of sizes and dtype, and each of groups and dtype; each softmax with each of
sizes."""


@pytest.mark.parametrize(("head_size", "block_size", "groups", "dtype", "kind"), CASES, ids=str)
def test_attention_is_the_references(operators, dtype, groups, head_size, block_size, kind):
    maker = CacheMaker(groups, 2, head_size, block_size, dtype)
    sequences = [
        maker.sequence(front=129, tail=3 * block_size + 101, seq_len=3 * block_size + 301, num_dead=7),
        maker.sequence(front=64, tail=64, seq_len=64 + 3, num_dead=64),  # only the tail lives
        maker.sequence(front=0, tail=0, seq_len=333),
        maker.sequence(front=17, tail=290, seq_len=291),
    ]
    check_against_reference(operators, maker, sequences, [1, 3, 40, 1], UPDATES[1:] + [None], groups, kind)


@examples(25)
@given(data=st.data())
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_any_segments(block_size, data):
    maker = CacheMaker(data.draw(st.integers(0, 1000)), 2, 32, block_size, torch.float32)
    sequences, lens = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        front = data.draw(st.integers(0, 150))
        tail = front + data.draw(st.integers(0, 150)) if front else 0
        seq_len = tail + data.draw(st.integers(1, 200))
        sequences.append(maker.sequence(front, tail, seq_len, data.draw(st.integers(0, front))))
        lens.append(data.draw(st.integers(1, min(9, seq_len - tail))))
    updates = [data.draw(st.sampled_from(UPDATES)) for _ in sequences]
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
        expected = attend(reference, maker, query, [sequence], [1], [update], 1.0)
        actual = attend(operators, maker, query, [sequence], [1], [update], 1.0)
        assert all(tensor.isfinite().all() for tensor in actual)
        assert relative_error(actual[0], expected[0]) < TOLERANCE[dtype]
        assert relative_error(actual[1], expected[1]) < 1e-4


def test_queries_and_outputs_may_be_strided_and_of_other_types(operators):
    maker = CacheMaker(2, 2, 64, 32, torch.bfloat16)
    sequence = maker.sequence(40, 64, 99)
    packed = maker.randn(3, 12, 64)
    query, output = packed[:, :8], torch.empty(3, 9, 64, dtype=torch.float16)[:, 1:]
    expected = torch.empty(3, 8, 64)
    batch = batch_of([sequence], [3], [None])
    operators.paged_attention(query, maker.pages, batch, 0.125, output)
    reference.paged_attention(query, maker.pages, batch, 0.125, expected)
    assert relative_error(output, expected) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_are_written_as_the_reference_does(operators, dtype):
    maker = CacheMaker(3, 2, 48, 32, dtype)
    slots = torch.randperm(NUM_BLOCKS * 32, generator=maker.generator)[:700]
    slots[::9] = -1
    key, value = (100 * maker.randn(700, 2, 48)).to(dtype), maker.randn(700, 3, 48).to(dtype)[:, 1:]
    ours, theirs = maker.cache.clone(), maker.cache.clone()
    operators.write_tokens(PagedKVCache.of(ours, 48), slots, key, value)
    reference.write_tokens(PagedKVCache.of(theirs, 48), slots, key, value)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(ours.view(bits), theirs.view(bits))


def test_float32_is_rounded_as_pytorch_does(operators):
    special = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e-8, 2.0**-25, 6e-8, 1e-5, -3e38, torch.inf])
    ties = torch.randint(0, 2**31 - 2**24, (48 * 40 - len(special),)).to(torch.int32).view(torch.float32)
    ties[:600] = torch.randn(600) * 2.0 ** torch.randint(-18, 17, (600,))
    ties[600:900] = ties[600:900].bfloat16().float()
    rows = torch.cat([special, ties]).view(1, 40, 48)
    for dtype in (torch.bfloat16, torch.float16, *QUANTISED):
        maker = CacheMaker(3, 1, 48, 32, dtype)
        places = torch.arange(40)[None]
        blocks = torch.tensor([4, 9])
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
        ({"seq_lens": torch.tensor([0.5])}, TypeError, "integers"),
        ({"seq_lens": torch.tensor([5000])}, ValueError, "does not fit"),
        ({"seq_lens": torch.tensor([60])}, ValueError, "not in order"),
        ({"fronts": torch.tensor([-1])}, ValueError, "not in order"),
        ({"fronts": torch.tensor([1, 2])}, ValueError, "fronts must have shape"),
        ({"query_lens": torch.tensor([2])}, ValueError, "not in the query"),
        ({"query_starts": torch.tensor([-1])}, ValueError, "not in the query"),
        ({"score_modes": torch.tensor([4])}, ValueError, "mode 4"),
        ({"score_decays": torch.tensor([1.0], dtype=torch.float64)}, TypeError, "score_decays must be float32"),
        ({"block_table": torch.full((1, 4), NUM_BLOCKS)}, ValueError, f"block {NUM_BLOCKS}"),
        ({"block_table": torch.full((1, 4), 1 << 40)}, ValueError, "block -1"),
        ({"block_table": torch.zeros(4, dtype=torch.int32)}, ValueError, "block_table must have shape"),
    ],
)
def test_bad_arguments_raise(change, error, message):
    maker = CacheMaker(0, 2, 32, 32, torch.float32)
    batch = batch_of([maker.sequence(33, 64, 99)], [1], [None])
    arguments = {"query": torch.zeros(1, 4, 32), "output": torch.zeros(1, 4, 32)}
    cpu.paged_attention(cache=maker.pages, batch=batch, scale=1.0, **arguments)
    of_query = {name: tensor for name, tensor in change.items() if name in arguments}
    batch = replace(batch, **{name: tensor for name, tensor in change.items() if name not in arguments})
    with pytest.raises(error, match=message):
        cpu.paged_attention(cache=maker.pages, batch=batch, scale=1.0, **(arguments | of_query))


LAYOUTS = {
    "side by side": lambda ids: ids.clone(),
    "rows of a wider table": lambda ids: torch.cat([ids, torch.full_like(ids, NUM_BLOCKS)], 1)[:, : ids.shape[1]],
    "every other column": lambda ids: torch.stack([ids, torch.full_like(ids, NUM_BLOCKS)], 2).flatten(1)[:, ::2],
    "columns first": lambda ids: ids.T.contiguous().T,
}


@needs_library
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_ids_are_read_where_they_lie(layout, dtype):
    """Whatever lies between them is no block's id."""
    maker = CacheMaker(0, 2, 32, 32, torch.float32)
    sequences = [maker.sequence(33, 64, 99) for _ in range(2)]
    batch, query = batch_of(sequences, [1, 1], [None, None]), maker.randn(2, 4, 32)
    assert batch.block_table.dtype == torch.int32 and batch.block_table.shape[1] > 2
    table = LAYOUTS[layout](batch.block_table.to(dtype))
    outputs = []
    for one in (batch, replace(batch, block_table=table)):
        outputs.append(torch.empty(2, 4, 32))
        cpu.paged_attention(query, maker.pages, one, 1.0, outputs[-1])
    assert torch.equal(*outputs)
    segments = torch.stack([batch.fronts, batch.tails, batch.seq_lens], 1).long()
    found = [
        cpu.gather_metadata(SequenceLayers([maker.pages], torch.tensor([0, 0]), ids, segments))
        for ids in (batch.block_table, table)
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@needs_library
def test_bad_entries_and_slots_raise():
    maker = CacheMaker(0, 2, 32, 32, torch.float32)
    pages, blocks, index = maker.pages, torch.tensor([3, 4]), torch.tensor([[0], [64]])
    seq_layers = SequenceLayers.of(pages, blocks, 0, 0, 64)
    with pytest.raises(IndexError, match="index: there is no entry 64 among 64"):
        cpu.gather_rows(seq_layers, "keys", index)
    with pytest.raises(IndexError, match="no entry 64"):
        cpu.move_entries(seq_layers, blocks[None], index)
    with pytest.raises(ValueError, match="length 65 does not fit in 2 blocks"):
        cpu.move_entries(seq_layers, blocks[None], torch.zeros(2, 65).long())
    with pytest.raises(IndexError, match="slot 64"):
        cpu.write_rows(seq_layers, blocks[None], index, torch.zeros(2, 1, 32), None)
    with pytest.raises(IndexError, match="no entry 64"):
        cpu.most_similar(seq_layers, index, index, torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(IndexError, match="no target 1 of 1"):
        cpu.mix_entries(seq_layers, "keys", index // 64, index // 64, torch.ones(2, 1), index // 64)
    with pytest.raises(IndexError, match="targets: -1 is usable"):
        cpu.most_similar(seq_layers, index // 64, index // 64 - 1, torch.ones(2, 1, dtype=torch.bool))
    origin, row, keys = torch.zeros(2, 3).long(), torch.zeros(2, 3).long(), torch.zeros(2, 1, 32)
    for changes, message in (
        (Changes(origin + 64, row, keys, None), "origin: there is no entry 64 among 64"),
        (Changes(origin, row + 1, keys, None), "row: there is no row 1 among 1"),
        (Changes(origin, row, keys, None), "index: there is no place 64 among 3"),
    ):
        with pytest.raises(IndexError, match=message):
            cpu.gather_rows(seq_layers, "keys", index, changes)
    with pytest.raises(ValueError, match="length 65 does not fit in 2 blocks"):
        cpu.write_metadata(seq_layers, blocks[None], *(torch.zeros(2, 65) for _ in range(3)), torch.zeros(2, 65).long())
    with pytest.raises(ValueError, match=f"block {NUM_BLOCKS}"):
        cpu.gather_metadata(SequenceLayers.of(pages, torch.tensor([3, NUM_BLOCKS]), 0, 0, 64))
    with pytest.raises(ValueError, match="not in order"):
        cpu.gather_metadata(SequenceLayers.of(pages, blocks, 9, 7, 64))
    with pytest.raises(IndexError, match="no layer 1"):
        cpu.gather_metadata(replace(seq_layers, layer=torch.tensor([1])))
    with pytest.raises(ValueError, match="differ in number of entries"):
        cpu.gather_metadata(
            SequenceLayers([pages], torch.tensor([0, 0]), blocks.repeat(2, 1), torch.tensor([[0, 0, 64], [0, 0, 63]]))
        )
    with pytest.raises(ValueError, match="layers differ"):
        cpu.gather_metadata(replace(seq_layers, layers=[pages, CacheMaker(0, 2, 64, 32, torch.float32).pages]))
    with pytest.raises(IndexError, match=f"slot {NUM_BLOCKS * 32}"):
        cpu.write_tokens(pages, torch.tensor([NUM_BLOCKS * 32]), torch.zeros(1, 2, 32), torch.zeros(1, 2, 32))
    with pytest.raises(TypeError, match="index must hold integers"):
        cpu.gather_rows(seq_layers, "keys", index.int())
    with pytest.raises(ValueError, match="keys must have shape"):
        cpu.write_rows(seq_layers, blocks[None], torch.zeros(2, 1).long(), torch.zeros(2, 2, 32), None)
    with pytest.raises(ValueError, match="queries, but 3 tokens"):
        cpu.score_prompt_queries(torch.zeros(4, 4, 32), pages, blocks, UPDATES[1], 1.0, *torch.zeros(2, 2, 3))
    with pytest.raises(ValueError, match="not among"):
        cpu.set_level("sse17")


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
        for cached in (cpu.library, cpu._function):
            cached.cache_clear()
        dispatch.forget()

    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("broken", ["missing", "empty"])
def test_without_the_library_the_reference_runs_after_one_warning(broken, unloaded, monkeypatch, tmp_path, warned):
    if broken == "empty":
        (tmp_path / "_native.so").write_bytes(b"")
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "_native.so")
    maker = CacheMaker(0, 2, 32, 32, torch.float32)
    sequence = maker.sequence(0, 0, 70)
    for _ in range(2):
        seq_layers = SequenceLayers.of(maker.pages, sequence.blocks, 0, 0, 70)
        keys = ops.gather_rows(seq_layers, "keys", torch.arange(70).repeat(2, 1))
        assert torch.equal(keys.double(), sequence.keys)
        assert ops.implementation().startswith("PyTorch reference")
    assert len(warned) == 1


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_similarity_does_not_depend_on_how_many_members_there_are(dtype):
    """Padding makes a call's width depend on a request's company, its results must not: bit for bit."""
    maker = CacheMaker(0, 2, 64, 32, dtype)
    s = maker.sequence(front=37, tail=200, seq_len=463)
    seq_layers = SequenceLayers.of(maker.pages, s.blocks, s.front, s.tail, s.seq_len)
    members = torch.stack([torch.randperm(300, generator=maker.generator)[:100] for _ in range(2)])
    carriers = torch.arange(300).expand(2, -1)
    usable = torch.rand(2, 300, generator=maker.generator) < 0.7
    chosen = cpu.level()
    try:
        for level in cpu.levels():
            cpu.set_level(level)
            many = cpu.most_similar(seq_layers, members, carriers, usable)
            for count in (1, 16, 33, 64, 65):
                few = cpu.most_similar(seq_layers, members[:, :count], carriers, usable)
                assert all(torch.equal(a, b[:, :count]) for a, b in zip(few, many, strict=True))
    finally:
        cpu.set_level(chosen)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *QUANTISED], ids=str)
@pytest.mark.parametrize(("groups", "head_size"), [(4, 64), (3, 80), (1, 128)])
def test_what_queries_get_does_not_depend_on_how_many_there_are(dtype, groups, head_size):
    """Chunks of a prompt end where a step's room does, which its company decides: bit for bit."""
    maker = CacheMaker(1, 2, head_size, 32, dtype)
    s = maker.sequence(front=37, tail=200, seq_len=763)
    count, scale = 301, head_size**-0.5
    query = maker.randn(count, 2 * groups, head_size).to(maker.query_dtype)

    def attended(first: int, stop: int) -> torch.Tensor:
        part, seq_len = query[first:stop], s.seq_len - count + stop
        output = torch.empty_like(part)
        batch = AttentionBatch.single(s.blocks, stop - first, seq_len, s.front, s.tail)
        cpu.paged_attention(part, maker.pages, batch, scale, output)
        return output

    chosen = cpu.level()
    try:
        for level in cpu.levels():
            cpu.set_level(level)
            whole = attended(0, count)
            assert all(torch.equal(attended(a, b), whole[a:b]) for a, b in ((0, 2), (2, 19), (19, 150), (150, 301)))
    finally:
        cpu.set_level(chosen)
