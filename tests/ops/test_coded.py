"""Coded fronts: what their pages hold, and attention over them."""

from dataclasses import replace

import pytest
import torch

from vllm_kvmerge.ops import (
    ROW_PLANES,
    AttentionBatch,
    HeadPages,
    PagedKVCache,
    ScoreMode,
    SequenceLayers,
    cell_bytes,
    cpu,
    reference,
)
from vllm_kvmerge.ops.coded import CODINGS, Coding, number_of, ranged, scaled, unranged
from vllm_kvmerge.ops.types import PageTables, Softmax

LAYERS, HEADS, BLOCKS, ROWS = 2, 2, 14, 4
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def write_codes_of(operators):
    return getattr(operators, "write_codes", reference.write_codes)  # the CPU's library has none


def is_on_cpu(operators, coding: Coding) -> bool:
    """Skips what Triton has not."""
    if operators in (reference, cpu):
        return True
    if coding != "int8":
        pytest.skip(f"servers refuse fronts in {coding} on GPUs")
    return False


def test_codes_of_8_bits_are_the_nearest():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(7, 50, 64, generator=generator) * torch.logspace(-1, 3, 50).unsqueeze(1)
    rows[0, 0] = 0.0
    codes, scales = scaled(rows)
    error = (rows - codes.float() * scales.float().unsqueeze(-1)).abs().amax(-1)
    assert (error <= scales.float() * 0.51).all() and (codes[0, 0] == 0).all()
    assert (rows.abs().amax(-1)[1:] / 127 / scales[1:].float()).sub(1).abs().max() < 2**-10


@pytest.mark.parametrize("length", [48, 64])
def test_codes_of_4_bits_are_the_nearest(length):
    """Between the least and the largest number of each group that lives; others may be anything."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(7, 50, length, generator=generator) * torch.logspace(-1, 3, 50).unsqueeze(1) + 100.0
    live = torch.rand(7, 50, length, generator=generator) < 0.7
    rows[0, 0], live[0, 1] = 3.0, False
    found = unranged(*ranged(rows.where(live, 1e9), live))
    for some, expected, which in zip(found.split(32, -1), rows.split(32, -1), live.split(32, -1), strict=True):
        low, high = expected.where(which, torch.inf).amin(-1), expected.where(which, -torch.inf).amax(-1)
        step = ((high - low) / 15).clamp(min=2**-14) + 2**-10 * low.abs()  # the least number is rounded too
        assert ((some - expected).abs() <= 0.51 * step.unsqueeze(-1)).logical_or(~which).all()
    assert found.isfinite().all()


class Scene:
    """Four rows: with a coded front, with an ordinary front, with one in pages that are not coded and, nothing of it
    compressed, a plain one."""

    def __init__(
        self, seed: int, block_size: int, head_size: int, dtype: torch.dtype, tail_len: int, coding: Coding
    ) -> None:
        self.generator, self.head_size = torch.Generator().manual_seed(seed), head_size
        cell = cell_bytes(head_size, dtype) // dtype.itemsize
        poison = torch.full((BLOCKS * ROWS, HEADS, block_size, cell), torch.nan, dtype=dtype)
        self.layers = [PagedKVCache.of(poison.clone(), head_size) for _ in range(LAYERS)]
        self.blocks = (torch.randperm(BLOCKS * ROWS, generator=self.generator)).view(ROWS, BLOCKS)
        self.front, self.tail = 4 * block_size + 5, 6 * block_size + 3
        self.seq_len = self.tail + tail_len
        self.fronts = torch.tensor([[self.front, 3], [2 * block_size, self.front - 1]])
        ids = torch.stack([HeadPages.even(LAYERS, layer, HEADS, self.blocks[0, :3]) for layer in range(LAYERS)])
        self.coding, coded = coding, torch.full((LAYERS,), number_of(coding), dtype=torch.uint8)
        self.pages = HeadPages(self.layers, ids, self.fronts, coded)
        order, segments = torch.arange(LAYERS), torch.tensor([[0, self.tail, self.seq_len]] * LAYERS)
        self.paged = SequenceLayers(self.layers, order, self.blocks[:1].repeat(LAYERS, 1), segments)
        self.keys, self.values = (self.randn(LAYERS * HEADS, self.front, head_size) for _ in range(2))
        self.votes = self.randn(LAYERS * HEADS, self.front).masked_fill(
            self.randn(LAYERS * HEADS, self.front) > 1, -torch.inf
        )
        for row, start in enumerate((self.tail, self.tail, self.tail, 0)):
            slots = torch.arange(start, self.seq_len)
            slots = self.blocks[row, slots // block_size] * block_size + slots % block_size
            for cache in self.layers:
                reference.write_tokens(cache, slots, *(self.randn(len(slots), HEADS, head_size) for _ in range(2)))
        ids = torch.stack([HeadPages.even(LAYERS, layer, HEADS, self.blocks[2, :5]) for layer in range(LAYERS)])
        self.others = HeadPages(self.layers, ids, self.fronts)
        places = torch.arange(self.front).expand(LAYERS * HEADS, -1)
        metadata = self.votes, *torch.zeros(2, LAYERS * HEADS, self.front), places
        for destination in (self.blocks[1:2].repeat(LAYERS, 1), self.others):
            reference.write_rows(self.paged, destination, places, self.keys, self.values)
            reference.write_metadata(self.paged, destination, *metadata)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def batch(self, layer: int, num_queries: int, device: torch.device | str = "cpu") -> AttentionBatch:
        """device: of the kernels, if any, that read tables."""
        one = AttentionBatch.single(self.blocks[0], num_queries, self.seq_len, self.front, self.tail)
        batch = one.map(lambda t: t.repeat(ROWS, *[1] * (t.dim() - 1)), num_queries)
        batch.block_table.copy_(self.blocks)
        batch.query_starts.copy_(torch.arange(ROWS) * num_queries)
        batch.fronts[3] = batch.tails[3] = 0
        ids = torch.full((ROWS, HEADS, 5), -1)
        ids[0, :, :3], ids[2] = self.pages.ids[layer], self.others.ids[layer]
        fronts = torch.zeros(ROWS, HEADS, dtype=torch.int64)
        fronts[0] = fronts[2] = self.fronts[layer]
        coded = torch.tensor([number_of(self.coding), 0, 0, 0], dtype=torch.uint8)
        pages = HeadPages(self.layers, ids, fronts, coded)
        self.tables = [some.table().to(device) for some in (self.pages, self.others)]  # must stay alive
        addresses = torch.tensor([self.tables[0].data_ptr(), 0, self.tables[1].data_ptr(), 0])
        return replace(batch, pages=pages, tables=PageTables(self.layers, layer, addresses, coded=True))

    def stored(self) -> list[torch.Tensor]:
        """Keys, values and votes as the pages hold them."""
        rows = [torch.zeros_like(plane) for plane in (self.keys, self.values, self.votes)]
        for number, front in enumerate(self.fronts.flatten().tolist()):
            layer, head = divmod(number, HEADS)
            blocks = self.blocks[0, : -(-front // self.pages.page_size(0))]
            found = self.layers[layer].coded(self.coding).read(blocks, torch.full_like(blocks, head))
            for plane, pages in zip(rows, found, strict=True):
                plane[number, :front] = pages.flatten(0, 1)[:front]
        return rows


def rows_from(batch: AttentionBatch, first: int) -> AttentionBatch:
    assert batch.pages is not None
    others = batch.map(lambda t: t[first:], batch.max_query_len)
    return replace(others, pages=batch.pages[first:])


@pytest.mark.thin(7)
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("num_queries", [1, 3, 40])
@pytest.mark.parametrize("groups", [1, 7])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 32), (128, 16), (80, 48)])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(operators, dtype, cap, head_size, block_size, groups, num_queries, coding):
    """Beside rows of other kinds, as over what the codes stand for."""
    device = getattr(operators, "device", "cpu")
    is_native = is_on_cpu(operators, coding)
    scene = Scene(head_size + groups, block_size, head_size, dtype, 70, coding)
    reference.write_codes(scene.paged, scene.pages, scene.keys, scene.values, scene.votes)
    query = scene.randn(ROWS * num_queries, HEADS * groups, head_size).to(dtype)
    stored, far = scene.stored()[:2], 0.03 if coding == "int8" else 0.3
    read = (scene.votes > -torch.inf) & (torch.arange(scene.front) < scene.fronts.view(-1, 1))
    for plane, given in zip(stored, (scene.keys, scene.values), strict=True):
        assert (plane - given).abs()[read].max() < far
    softmax, scale = Softmax(cap, scene.randn(HEADS, groups)), head_size**-0.5
    for layer, cache in enumerate(scene.layers):
        batch, output = scene.batch(layer, num_queries, device), torch.zeros_like(query)
        operators.paged_attention(query, cache, batch, scale, output, softmax)
        heads = slice(layer * HEADS, (layer + 1) * HEADS)
        tail = SequenceLayers.of(cache, scene.blocks[0], 0, scene.tail, scene.seq_len)
        index = torch.arange(tail.num_entries).expand(HEADS, -1)
        rows = [
            torch.cat([front[heads], reference.gather_rows(tail, plane, index)], 1)
            for plane, front in zip(ROW_PLANES, stored, strict=True)
        ]
        bias = torch.cat([scene.votes[heads].clone(), torch.zeros(HEADS, tail.num_entries)], 1)
        bias[:, : scene.front][torch.arange(scene.front) >= scene.fronts[layer].unsqueeze(1)] = -torch.inf
        visible = torch.ones(num_queries, bias.shape[1], dtype=torch.bool).tril_(bias.shape[1] - num_queries)
        grouped = query[:num_queries].float().unflatten(1, (HEADS, groups)).permute(1, 2, 0, 3)
        logits = softmax.capped(grouped @ rows[0].mT.unsqueeze(1) * scale) + bias[:, None, None]
        expected = softmax.probabilities(logits.masked_fill(~visible, -torch.inf)) @ rows[1].unsqueeze(1)
        tolerance = {torch.float32: 2e-5, torch.float16: 4e-3}.get(dtype, 2e-2)
        found = output[:num_queries].float()
        assert (found - expected.permute(2, 0, 1, 3).flatten(1, 2)).abs().max() < tolerance
        alone = torch.zeros_like(query)
        (operators if is_native else reference).paged_attention(
            query, cache, rows_from(batch, 1), scale, alone, softmax
        )
        difference = (output[num_queries:].float() - alone[num_queries:].float()).abs().max()
        assert difference <= (0.0 if is_native else tolerance)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 32), (80, 16)])
def test_codes_are_written_as_by_the_reference(operators, dtype, head_size, block_size, coding):
    """To the bit, of rows of any size."""
    is_on_cpu(operators, coding)
    scene, other = (Scene(7, block_size, head_size, dtype, 9, coding) for _ in range(2))
    for one, write in ((scene, reference.write_codes), (other, write_codes_of(operators))):
        keys = one.keys * torch.logspace(-4, 2, one.front).unsqueeze(1)
        keys[:, ::5] = keys[:, ::5].sign()  # many ties
        write(one.paged, one.pages, keys, one.values, one.votes)
    assert all(map(torch.equal, scene.stored(), other.stored()))


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_stay_in_their_pages(operators, dtype, coding):
    """Other heads' pages and blocks keep every bit."""
    is_on_cpu(operators, coding)
    scene = Scene(3, 32, 64, dtype, 9, coding)
    before = [(cache.content.clone(), *(plane.clone() for plane in cache.metadata)) for cache in scene.layers]
    write_codes_of(operators)(
        scene.paged,
        scene.pages.of_heads(torch.tensor([[True, False], [False, False]])),
        scene.keys,
        scene.values,
        scene.votes,
    )
    own = scene.pages.ids[0, 0] // (LAYERS * HEADS)
    for layer, (cache, planes) in enumerate(zip(scene.layers, before, strict=True)):
        for old, new in zip(planes, (cache.content, *cache.metadata), strict=True):
            changed = (old.view(torch.uint8) != new.view(torch.uint8)).any(-1).nonzero()
            assert {tuple(at) for at in changed.tolist()} <= {(block, 0) for block in own.tolist() if layer == 0}


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("head_size", [32, 48, 80, 128])
def test_planes_do_not_overlap(head_size, block_size, coding):
    """Neither each other nor other pages."""
    shape = 3, HEADS, block_size, cell_bytes(head_size, torch.bfloat16) // 2
    cache = PagedKVCache.of(torch.zeros(shape, dtype=torch.bfloat16), head_size)
    pages, block, head = cache.coded(coding), torch.tensor([1, 2]), torch.tensor([0, 1])
    keys, values = torch.randn(2, 2, pages.slots * block_size, head_size, generator=torch.Generator().manual_seed(1))
    votes = values[..., 0]
    pages.write(block, head, keys, values, votes)
    for name, plane in (pages.encode(keys, values, votes > -torch.inf) | {"log_votes": votes}).items():
        assert torch.equal(getattr(pages, name)[block, head], plane)
    for plane in (cache.content, *cache.metadata):
        assert plane[0].count_nonzero() == plane[1, 1].count_nonzero() == plane[2, 0].count_nonzero() == 0


@pytest.mark.parametrize("coding", CODINGS)
def test_coded_fronts_have_no_scores(operators, coding):
    if not is_on_cpu(operators, coding):
        pytest.skip("only the CPU's operators check again what requests are refused for")
    scene = Scene(4, 32, 64, torch.float32, 9, coding)
    reference.write_codes(scene.paged, scene.pages, scene.keys, scene.values, scene.votes)
    batch = scene.batch(0, 1)
    batch.score_modes[0] = ScoreMode.SUM.code
    query = scene.randn(ROWS, HEADS, 64)
    with pytest.raises(ValueError, match="a coded front has no scores"):
        operators.paged_attention(query, scene.layers[0], batch, 1.0, torch.zeros_like(query))
