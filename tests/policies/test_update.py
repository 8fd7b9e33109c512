"""What a compression changes: index arithmetic by brute force, and places that entries keep."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_same, random_entries, random_update, stack_rows
from tests.policies.test_baselines import built
from tests.policies.test_composition import context_for, entries_for
from vllm_kvmerge.policies import DEAD, PRESETS, CacheUpdate
from vllm_kvmerge.policies.indexing import (
    by_position,
    in_place,
    inverse,
    largest,
    newest,
    padded_nonzero,
    select,
)


@examples(100)
@given(SEEDS, st.integers(1, 3), st.integers(1, 20), st.data())
def test_index_arithmetic_by_brute_force(seed, num_heads, n, data):
    generator = torch.Generator().manual_seed(seed)
    ranking = torch.randint(0, 5, (num_heads, n), generator=generator)
    ranking = ranking.float() if data.draw(st.booleans()) else ranking
    if ranking.is_floating_point():
        ranking = ranking.masked_fill(ranking == 4, torch.inf).masked_fill(ranking == 0, -torch.inf)
    count = data.draw(st.integers(0, n))
    mask = largest(ranking, count)
    for row, values in zip(mask.tolist(), ranking.tolist(), strict=True):
        expected = sorted(range(n), key=lambda i: (-values[i], i))[:count]
        assert [i for i in range(n) if row[i]] == sorted(expected)
    for row, index in zip(mask.tolist(), in_place(mask, count).tolist(), strict=True):
        assert sorted(index) == [i for i in range(n) if row[i]]
        assert all(index[i] == i for i in range(count) if row[i])
        moved = [index[i] for i in range(count) if not row[i]]
        assert moved == sorted(moved) and all(i >= count for i in moved)
    some = torch.rand(num_heads, n, generator=generator) < 0.4
    for row, index in zip(some.tolist(), padded_nonzero(some).tolist(), strict=True):
        assert [i for i in index if i >= 0] == [i for i in range(n) if row[i]]
        assert index == sorted(index, key=lambda i: (i < 0, i))
    index = padded_nonzero(some, n)
    where = inverse(index, n)
    assert torch.equal(select(index, where), torch.arange(n).masked_fill(~some, -1))


@examples(50)
@given(SEEDS, st.integers(1, 3), st.integers(1, 20), st.data())
def test_order_and_newest(seed, num_heads, n, data):
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n)))
    assert torch.equal(by_position(entries), entries.positions.argsort(dim=1, stable=True))
    count = data.draw(st.integers(0, n))
    for row, positions in zip(newest(entries, count).tolist(), entries.positions.tolist(), strict=True):
        live = sorted((p for p in positions if p != DEAD), reverse=True)
        assert {p for p, new in zip(positions, row, strict=True) if new} == set(live[:count])


@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(2, 20), st.data())
def test_outcomes_of_outcomes(seed, num_heads, n, data):
    """One after the other is the same as both in one, and putting entries in place changes their order alone."""
    generator = torch.Generator().manual_seed(seed)
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n)))
    earlier = random_update(entries, n, data.draw(st.integers(0, n)), generator)
    between = earlier.view(entries)
    num_places = data.draw(st.integers(1, n))
    later = random_update(between, num_places, data.draw(st.integers(0, num_places)), generator)
    if data.draw(st.booleans()):
        later.values = None
    both = later.after(earlier, between)
    expected = later.apply(earlier.apply(entries))
    assert_same(both.apply(entries), expected)

    capacity = data.draw(st.integers(num_places, n + 3))
    placed = both.in_place(entries, capacity).emptied()
    result = placed.apply(entries)
    assert len(result) == capacity
    for head in range(num_heads):
        rows = [torch.cat([plane[head] for plane in (result.keys, result.values)], 1)[i] for i in range(capacity)]
        live = [i for i in range(capacity) if result.is_live[head, i]]
        wanted = [i for i in range(num_places) if expected.is_live[head, i]]
        assert len(live) == len(wanted)
        for i in wanted:
            row = torch.cat([expected.keys[head, i], expected.values[head, i]])
            matches = [
                j for j in live if torch.equal(rows[j], row) and result.scores[head, j] == expected.scores[head, i]
            ]
            assert matches
            source = int(both.kept[head, i])
            if 0 <= source < capacity:
                assert source in matches
        for i in set(range(capacity)) - set(live):
            assert placed.kept[head, i] in (DEAD, i)


def test_heads_of_several_outcomes():
    generator = torch.Generator().manual_seed(0)
    entries = [random_entries(seed, num_heads=2, n=12) for seed in range(3)]
    updates = [random_update(some, 6, width, generator) for some, width in zip(entries, (3, 0, 5), strict=True)]
    updates[1].keys = None
    updates[2].values = None
    whole = CacheUpdate.stack_rows(updates, entries)
    stacked = stack_rows(entries)
    expected = stack_rows([o.apply(e) for o, e in zip(updates, entries, strict=True)])
    assert_same(whole.apply(stacked), expected)
    assert_same(whole.of_rows([4, 1]).apply(stacked.of_rows([4, 1])), expected.of_rows([4, 1]))


@pytest.mark.parametrize("name", PRESETS)
def test_entries_that_stay_keep_their_places(name):
    policy = built(PRESETS[name])
    budget = policy.min_budget + 20
    n = policy.allocator.capacity(budget) + 16
    entries = entries_for(policy, 5, 2, n, num_dead=0)
    result = policy.compress(entries, context_for(policy, entries, budget))
    kept, capacity = result.update.kept, result.update.kept.shape[1]
    assert capacity == n - 16
    where = {(head, int(e)): place for head in range(2) for place, e in enumerate(kept[head]) if e >= 0}
    assert all(place == e for (_, e), place in where.items() if e < capacity)
    # Whatever moved was changed or comes from behind.
    assert ((kept == torch.arange(capacity)) | (kept < 0) | (kept >= capacity)).all()


@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(3, 24), st.data())
def test_similarity_to_entries_that_an_outcome_has_changed(seed, num_heads, n, data):
    """What is compared where it lies, and what apart, together give what the dense entries give."""
    generator = torch.Generator().manual_seed(seed)
    entries = random_entries(seed, num_heads, n)
    update = random_update(entries, n, data.draw(st.integers(0, n)), generator)
    if data.draw(st.booleans()):  # ties
        update.keys, entries.keys = update.keys.sign(), entries.keys.sign()
    view, dense = update.view(entries), update.apply(entries)
    index = torch.rand(num_heads, n, generator=generator).argsort(1)
    cut = data.draw(st.integers(1, n - 1))
    members, carriers = index[:, :cut], index[:, cut:]
    usable = dense.is_live.gather(1, carriers) & (torch.rand(carriers.shape, generator=generator) < 0.8)
    similarity, best = view.most_similar(members, carriers, usable)
    expected, _ = dense.most_similar(members, carriers, usable)
    torch.testing.assert_close(similarity, expected)
    clear = expected.isfinite()
    assert usable.gather(1, inverse(carriers, n).gather(1, best))[clear].all()
    head = torch.arange(num_heads).unsqueeze(1)
    cosine = torch.cosine_similarity(dense.keys[head, members], dense.keys[head, best], dim=-1)
    torch.testing.assert_close(cosine[clear], expected[clear], rtol=1e-4, atol=1e-5)
