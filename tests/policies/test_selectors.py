"""Selectors against loops over heads and entries."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.policies.sampling import SEEDS, as_worker, for_parts, in_layer, live, random_entries, rope
from vllm_kvmerge.policies import DEAD, CompressionContext, Entries, Selector, noise
from vllm_kvmerge.policies.base import HeadShape
from vllm_kvmerge.policies.noise import uniform
from vllm_kvmerge.policies.selectors import (
    Fused,
    HeavyHitter,
    KeyDiff,
    KeyNorm,
    RandomKeep,
    Recent,
    RedundancyAware,
    SinkRecent,
    TopScores,
    Tova,
    ValueLeverage,
    WindowTopK,
    value_leverage,
)

SINKS, WINDOWS = st.integers(0, 3), st.integers(0, 4)


def select(selector: Selector, entries: Entries, context: CompressionContext) -> list[set[int]]:
    """Positions kept per head, after checks that hold for every selector."""
    context = for_parts(context)
    protected = selector.protected(entries, context)
    kept = selector.select(entries, entries.scores, protected, context)
    assert kept.dtype == torch.bool and (kept.sum(1) == context.num_kept).all()
    assert not (protected & ~kept).any() and not (protected & ~entries.is_live).any()
    num_live_kept = (kept & entries.is_live).sum(1)
    assert torch.equal(num_live_kept, entries.is_live.sum(1).clamp(max=context.num_kept)), "live before dead"
    return [set(row) - {DEAD} for row in entries.positions.masked_fill(~kept, DEAD).tolist()]


def pooled(values: list[float], reach: int, first: int, last: int) -> list[float]:
    """The largest of each value's neighbours from ``first`` to ``last``."""
    return [max(values[max(first, i - reach) : min(last, i + reach + 1)], default=0.0) for i in range(len(values))]


def chunk_means(values: list[float], size: int, last: int) -> list[float]:
    """The mean of each value's chunk, up to ``last``."""
    chunks = [values[first : min(first + size, last)] for first in range(0, len(values), size)]
    means = [sum(chunk) / len(chunk) if chunk else 0.0 for chunk in chunks]
    return [means[i // size] for i in range(len(values))]


# Rankings of a head's live entries, in their order, of which those from ``end`` on are the window.


def by_difference(selector: KeyDiff, entries: Entries, head: int, order: list[int], end: int) -> list[float]:
    keys = entries.keys[head, order].double()
    if selector.before_rope:
        angles = entries.positions[head, order].double().outer(1e4 ** -(torch.arange(0, 8, 2).double() / 8))
        unturned = torch.complex(*keys.chunk(2, 1)) * torch.polar(torch.ones_like(angles), -angles)
        keys = torch.cat([unturned.real, unturned.imag], 1)
    keys = torch.nn.functional.normalize(keys, dim=-1)
    return (-torch.cosine_similarity(keys, keys.mean(0, keepdim=True))).tolist()


def by_leverage_of_values(
    selector: ValueLeverage, entries: Entries, head: int, order: list[int], end: int
) -> list[float]:
    values = entries.values[head, order].double()
    values = values - values.mean(0)
    gram = values.T @ values
    ridge = value_leverage.RIDGE * gram.diagonal().mean() + 1e-30
    return (values @ torch.linalg.inv(gram + ridge * torch.eye(len(gram))) * values).sum(1).tolist()


def by_draw(selector: RandomKeep, entries: Entries, head: int, order: list[int], end: int) -> list[float]:
    context = CompressionContext.of_layer(entries, 1, len(entries), at_prompt_end=True, layer=2)
    return uniform(selector.seed, entries, context)[head, order].tolist()


def by_redundancy(selector: RedundancyAware, entries: Entries, head: int, order: list[int], end: int) -> list[float]:
    n = len(order)
    keys = torch.nn.functional.normalize(entries.keys[head, order].double(), dim=-1)
    attention = (entries.scores[head, order].double() / entries.scores[head, order].double().sum()).tolist()
    attention[end:] = [0.0] * (n - end)
    counted = (keys @ keys.T).fill_diagonal_(0.0)
    for row in counted:
        similar = (row > selector.redundancy_threshold).nonzero()
        if len(similar):
            row[similar.max()] = 0.0
    redundancy = counted.mean(0).softmax(0).tolist()
    share = selector.attention_share
    both = zip(pooled(attention, selector.pooling_reach, 0, n), redundancy, strict=True)
    return [share * a - (1 - share) * r for a, r in both]


CASES = {
    "local": (st.builds(Recent), lambda _, entries, head, order, end: entries.positions[head, order].tolist()),
    "streaming_llm": (
        st.builds(SinkRecent, num_sink_tokens=SINKS),
        lambda _, entries, head, order, end: entries.positions[head, order].tolist(),
    ),
    "h2o": (
        st.builds(
            HeavyHitter,
            num_sink_tokens=SINKS,
            recent_window=st.none() | WINDOWS,
            recent_share=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
        ),
        lambda _, entries, head, order, end: entries.scores[head, order].tolist(),
    ),
    "snapkv": (
        st.builds(WindowTopK, window_size=st.integers(1, 9), kernel_size=st.sampled_from([1, 3, 7, 255])),
        lambda selector, entries, head, order, end: pooled(
            entries.scores[head, order].tolist(), selector.kernel_size // 2, 0, end
        ),
    ),
    "chunkkv": (
        st.builds(WindowTopK, window_size=st.integers(1, 9), kernel_size=st.just(1), chunk_length=st.integers(2, 12)),
        lambda selector, entries, head, order, end: chunk_means(
            entries.scores[head, order].tolist(), selector.chunk_length, end
        ),
    ),
    "knorm": (
        st.builds(KeyNorm, num_sink_tokens=SINKS, recent_window=WINDOWS),
        lambda _, entries, head, order, end: (-entries.keys[head, order].norm(dim=-1)).tolist(),
    ),
    "keydiff": (
        st.builds(KeyDiff, num_sink_tokens=SINKS, recent_window=WINDOWS, before_rope=st.booleans()),
        by_difference,
    ),
    "value_leverage": (st.builds(ValueLeverage, num_sink_tokens=SINKS, recent_window=WINDOWS), by_leverage_of_values),
    "tova": (
        st.builds(Tova, recent_window=WINDOWS),
        lambda _, entries, head, order, end: entries.scores.mean(0)[order].tolist(),
    ),
    "random": (st.builds(RandomKeep, seed=SEEDS, recent_window=WINDOWS), by_draw),
    "rkv": (
        st.builds(
            RedundancyAware,
            recent_window=WINDOWS,
            attention_share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
            redundancy_threshold=st.sampled_from([0.0, 0.3, 0.5]),
            pooling_reach=st.sampled_from([0, 1, 3]),
        ),
        by_redundancy,
    ),
}


@pytest.mark.parametrize("name", CASES)
@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(1, 28), st.data())
def test_what_is_protected_and_what_ranks_highest_stays(name, seed, num_heads, more, data):
    strategy, ranking = CASES[name]
    selector = data.draw(strategy)
    n = selector.min_budget + more
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n - 1)))
    if name == "tova":  # whose heads hold the same tokens in the same places, wherever it alone has chosen
        entries = replace(entries, positions=entries.positions[:1].repeat(num_heads, 1))
        entries.scores.nan_to_num_(nan=0.0)
    budget = data.draw(st.integers(selector.min_budget, n - 1))
    num_slots = data.draw(st.integers(0, budget - selector.min_budget))
    known = {"layer": 2, "num_slots": num_slots, "rotation": rope(8)}
    context = CompressionContext.of_layer(entries, budget, n, at_prompt_end=True, **known)
    num_sinks, num_kept = getattr(selector, "num_sink_tokens", 0), budget - num_slots
    window = getattr(selector, "window_size", getattr(selector, "recent_window", 0))
    assert selector.min_budget == num_sinks + (1 if window is None else window) + 1
    if window is None:  # The share is of the whole budget; sinks and one heavy hitter come first.
        window = max(1, min(int(selector.recent_share * budget), num_kept - num_sinks - 1))
    for head, kept in enumerate(select(selector, entries, context)):
        order = live(entries, head)
        positions, end = entries.positions[head, order].tolist(), max(0, len(order) - window)
        ranks = dict(zip(positions, ranking(selector, entries, head, order, end), strict=True))
        protected = {p for p in positions if p < num_sinks} | set(positions[end:])
        assert protected <= kept
        others = sorted((ranks[p] for p in positions if p not in protected), reverse=True)
        # Rankings that differ by rounding alone may be taken for one another.
        chosen = sorted((ranks[p] for p in kept - protected), reverse=True)
        assert chosen == pytest.approx(others[: max(0, num_kept - len(protected))], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("by", ["max_rank", "sum_rank", "shares"])
@examples(60)
@given(SEEDS, st.integers(1, 3), st.integers(1, 28), st.data())
def test_fused_rankings(by, seed, num_heads, more, data):
    members = {
        "snapkv": WindowTopK(window_size=data.draw(st.integers(1, 4)), kernel_size=3),
        "keydiff": KeyDiff(num_sink_tokens=data.draw(SINKS), recent_window=data.draw(WINDOWS)),
        "top_scores": TopScores(num_sink_tokens=2),
    }
    of = data.draw(st.lists(st.sampled_from(sorted(members)), min_size=2, max_size=4))
    selector = Fused(of=of, by=by, **members)
    n = selector.min_budget + more
    entries = random_entries(seed, num_heads, n, num_dead=data.draw(st.integers(0, n - 1)))
    budget = data.draw(st.integers(selector.min_budget, n - 1))
    context = for_parts(CompressionContext.of_layer(entries, budget, n, at_prompt_end=True))
    protected = selector.protected(entries, context)
    assert torch.equal(protected, sum(members[name].protected(entries, context) for name in of).bool())
    rankings = [members[name].ranking(entries, entries.scores, protected, context) for name in of]
    for head, kept in enumerate(select(selector, entries, context)):
        fixed = {i for i in range(n) if protected[head, i]}
        others = [i for i in range(n) if entries.is_live[head, i] and i not in fixed]
        orders = [sorted(others, key=lambda i: -ranking[head, i]) for ranking in rankings]
        chosen, room = list[int](), budget - len(fixed)
        if by == "shares":
            for number, order in enumerate(orders, 1):
                left = [i for i in order if i not in chosen]
                chosen += left[: room * number // len(of) - len(chosen)]
        else:
            fuse = min if by == "max_rank" else sum
            chosen = sorted(others, key=lambda i: fuse(order.index(i) for order in orders))[:room]
        assert kept == {int(entries.positions[head, i]) for i in fixed | set(chosen)}


def test_a_fused_selector_asks_for_what_its_members_need():
    by_keys, by_queries = Fused(of=["keydiff", "knorm"]), Fused(of=["keydiff", "compactor", "morphkv"])
    shape = HeadShape(num_entries=100, num_kept=25, head_size=64, group_size=2, hidden_size=256)
    for fused in (by_keys, by_queries):
        members = fused.members
        assert [one.name for one in members] == fused.of
        assert fused.query_window == max(one.query_window for one in members)
        assert fused.held(shape) == max(one.held(shape) for one in members)
        for trait, combined in (("needs_rotation", any), ("has_mass", any), ("takes_cap", all), ("takes_sinks", all)):
            assert getattr(fused, trait) == combined(getattr(one, trait) for one in members)
    assert not by_keys.needs_rotation and by_queries.needs_rotation and by_queries.query_window == 128


@pytest.mark.parametrize("scale", [0.0, 300.0, 1e4])
def test_leverage_of_values_that_differ_in_one_channel_alone(scale):
    """Rounding leaves a matrix that need not be positive."""
    entries = random_entries(3, num_heads=2, n=3000, head_size=64)
    noise = 1e-3 * entries.values[:, :, 0]
    entries.values = scale * torch.linspace(0.7, 1.3, 64).repeat(2, 3000, 1)
    entries.values[:, :, 0] += noise
    context = for_parts(CompressionContext.of_layer(entries, 20, 3000, at_prompt_end=True))
    selector = ValueLeverage()
    scores = selector.ranking(entries, entries.scores, selector.protected(entries, context), context)
    assert (scores >= 0).all() and scores.max() <= 1


def test_tova_counts_dead_entries_as_unused():
    entries = random_entries(0, num_heads=2, n=5)
    entries.positions.copy_(torch.arange(5))
    entries.scores.copy_(torch.tensor([[3.0, 1.0, 2.0, 2.5, 0.0], [0.0, 1.0, 2.0, 2.5, 0.0]]))
    entries.positions[1, 0], entries.scores[1, 0] = DEAD, torch.nan
    context = CompressionContext.of_layer(entries, 3, 5, at_prompt_end=False)
    assert select(Tova(), entries, context) == [{2, 3, 4}, {2, 3, 4}]
    entries.scores[0, 0] = 5.0
    assert select(Tova(), entries, context) == [{0, 3, 4}, {2, 3, 4}]


def test_pooling_stops_at_the_window_and_skips_dead_entries():
    entries = random_entries(0, num_heads=1, n=20)
    entries.positions.copy_(torch.arange(20))
    entries.scores[:] = torch.arange(20.0, 0.0, -1.0)
    entries.scores[:, 16:] = 1000.0  # The window's own scores are large.
    entries.scores[:, 10] = 500.0
    entries.kill((torch.arange(20) > 10) & (torch.arange(20) < 13) & entries.is_live)
    context = CompressionContext.of_layer(entries, 8, 20, at_prompt_end=True)
    assert select(WindowTopK(window_size=4, kernel_size=3), entries, context) == [{16, 17, 18, 19, 9, 10, 13, 0}]


def test_random_numbers_are_uniform_and_differ_between_seeds_layers_and_heads():
    n = 20_000
    entries = random_entries(0, num_heads=3, n=n, head_size=1)
    entries.positions.copy_(torch.arange(n))
    context = CompressionContext.of_layer(entries, 10, n, at_prompt_end=True)
    draws = uniform(0, entries, context)
    others: list[Tensor] = [uniform(1, entries, context)[0], uniform(0, entries, in_layer(context, 1))[0]]
    streams = torch.stack([*draws, *others, draws[0].roll(1)])
    assert streams.min() >= 0 and streams.max() < 1
    for stream in streams:
        chi_squared = ((torch.histc(stream, bins=20, min=0.0, max=1.0) - n / 20) ** 2 / (n / 20)).sum()
        assert chi_squared < 45  # 0.9993 quantile for 19 degrees of freedom
    assert (torch.corrcoef(streams) - torch.eye(len(streams))).abs().max() < 4.5 / math.sqrt(n)
    assert torch.equal(uniform(0, entries.of_rows([2, 1]), as_worker(context, [2, 1])), draws[[2, 1]])
    # A token's number is the same wherever its entry lies, so that what stays is always a sample of all tokens.
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).expand(3, -1)
    assert torch.equal(uniform(0, entries.take(order), context), draws.gather(1, order))


def test_random_numbers_are_splitmix64():
    first_outputs = {0: 0xE220A8397B1DCDAF, 1: 0x910A2DEC89025CC1}
    mixed = noise._mix(torch.tensor(list(first_outputs)))
    assert [value % (1 << 64) for value in mixed.tolist()] == list(first_outputs.values())
