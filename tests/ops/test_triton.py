"""Triton's operators without a GPU: in the interpreter, compiled for GPUs, and what they launch.

The interpreter is chosen when Triton is imported, so it gets a process of its own. It says nothing about whether a
kernel compiles, so all are compiled too, with the ptxas that comes with Triton.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ops.conftest import NUM_BLOCKS, SUM, CacheMaker, Watch, batch_of
from tests.processes import end_with_tests
from vllm_kvmerge.ops import AttentionBatch, Changes, HeadPages, PagedKVCache, SequenceLayers, Softmax, cell_bytes

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.ops.triton_compiler import CUOBJDUMP, compile_for, launches  # noqa: E402
from vllm_kvmerge.ops import triton  # noqa: E402
from vllm_kvmerge.ops.cuda import backend as cuda_backend  # noqa: E402
from vllm_kvmerge.ops.regression import OutputDerivative  # noqa: E402
from vllm_kvmerge.ops.triton import tuning  # noqa: E402
from vllm_kvmerge.ops.types import QUANTISED, PageTables, ScoreMode, ScoreUpdate  # noqa: E402
from vllm_kvmerge.ops.workspace import Workspace  # noqa: E402
from vllm_kvmerge.ops.zipping import ZipPlanes  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TESTS = Path(__file__).parent
CHOSEN = "(triton or backend_interpreted) and not 40-2 and not 256-16 and not rounded"
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes that a program may have, by kind of GPU (CUDA C++ programming guide, by compute capability)."""
STACK = 16
"""Bytes of a thread's stack that are no spill yet: a few, of a scalar. Twice as many where no loop uses them."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("thin", [298, pytest.param(41, marks=pytest.mark.gpu_code)])
def test_everything_in_the_interpreter(thin):
    """Some cases of each test of all operators, and those of ``test_triton_interpreted`` and of the CUDA backend.

    Left out: 40 query heads, and cells of 256 numbers in blocks of 16, which take the interpreter minutes, and
    rounding, which it does not do as GPUs do.
    """
    names = ["operators", "rows", "index", "zipping", "cpu", "head_pages", "large_pool", "regression"]
    names += ["coded", "queries", "triton_interpreted"]
    files = [*(f"test_{name}.py" for name in names), "../engine/cuda/test_backend_interpreted.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--thin", str(thin)]
    command += ["-k", CHOSEN, *(str(TESTS / name) for name in files)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=TESTS.parents[1], capture_output=True, text=True, preexec_fn=end_with_tests
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@pytest.fixture
def gpu(monkeypatch):
    """Shapes are cut into programs as for an H200, though tensors are on the CPU."""
    monkeypatch.setattr("vllm_kvmerge.ops.triton.plan.device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("vllm_kvmerge.ops.triton.plan.multiprocessors", lambda device: 132)


def run_all(
    dtype: torch.dtype, head_size: int, groups: int, num_queries: int, only_attention: bool, has_pages: bool
) -> None:
    """Calls every operator once, on a cache as a GPU has it."""
    heads, rows, width = 8, 4, 512
    elements = cell_bytes(head_size, dtype) // dtype.itemsize
    pages = PagedKVCache.of(torch.zeros(512, heads, 16, elements, dtype=dtype), head_size, row_major_keys=True)
    table = torch.zeros(rows, width, dtype=torch.int32)
    numbers = torch.full((rows,), 100, dtype=torch.int32)
    wide = torch.bfloat16 if dtype in QUANTISED else dtype
    query = torch.zeros(rows * num_queries, heads * groups, head_size, dtype=wide)
    batch = AttentionBatch(table, *[numbers] * 6, torch.zeros(rows), num_queries)
    triton.paged_attention(query, pages, batch, 0.1, query.clone())
    if has_pages:
        triton.paged_attention(query, pages, batch, 0.1, query.clone(), window=100)
        triton.paged_attention(query, pages, batch, 0.1, query.clone(), window=128, chunked=True)
        tables = PageTables((pages, pages), 1, torch.zeros(rows, dtype=torch.int64))
        triton.paged_attention(query, pages, replace(batch, tables=tables), 0.1, query.clone())
        if dtype not in QUANTISED:
            coded = replace(batch, tables=replace(tables, coded=True))
            triton.paged_attention(query, pages, coded, 0.1, query.clone())
    if only_attention:
        return
    for mode in (ScoreMode.SUM, ScoreMode.LOG_EMA):
        statistics = torch.zeros(2, heads, 100)
        triton.score_prompt_queries(query, pages, table[0], ScoreUpdate(mode, 0.9), 0.1, *statistics)
    for num_rows, weights in ((heads, None), (heads * groups, torch.ones(len(query)))):
        scores = torch.zeros(num_rows, 60)
        triton.score_repetition(query, pages, table[0], 0.1, 100 + len(query), 100, 30, 4, scores, weights)
    triton.score_repetition(query, pages, table[0], 0.1, 100, 100, 30, 4, torch.zeros(heads, 60), own=query)
    tokens = torch.zeros(64, heads, head_size, dtype=wide)
    triton.write_tokens(pages, torch.zeros(64, dtype=torch.int64), tokens, tokens)
    for places in (None, torch.zeros(rows, dtype=torch.int64)):
        triton.keep_queries(query, torch.zeros(rows, dtype=torch.int64), 1, places)
    seq_layers = SequenceLayers((pages, pages), torch.tensor([0, 1]), table[:2], torch.tensor([[50, 60, 110]] * 2))
    index, planes = torch.zeros(2 * heads, 32, dtype=torch.int64), torch.zeros(3, 2 * heads, 32)
    newest = torch.zeros(2 * heads, groups, 32, head_size)
    votes, positions = torch.zeros(2 * heads, 100), torch.zeros(2 * heads, 100, dtype=torch.int64)
    ids, fronts = torch.zeros(2, heads, 4, dtype=torch.int64), torch.full((2, heads), 50)
    head_pages = HeadPages((pages, pages), ids, fronts)
    for located, destination in ((seq_layers, table[:2]), (replace(seq_layers, pages=head_pages), head_pages)):
        triton.gather_metadata(located)
        triton.write_rows(located, destination, index, newest[:, 0], newest[:, 0])
        triton.write_metadata(located, destination, *planes, index)
        triton.move_entries(located, destination, index)
        for changes in (None, Changes(index, index, newest[:, 0], newest[:, 0]), Changes(index, index, None, None)):
            triton.gather_rows(located, "keys", index, changes)
            triton.most_similar(located, index, index, index.bool(), changes)
        for fusion in ("sum", "max"):
            triton.fused_attention(located, newest, index, votes, positions, 0.1, fusion)
    triton.write_codes(seq_layers, head_pages, newest[:, 0], newest[:, 0], planes[0])
    mask = index.bool()
    for ranking in (votes, positions):
        triton.largest(ranking, 7)
        triton.largest(ranking, fronts.flatten())
    triton.top(votes, votes.bool(), votes.bool(), 7)
    triton.top(votes, votes.bool(), votes.bool(), fronts.flatten())
    triton.in_place(mask, 7)
    triton.in_place(mask, fronts.flatten(), 32)
    triton.inverse(index, 50)
    triton.take(index, [votes, *planes[:2], positions], [-float("inf"), 0.0, 0.0, -1])
    triton.take(index, [positions, votes, *planes], [-1, -float("inf"), 0.0, 0.0, 0.0])
    triton.put(index, [votes, positions, *planes], [planes[0], index, *planes])
    for some in ((None, newest[:, 0]), (newest[:, 0], None), (newest[:, 0], newest[:, 0])):
        triton.overflowing(index, votes, *some, wide)
    for count in (7, fronts.flatten()):
        triton.newest(positions, count, 4)
    triton.free_places(index, index, 7)
    triton.num_live(positions)
    triton.log_contributions(votes, votes, votes, 0.9)
    triton.join_changes(index, index, index, index, 32)
    triton.take_rows(index, newest[:, 0], newest[:, 0])
    triton.line_up(positions, positions, votes, votes, 32)
    triton.list_joined(index, mask, 50)
    for own in (None, newest[:, 0]):
        triton.mix_in(newest[:, 0], index, planes[0], own)
    triton.empty_places(index, index, *planes)
    weights = triton.attention_weights(newest, index, newest[:, 0], votes[:, :32], positions[:, :32], 0.1).flatten(1, 2)
    derivative = OutputDerivative(weights, newest[:, 0], newest.flatten(1, 2), 0.1, mask)
    triton.solve_outputs(newest.flatten(1, 2), derivative, 0.1, 1, 0.1)
    triton.hand_over(positions, positions, positions.bool(), votes, 60)
    triton.join_slots(*(torch.zeros(2 * heads, n, 64) for n in (816, 16)), planes[0, :, :16], votes.new_zeros(16, 816))
    for num_scores, cap in ((1, 0.0), (groups, 30.0)):
        scored = torch.zeros(2 * heads, num_scores, 100)
        merged = ZipPlanes(votes, votes, votes, positions, votes.bool(), scored, scored[..., :1])
        triton.zip_groups(index, index, mask, merged, ScoreMode.MEAN, "auto", Softmax(cap))


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of Triton has no tools for GPUs")
@pytest.mark.parametrize(
    ("dtype", "head_size", "groups", "num_queries", "capabilities", "paged_on"),
    [
        (torch.bfloat16, 128, 4, 1, [80], 90),
        pytest.param(torch.bfloat16, 128, 4, 1, [89, 90], None, marks=pytest.mark.gpu_code),
        (torch.bfloat16, 128, 4, 64, [89, 90], 90),
        (torch.float16, 80, 7, 1, [90], None),
        pytest.param(torch.bfloat16, 256, 1, 1, [80], None, marks=pytest.mark.gpu_code),
        pytest.param(torch.bfloat16, 64, 8, 1, [90], None, marks=pytest.mark.gpu_code),
        (torch.float32, 128, 2, 1, [80], None),
        (torch.float8_e4m3fn, 128, 4, 1, [89], None),
        pytest.param(torch.float8_e4m3fn, 128, 4, 1, [90], 90, marks=pytest.mark.gpu_code),
        pytest.param(torch.float8_e5m2, 64, 8, 1, [80], None, marks=pytest.mark.gpu_code),
        pytest.param(torch.float8_e4m3fn, 256, 1, 64, [89], None, marks=pytest.mark.gpu_code),
    ],
)
def test_kernels_compile_without_spills(dtype, head_size, groups, num_queries, capabilities, paged_on, tmp_path, gpu):
    """With the arguments that the operators launch them with; all kernels once, attention for more shapes and GPUs.

    paged_on: the kind of GPU that kernels are compiled for with head pages, another than without: each takes a second.
    """
    everything = (head_size, num_queries) == (128, 1) and paged_on is not None
    with launches() as found:
        run_all(dtype, head_size, groups, num_queries, not everything, has_pages=paged_on is not None)
    found = list({launch.key: launch for launch in found}.values())
    assert len({launch.kernel.__name__ for launch in found}) >= (25 if everything else 2)
    for launch in found:
        for capability in [paged_on] if launch.is_paged else capabilities:
            code = compile_for(launch, capability, tmp_path)
            told = launch.kernel.__name__, capability, code.registers, code.stack, code.spills_in_loops, code.shared
            assert code.stack <= (STACK if code.spills_in_loops else 2 * STACK), told
            assert code.shared <= SHARED_MEMORY[capability], told
            if launch.kernel.__name__ == "attend":
                assert "cp.async" in code.ptx, "keys and values are not loaded ahead"
                assert ("mma.sync" in code.ptx or "wgmma" in code.ptx) == (dtype is not torch.float32), told


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of Triton has no tools for GPUs")
@pytest.mark.parametrize(
    ("dtype", "head_size", "groups", "num_queries", "capability"),
    [
        (torch.bfloat16, 128, 4, 1, 80),
        (torch.float16, 64, 7, 1, 90),
        (torch.float16, 128, 4, 64, 80),
        pytest.param(torch.float16, 128, 4, 1, 90, marks=pytest.mark.gpu_code),
        pytest.param(torch.bfloat16, 64, 7, 1, 80, marks=pytest.mark.gpu_code),
        pytest.param(torch.bfloat16, 64, 7, 64, 90, marks=pytest.mark.gpu_code),
        pytest.param(torch.bfloat16, 128, 4, 64, 80, marks=pytest.mark.gpu_code),
    ],
)
def test_coded_fronts_need_no_other_kernel_and_no_spills(
    dtype, head_size, groups, num_queries, capability, tmp_path, gpu
):
    """Codes are loaded ahead as bytes and multiplied on tensor cores; the kernels beside ``attend`` are the same."""
    with launches() as found:
        run_all(dtype, head_size, groups, num_queries, only_attention=True, has_pages=True)
    kernels = [launch for launch in {launch.key: launch for launch in found}.values() if launch.is_paged]
    assert [launch.kernel.__name__ for launch in kernels].count("attend") == 2
    assert len(kernels) == len({launch.kernel.__name__ for launch in kernels}) + 1
    (launch,) = [launch for launch in kernels if launch.arguments.get("codes") is not None]
    code = compile_for(launch, capability, tmp_path)
    told = code.registers, code.stack, code.spills_in_loops, code.shared
    assert code.stack <= (STACK if code.spills_in_loops else 2 * STACK), told
    assert code.shared <= SHARED_MEMORY[capability], told
    assert "cp.async" in code.ptx and ("mma.sync" in code.ptx or "wgmma" in code.ptx), told


@pytest.mark.parametrize(("dtype", "too_old"), [(torch.float8_e4m3fn, True), (torch.float8_e5m2, False)], ids=str)
def test_caches_of_8_bits_are_tritons(dtype, too_old, monkeypatch):
    pages = PagedKVCache.of(torch.zeros(4, 2, 16, 80, dtype=dtype), 32, row_major_keys=True, key_scale=0.5)
    assert triton.obstacle(pages) is None
    assert cuda_backend.obstacle(pages) == f"the cache is {dtype}"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    on_gpu = replace(pages)
    on_gpu.__dict__["device"] = torch.device("cuda")
    assert ("compute capability 8.9" in (triton.obstacle(on_gpu) or "")) == too_old


def test_layers_and_batches_need_no_kernels_of_their_own_to_keep_queries(gpu):
    query, addresses = torch.zeros(9, 4, 64), torch.zeros(9, dtype=torch.int64)
    with launches() as found, Watch():
        for layer, start in ((0, 0), (1, 1), (16, 3)):
            triton.keep_queries(query, addresses[start:], layer)
    assert len(found) == 3 and len({launch.key for launch in found}) == 1


@pytest.mark.parametrize("num_queries", [1, 40])
def test_batches_and_compactions_need_no_kernels_of_their_own(num_queries, gpu):
    """Wherever rows begin among others, and however many entries there are: also one, and multiples of 16."""
    pages, query = CacheMaker(0, 2, 64, 16, torch.bfloat16).pages, torch.zeros(80, 8, 64, dtype=torch.bfloat16)
    table, numbers, decays = torch.zeros(20, 9, dtype=torch.int32), torch.ones(20, dtype=torch.int32), torch.ones(20)
    with launches() as found:
        for first, count, blocks in ((0, 1, 1), (1, 2, 7), (5, 2, 9)):
            rows = slice(first, first + count)
            batch = AttentionBatch(table[rows, :blocks], *[numbers[rows]] * 6, decays[rows], num_queries)
            triton.paged_attention(query, pages, batch, 0.1, query)
        for count, layers in ((1, 1), (16, 2), (37, 3)):
            many = torch.tensor([0] * layers), torch.zeros(layers, count, dtype=torch.int32)
            located = SequenceLayers((pages,) * layers, *many, torch.tensor([[0, 0, 16 * count]] * layers))
            index = torch.zeros(2 * layers, count, dtype=torch.int64)
            triton.gather_rows(located, "keys", index, Changes(index, index, None, None))
            triton.most_similar(located, index, index, index.bool())
            triton.write_rows(located, located.blocks, index, torch.zeros(*index.shape, 64), None)
    kernels = [launch.kernel.__name__ for launch in {launch.key: launch for launch in found}.values()]
    assert len(kernels) == len({*kernels}) >= 6, kernels


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_workspace_that_was_reserved_does_not_grow(name, gpu, request, monkeypatch):
    """For as many blocks as there could be: captured batches take nothing more."""
    operators = request.getfixturevalue("cuda") if name == "cuda" else triton
    monkeypatch.setattr(cuda_backend, "fallback", lambda device: pytest.fail("the kernels did not run"))
    maker, device = CacheMaker(0, 2, 64, 16, torch.bfloat16), torch.device("cpu")
    maker.cache[0] = 0
    work, planned = Workspace(device), PagedKVCache.planned(NUM_BLOCKS + 90, 2, 16, 64, torch.bfloat16, device)
    work.reserve(planned, 8, [(rows, 1) for rows in range(1, 10)], max_blocks=64)
    before = work.num_bytes
    assert before > NUM_BLOCKS * 2 * 4 * 16 * 4, "logits of 4 query heads for each slot, and pieces"
    for rows in range(1, 10):
        query = maker.randn(rows, 8, 64).bfloat16()
        ones, table = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 64, dtype=torch.int32)
        batch = AttentionBatch(table, torch.arange(rows), ones, ones, *[ones - 1] * 3, torch.ones(rows), 1)
        with launches():
            operators.paged_attention(query, maker.pages, batch, 0.1, query, workspace=work)
        assert name == "triton" or not query.any()
    assert work.num_bytes == before
    old = work.take("kept", 1)
    assert work.take("kept", old.numel() + 1).numel() == old.numel() + 1
    assert work.num_bytes > before + 4 * old.numel(), "graphs may still write to the old buffer"


@pytest.mark.parametrize("num_queries", [1, 40])
def test_one_list_of_pieces_serves_all_layers(num_queries, gpu):
    """It is made once in each forward pass, by its first layer, whatever was made before."""
    maker = CacheMaker(0, 2, 64, 16, torch.bfloat16)
    layers = [maker.pages, *(maker.views(maker.cache.clone()) for _ in range(2))]
    query = maker.randn(3 * num_queries, 8, 64).bfloat16()
    batch = batch_of([maker.sequence(0, 0, 300)] * 3, [num_queries] * 3, [SUM] * 3, num_queries)
    for _ in range(2):
        with launches() as found:
            for layer in layers:
                triton.paged_attention(query, layer, replace(batch), 0.1, query)
        names = [launch.kernel.__name__ for launch in found]
        assert names[0] == "divide" and names.count("divide") == 1 and names.count("attend") == 3
        assert len({launch.arguments["pieces"].data_ptr() for launch in found if "pieces" in launch.arguments}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_size", [16, 32, 64, 128, 256])
def test_every_kernel_has_tile_sizes_for_every_shape(dtype, head_size):
    for kernel in {rule["kernel"] for rule in tuning.rules()}:
        for device in ("", "NVIDIA H200", "interpreter"):
            chosen = tuning.settings(kernel, device, head_size, head_size * dtype.itemsize)
            assert chosen.least % chosen.block_n == 0 or kernel not in ("decode", "prefill")
    assert not tuning.is_tuned("NVIDIA H200"), "then this table has been measured: say so in docs/gpu.md"


def test_a_gpus_own_rules_win(monkeypatch):
    rule = {"kernel": "decode", "device": "NVIDIA H200", "head_size": [128], "groups": [4], "block_n": 256}
    before = tuning.rules()
    monkeypatch.setattr(tuning, "rules", lambda: [*before, rule])
    tuning.settings.cache_clear()
    try:
        sizes = [tuning.settings("decode", gpu, 128, 256, groups).block_n
                 for gpu, groups in (("NVIDIA H200", 4), ("NVIDIA H200", 1), ("NVIDIA H100", 4))]  # fmt: skip
        assert sizes == [256, 64, 64]
        assert tuning.is_tuned("NVIDIA H200") and not tuning.is_tuned("NVIDIA H100")
    finally:
        tuning.settings.cache_clear()
