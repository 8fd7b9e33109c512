"""Fronts whose heads have pages of their own, against the same entries in ordinary fronts, with dead ones behind."""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import UPDATES
from tests.policies.sampling import rope
from vllm_kvmerge.ops import AttentionBatch, HeadPages, PagedKVCache, Rows, SequenceLayers, cell_bytes, cpu, reference
from vllm_kvmerge.ops.types import NO_UPDATE, PLAIN_SOFTMAX, QUANTISED, Changes, PageTables, Softmax, stored

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OPERATORS = ["triton"] if INTERPRETED else ["plain-torch", *(cpu.levels() if cpu.LIBRARY.exists() else [])]
LAYERS, HEADS, GROUPS, SIZE = 3, 2, 2, 32
SCALES = [{"key_scale": 0.5 * 2**i, "value_scale": 2.0 / 2**i} for i in range(LAYERS)]


def empty_layers(block_size: int, dtype: torch.dtype, num_blocks: int) -> list[PagedKVCache]:
    """Caches full of poison."""
    cell = cell_bytes(SIZE, dtype) // dtype.itemsize
    shape = num_blocks, HEADS, block_size, cell
    # A head's entries are over the scales of its own layer, whichever layer's pages they lie in.
    scales = SCALES if dtype in QUANTISED else [{}] * LAYERS
    interleaved = not INTERPRETED and dtype == torch.float32
    options = {"interleaved": True} if interleaved else {}
    return [PagedKVCache.of(torch.full(shape, torch.nan, dtype=dtype), SIZE, **some, **options) for some in scales]


@dataclass
class Scene:
    """The entries of all layers of one sequence twice: with head pages, and in an ordinary front with dead entries."""

    generator: torch.Generator
    paged: SequenceLayers
    plain: SequenceLayers
    fronts: Tensor  # [LAYERS, HEADS]

    @classmethod
    def make(cls, seed: int, block_size: int, dtype: torch.dtype, tail_len: int, num_pages: int = 3) -> "Scene":
        """num_pages: of a head, at most."""
        generator = torch.Generator().manual_seed(seed)
        capacity, tail = (num_pages - 1) * block_size + 5, 2 * num_pages * block_size + 7
        fronts = torch.randint(1, capacity + 1, (LAYERS, HEADS), generator=generator)
        fronts[1, 0] = capacity
        num_tokens = tail + tail_len
        num_blocks = 8 * num_pages
        layers = empty_layers(block_size, dtype, num_blocks), empty_layers(block_size, dtype, num_blocks)
        blocks = torch.randperm(num_blocks - 1, generator=generator)[: -(-num_tokens // block_size)] + 1
        ids = page_ids(generator, blocks[:num_pages], fronts, block_size)
        segments = torch.tensor([[capacity, tail, num_tokens]] * LAYERS)
        order = torch.arange(LAYERS)
        plain = SequenceLayers(layers[0], order, blocks.repeat(LAYERS, 1), segments)
        paged = replace(plain, layers=layers[1], pages=HeadPages(layers[1], ids, fronts))
        scene = cls(generator, paged, plain, fronts)
        live = torch.arange(capacity) < fronts.flatten().unsqueeze(1)
        rows = [scene.randn(LAYERS * HEADS, capacity, SIZE).masked_fill(~live.unsqueeze(-1), 0.0) for _ in range(2)]
        metadata = (
            scene.randn(*live.shape).abs().masked_fill(~live, -torch.inf),
            scene.randn(*live.shape).masked_fill(~live, 0.0),
            torch.randint(0, 3, live.shape, generator=generator).float().masked_fill(~live, 0.0),
            torch.arange(capacity).expand(live.shape).masked_fill(~live, -1),
        )
        places = torch.arange(capacity).expand(live.shape)
        for cache in (*layers[0], *layers[1]):  # what attention leaves in a tail
            cache.scores.fill_(0.25)
            cache.aux.fill_(1.0)
        for some, to in ((paged, paged.pages), (plain, plain.blocks)):
            reference.write_rows(some, to, places, *rows)
            reference.write_metadata(some, to, *metadata)
        slots = torch.arange(tail, num_tokens)
        slots = blocks[slots // block_size] * block_size + slots % block_size
        for one, other in zip(*layers, strict=True):
            key, value = scene.randn(tail_len, HEADS, SIZE), scene.randn(tail_len, HEADS, SIZE)
            for cache in (one, other):
                reference.write_tokens(cache, slots, key, value)
        return scene

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    @property
    def num_entries(self) -> int:
        return self.plain.num_entries

    @property
    def live(self) -> Tensor:
        """``[H, n]`` bool."""
        index, front = torch.arange(self.num_entries), int(self.plain.segments[0, 0])
        return (index < self.fronts.flatten().unsqueeze(1)) | (index >= front)

    def index(self, count: int) -> Tensor:
        shuffled = [torch.randperm(self.num_entries, generator=self.generator) for _ in range(LAYERS * HEADS)]
        return torch.stack(shuffled)[:, :count]


def page_ids(generator: torch.Generator, blocks: Tensor, counts: Tensor, block_size: int) -> Tensor:
    """``[LAYERS, HEADS, pages]``: pages of all layers and heads of the blocks, in any order."""
    lanes = LAYERS * HEADS
    free = (blocks.unsqueeze(1) * lanes + torch.arange(lanes)).flatten()
    is_page = torch.arange(len(blocks)) * block_size < counts.unsqueeze(-1)
    ids = torch.zeros(is_page.shape, dtype=torch.int64)
    ids[is_page] = free[torch.randperm(len(free), generator=generator)][: int(is_page.sum())]
    return ids


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16, *QUANTISED], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=[16, 48])
def scene(request, dtype):
    return Scene.make(request.param, request.param, dtype, tail_len=61)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((actual.float() - expected.float()).abs().max()) <= tolerance


@pytest.mark.thin(5)  # all updates: one of four would always have the same
@pytest.mark.parametrize(("groups", "num_queries"), [(4, 1), (2, 5), (1, 23)])
@pytest.mark.parametrize("update", [NO_UPDATE, *UPDATES[1:]], ids=lambda update: update.mode)
def test_attention(operators, scene, dtype, update, groups, num_queries):
    """Beside an ordinary row; scores go to the pages, wherever they are."""
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}.get(dtype, 3e-2)
    query = scene.randn(2 * num_queries, HEADS * groups, SIZE).to(torch.bfloat16 if dtype in QUANTISED else dtype)
    front, tail, seq_len = scene.plain.segments[0].tolist()
    batch = AttentionBatch.single(scene.plain.blocks[0], num_queries, seq_len, front, tail, update)
    both = batch.map(lambda t: torch.cat([t, t]), num_queries)
    both.query_starts[1] = num_queries
    both.fronts[1] = both.score_modes[1] = 0  # another of which there is but the tail
    table = scene.paged.pages.table().to(getattr(operators, "device", "cpu"))  # must stay alive
    for layer in range(LAYERS):
        plain, paged = torch.zeros_like(query[:num_queries]), torch.zeros_like(query)
        reference.paged_attention(query[:num_queries], scene.plain.layers[layer], batch, 0.2, plain)
        cache = scene.paged.layers[layer]
        ids = torch.stack([scene.paged.pages.ids[layer], torch.full_like(scene.paged.pages.ids[layer], -1)])
        fronts = torch.stack([scene.fronts[layer], torch.zeros_like(scene.fronts[layer])])
        pages = HeadPages(scene.paged.layers, ids, fronts)
        tables = PageTables(scene.paged.layers, layer, torch.tensor([table.data_ptr(), 0]))
        operators.paged_attention(query, cache, replace(both, pages=pages, tables=tables), 0.2, paged)
        assert_close(paged[:num_queries], plain, tolerance)
        alone = torch.zeros_like(plain)
        of_tail = AttentionBatch.single(scene.plain.blocks[0], num_queries, seq_len, 0, tail)
        reference.paged_attention(query[num_queries:], cache, of_tail, 0.2, alone)
        assert_close(paged[num_queries:], alone, tolerance)
    for actual, expected in zip(
        operators.gather_metadata(scene.paged), reference.gather_metadata(scene.plain), strict=True
    ):
        assert_close(actual[scene.live], expected[scene.live], tolerance)


def test_reading(operators, scene, dtype):
    """Metadata, rows, comparisons and attention of kept queries; dead entries are as dead as in an ordinary front."""
    metadata = operators.gather_metadata(scene.paged)
    for actual, expected in zip(metadata, reference.gather_metadata(scene.plain), strict=True):
        assert torch.equal(actual, expected)
    index = scene.index(40)
    index[:, ::7] = -1
    for plane in ("keys", "values"):
        expected = reference.gather_rows(scene.plain, plane, index)
        assert torch.equal(operators.gather_rows(scene.paged, plane, index), expected)
    log_votes, _, _, positions = metadata
    everything, usable = torch.arange(scene.num_entries).expand(len(positions), -1), positions >= 0
    for num_sources in (9, 70):
        sources = scene.index(num_sources)
        arguments = sources, everything, usable
        weights = torch.ones(arguments[0].shape), torch.ones(arguments[1].shape)
        joins = scene.paged, arguments[1], arguments[0], *weights
        expected_joins = reference.join_entries(scene.plain, *joins[1:])
        assert all(map(torch.equal, operators.join_entries(*joins), expected_joins))
        mixing = "keys", arguments[0], torch.zeros_like(sources), weights[0] / num_sources, scene.index(2)
        assert_close(operators.mix_entries(scene.paged, *mixing), reference.mix_entries(scene.plain, *mixing), 1e-5)
        similarity, best = operators.most_similar(scene.paged, *arguments)
        expected, expected_best = reference.most_similar(scene.plain, *arguments)
        is_live = scene.live.gather(1, sources)
        assert_close(similarity[is_live], expected[is_live], 1e-5)
        assert float((best == expected_best)[is_live].float().mean()) > 0.98  # but for equally similar ones
    new = scene.randn(len(positions), 9, SIZE).mul(8).round() / 8  # which any dtype can hold
    row = everything.roll(5, 1).masked_fill(everything.roll(5, 1) >= 9, -1)
    changes = Changes(everything.flip(1), row, new, None)
    for plane in ("keys", "values"):
        expected = reference.gather_rows(scene.plain, plane, index, changes)
        assert torch.equal(operators.gather_rows(scene.paged, plane, index, changes), expected)
    exists = scene.live.flip(1) | (row >= 0)
    arguments = everything[:, :20].contiguous(), everything[:, 20:].contiguous(), exists[:, 20:].contiguous(), changes
    similarity, _ = operators.most_similar(scene.paged, *arguments)
    expected, _ = reference.most_similar(scene.plain, *arguments)
    assert_close(similarity[exists[:, :20]], expected[exists[:, :20]], 1e-5)
    queries, where = (
        scene.randn(len(positions), GROUPS, 3, SIZE),
        torch.tensor([60, 200, 900]).expand(len(positions), 3),
    )
    sinks = 2.0 + scene.randn(len(positions), GROUPS)
    for fusion, softmax in (("sum", PLAIN_SOFTMAX), ("max", PLAIN_SOFTMAX), ("sum", Softmax(sinks=sinks))):
        arguments = queries, where, log_votes, positions, 0.2, fusion, softmax
        fused = operators.fused_attention(scene.paged, *arguments)
        assert_close(fused, reference.fused_attention(scene.plain, *arguments), 1e-5)


def dealt(scene: Scene, wanted: Tensor) -> tuple[HeadPages, Tensor]:
    """Pages for fronts of ``wanted`` entries, as far as there are any: a head's own, then what others leave. Also which
    heads get others' pages."""
    size, lanes, old = scene.paged.layers[0].block_size, LAYERS * HEADS, scene.paged.pages.ids
    num_old, num_new = (-(-counts // size) for counts in (scene.fronts, wanted))
    ids, grows = torch.zeros_like(old), torch.zeros_like(wanted, dtype=torch.bool)
    free = (scene.paged.blocks[0, :3].unsqueeze(1) * lanes + torch.arange(lanes)).flatten().tolist()
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    for at in heads:
        stay = min(int(num_old[at]), int(num_new[at]))
        ids[at][:stay] = old[at][:stay]
        free = [page for page in free if page not in ids[at][:stay]]
    for at in heads:
        for page in range(int(num_old[at]), int(num_new[at])):
            grows[at] |= bool(free)
            ids[at][page] = free.pop() if free else 0
            num_new[at] = num_new[at] if ids[at][page] else min(num_new[at], page)
    return HeadPages(scene.paged.layers, ids, torch.minimum(wanted, num_new * size)), grows


def test_compaction(operators, scene, dtype):
    """Heads grow and shrink: first those that keep to their own pages, then those that grow into what is left."""
    num_places = 3 * scene.paged.layers[0].block_size
    wanted = torch.randint(1, num_places - 5, scene.fronts.shape, generator=scene.generator)
    pages, grows = dealt(scene, wanted)
    assert grows.any() and not grows.all()
    places = torch.arange(num_places).expand(LAYERS * HEADS, -1)
    exists = places < pages.fronts.flatten().unsqueeze(1)
    # Most entries stay where they are; others come from anywhere, and some places become empty.
    stays = (torch.rand(places.shape, generator=scene.generator) < 0.6) & scene.live[:, :num_places]
    stays &= places < scene.plain.segments[0, 0]
    kept = torch.where(stays, places, -1)
    for row, line in enumerate(scene.index(scene.num_entries)):
        others = line[scene.live[row][line] & ~torch.isin(line, kept[row])]
        holes = (kept[row] < 0).nonzero().squeeze(1)[: len(others)]
        kept[row, holes] = others[: len(holes)]
    metadata = (
        *(scene.randn(*places.shape) for _ in range(3)),
        torch.randint(0, 99, places.shape, generator=scene.generator),
    )
    changed = torch.stack([torch.randperm(num_places, generator=scene.generator)[:7] for _ in places])
    changed[:, 3] = -1
    rows = Rows(changed, scene.randn(len(places), 7, SIZE), scene.randn(len(places), 7, SIZE))
    expected = [reference.gather_rows(scene.paged, plane, kept) for plane in ("keys", "values")]
    for name, plane, new in zip(("keys", "values"), expected, (rows.keys, rows.values), strict=True):
        for row, line in enumerate(changed):
            scale = scene.paged.layers[row // HEADS].scale_of(name)
            plane[row, line[line >= 0]] = stored(new[row, line >= 0] / scale, dtype).float() * scale
    for mask in (~grows, grows):
        operators.merge_entries(scene.paged, pages.of_heads(mask), kept, metadata, rows)
    segments = torch.tensor([[num_places, *scene.paged.segments[0, 1:].tolist()]] * LAYERS)
    after = replace(scene.paged, pages=pages, segments=segments)
    for plane, values in zip(("keys", "values"), expected, strict=True):
        assert torch.equal(reference.gather_rows(after, plane, places)[exists], values[exists])
    for actual, values in zip(reference.gather_metadata(after), metadata, strict=True):
        assert torch.equal(actual[:, :num_places][exists], values[exists].to(actual.dtype))

    # Of half of the heads, once more, the keys are turned.
    rotation, half = rope(SIZE, num_positions=99), grows.flatten().unsqueeze(1) & exists
    origin, target = torch.randint(0, 99, (2, *places.shape), generator=scene.generator)
    operators.turn_keys(scene.paged, pages.of_heads(grows), origin, target, rotation.table, True)
    turned = torch.where(half.unsqueeze(-1), rotation.moved(expected[0], origin, target), expected[0])
    keys = reference.gather_rows(after, "keys", places)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    relative = 1.01 * torch.finfo(dtype).eps / 2 if dtype in QUANTISED else 0.0
    torch.testing.assert_close(keys[exists], turned[exists], rtol=relative, atol=tolerance)
    assert torch.equal(keys[exists & ~half], expected[0][exists & ~half])


@pytest.mark.parametrize("fault", ["page", "front", "none"])
def test_impossible_pages_are_refused(fault):
    scene = Scene.make(0, 16, torch.float32, tail_len=3)
    pages = scene.paged.pages
    ids, fronts = pages.ids.clone(), pages.fronts.clone()
    if fault == "page":
        ids[1, 0, 0] = 24 * LAYERS * HEADS
    elif fault == "front":
        fronts[1, 0] = 3 * 16 + 1
    else:
        ids[1, 0] = -1
    with pytest.raises((ValueError, IndexError), match="page"):
        cpu.gather_metadata(replace(scene.paged, pages=HeadPages(pages.layers, ids, fronts)))
