"""Head pages in CUDA's operators: emulated on the CPU, and compiled for GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.ops import test_head_pages
from tests.ops.conftest import Watch, cuda_on_gpu
from tests.ops.on_gpu import OnGPU
from tests.ops.test_cuda import COPIES, PLACES, check_compiled
from tests.ops.test_head_pages import UPDATES, Scene
from vllm_kvmerge.ops import AttentionBatch, HeadPages, PagedKVCache, SequenceLayers, cell_bytes, reference
from vllm_kvmerge.ops.types import PageTables

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
    if request.param == "emulated":
        cuda = request.getfixturevalue("cuda")
    else:
        cuda_on_gpu()
        from vllm_kvmerge.ops import cuda
    fallback = "vllm_kvmerge.ops.cuda.backend.fallback"
    monkeypatch.setattr(fallback, lambda device: pytest.fail("the kernels did not run"))
    there = WithTables(cuda, torch.device("cpu" if request.param == "emulated" else "cuda"))
    return SimpleNamespace(**vars(reference) | {"paged_attention": there.paged_attention})


@pytest.fixture(params=[(16, torch.bfloat16, 3), (48, torch.float16, 3), (32, torch.float32, 20)], ids=str)
def scene(request):
    """Of ``test_head_pages``, with fronts of one piece and of several."""
    block_size, dtype, num_pages = request.param
    return Scene.make(block_size, block_size, dtype, 61, num_pages)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("groups", "num_queries"), [(4, 1), (2, 5)])  # longer chunks are another's
@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_attention(operators, scene, update, groups, num_queries, multiprocessors, monkeypatch):
    """Each head's entries are cut into as many pieces as the row has, of which it may leave some empty."""
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.plan.multiprocessors", lambda device: multiprocessors)
    dtype = scene.paged.layers[0].keys.dtype
    test_head_pages.test_attention(operators, scene, dtype, update, groups, num_queries)


def row_major_layers() -> list[PagedKVCache]:
    shape = 8, 2, 16, cell_bytes(64, torch.float32) // 4
    return [PagedKVCache.of(torch.zeros(shape), 64, True) for _ in range(3)]


def test_layers_that_lie_differently_are_left_to_others(cuda, monkeypatch):
    """Pages are found by the distance of their layer."""
    left = []
    fallback = SimpleNamespace(paged_attention=lambda *args: left.append(args[2]))
    monkeypatch.setattr("vllm_kvmerge.ops.cuda.backend.fallback", lambda device: fallback)
    own, query = row_major_layers(), torch.randn(1, 2, 64)
    batch = AttentionBatch.single(torch.arange(4), 1, 50)
    for layers in (own, [own[0], replace(own[1], aux=own[0].aux.clone())]):
        tables = PageTables(layers, 0, torch.zeros(1, dtype=torch.int64))
        cuda.paged_attention(query, layers[0], replace(batch, tables=tables), 0.1, query.clone())
    assert [one.tables.layers for one in left] == [layers]


def test_nothing_is_asked_of_the_gpu(cuda):
    """Captured graphs hold for fronts of all shapes: tables are read by the kernels alone."""
    layers, query = row_major_layers(), torch.randn(1, 2, 64)
    table = HeadPages(layers, torch.zeros(3, 2, 2).long(), torch.zeros(3, 2).long()).table()
    tables = PageTables(layers, 1, torch.tensor([table.data_ptr()]))
    batch = replace(AttentionBatch.single(torch.arange(4), 1, 50), tables=tables)
    with Watch():
        cuda.paged_attention(query, layers[1], batch, 0.1, query.clone())
    wrong = replace(batch, tables=replace(tables, layer=3))
    with pytest.raises(ValueError, match="there is no layer 3 among 3"):
        cuda.paged_attention(query, layers[1], wrong, 0.1, query.clone())


KERNELS = {
    "Attend<MatrixUnits<Bf16, 128>, 4, 3, true>": [COPIES, "HMMA.16816.F32.BF16", "LDSM.16.M"],
    "Finish<256, float>": ["LDG.E.128"],
}
"""Some of the kernels, and instructions that are meant to be in them."""


@pytest.mark.parametrize("target", ["80", "89", "90a"])
def test_kernels_compile_without_spills(target, tmp_path):
    check_compiled(KERNELS, target, tmp_path)
