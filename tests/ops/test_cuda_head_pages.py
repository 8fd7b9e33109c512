"""Head pages in CUDA's operators: emulated on the CPU, and compiled for GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.ops import test_head_pages
from tests.ops.conftest import Watch, cuda_on_gpu
from tests.ops.on_gpu import OnGPU
from tests.ops.test_cpu import TOLERANCE, relative_error
from tests.ops.test_cuda import PLACES, check_compiled
from tests.ops.test_head_pages import UPDATES, Scene
from vllm_kvmerge.ops import (
    AttentionBatch,
    HeadPages,
    PagedKVCache,
    SequenceLayers,
    cell_bytes,
    reference,
)
from vllm_kvmerge.ops.types import PLANES, PageTables

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPERATORS = PLACES
"""Where the kernels run."""


def with_tables(batch: AttentionBatch, cache: PagedKVCache) -> tuple[AttentionBatch, list[Tensor]]:
    """The batch with tables in place of its pages, on the cache's device, and the tensors that they are in.

    Lists of other layers than that of ``cache`` are of no page that there is, and a row without queries has the address
    of no table.
    """
    pages = batch.pages
    layer = next(number for number, one in enumerate(pages.layers) if one is cache)
    tables, addresses = [], []
    for ids, fronts, num_queries in zip(pages.ids, pages.fronts, batch.query_lens.tolist(), strict=True):
        all_ids = ids.new_full((len(pages.layers), *ids.shape), 1 << 30)
        all_fronts = fronts.new_full((len(pages.layers), *fronts.shape), 1 << 30)
        all_ids[layer], all_fronts[layer] = ids, fronts
        tables.append(HeadPages(pages.layers, all_ids, all_fronts).table().to(cache.device))
        addresses.append(0 if ids[0, 0] < 0 else tables[-1].data_ptr() if num_queries else 8)
    of_rows = PageTables(pages.layers, layer, torch.tensor(addresses, device=cache.device))
    return replace(batch, pages=None, tables=of_rows), tables


class WithTables(OnGPU):
    """``OnGPU`` of operators that are given batches with tables, as on a GPU, where the tests give pages."""

    def _call(self, operator, *args, **kwargs):
        def given_tables(*args, **kwargs):
            batches = [value for value in args if isinstance(value, AttentionBatch) and value.pages is not None]
            if not batches:
                return operator(*args, **kwargs)
            (cache,) = (value for value in args if isinstance(value, PagedKVCache))
            batch, tables = with_tables(batches[0], cache)
            result = operator(*(batch if value is batches[0] else value for value in args), **kwargs)
            if tables[0].is_cuda:
                torch.cuda.synchronize()  # they have to live until then
            return result

        return super()._call(given_tables, *args, **kwargs)

    def _moved(self, value, there):
        if isinstance(value, HeadPages):  # ids and fronts are on the CPU, wherever the caches are
            return replace(value, layers=[self._moved(cache, there) for cache in value.layers])
        moved = super()._moved(value, there)
        if isinstance(value, AttentionBatch | SequenceLayers) and value.pages is not None:
            moved = replace(moved, pages=self._moved(value.pages, there))
        return moved


@pytest.fixture
def operators(request, monkeypatch):
    """CUDA's operators, which leave no call to others, and the reference's, on the CPU, for what they have not."""
    device = torch.device("cpu" if request.param == "emulated" else "cuda")
    if request.param == "emulated":
        cuda = request.getfixturevalue("cuda")
    else:
        cuda_on_gpu()
        from vllm_kvmerge.ops import cuda
    refusal = "vllm_kvmerge.ops.cuda.backend.fallback", lambda device: pytest.fail("the kernels did not run")
    monkeypatch.setattr(*refusal)
    there = WithTables(cuda, device)
    return SimpleNamespace(**vars(reference) | {"paged_attention": there.paged_attention})


@pytest.fixture(params=[(16, torch.bfloat16), (48, torch.float16)], ids=str)
def scene(request):
    """Of ``test_head_pages``."""
    return Scene.make(request.param[0], *request.param, tail_len=61)


@pytest.fixture
def dtype(scene):
    return scene.paged.layers[0].keys.dtype


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("groups", "num_queries"), [(4, 1), (2, 5)])  # longer chunks are another's
def test_attention(operators, scene, dtype, update, groups, num_queries):
    test_head_pages.test_attention(operators, scene, dtype, update, groups, num_queries)


LAYERS, HEADS = 3, 2


class Pool:
    """Layers of random numbers in every slot, so that what is read in a wrong place shows."""

    def __init__(self, seed: int, head_size: int, block_size: int, dtype: torch.dtype, num_blocks: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.head_size, self.block_size, self.dtype = head_size, block_size, dtype
        cell = cell_bytes(head_size, dtype) // dtype.itemsize
        shape = num_blocks, HEADS, block_size, cell
        self.layers = [PagedKVCache.of(torch.zeros(shape, dtype=dtype), head_size, True) for _ in range(LAYERS)]
        for cache in self.layers:
            for plane in (cache.keys, cache.values, cache.scores):
                plane.copy_(self.randn(*plane.shape))
            votes = self.randn(*cache.log_votes.shape).abs()
            dead = torch.rand(votes.shape, generator=self.generator) < 0.1
            cache.log_votes.copy_(votes.masked_fill(dead, -torch.inf))
            cache.aux.copy_(torch.randint(0, 3, votes.shape, generator=self.generator))
        self._blocks = torch.randperm(num_blocks, generator=self.generator)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def count(self, num_slots: int) -> int:
        """Blocks, or pages, that so many slots take."""
        return -(-num_slots // self.block_size)

    def blocks(self, count: int) -> Tensor:
        """Blocks that nobody has yet."""
        taken, self._blocks = self._blocks[:count], self._blocks[count:]
        assert len(taken) == count
        return taken

    def pages(self, blocks: Tensor) -> Tensor:
        """``[pages]``: those of all layers and heads of the blocks, in any order."""
        lanes = LAYERS * HEADS
        ids = (blocks.unsqueeze(1) * lanes + torch.arange(lanes)).flatten()
        return ids[torch.randperm(len(ids), generator=self.generator)]

    def copy(self) -> list[PagedKVCache]:
        copies = []
        for cache in self.layers:
            cell = cell_bytes(self.head_size, self.dtype) // self.dtype.itemsize
            copies.append(
                PagedKVCache.of(torch.zeros(*cache.log_votes.shape, cell, dtype=self.dtype), self.head_size, True)
            )
            for name in PLANES:
                getattr(copies[-1], name).copy_(getattr(cache, name))
        return copies


ROWS = [(189, 400, 470, (301, 77)), (129, 200, 290, None), (0, 96, 130, (40, 0)), (0, 0, 150, None)]
"""front, tail and seq_len of each row, and, where they have pages of their own, the entries of its heads. Of these only
how many pieces a row has depends on its front, so any number will do."""
SKEWED = [(0, 0, 33, None), (600, 900, 921, (1100, 1)), (0, 320, 331, (0, 300)), (100, 128, 150, (150, 49))]
"""The same, of fronts that are as long as their heads' on average, or said to be none."""


@pytest.mark.parametrize(
    ("dtype", "groups", "head_size", "block_size", "lens", "modes"),
    [
        (torch.bfloat16, 1, 128, 16, [1, 1, 1, 1], ["mean", "log_ema", "sum", "none"]),
        (torch.float16, 2, 80, 24, [1, 0, 1, 1], ["sum", "sum", "log_ema", "mean"]),
        (torch.bfloat16, 4, 128, 48, [1, 1, 1, 1], ["sum", "none", "mean", "log_ema"]),
        (torch.bfloat16, 4, 64, 24, [3, 2, 0, 4], ["mean", "mean", "sum", "log_ema"]),
        (torch.float16, 5, 256, 16, [3, 1, 2, 1], ["log_ema", "sum", "mean", "none"]),
        (torch.float32, 4, 64, 32, [1, 1, 1, 0], ["sum", "log_ema", "mean", "sum"]),
        (torch.float32, 1, 160, 16, [4, 1, 5, 1], ["mean", "sum", "log_ema", "sum"]),
    ],
    ids=str,
)
def test_rows_of_all_kinds_share_a_batch(operators, dtype, groups, head_size, block_size, lens, modes):
    """Fronts of two pieces and of none, in pages of all layers, beside ordinary ones; holes, several queries, pages
    that end within a step. Statistics change where they should, in all layers, and nowhere else."""
    check_rows(operators, ROWS, dtype, groups, head_size, block_size, lens, modes)


@pytest.mark.parametrize("multiprocessors", [1, 3, 8])
@pytest.mark.parametrize(
    ("dtype", "groups", "head_size", "block_size", "lens", "modes"),
    [
        (torch.bfloat16, 4, 64, 32, [1, 1, 1, 1], ["sum", "mean", "sum", "log_ema"]),
        (torch.float16, 1, 64, 16, [0, 1, 2, 1], ["sum", "log_ema", "mean", "sum"]),
        (torch.float32, 1, 64, 16, [1, 2, 1, 0], ["mean", "sum", "none", "sum"]),
    ],
    ids=str,
)
def test_heads_of_all_lengths_share_a_row(
    operators, dtype, groups, head_size, block_size, lens, modes, multiprocessors, monkeypatch
):
    """Each head's entries are cut into as many pieces as the row has, of which it may leave some empty."""
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.plan.multiprocessors", lambda device: multiprocessors)
    check_rows(operators, SKEWED, dtype, groups, head_size, block_size, lens, modes)


def check_rows(operators, rows, dtype, groups, head_size, block_size, lens, modes):
    """Attention and statistics of all layers against the reference's."""
    longest, most = max(row[2] for row in rows), max(max(row[3] or (0,)) for row in rows)
    pool = Pool(groups + head_size, head_size, block_size, dtype, num_blocks=100)
    blocks = torch.zeros(len(rows), pool.count(longest), dtype=torch.int32)
    ids, fronts = torch.full((len(rows), HEADS, pool.count(most)), -1), torch.zeros(len(rows), HEADS, dtype=torch.int64)
    for row, (front, tail, seq_len, own) in enumerate(rows):
        num_front = pool.count(front if own is None else sum(own) // 2)
        blocks[row, :num_front] = pool.blocks(num_front)
        blocks[row, tail // block_size : pool.count(seq_len)] = pool.blocks(pool.count(seq_len) - tail // block_size)
        if own is not None:
            pages = pool.pages(blocks[row, :num_front].long()).tolist()
            fronts[row] = torch.tensor(own)
            ids[row] = 1 << 29  # no page
            for head, count in enumerate(own):
                ids[row, head, : pool.count(count)] = torch.tensor([pages.pop() for _ in range(pool.count(count))])
    front, tail, seq_len = torch.tensor([row[:3] for row in rows]).T
    lens = torch.tensor(lens)
    updates = [UPDATES[mode] for mode in modes]
    batch = AttentionBatch(
        blocks, lens.cumsum(0) - lens, lens, seq_len, front, tail,
        torch.tensor([update.mode.code for update in updates]),
        torch.tensor([update.decay for update in updates]), int(lens.max()),
    )  # fmt: skip
    query = pool.randn(int(lens.sum()), HEADS * groups, head_size).to(dtype)
    found = []
    for module in (reference, operators):
        layers, output = pool.copy(), torch.full_like(query, torch.nan)
        with_pages = replace(batch, pages=HeadPages(layers, ids, fronts))
        module.paged_attention(query, layers[head_size % LAYERS], with_pages, 0.3 / groups, output)
        found.append((output, layers))
    (expected, theirs), (output, ours) = found
    assert relative_error(output, expected) < TOLERANCE[dtype]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.scores, other.scores, rtol=1e-4, atol=2e-5)
        assert torch.equal(one.aux, other.aux)


def test_layers_that_lie_differently_are_left_to_others(cuda, monkeypatch):
    """Pages are found by the distance of their layer."""
    left = []
    fallback = SimpleNamespace(paged_attention=lambda *args: left.append(args[2]))
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.backend.fallback", lambda device: fallback)
    pool = Pool(0, 64, 16, torch.float32, num_blocks=8)
    batch = AttentionBatch.single(torch.arange(4), 1, 50)
    query = pool.randn(1, HEADS, 64)
    for layers in (pool.layers, [pool.layers[0], replace(pool.layers[1], aux=pool.layers[0].aux.clone())]):
        tables = PageTables(layers, 0, torch.zeros(1, dtype=torch.int64))
        cuda.paged_attention(query, layers[0], replace(batch, tables=tables), 0.1, query.clone())
    assert [one.tables.layers for one in left] == [layers]


def test_nothing_is_asked_of_the_gpu(cuda):
    """Captured graphs hold for fronts of all shapes: tables are read by the kernels alone."""
    pool = Pool(0, 64, 16, torch.float32, num_blocks=8)
    table = HeadPages(pool.layers, torch.zeros(LAYERS, HEADS, 2).long(), torch.zeros(LAYERS, HEADS).long()).table()
    batch = replace(
        AttentionBatch.single(torch.arange(4), 1, 50),
        tables=PageTables(pool.layers, 1, torch.tensor([table.data_ptr()])),
    )
    query = pool.randn(1, HEADS, 64)
    with Watch(Watch.WAITS):
        cuda.paged_attention(query, pool.layers[1], batch, 0.1, query.clone())
    wrong = replace(batch, tables=PageTables(pool.layers, LAYERS, batch.tables.addresses))
    with pytest.raises(ValueError, match="there is no layer 3 among 3"):
        cuda.paged_attention(query, pool.layers[1], wrong, 0.1, query.clone())


KERNELS = {
    "Attend<MatrixUnits<Bf16, 128>, 4, 3, true>": [
        "LDGSTS.E.BYPASS.LTC128B.128", "HMMA.16816.F32.BF16", "LDSM.16.M",
    ],
    "Finish<256, float>": ["LDG.E.128"],
}  # fmt: skip
"""Some of the kernels, and instructions that are meant to be in them."""


@pytest.mark.parametrize("target", ["80", "89", "90a"])
def test_kernels_compile_without_spills(target, tmp_path):
    check_compiled(KERNELS, target, tmp_path)
