"""Coded fronts: what their pages hold, and attention over them."""

from dataclasses import replace

import pytest
import torch

from vllm_kvmerge.ops import (
    AttentionBatch,
    HeadPages,
    PagedKVCache,
    ScoreMode,
    SequenceLayers,
    cell_bytes,
    cpu,
    reference,
)
from vllm_kvmerge.ops.types import PLANES, PageTables, Softmax, coded

LAYERS, HEADS, BLOCKS, ROWS = 2, 2, 14, 4
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def write_codes_of(operators):
    return getattr(operators, "write_codes", reference.write_codes)  # the CPU's library has none


def test_codes_are_the_nearest():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(7, 50, 64, generator=generator) * torch.logspace(-1, 3, 50).unsqueeze(1)
    rows[0, 0] = 0.0
    codes, scales = coded(rows)
    error = (rows - codes.float() * scales.float().unsqueeze(-1)).abs().amax(-1)
    assert (error <= scales.float() * 0.51).all() and (codes[0, 0] == 0).all()
    assert (rows.abs().amax(-1)[1:] / 127 / scales[1:].float()).sub(1).abs().max() < 2**-10


class Scene:
    """Four rows: with a coded front, with an ordinary front, with one in pages that are not coded and, nothing of it
    compressed, a plain one."""

    def __init__(self, seed: int, block_size: int, head_size: int, dtype: torch.dtype, tail_len: int) -> None:
        self.generator, self.head_size = torch.Generator().manual_seed(seed), head_size
        cell = cell_bytes(head_size, dtype) // dtype.itemsize
        poison = torch.full((BLOCKS * ROWS, HEADS, block_size, cell), torch.nan, dtype=dtype)
        self.layers = [PagedKVCache.of(poison.clone(), head_size) for _ in range(LAYERS)]
        self.blocks = (torch.randperm(BLOCKS * ROWS, generator=self.generator)).view(ROWS, BLOCKS)
        self.front, self.tail = 4 * block_size + 5, 6 * block_size + 3
        self.seq_len = self.tail + tail_len
        self.fronts = torch.tensor([[self.front, 3], [2 * block_size, self.front - 1]])
        ids = torch.stack([HeadPages.even(LAYERS, layer, HEADS, self.blocks[0, :3]) for layer in range(LAYERS)])
        self.pages = HeadPages(self.layers, ids, self.fronts, torch.ones(LAYERS, dtype=torch.bool))
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
        pages = HeadPages(self.layers, ids, fronts, torch.tensor([True, False, False, False]))
        self.tables = [some.table().to(device) for some in (self.pages, self.others)]  # must stay alive
        addresses = torch.tensor([self.tables[0].data_ptr(), 0, self.tables[1].data_ptr(), 0])
        return replace(batch, pages=pages, tables=PageTables(self.layers, layer, addresses, coded=True))


def rows_from(batch: AttentionBatch, first: int) -> AttentionBatch:
    assert batch.pages is not None
    others = batch.map(lambda t: t[first:], batch.max_query_len)
    return replace(others, pages=batch.pages[first:])


@pytest.mark.thin(4)
@pytest.mark.parametrize("num_queries", [1, 3, 40])
@pytest.mark.parametrize("groups", [1, 7])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 32), (128, 16), (80, 48)])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(operators, dtype, cap, head_size, block_size, groups, num_queries):
    """Beside rows of other kinds, as over what the codes stand for."""
    device = getattr(operators, "device", "cpu")
    is_native = operators is reference or operators is cpu
    scene = Scene(head_size + groups, block_size, head_size, dtype, tail_len=70)
    reference.write_codes(scene.paged, scene.pages, scene.keys, scene.values, scene.votes)
    query = scene.randn(ROWS * num_queries, HEADS * groups, head_size).to(dtype)
    softmax, scale = Softmax(cap, scene.randn(HEADS, groups)), head_size**-0.5
    for layer, cache in enumerate(scene.layers):
        batch, output = scene.batch(layer, num_queries, device), torch.zeros_like(query)
        operators.paged_attention(query, cache, batch, scale, output, softmax)
        heads = slice(layer * HEADS, (layer + 1) * HEADS)
        tail = SequenceLayers.of(cache, scene.blocks[0], 0, scene.tail, scene.seq_len)
        index = torch.arange(tail.num_entries).expand(HEADS, -1)
        rows = []
        for plane, front in (("keys", scene.keys), ("values", scene.values)):
            codes, scales = coded(front[heads])
            rows.append(torch.cat([codes * scales.float().unsqueeze(-1), reference.gather_rows(tail, plane, index)], 1))
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 32), (80, 16)])
def test_codes_are_written_as_by_the_reference(operators, dtype, head_size, block_size):
    """To the bit, of rows of any size; what lies behind a head's front stays."""
    scene, other = (Scene(7, block_size, head_size, dtype, tail_len=9) for _ in range(2))
    for one, write in ((scene, reference.write_codes), (other, write_codes_of(operators))):
        keys = one.keys * torch.logspace(-9, 2, one.front).unsqueeze(1)
        keys[:, ::5] = keys[:, ::5].sign()  # many ties
        write(one.paged, one.pages, keys, one.values, one.votes)
    for expected, actual in zip(scene.layers, other.layers, strict=True):
        for name in PLANES:
            planes = (getattr(cache, name).contiguous().view(torch.uint8) for cache in (expected, actual))
            assert torch.equal(*planes), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_stay_in_their_pages(operators, dtype):
    """In 16 bits they fill them; other heads' pages and blocks keep every bit."""
    scene = Scene(3, 32, 64, dtype, tail_len=9)
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
    pages, cache = scene.layers[0].coded, scene.layers[0]
    assert (
        pages.values.shape[2] == 64
        and pages.keys.nbytes + pages.values.nbytes == cache.content.nbytes * 2 // dtype.itemsize
    )
    assert pages.log_votes.nbytes + 2 * pages.key_scales.nbytes == 4 * cache.log_votes.nbytes


def test_coded_fronts_have_no_scores(operators):
    if operators not in (reference, cpu):
        pytest.skip("kernels on a GPU do not look")
    scene = Scene(4, 32, 64, torch.float32, tail_len=9)
    reference.write_codes(scene.paged, scene.pages, scene.keys, scene.values, scene.votes)
    batch = scene.batch(0, 1)
    batch.score_modes[0] = ScoreMode.SUM.code
    query = scene.randn(ROWS, HEADS, 64)
    with pytest.raises(ValueError, match="a coded front has no scores"):
        operators.paged_attention(query, scene.layers[0], batch, 1.0, torch.zeros_like(query))
