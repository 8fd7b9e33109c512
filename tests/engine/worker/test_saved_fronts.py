"""Fronts in files, without an engine: what is written comes back bit for bit, and nothing that is torn does."""

import pytest
import torch

from vllm_kvmerge.engine.worker.saved_fronts import (
    SavedFrontError,
    file_of,
    front_tensors,
    read_front,
    read_manifest,
    restore_front,
    write_front,
)
from vllm_kvmerge.ops import HeadPages, PagedKVCache
from vllm_kvmerge.ops.types import QUANTISED, cell_bytes

LAYERS, HEADS, SIZE, DIM, BLOCKS = 3, 2, 16, 32, 9


def make_layers(dtype: torch.dtype) -> list[PagedKVCache]:
    cell = cell_bytes(DIM, dtype) // dtype.itemsize
    shape = LAYERS, BLOCKS, HEADS, SIZE, cell * dtype.itemsize
    return [PagedKVCache.of(memory.view(dtype), DIM) for memory in torch.randint(-128, 127, shape, dtype=torch.int8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *QUANTISED], ids=str)
@pytest.mark.parametrize("has_pages", [False, True])
def test_a_front_comes_back_bit_for_bit(tmp_path, dtype, has_pages):
    """Into other blocks of another cache, and with the heads' pages in these."""
    there, here = make_layers(dtype), make_layers(dtype)
    sources, targets = [7, 2, 5], [1, 8, 3]
    before = [[plane.clone() for plane in (cache.content, *cache.metadata)] for cache in here]
    rest = [block for block in range(BLOCKS) if block not in targets]
    pages = None
    if has_pages:
        ids = torch.tensor(sources)[torch.randint(3, (LAYERS, HEADS, 4))] * LAYERS * HEADS
        pages = HeadPages(there, ids + torch.randint(LAYERS * HEADS, ids.shape), torch.randint(1, 60, (LAYERS, HEADS)))
    queries = torch.randn(LAYERS, 4, 6, DIM).to(torch.bfloat16 if dtype in QUANTISED else dtype)
    path = file_of(tmp_path, 0, 1)
    write_front(path, front_tensors(there, sources, pages, {"queries": queries, "output": None}), '{"a": 1}', "weights")
    assert read_manifest(path) == {"a": 1}
    found, others = restore_front(here, targets, read_front(path, "weights"), {"queries": (LAYERS, None, 6, DIM)})
    for cache, other, planes in zip(here, there, before, strict=True):
        mine, theirs = (cache.content, *cache.metadata), (other.content, *other.metadata)
        for plane, source, old in zip(mine, theirs, planes, strict=True):
            ints = {4: torch.int32, 2: torch.int16, 1: torch.int8}[plane.element_size()]
            assert torch.equal(plane[targets].view(ints), source[sources].view(ints))
            assert torch.equal(plane[rest].view(ints), old[rest].view(ints))
    assert list(others) == ["queries"] and torch.equal(others["queries"], queries)
    if pages is None:
        assert found is None
        return
    moved = dict(zip(sources, targets, strict=True))
    layer, block, head = (part.flatten().tolist() for part in pages.places(pages.ids))
    expected = [layer, [moved[one] for one in block], head]
    assert [part.flatten().tolist() for part in found.places(found.ids)] == expected
    assert torch.equal(found.fronts, pages.fronts)


def test_what_does_not_fit_writes_nothing():
    layers = make_layers(torch.float32)
    tensors = front_tensors(layers, [1, 2], None, {})
    ids = torch.zeros(LAYERS, HEADS, 2, dtype=torch.int64)
    for change in (
        {"content.2": tensors["content.2"][:1]},
        {"metadata.1": tensors["metadata.1"][:3]},
        {"content.0": tensors["content.0"].to(torch.float64)},
        {"queries": torch.zeros(2)},
        {"pages.ids": ids + 2 * LAYERS * HEADS, "pages.fronts": torch.ones(LAYERS, HEADS)},
        {"pages.ids": ids, "pages.fronts": torch.full((LAYERS, HEADS), 33)},
    ):
        before = layers[0].content.clone()
        with pytest.raises(SavedFrontError):
            restore_front(layers, [3, 4], tensors | change, {})
        assert torch.equal(layers[0].content.nan_to_num(), before.nan_to_num())
    with pytest.raises(SavedFrontError, match="layer 2"):
        restore_front(layers, [3, 4], {name: one for name, one in tensors.items() if not name.endswith("2")}, {})
