"""What a compression changes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_same, random_entries, random_update, stack_rows
from vllm_kvmerge.policies import DEAD, CacheUpdate
from vllm_kvmerge.policies.indexing import inverse


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
        found, wanted = (
            torch.cat([some.keys[head], some.values[head], some.scores[head, :, None]], 1)[some.is_live[head]].tolist()
            for some in (result, expected)
        )
        assert sorted(found) == sorted(wanted)
        kept, is_live = placed.kept[head].tolist(), result.is_live[head].tolist()
        sources = both.kept[head, expected.is_live[head]].tolist()
        assert all(kept[source] == source for source in sources if 0 <= source < capacity)
        assert all(is_live[place] or kept[place] in (DEAD, place) for place in range(capacity))


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
