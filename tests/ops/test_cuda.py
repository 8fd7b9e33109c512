"""CUDA's operators without a GPU: the kernels run by an emulation on the CPU, and compiled for GPUs."""

import json
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from unittest import TestCase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.ops import test_head_pages
from tests.ops.conftest import (
    EMA,
    SOFTMAXES,
    SUM,
    UPDATES,
    CacheMaker,
    Watch,
    batch_of,
    by_the_rule,
    cuda_module,
    cuda_on_gpu,
    emulated,
    relative_error,
)
from tests.ops.on_gpu import OnGPU
from tests.ops.test_cpu import (
    check_against_reference,
    random_segments,
    test_huge_logits_do_not_overflow,  # noqa: F401
    test_queries_and_outputs_may_be_strided_and_of_other_types,  # noqa: F401
)
from tests.ops.test_operators import test_attention_over_front_and_tail  # noqa: F401
from vllm_kvmerge import ops
from vllm_kvmerge.engine.arguments import kvmerge_engine_args
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.ops import AttentionBatch, HeadPages, PagedKVCache, cell_bytes, choice, dispatch, reference
from vllm_kvmerge.ops.cuda import backend
from vllm_kvmerge.ops.cuda.plan import AttentionPlan
from vllm_kvmerge.ops.pieces import Division
from vllm_kvmerge.ops.types import NO_UPDATE, PageTables, ScoreMode, ScoreUpdate
from vllm_kvmerge.ops.workspace import Workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPERATORS = ["cuda", *(["cuda-gpu"] if torch.cuda.is_available() else [])]
"""What the tests imported above run on."""
PLACES = ["emulated", *(["on-gpu"] if torch.cuda.is_available() else [])]
"""Where the kernels run."""
without_a_gpu = pytest.mark.parametrize("strict", ["emulated"], indirect=True)
"""For tests that look at what the CPU is told."""

SKEWED = [(0, 0, 40), (300, 352, 400), (1500, 1600, 3000), (0, 0, 64), (0, 0, 256), (64, 96, 289), (0, 0, 257)]
"""front, tail, seq_len: one row longer than all others, and lengths about the bounds of steps and pieces."""


@pytest.fixture(params=PLACES)
def strict(request, monkeypatch):
    """No call may be left to another implementation."""
    refusal = "vllm_kvmerge.ops.cuda.backend.fallback", lambda device: pytest.fail("the kernels did not run")
    operators = request.getfixturevalue("cuda") if request.param == "emulated" else cuda_on_gpu()
    monkeypatch.setattr(*refusal)
    return operators


class Exact(Workspace):
    """No element more than a call needs."""

    def take(self, name, size):
        return torch.full((size,), torch.nan, device=self.device)


@pytest.mark.parametrize(("multiprocessors", "turn"), [(1, 0), (2, 1), (8, 2), (40, 0)])
@pytest.mark.parametrize(
    ("dtype", "groups", "head_size", "lens"),
    [
        (torch.bfloat16, 4, 64, [1, 2, 4, 1, 0, 3, 1]),
        (torch.bfloat16, 7, 128, [1, 1, 2, 1, 1, 1, 0]),
        (torch.bfloat16, 16, 32, [1, 1, 1, 0, 1, 1, 1]),
        (torch.float16, 1, 96, [16, 1, 5, 1, 1, 2, 3]),
        (torch.float16, 2, 80, [1, 1, 8, 0, 1, 1, 1]),
        (torch.float16, 5, 256, [1, 3, 2, 1, 1, 0, 1]),
        (torch.float32, 2, 64, [1, 0, 2, 1, 1, 2, 2]),
        (torch.float32, 3, 128, [3, 2, 5, 1, 0, 1, 1]),
        (torch.float32, 1, 160, [1, 4, 1, 1, 2, 1, 0]),
        (torch.float32, 1, 256, [1, 8, 3, 1, 1, 1, 0]),
    ],
)
def test_attention_is_the_references(strict, dtype, groups, head_size, lens, multiprocessors, turn, monkeypatch):
    """Rows in one piece each, in a few large ones and in many, with holes and dead entries; those without queries stay
    as they are. Each turn updates the scores of the longest row in another way."""
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.plan.multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.attention.workspace_of", Exact)
    maker = CacheMaker(head_size + groups, 2, head_size, 32 if dtype is torch.float32 else 48, dtype)
    sequences = [maker.sequence(*shape, num_dead=shape[0] // 10) for shape in SKEWED]
    updates = [UPDATES[1 + (row + turn) % 3] for row in range(len(SKEWED))]
    updates[3 + turn] = None
    kind = SOFTMAXES[(groups + head_size // 32 + turn) % 4]
    check_against_reference(strict, maker, sequences, lens, updates, groups, kind)


@examples(20)
@given(data=st.data())
def test_any_segments(emulated_library, data):
    block_size, dtype = (data.draw(st.sampled_from(some)) for some in ([16, 24, 32], [torch.float32, torch.half]))
    groups, seed = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(0, 1000))
    with emulated(emulated_library) as cuda:
        maker = CacheMaker(seed, 1, 64, block_size, dtype)
        check_against_reference(cuda, maker, *random_segments(data, maker, 400, 4), groups)


@pytest.mark.parametrize("bound", [1, 4])
def test_rows_without_queries_are_skipped(strict, bound):
    maker = CacheMaker(3, 2, 64, 16, torch.float32)
    sequences = [maker.sequence(40, 64, 99), maker.sequence(0, 0, 70)]
    tova = ScoreUpdate(ScoreMode.SUM, 0.0)
    check_against_reference(strict, maker, sequences, [1, 1], [tova, None], 2, bound=bound)


def test_what_kernels_cannot_do_is_left_to_others(cuda):
    """Chunks of many queries, and queries of another dtype than the cache's."""
    maker = CacheMaker(4, 2, 64, 32, torch.bfloat16)
    sequence = maker.sequence(40, 64, 160)
    check_against_reference(cuda, maker, [sequence], [30], [SUM], 4)
    query, outputs, batch = maker.randn(1, 4, 64), torch.empty(2, 1, 4, 64), batch_of([sequence], [1], [None])
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
    batch = batch_of(sequences, [1, 1], [SUM, EMA])
    with Watch():
        strict.paged_attention(query, maker.pages, replace(batch, max_query_len=1), 0.1, query.clone())


def test_queries_of_too_many_heads_are_left_to_others():
    pages = PagedKVCache.of(CacheMaker(0, 8, 64, 16, torch.bfloat16).cache, 64, row_major_keys=True)
    assert AttentionPlan.obstacle(pages, 32, 4) is None
    assert AttentionPlan.obstacle(pages, 32, 5) == "20 rows of queries of a KV head are not from 1 to 16"


def divided(operators, lengths, slots, least):
    """(division, the three lists) that the kernel makes of rows that see so many entries."""
    division = Division(len(lengths), slots, most=1 << 20)
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


@pytest.mark.parametrize(
    ("rows", "longest", "slots", "least"),
    [(1, 4000, 1, 256), (1, 200000, 600, 64), (2, 5000, 3, 128), (7, 9000, 33, 256), (40, 130000, 66, 256),
     (256, 700, 8, 256), (257, 9000, 264, 64), (600, 2000, 33, 256)],
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
        division, (pieces, parts, order) = divided(strict, lengths, slots, least)
        expected, *others = by_the_rule(lengths, slots, least)
        assert pieces == expected + [-1] * (division.num_pieces - len(expected)) and [parts, order] == others
        counts = [parts[2 * row + 1] for row in order]
        assert max(counts[division.split_tiles :], default=0) <= 1
        assert sum(count for count in counts if count > 1) <= division.num_split


# Head pages


@pytest.mark.parametrize(
    ("block_size", "dtype", "num_pages"), [(16, torch.bfloat16, 3), (48, torch.float16, 3), (32, torch.float32, 20)]
)
@pytest.mark.parametrize("update", [NO_UPDATE, *UPDATES[1:]], ids=lambda update: update.mode)
@pytest.mark.parametrize(("groups", "num_queries"), [(4, 1), (2, 5)])  # longer chunks are another's
@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_heads_attend_to_pages_of_their_own(
    strict, block_size, dtype, num_pages, update, groups, num_queries, multiprocessors, monkeypatch
):
    """Each head's entries are cut into as many pieces as the row has, of which it may leave some empty."""
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.plan.multiprocessors", lambda device: multiprocessors)
    scene = test_head_pages.Scene.make(block_size, block_size, dtype, 61, num_pages)
    given = {"paged_attention": strict.paged_attention, "device": getattr(strict, "device", "cpu")}
    operators = SimpleNamespace(**vars(reference) | given)
    test_head_pages.test_attention(operators, scene, dtype, update, groups, num_queries)


@without_a_gpu
def test_layers_of_head_pages(strict, monkeypatch):
    """Captured graphs hold for fronts of all shapes: tables are read by the kernels alone. Pages are found by the
    distance of their layer, so layers that lie differently are left to others, as coded fronts are."""
    shape, query = (8, 2, 16, cell_bytes(64, torch.float32) // 4), torch.randn(1, 2, 64)
    layers = [PagedKVCache.of(torch.zeros(shape), 64, True) for _ in range(3)]
    table = HeadPages(layers, torch.zeros(3, 2, 2).long(), torch.zeros(3, 2).long()).table()
    tables = PageTables(layers, 1, torch.tensor([table.data_ptr()]))
    batch = replace(AttentionBatch.single(torch.arange(4), 1, 50), tables=tables)
    with Watch():
        strict.paged_attention(query, layers[1], batch, 0.1, query.clone())
    wrong = replace(batch, tables=replace(tables, layer=3))
    with pytest.raises(ValueError, match="there is no layer 3 among 3"):
        strict.paged_attention(query, layers[1], wrong, 0.1, query.clone())
    left = []
    fallback = SimpleNamespace(paged_attention=lambda *args: left.append(args[2]))
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.backend.fallback", lambda device: fallback)
    scattered = replace(tables, layers=[*layers[:2], replace(layers[2], aux=layers[2].aux.clone())])
    for others in (scattered, replace(tables, coded=True)):
        strict.paged_attention(query, layers[1], replace(batch, tables=others), 0.1, query.clone())
        assert left.pop().tables is others


# The table of choices


def test_a_rule_of_a_gpu_wins(monkeypatch):
    default = json.loads(choice.RULES.read_text())
    assert default == [{"implementation": "triton"}], "say in docs/gpu.md what was measured"
    rule = {"operator": "paged_attention", "device": "NVIDIA H200", "head_sizes": [128], "implementation": "cuda"}
    monkeypatch.setattr(choice, "rules", lambda: [*default, rule])
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
        ops.choose(None)
        assert ops.implementations(maker.pages) == before
        ops.override({"paged_attention": "cuda", "gather_rows": "reference"})
        table = ops.implementations(maker.pages)
        assert table["paged_attention"] == "CUDA C++, emulated" and table["gather_rows"].endswith("it was chosen")
        assert not table["merge_entries"].startswith("CUDA")
        with pytest.raises(ValueError, match="there is no operator 'softmax' to choose"):
            ops.override({"softmax": "cuda"})
    finally:
        ops.choose(None)
        ops.override({})


@pytest.mark.parametrize("wrong", [{"paged_attention": "rocm"}, ["cuda"]])
def test_a_server_may_override_operators(wrong):
    given = {"kvmerge": {"operators": {"paged_attention": "cuda"}}}
    found = kvmerge_engine_args(additional_config=given)["additional_config"]["kvmerge"]["operators"]
    assert found == given["kvmerge"]["operators"]
    with pytest.raises(UnsupportedConfigError, match="additional_config.kvmerge.operators="):
        kvmerge_engine_args(additional_config={"kvmerge": {"operators": wrong}})


def test_a_library_that_is_missing_is_said_once(monkeypatch, tmp_path):
    from vllm_kvmerge.ops import cuda

    monkeypatch.setattr(cuda.backend, "_path", tmp_path / "_cuda.so")
    dispatch.forget()
    maker = CacheMaker(0, 2, 64, 16, torch.float32)
    try:
        with TestCase().assertLogs(level="WARNING") as logs:
            ops.override({"paged_attention": "cuda"})
            for _ in range(2):
                assert not ops.implementation(maker.pages).startswith("CUDA")
        assert len([message for message in logs.output if "csrc/cuda/build.py builds it" in message]) == 1
        with pytest.raises(OSError, match="is missing"):
            ops.choose("cuda")
        (tmp_path / "broken.so").write_text("no library")
        with pytest.raises(OSError, match="cannot be loaded"):
            cuda.use(tmp_path / "broken.so")
    finally:
        ops.override({})
        dispatch.forget()


# Compilation

COPIES = "LDGSTS.E.BYPASS.LTC128B.128"
KERNELS = {
    "Attend<MatrixUnits<Bf16, 128>, 4, 3, false>": [COPIES, "HMMA.16816.F32.BF16", "LDSM.16.M"],
    "Attend<MatrixUnits<F16, 256>, 4, 2, false>": ["HMMA.16816.F32", "LDSM.16.M"],
    "Attend<Cores<Bf16, 128, 1>, 4, 3, false>": [COPIES, "LDS.128"],
    "Attend<MatrixUnits<Bf16, 128>, 4, 3, true>": [COPIES, "HMMA.16816.F32.BF16", "LDSM.16.M"],
    "Finish<128, void>": [],
    "Finish<256, float>": ["LDG.E.128"],
    "Divide": [],
}  # fmt: skip
"""Some of the ops, and instructions that are meant to be in them."""


def _mangled(kernel):
    """A pattern of a kernel's name in machine code."""
    known = {"true": "Lb1E", "false": "Lb0E", "void": "v", "float": "f", "Bf16": "13__nv_bfloat16", "F16": "6__half"}
    words = re.findall(r"\w+", kernel)
    parts = [known.get(word) or (f"Li{word}E" if word.isdigit() else f"{len(word)}{word}") for word in words]
    return "[INSE_]*".join(parts) + "E"


@pytest.mark.parametrize("target", ["80", "89", "90a"])
def test_kernels_compile_without_spills(target, tmp_path):
    """Nothing is in a thread's stack, and the loads, copies and products that were meant are in the machine code."""
    builder = cuda_module("build")
    compiler = builder.nvcc()
    if compiler is None:
        pytest.skip("there is no nvcc")
    source, binary = tmp_path / "ops.cu", tmp_path / "ops.cubin"
    includes = [f'#include "{builder.SOURCES / name}.h"' for name in ("attention", "divide")]
    instances = [f"template __global__ void run_kernel<{kernel}>(const __grid_constant__ {kernel}::Params);"
                 for kernel in KERNELS]  # fmt: skip
    source.write_text("\n".join([*includes, "namespace kvmerge {", *instances, "}"]))
    virtual = target if target in builder.ARCHITECTURES else "80"  # other GPUs get the PTX of this one
    code = f"arch=compute_{virtual},code=sm_{target}"
    said = builder.run([compiler, *builder.NVCC_FLAGS, "-gencode", code, "-cubin", str(source), "-o", str(binary)])
    found = builder.usage(said)
    assert len(found) == len(KERNELS) and {kernel.target for kernel in found} == {f"sm_{target}"}
    assert all(kernel.stack == 0 and 0 < kernel.registers <= 255 for kernel in found), found
    tools = pytest.importorskip("tests.ops.triton_compiler", reason="there is no disassembler: Triton brings one")
    listing = subprocess.run([tools.CUOBJDUMP, "-sass", binary], capture_output=True, text=True, check=True).stdout
    functions = dict(part.split("\n", 1) for part in listing.split("Function : ")[1:])
    assert len(functions) == len(KERNELS)
    for kernel, instructions in KERNELS.items():
        (code,) = [code for name, code in functions.items() if re.search(_mangled(kernel), name)]
        for instruction in instructions:
            assert instruction in code, (kernel, instruction)
        assert not re.search(r"\b(LDL|STL)\b", code), f"{kernel} uses local memory"
