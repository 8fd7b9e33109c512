"""Protected tokens: their entries stay bit for bit, whatever the parts do."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_same, assert_sound, concatenate, newest_queries, random_entries, rope
from vllm_kvmerge.policies import PRESETS, CacheUpdate, CompressionContext, CompressionPolicy, Entries, Heads
from vllm_kvmerge.policies.mergers import AttentionMatchingMerger, DropMerger
from vllm_kvmerge.policies.protection import count_below, disjoint, within
from vllm_kvmerge.policies.selectors import Recent, WindowTopK
from vllm_kvmerge.policies.trackers import NoTracker, SumTracker
from vllm_kvmerge.request.parameters import parse_compression

REQUESTS = [
    *({"policy": name} for name in PRESETS),
    {"policy": "snapkv", "merger": "attention_matching"},
    {"policy": "snapkv", "merger": "zip", "merge_threshold": -1.0},
    {"policy": "kvmerger", "merge_threshold": -1.0},
    {"policy": "asymkv", "merge_first": False},
    {"policy": "snapkv", "allocator": "threshold", "threshold": 0.02},
    {"policy": "zsmerge", "allocator": "adaptive"},
]
SMALL = {"window_size": 4, "recent_window": 3, "num_sink_tokens": 2, "score_window": 8}
RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda r: (r[0], sum(r))), min_size=1, max_size=3
)


def policy_of(request: dict, ranges) -> CompressionPolicy:
    """The request's policy with small windows, as far as its parts have them."""
    default = parse_compression(request).policy
    fields = {name for part in default.parts for name in type(part).model_fields}
    if "recent_window" in fields and request["policy"] == "morphkv":
        fields -= {"num_sink_tokens"}
    small = {name: value for name, value in SMALL.items() if name in fields and request["policy"] != "tova"}
    policy = parse_compression({**small, **request}).policy
    return policy.model_copy(update={"protect": disjoint(ranges)})


def context_of(policy: CompressionPolicy, entries: Entries, budget: int, num_tokens: int, **options):
    num_heads, n, head_size = entries.keys.shape
    capacity = policy.capacity(budget)
    context = CompressionContext.of_layer(
        entries, budget, num_tokens, capacity=n if capacity is None else min(capacity, n),
        queries=newest_queries(torch.randn(num_heads, 2, max(1, min(policy.query_window, n)), head_size), num_tokens),
        output_weights=torch.randn(num_heads, 2, 12, head_size), rotation=rope(head_size), **options,
    )  # fmt: skip
    context = replace(context, heads=Heads.of([0, 1], [0], 2, gather=lambda tensor: tensor))
    if policy.allocator.has_layer_statistic:
        context = replace(context, layer_statistics=policy.layer_statistic(entries, context).expand(2, -1))
    return context


def protected_entries(policy: CompressionPolicy, entries: Entries) -> Entries:
    """In order of position."""
    order = entries.positions.masked_fill(~within(policy.protect, entries.positions), 1 << 30).argsort(1)
    return entries.take(order[:, : int(within(policy.protect, entries.positions).sum(1).max())])


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: "-".join(map(str, request.values())))
@examples(4)
@given(SEEDS, RANGES, st.data())
def test_protected_entries_stay_bit_for_bit(request_, seed, ranges, data):
    torch.manual_seed(seed)
    policy, n = policy_of(request_, ranges), 64
    entries = random_entries(seed, num_heads=2, n=n)
    entries.aux.fill_(1.0 if policy.tracker.mode in ("log_ema", "mean") else 0.0)
    if data.draw(st.booleans()):
        dead = torch.rand(2, n) < 0.2
        entries.kill(dead & ~within(policy.protect, entries.positions))
    budget = data.draw(st.integers(policy.min_budget, 56))
    before = protected_entries(policy, entries)
    assert before.is_live.all() and len(before) == policy.num_protected
    num_tokens = n
    for step in range(3):
        context = context_of(policy, entries, budget, num_tokens, at_prompt_end=step == 0)
        untouched = entries.clone()
        result = policy.compress(entries, context)
        assert_same(entries, untouched)
        assert_sound(result.entries, context.capacity)
        assert_same(protected_entries(policy, result.entries), before)
        assert result.num_merged >= 0 and result.num_evicted >= 0
        fresh = random_entries(seed + step, num_heads=2, n=12)
        fresh.aux.fill_(1.0 if policy.tracker.mode in ("log_ema", "mean") else 0.0)
        fresh.positions += num_tokens
        entries, num_tokens = concatenate(result.entries, fresh), num_tokens + 12


@pytest.mark.parametrize("merger", [DropMerger(), AttentionMatchingMerger()], ids=lambda merger: merger.name)
@pytest.mark.parametrize("ranges", [((0, 4), (30, 37)), ((50, 60),)])
def test_the_others_are_compressed_as_if_they_were_alone(merger, ranges):
    """With what protected entries leave of the budget; shares of heads include them."""
    entries = random_entries(3, num_heads=4, n=64)
    alone = CompressionPolicy(tracker=SumTracker(), selector=WindowTopK(window_size=4, kernel_size=3), merger=merger)
    policy = alone.model_copy(update={"protect": ranges})
    count, is_protected = policy.num_protected, within(ranges, entries.positions)
    assert policy.min_budget == alone.min_budget + count
    context = context_of(policy, entries, 40, 64, at_prompt_end=True)
    context = replace(context, heads=Heads.of([0], [0, 1, 2, 3], 1, gather=lambda tensor: tensor))
    hidden = entries.without(is_protected)
    for shares in (None, [40, 40, 40, 40], [30, 50, 45, 25]):
        some = replace(context, shares=shares, capacity=max(shares or [40]))
        result = policy.compress(entries, some)
        less = None if shares is None else [share - count for share in shares]
        other = replace(some, budget=40 - count, capacity=some.capacity - count, shares=less)
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


def test_budgets_of_layers_and_heads_hold_all_protected_entries():
    for allocator in ("pyramid", "adaptive", "variance", "threshold"):
        request = {"policy": "snapkv", "window_size": 4, "allocator": allocator, "budget": 30}
        policy = parse_compression({**request, "protect": {"tokens": [[0, 12], [20, 25]]}}).policy
        assert policy.min_budget == 17 + 5
        layers = policy.layer_budgets(30, 90, 6)
        if layers is not None:
            assert min(layers) >= 22 and sum(layers) == 180 and max(layers) <= policy.capacity(30)
        entries = random_entries(1, num_heads=2, n=90)
        entries.scores[1] = torch.eye(90)[3]  # all of its attention is on a token that is protected or not alike
        context = context_of(policy, entries, 30, 90, at_prompt_end=True)
        budgets = policy.head_budgets(entries, context)
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


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda r: (r[0], sum(r))), max_size=5))
def test_ranges(ranges):
    apart, tokens = disjoint(ranges), {token for start, end in ranges for token in range(start, end)}
    assert {token for start, end in apart for token in range(start, end)} == tokens
    assert all(one[1] < other[0] for one, other in zip(apart, apart[1:], strict=False))
    for num_tokens in (0, 7, 50):
        assert count_below(apart, num_tokens) == len([token for token in tokens if token < num_tokens])
    positions = torch.arange(-1, 50)
    assert set(positions[within(apart, positions)].tolist()) == tokens
