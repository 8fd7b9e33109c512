"""The operators that read and change single entries, against dense arithmetic and slot by slot."""

import pytest
import torch
from torch import Tensor

from tests.entries import gather_entries, write_front
from tests.ops.conftest import CacheMaker, Sequence, softmax_of
from tests.policies.sampling import rope
from vllm_kvmerge.ops import ROW_PLANES, Changes, PagedKVCache, PlaneName, SequenceLayers
from vllm_kvmerge.ops.types import PLANES, QUANTISED
from vllm_kvmerge.policies.base import DEAD, Entries
from vllm_kvmerge.policies.rotation import Rotation

DTYPES = [torch.float32, torch.bfloat16, torch.float16, *QUANTISED]
SHAPES = [(0, 0, 77, 0), (37, 200, 231, 5), (32, 64, 96, 0), (50, 50, 91, 3), (1, 130, 160, 1)]
"""front, tail, seq_len, dead entries of each head: never compressed, holes, odd lengths, no hole."""


def make(dtype: torch.dtype, shape: tuple[int, int, int, int], seed: int = 0) -> tuple[CacheMaker, Sequence]:
    maker = CacheMaker(seed, 3, 48, 32, dtype)
    sequence = maker.sequence(*shape)
    for plane in (maker.pages.scores, maker.pages.aux):
        plane.copy_(maker.randn(*plane.shape))
    return maker, sequence


def live(maker: CacheMaker, s: Sequence) -> Entries:
    return gather_entries(maker.pages, s.blocks, s.front, s.tail, s.seq_len)


def random_index(maker: CacheMaker, num_entries: int, count: int, num_negative: int = 0) -> Tensor:
    """``[3, count]``: different entries for each head, in any order, and -1 in ``num_negative`` places."""
    ranks = torch.rand(3, num_entries, generator=maker.generator).argsort(1)[:, :count]
    return ranks.masked_fill(torch.rand(3, count, generator=maker.generator).argsort(1) < num_negative, -1)


def by_index(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of ``[H, n, d]`` at ``[H, m]``; zeros where negative."""
    rows = torch.take_along_dim(tensor, index.clamp(min=0).unsqueeze(-1), 1)
    return rows.masked_fill(index.unsqueeze(-1) < 0, 0.0)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal everywhere, or both NaN."""
    return torch.equal(*(tensor.double().nan_to_num(7.0, torch.inf, -torch.inf) for tensor in (one, other)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_metadata_and_rows_are_those_of_the_dense_sequence(operators, dtype, shape):
    maker, s = make(dtype, shape)
    slots = torch.tensor([*range(s.front), *range(s.tail, s.seq_len)])
    block, offset = s.blocks[slots // 32].long(), slots % 32
    log_votes, scores, aux, positions = operators.gather_metadata(maker.layers(s))
    assert torch.equal(log_votes.double(), s.log_votes)
    assert torch.equal(scores, maker.pages.scores[block, :, offset].t())
    assert torch.equal(aux, maker.pages.aux[block, :, offset].t())
    expected = torch.cat([torch.arange(s.front), torch.arange(s.tail, s.seq_len)]).repeat(3, 1)
    expected[:, : shape[3]] = DEAD
    assert positions.dtype == torch.int64 and torch.equal(positions, expected)
    for tensor in (log_votes, scores, aux, positions):
        tensor.fill_(7)  # copies: the pages stay as they are
    assert torch.equal(live(maker, s).log_votes.double(), s.log_votes)

    index = random_index(maker, len(slots), len(slots) // 2, num_negative=4)
    for plane, dense in (("keys", s.keys), ("values", s.values)):
        rows = operators.gather_rows(maker.layers(s), plane, index)
        assert rows.dtype == torch.float32 and torch.equal(rows.double(), by_index(dense, index))
        assert operators.gather_rows(maker.layers(s), plane, index[:, :0]).shape == (3, 0, 48)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plane", ["keys", "values"])
@pytest.mark.parametrize("has_targets", [True, False])
def test_entries_are_mixed(operators, dtype, shape, plane, has_targets):
    """Several sources join a target; some sources and targets are none. Against sums in float64."""
    maker, s = make(dtype, shape)
    dense, n = (s.keys if plane == "keys" else s.values), s.keys.shape[1]
    index = random_index(maker, n, n)
    targets, sources = index[:, : n // 3].clone(), index[:, n // 3 :].clone()
    sources[:, 1:2], targets[1, :1] = -1, -1
    num_places = targets.shape[1] if has_targets else sources.shape[1]
    row = torch.randint(-1, num_places, sources.shape, generator=maker.generator)
    shares = torch.rand(sources.shape, generator=maker.generator).masked_fill(sources < 0, 0.0)
    given = row, shares, targets if has_targets else None
    mixed = operators.mix_entries(maker.layers(s), plane, sources, *given)
    before = by_index(dense, targets) if has_targets else torch.zeros(3, num_places, 48).double()
    expected = before.clone()
    for head in range(3):
        for source, place, share in zip(sources[head].tolist(), row[head].tolist(), shares[head].tolist(), strict=True):
            if source >= 0 and place >= 0:
                expected[head, place] += share * (dense[head, source] - before[head, place])
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_entries_join_the_slots_of_largest_product(operators, dtype, shape):
    """Slots anywhere and side by side, a source that is none; against means of keys, in float64."""
    maker, s = make(dtype, shape)
    n = s.keys.shape[1]
    index = random_index(maker, n, n)
    slots, sources = index[:, : n // 3].sort(1).values, index[:, n // 3 : n // 2].clone()
    sources[:, 1:2] = -1
    before = torch.randint(1, 9, slots.shape, generator=maker.generator).float()
    before[1, :3], slots[1, :3] = 0.0, -1  # no such slots
    weights = torch.randint(1, 4, sources.shape, generator=maker.generator).masked_fill(sources < 0, 0).float()
    joined, total = operators.join_entries(maker.layers(s), slots, sources, weights, before)
    for head in range(3):
        means, expected = s.keys[head, slots[head]].double(), before[head].clone()
        for i, source in enumerate(sources[head].tolist()):
            if source < 0:
                continue
            key = s.keys[head, source].double()
            slot, products = int(joined[head, i]), (means @ key).masked_fill(before[head] == 0, -torch.inf)
            assert products[slot] >= products.max() - 1e-4 * (means @ key).abs().max()
            expected[slot] += weights[head, i]
            means[slot] += weights[head, i] / expected[slot] * (key - means[slot])
        assert torch.equal(total[head], expected)


def changes_of(maker: CacheMaker, num_entries: int, num_places: int, num_new: int) -> Changes:
    """Places for entries, of which some hold none, and some new ones that any dtype can hold."""
    origin = random_index(maker, num_entries, num_places, num_negative=5)
    row = random_index(maker, num_places, num_places)
    row = row.masked_fill(row >= num_new, DEAD)
    keys, values = (maker.randn(3, num_new, 48).mul(8).round() / 8 for _ in range(2))
    return Changes(origin, row, keys, values)


def changed_rows(maker: CacheMaker, s: Sequence, changes: Changes, plane: PlaneName) -> Tensor:
    """``[3, C, d]`` of all places."""
    dense, new = by_index(s.keys if plane == "keys" else s.values, changes.origin), getattr(changes, plane)
    if new is None or not new.shape[1]:
        return dense
    return torch.where(changes.row[..., None] >= 0, by_index(new, changes.row).double(), dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_places_are_new_or_those_of_entries(operators, dtype, shape):
    maker, s = make(dtype, shape)
    n, located = s.keys.shape[1], maker.layers(s)
    for num_new in (0, 1, n // 3):
        changes = changes_of(maker, n, n - 7, num_new)
        index = random_index(maker, n - 7, n // 2, num_negative=4)
        for plane in ROW_PLANES:
            rows = operators.gather_rows(located, plane, index, changes)
            assert torch.equal(rows.double(), by_index(changed_rows(maker, s, changes, plane), index))
            assert operators.gather_rows(located, plane, index[:, :0], changes).shape == (3, 0, 48)
    stays = Changes(changes.origin, changes.row, None, changes.values)
    rows = operators.gather_rows(located, "keys", index, stays)
    assert torch.equal(rows.double(), by_index(changed_rows(maker, s, stays, "keys"), index))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_sources", "has_changes"), [(9, True), (70, True), (9, False), (70, False)])
def test_most_similar_against_a_loop(operators, dtype, shape, num_sources, has_changes):
    """Also to new keys; however many sources there are, which decides how they are compared where nothing is new. What
    is no source is similar to none."""
    maker, s = make(dtype, shape)
    n = s.keys.shape[1]
    num_sources = min(num_sources, n // 2)
    for num_new in (0, n // 3) if has_changes else (0,):
        changes = changes_of(maker, n, n, num_new) if has_changes else None
        keys, index = changed_rows(maker, s, changes, "keys") if changes else s.keys, random_index(maker, n, n)
        sources, targets = index[:, :num_sources].clone(), index[:, num_sources:].clone()
        usable = torch.rand(targets.shape, generator=maker.generator) < 0.7
        usable[2] = False
        sources[0, ::4] = DEAD
        targets[~usable] = DEAD
        similarity, best = operators.most_similar(maker.layers(s), sources, targets, usable, changes)
        assert (similarity[2] == -torch.inf).all() and (similarity[0, ::4] == -torch.inf).all()
        for head in range(2):
            candidates = targets[head][usable[head]]
            for j, source in enumerate(sources[head]):
                if source >= 0:
                    cosine = torch.cosine_similarity(keys[head, candidates], keys[head, source], dim=-1)
                    torch.testing.assert_close(similarity[head, j].double(), cosine.max(), rtol=0, atol=1e-6)
                    assert cosine[(candidates == best[head, j]).nonzero()] >= cosine.max() - 1e-6


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_targets", [3, 90])
def test_a_key_that_is_no_number_is_similar_to_none(num_targets, number, operators):
    """However many targets there are, which decides how it is found; nor is one of infinite length."""
    maker, s = make(torch.float32, (37, 200, 231, 0))
    rows = maker.randn(3, 1, 48)
    rows[..., 7] = number
    operators.write_rows(maker.layers(s), s.blocks[None], torch.full((3, 1), 4), rows, None)
    targets = torch.arange(5, 5 + num_targets).clamp(max=s.keys.shape[1] - 1).expand(3, -1).contiguous()
    sources = torch.full((3, 2), 4)
    sources[:, 1] = 0
    similarity, _ = operators.most_similar(maker.layers(s), sources, targets, targets >= 0)
    assert not (similarity[:, 0] >= -1).any() and (similarity[:, 1] >= -1).all()


def test_of_equally_similar_carriers_the_first_is_taken(operators):
    maker, s = make(torch.float32, (37, 200, 231, 0))
    rows = maker.randn(3, 1, 48)
    places, sources, targets = (torch.tensor([some]).expand(3, -1) for some in ([4, 8, 20], [8], [5, 20, 4, 40]))
    operators.write_rows(maker.layers(s), s.blocks[None], places, rows.expand(-1, 3, -1), None)
    similarity, best = operators.most_similar(maker.layers(s), sources, targets, targets >= 0)
    assert (best == 20).all() and (similarity <= 1.0).all() and (similarity > 0.999).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", ["same", "shuffled", "fresh"])
def test_moves_are_as_if_everything_had_been_read_first(operators, dtype, shape, where):
    """Destinations among the sequence's own blocks in any order, its hole's, and others; slot by slot."""
    maker, s = make(dtype, shape, seed=DTYPES.index(dtype))
    n = s.keys.shape[1]
    num_kept = int(torch.randint(1, n + 1, (1,), generator=maker.generator))
    pool = maker.sequence(0, 0, 32 * -(-num_kept // 32)).blocks
    if where == "same":
        own = s.blocks[: len(pool)]
        pool = torch.where(own > 0, own, pool)
    elif where == "shuffled":
        pool = torch.cat([s.blocks[s.blocks > 0], pool[:1]])
        pool = pool[torch.randperm(len(pool), generator=maker.generator)]
        num_kept = min(num_kept, 32 * len(pool))
    destination = pool[: -(-num_kept // 32)]
    kept = random_index(maker, n, num_kept, num_negative=min(3, num_kept))
    stays = torch.arange(num_kept) % 3 == 0  # some entries stay in their place
    kept[0] = torch.where(stays, torch.arange(num_kept), kept[0])
    old = PagedKVCache.of(maker.cache.clone(), 48)
    operators.move_entries(maker.layers(s), destination[None], kept)

    expected_keys, expected_values = old.keys.float(), old.values.float()
    places, slots = torch.arange(num_kept), torch.where(kept < s.front, kept, s.tail + kept - s.front)
    to, at = destination[places // 32].long(), places % 32
    for head, (entries, row) in enumerate(zip(kept, slots.clamp(min=0), strict=True)):
        block, offset, is_none = s.blocks[row // 32].long(), row % 32, (entries < 0).unsqueeze(1)
        expected_keys[to, head, :, at] = old.keys[block, head, :, offset].float().masked_fill(is_none, 0)
        expected_values[to, head, at] = old.values[block, head, offset].float().masked_fill(is_none, 0)
    assert same(maker.pages.keys, expected_keys) and same(maker.pages.values, expected_values)
    for name in ("log_votes", "scores", "aux", "positions"):
        assert same(getattr(maker.pages, name), getattr(old, name)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_rows_and_metadata_make_a_front(operators, dtype):
    """The three writing operators give what ``write_front`` gives for the same entries, and change nothing else."""
    maker, s = make(dtype, (37, 200, 231, 5))
    before = live(maker, s)
    kept = random_index(maker, len(before), 50, num_negative=4)
    entries = before.take(kept.clamp(min=0))
    entries.kill(kept < 0)
    places = random_index(maker, 50, 7, num_negative=2)
    rows = maker.randn(3, 7, 48)
    head, row = (places >= 0).nonzero(as_tuple=True)
    entries.keys[head, places[head, row]] = rows[head, row]
    entries.values[head, places[head, row]] = -rows[head, row]
    fresh, again = maker.sequence(0, 0, 64), maker.sequence(0, 0, 64)
    write_front(maker.pages, fresh.blocks, entries)
    old = maker.views(maker.cache.clone())
    operators.move_entries(maker.layers(s), again.blocks[None], kept)
    operators.write_rows(maker.layers(s), again.blocks[None], places, rows, None)
    operators.write_rows(maker.layers(s), again.blocks[None], places, None, -rows)
    metadata = entries.log_votes, entries.scores, entries.aux, entries.positions
    operators.write_metadata(maker.layers(s), again.blocks[None], *metadata)
    page, slot = torch.arange(50) // 32, torch.arange(50) % 32
    for name in PLANES:
        plane, expected = (getattr(pages, name).float() for pages in (maker.pages, old))
        if name == "keys":
            plane, expected = plane.mT, expected.mT
        expected[again.blocks[page].long(), :, slot] = plane[fresh.blocks[page].long(), :, slot]
        assert same(plane, expected), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_units_together_are_as_each_alone(operators, dtype):
    """Layers of several sequences, in any order, some sequences in one layer only; bit for bit."""
    makers = [CacheMaker(seed, 3, 48, 32, dtype) for seed in range(2)]
    shapes, layer = [(0, 0, 71, 0), (37, 200, 234, 5), (50, 64, 85, 1), (71, 71, 71, 0)], [1, 0, 1, 1]
    sequences = [makers[which].sequence(*shape) for which, shape in zip(layer, shapes, strict=True)]
    alone = [makers[which].layers(s) for which, s in zip(layer, sequences, strict=True)]
    blocks = torch.nn.utils.rnn.pad_sequence([s.blocks for s in sequences], batch_first=True, padding_value=-1)
    together = SequenceLayers(
        [maker.pages for maker in makers], torch.tensor(layer), blocks, torch.cat([unit.segments for unit in alone])
    )
    assert together.num_entries == 71 and together.num_heads == 12
    for maker in makers:
        for plane in (maker.pages.scores, maker.pages.aux):
            plane.copy_(maker.randn(*plane.shape))

    def read(units, index, usable):
        metadata = operators.gather_metadata(units)
        found = operators.most_similar(units, index[:, :20], index[:, 20:], usable)
        return *metadata, *found, operators.gather_rows(units, "values", index)

    def change(units, destination, kept, places, rows, *metadata):
        operators.move_entries(units, destination, kept)
        operators.write_rows(units, destination, places, rows, None)
        operators.write_metadata(units, destination, *metadata)

    index = torch.cat([random_index(makers[0], 71, 60) for _ in alone])
    usable = torch.rand(12, 40, generator=makers[0].generator) < 0.8
    found = read(together, index, usable)
    separate = [read(*parts) for parts in zip(alone, index.chunk(4), usable.chunk(4), strict=True)]
    for one, others in zip(found, zip(*separate, strict=True), strict=True):
        assert torch.equal(one, torch.cat(others))

    destination = torch.stack([makers[which].sequence(0, 0, 60).blocks for which in layer])
    kept = index.masked_fill(torch.rand(index.shape, generator=makers[0].generator) < 0.1, -1)
    rows = found[-1]
    planes = kept, random_index(makers[0], 60, 9, 2).repeat(4, 1), rows[:, :9], *rows[..., :3].unbind(-1), index
    before = [maker.cache.clone() for maker in makers]
    change(together, destination, *planes)
    after = [maker.cache.clone() for maker in makers]
    for maker, cache in zip(makers, before, strict=True):
        maker.cache.copy_(cache)
    for number, unit in enumerate(alone):
        change(unit, destination[[number]], *(plane.chunk(4)[number] for plane in planes))
    for maker, cache in zip(makers, after, strict=True):
        assert same(maker.cache, cache)


@pytest.mark.parametrize(
    ("shape", "num_groups", "num_queries", "dtype"),
    [
        (shape, *queries, DTYPES[(i + j) % 5])  # every shape with every queries, and nearly every dtype
        for i, shape in enumerate([*SHAPES, (0, 0, 300, 0)])
        for j, queries in enumerate([(1, 1), (4, 13), (7, 9), (40, 2)])
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("fusion", "kind", "merged"),
    [
        ("sum", "plain", True),
        ("max", "plain", True),
        ("sum", "capped", True),
        ("max", "sinks", True),
        ("sum", "plain", False),
        ("max", "capped-sinks", False),
    ],
)
def test_fused_attention_is_the_softmax_of_dense_keys(
    operators, dtype, shape, num_groups, num_queries, fusion, kind, merged
):
    """Holes, dead entries that hold anything, queries that see only some entries or none, votes that pages do not. Not
    merged: tokens in order, without votes, of which queries do not see the last ones."""
    maker, s = make(dtype, shape)
    n = s.keys.shape[1]
    # As a model has them; in one case queries are not of the cache's dtype.
    query_dtype = torch.float32 if num_groups == 7 else maker.query_dtype
    queries = (2 * maker.randn(3, num_groups, num_queries, 48)).to(query_dtype)
    positions = torch.stack([torch.randperm(n, generator=maker.generator) for _ in range(3)]) + 10
    positions[torch.rand(3, n, generator=maker.generator) < 0.2] = DEAD
    query_positions = torch.randint(9, n + 10, (3, num_queries), generator=maker.generator)
    query_positions[0, 0] = 9
    log_votes = maker.randn(3, n).masked_fill(positions == DEAD, -torch.inf)
    if not merged:
        positions, log_votes = (torch.arange(n) + 10).repeat(3, 1), torch.zeros(3, n)
        query_positions = torch.randint(n, n + 10, (3, num_queries), generator=maker.generator)
    scale, softmax = 48**-0.5, softmax_of(maker, kind, 3, num_groups)
    fused = operators.fused_attention(
        maker.layers(s), queries, query_positions, log_votes, positions, scale, fusion, softmax
    )
    logits = torch.einsum("hgwd,hnd->hgwn", queries.double(), s.keys) * scale
    logits = softmax.capped(logits) + log_votes[:, None, None].double()
    seen = (positions != DEAD).unsqueeze(1) & (positions.unsqueeze(1) <= query_positions.unsqueeze(2))
    weights = logits.masked_fill(~seen.unsqueeze(1), -torch.inf).exp()
    sinks = 0.0 if softmax.sinks is None else softmax.sinks[..., None, None].double().exp()
    weights = (weights / (weights.sum(-1, keepdim=True) + sinks)).nan_to_num(0.0).sum(1)
    expected = weights.sum(1) if fusion == "sum" else weights.amax(1)
    assert fused.dtype == torch.float32
    torch.testing.assert_close(fused.double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("size", [48, 20], ids=["all", "some"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_are_turned_to_other_positions(operators, dtype, size, is_neox):
    """By a table with an attention factor, in float64; what does not move, or is not there, is not touched."""
    maker, s = make(dtype, (70, 130, 160, 4))
    rotation = rope(size, is_neox, 200, factor=1.3)
    before, after = torch.randint(0, 200, (2, 3, 70), generator=maker.generator)
    after[:, :4] = -1
    after[:, 10:20] = before[:, 10:20]
    block = s.blocks[torch.arange(70) // 32].long()
    maker.pages.keys[block[:4], :, :, torch.arange(4)] = torch.nan
    content = maker.cache.clone()
    operators.turn_keys(maker.layers(s), s.blocks[None, :3], before, after, rotation.table, is_neox)

    exact = Rotation(rotation.table.double(), is_neox)
    expected = exact.turned(exact.turned_back(s.keys[:, :70], before), after)
    found = live(maker, s)
    moving = after[0, 4:] != before[0, 4:]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype, 1e-2)
    relative = 1.01 * torch.finfo(dtype).eps / 2 if dtype in QUANTISED else 0.0
    torch.testing.assert_close(
        found.keys[:, 4:70][:, moving].double(), expected[:, 4:][:, moving], rtol=relative, atol=tolerance
    )
    assert not torch.equal(found.keys[:, 20:70].double(), s.keys[:, 20:70])
    for place in torch.arange(4, 70)[moving].tolist():  # as they were, for what else there is to be compared
        keys = PagedKVCache.of(content, 48).keys[block[place], :, :, place % 32]
        maker.pages.keys[block[place], :, :, place % 32] = keys
    assert torch.equal(maker.cache.view(torch.uint8), content.view(torch.uint8))
    nothing = before[:, :0]
    operators.turn_keys(maker.layers(s), s.blocks[None, :0], nothing, nothing, rotation.table, is_neox)
