"""Protected tokens: their entries stay bit for bit, whatever the parts do."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.every import REQUESTS, context_for, entries_for, name_of, policy_of, small_policy
from tests.policies.sampling import SEEDS, assert_same, assert_sound, concatenate, random_entries
from vllm_kvmerge.policies import CacheUpdate, CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.mergers import AttentionMatchingMerger, DropMerger
from vllm_kvmerge.policies.protection import count_below, disjoint, within
from vllm_kvmerge.policies.selectors import Recent, WindowTopK
from vllm_kvmerge.policies.trackers import NoTracker, SumTracker


def ranges_of(most: int, max_size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Starting at up to 40, of up to ``most`` tokens each."""
    lengths = st.tuples(st.integers(0, 40), st.integers(1, most))
    return st.lists(lengths.map(lambda r: (r[0], sum(r))), max_size=max_size)


def protected_entries(policy: CompressionPolicy, entries: Entries) -> Entries:
    """In order of position."""
    order = entries.positions.masked_fill(~within(policy.protect, entries.positions), 1 << 30).argsort(1)
    return entries.take(order[:, : int(within(policy.protect, entries.positions).sum(1).max())])


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
@examples(4)
@given(SEEDS, ranges_of(8, 3), st.data())
def test_protected_entries_stay_bit_for_bit(request_, seed, ranges, data):
    policy, n = small_policy(request_).model_copy(update={"protect": disjoint(ranges)}), 64
    entries = entries_for(policy, seed, 2, n)
    if data.draw(st.booleans()):
        dead = torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < 0.2
        entries.kill(dead & ~within(policy.protect, entries.positions))
    budget = data.draw(st.integers(policy.min_budget, 56))
    before = protected_entries(policy, entries)
    assert before.is_live.all() and len(before) == policy.num_protected
    for num_tokens in (n, n + 12, n + 24):
        context = context_for(policy, entries, budget, num_tokens, at_prompt_end=num_tokens == n, by_layer=True)
        untouched = entries.clone()
        result = policy.compress(entries, context)
        assert_same(entries, untouched)
        assert_sound(result.entries, context.capacity)
        assert_same(protected_entries(policy, result.entries), before)
        assert result.num_merged >= 0 and result.num_evicted >= 0
        entries = concatenate(result.entries, entries_for(policy, seed + num_tokens, 2, 12, first=num_tokens))


@pytest.mark.parametrize("merger", [DropMerger(), AttentionMatchingMerger()], ids=lambda merger: merger.name)
@pytest.mark.parametrize("ranges", [((0, 4), (30, 37)), ((50, 60),)])
def test_the_others_are_compressed_as_if_they_were_alone(merger, ranges):
    """With what protected entries leave of the budget; shares of heads include them."""
    entries = random_entries(3, num_heads=4, n=64)
    alone = CompressionPolicy(tracker=SumTracker(), selector=WindowTopK(window_size=4, kernel_size=3), merger=merger)
    policy = alone.model_copy(update={"protect": ranges})
    count, is_protected = policy.num_protected, within(ranges, entries.positions)
    assert policy.min_budget == alone.min_budget + count
    context = context_for(policy, entries, 40)
    hidden = entries.without(is_protected)
    for shares in (None, [40, 40, 40, 40], [30, 50, 45, 25]):
        given = None if shares is None else torch.tensor(shares)
        some = replace(context, budgets=given, is_packed=shares is not None, capacity=max(shares or [40]))
        result = policy.compress(entries, some)
        less = None if given is None else given - count
        other = replace(some, budget=40 - count, capacity=some.capacity - count, budgets=less)
        expected = alone.compress(hidden, other)
        for head, share in enumerate(shares or [40] * 4):
            row, wanted = (one.entries.of_rows([head]) for one in (result, expected))
            assert row.is_live[:, :share].all() and not row.is_live[:, share:].any()
            is_other = (~within(ranges, row.positions) & row.is_live)[0].nonzero()[:, 0]
            got = row.take(is_other[row.positions[0, is_other].argsort()].unsqueeze(0))
            live = wanted.is_live[0].nonzero()[:, 0]
            wanted = wanted.take(live[wanted.positions[0, live].argsort()].unsqueeze(0))
            assert_same(got, wanted)
        assert (result.num_merged, result.num_evicted) == (expected.num_merged, expected.num_evicted)


@pytest.mark.parametrize("allocator", ["pyramid", "adaptive", "variance", "threshold"])
def test_budgets_of_layers_and_heads_hold_all_protected_entries(allocator):
    request = {"policy": "snapkv", "window_size": 4, "allocator": allocator, "budget": 30}
    policy = policy_of(request | {"protect": {"tokens": [[0, 12], [20, 25]]}})
    assert policy.min_budget == 17 + 5
    layers = policy.layer_budgets(30, 90, 6)
    if layers is not None:
        assert min(layers) >= 22 and sum(layers) == 180 and max(layers) <= policy.capacity(30)
    entries = random_entries(1, num_heads=2, n=90)
    entries.scores[1] = torch.eye(90)[3]  # all of its attention is on a token that is protected or not alike
    budgets = policy.head_budgets(entries, context_for(policy, entries, 30, by_layer=True)).tolist()
    assert min(budgets) >= 22 and max(budgets) <= policy.capacity(30)


class Reckless(DropMerger):
    """Writes nonsense to all that it is given."""

    name = "reckless"

    def merge(self, entries, kept, importance, protected, context) -> CacheUpdate:
        update = CacheUpdate.of(entries, kept)
        nonsense = torch.full_like(entries.keys_at(kept), 7.0)
        places = torch.arange(kept.shape[1]).expand_as(kept)
        return update.write(places, nonsense, nonsense, update.merged, log_votes=update.log_votes + 1.0)


def test_a_part_that_ignores_protection_cannot_break_it():
    entries = random_entries(2, num_heads=3, n=40)
    policy = CompressionPolicy(tracker=NoTracker(), selector=Recent(), merger=Reckless(), protect=((2, 9),))
    result = policy.compress(entries, CompressionContext.of_layer(entries, 20, 40, at_prompt_end=True)).entries
    assert_same(protected_entries(policy, result), protected_entries(policy, entries))
    assert (result.keys[~within(policy.protect, result.positions)] == 7.0).all()
    assert (result.positions.sort(1).values == torch.tensor([*range(2, 9), *range(27, 40)])).all()


@given(ranges_of(9, 5))
def test_ranges(ranges):
    apart, tokens = disjoint(ranges), {token for start, end in ranges for token in range(start, end)}
    assert {token for start, end in apart for token in range(start, end)} == tokens
    assert all(one[1] < other[0] for one, other in zip(apart, apart[1:], strict=False))
    for num_tokens in (0, 7, 50):
        assert count_below(apart, num_tokens) == len([token for token in tokens if token < num_tokens])
    positions = torch.arange(-1, 50)
    assert set(positions[within(apart, positions)].tolist()) == tokens
