"""That merge maps say what mergers did."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from tests.ops.conftest import CacheMaker
from tests.policies.sampling import assert_same, newest_queries, random_entries, rope
from vllm_kvmerge import ops
from vllm_kvmerge.engine.worker.paged_entries import PagedEntries
from vllm_kvmerge.evaluation import merge_map
from vllm_kvmerge.evaluation.merge_map import Provenance, RecordedPolicy
from vllm_kvmerge.ops import SequenceLayers
from vllm_kvmerge.policies import DEAD, MERGERS, CompressionContext, Heads
from vllm_kvmerge.request.parameters import parse_compression

HEADS, N, BUDGET, SIZE = 4, 96, 40, 16

MEANS = ["asymkv", "d2o", "keepkv", "kvmerger", "weightedkv", "zsmerge"]
OTHERS = ["cam", "grkv"]

REQUESTS = [{"policy": name} for name in MEANS + OTHERS] + [
    {"policy": "keepkv", "merge_first": False},
    {"policy": "keepkv", "merge_threshold": -1.0},
    {"policy": "keepkv", "selector": "morphkv", "recent_window": 4},
    {"policy": "keepkv", "selector": "expected_attention", "allocator": "adaptive"},
    {"policy": "cam", "merge_prompt": True},
    {"policy": "grkv", "components": "v"},
    {"policy": "criticalkv", "merger": "regression", "window_size": 8},
    {"policy": "snapkv", "merger": "attention_matching"},
    {"policy": "adakv", "merger": "kvmerger", "merge_threshold": -1.0, "window_size": 8},
]


def policy_of(request):
    limits = {"window_size": 8} if request["policy"] in ("grkv", "snapkv") else {}
    return parse_compression({"budget": BUDGET, **limits, **request}).policy


def sample(policy, at_prompt_end=True, num_dead=0, seed=None):
    """Entries that the policy's tracker could have left, and a context with queries and an output projection."""
    seed = torch.randint(2**31, ()).item() if seed is None else seed
    entries = random_entries(seed, HEADS, N, SIZE, num_dead)
    # Neighbours' keys are alike, so that there are similar pairs.
    entries.keys[:, 1::2] = entries.keys[:, ::2] + 0.2 * entries.keys[:, 1::2]
    if policy.tracker.mode in ("mean", "log_ema"):
        entries.aux = torch.where(entries.is_live, 3.0, entries.aux)
    generator = torch.Generator().manual_seed(seed + 2)
    context = CompressionContext.of_layer(
        entries,
        BUDGET,
        N,
        at_prompt_end,
        capacity=policy.allocator.capacity(BUDGET),
        scale=SIZE**-0.5,
        queries=newest_queries(torch.randn(HEADS, 2, 8, SIZE, generator=generator), N),
        output_weights=torch.randn(HEADS, 2, 24, SIZE, generator=generator),
        rotation=rope(SIZE),
    )
    context = replace(context, heads=Heads.of([0, 1], [0, 1], 2, gather=lambda tensor: tensor))
    return entries, context


def compress(policy, entries, context):
    mixtures = []
    result = RecordedPolicy.of(policy, mixtures.append).compress(entries, context)
    assert [mixture.layer for mixture in mixtures] == [0, 1]
    return result, mixtures


def stacked(mixtures, name):
    return torch.cat([getattr(mixture, name) for mixture in mixtures])


@pytest.mark.parametrize("at_prompt_end", [True, False])
@pytest.mark.parametrize("num_dead", [0, 9])
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_weights_reproduce_merged_values(request_, num_dead, at_prompt_end):
    policy = policy_of(request_)
    entries, context = sample(policy, at_prompt_end, num_dead)
    result, mixtures = compress(policy, entries, context)
    assert_same(result.entries, policy.compress(entries, context).entries)
    weights, changed = stacked(mixtures, "weights"), stacked(mixtures, "changed")
    values = torch.where(entries.is_live.unsqueeze(-1), entries.values, 0.0)
    update = result.update
    if update.values is not None:
        assert torch.equal(changed, update.changed)
        for head in range(HEADS):
            rows = changed[head] >= 0
            if rows.any():
                merged = update.values[head, rows]
                error = (weights[head, rows] @ values[head] - merged).norm() / merged.norm()
                assert error < 1e-5
        assert all(mixture.residual < 1e-5 for mixture in mixtures)
    assert not weights[~entries.is_live.unsqueeze(1).expand_as(weights)].any()


@pytest.mark.parametrize("name", [*MEANS, "grkv", "attention_matching"])
def test_rows_sum_to_one(name):
    """Those of least squares as well, since its A and the full cache's have rows of sum 1; but some are negative."""
    policy = policy_of({"policy": "snapkv", "merger": name} if name == "attention_matching" else {"policy": name})
    entries, context = sample(policy)
    _, mixtures = compress(policy, entries, context)
    rows = torch.cat([mixture.weights[mixture.changed >= 0] for mixture in mixtures])
    assert (rows != 0).sum() > len(rows) > 0
    torch.testing.assert_close(rows.sum(1), torch.ones(len(rows)), rtol=1e-4, atol=1e-4)
    assert (rows.min() >= 0) == (name in MEANS)


def test_merged_keys_are_compared_as_in_the_cache(monkeypatch):
    """Where operators round them, as they may; the threshold is close to many similarities."""
    most_similar = ops.most_similar

    def rounding(seq_layers, sources, targets, usable, changes=None):
        if changes is not None:
            changes = replace(changes, keys=changes.keys.bfloat16().float())
        return most_similar(seq_layers, sources, targets, usable, changes)

    monkeypatch.setattr(ops, "most_similar", rounding)
    num_entries, size = 1000, 32
    maker = CacheMaker(0, HEADS, size, 16, torch.bfloat16)
    sequence = maker.sequence(0, 0, num_entries)
    maker.pages.scores.copy_(maker.randn(*maker.pages.scores.shape))
    maker.pages.aux.fill_(3.0)
    entries = PagedEntries.gather(SequenceLayers.of(maker.pages, sequence.blocks, 0, 0, num_entries))
    policy = policy_of({"policy": "keepkv", "merge_threshold": 0.4, "merge_passes": 4})
    context = CompressionContext.of_layer(entries, 100, num_entries, at_prompt_end=True)
    mixtures = []
    result = RecordedPolicy.of(policy, mixtures.append).compress(entries, context)
    assert result.num_merged > 1000 and mixtures[0].residual < 1e-5


def test_values_that_cam_adds_make_sums_larger():
    policy = policy_of({"policy": "cam", "merge_prompt": True})
    entries, context = sample(policy)
    _, mixtures = compress(policy, entries, context)
    for mixture in mixtures:
        gained = mixture.weights[mixture.changed >= 0].sum(1) - 1
        assert len(gained) > 0 and (gained > 0).all()


def test_a_regression_in_several_steps_says_how_far_its_weights_are_off():
    """Where a later value step starts, rounding in the key step before it has a part: see the module."""
    policy = policy_of({"policy": "grkv", "steps": 2})
    entries, context = sample(policy)
    result, mixtures = compress(policy, entries, context)
    for mixture, heads in zip(mixtures, (slice(0, 2), slice(2, 4)), strict=True):
        rows = mixture.changed >= 0
        merged, expected = result.update.values[heads][rows], (mixture.weights @ entries.values[heads])[rows]
        error = ((expected - merged).norm() / merged.norm()).item()
        assert error == pytest.approx(mixture.residual, rel=1e-3, abs=1e-7)
        assert error < 0.05


def test_every_merger_is_looked_at():
    assert {policy_of(request).merger.name for request in REQUESTS} == set(MERGERS) - {"drop"}


def test_zip_merges_into_the_nearest_key():
    policy = policy_of({"policy": "keepkv", "merge_first": False})
    entries, context = sample(policy)
    result, mixtures = compress(policy, entries, context)
    weights, changed, kept = (stacked(mixtures, name) for name in ("weights", "changed", "kept"))
    keys = normalize(entries.keys.double(), dim=-1)
    num_joined = 0
    for head in range(HEADS):
        stays = set(kept[head].tolist())
        own = kept[head].tolist()
        for entry in set(range(N)) - stays:
            similarity = keys[head, own] @ keys[head, entry]
            targets = [changed[head, row].item() for row in weights[head, :, entry].nonzero().flatten()]
            expected = [similarity.argmax().item()] if similarity.max() > policy.merger.merge_threshold else []
            assert targets == expected
            num_joined += len(targets)
    assert num_joined == result.num_merged > 0


def test_residual_slots_are_runs_of_neighbours():
    policy = policy_of({"policy": "zsmerge"})
    entries, context = sample(policy)
    _, mixtures = compress(policy, entries, context)
    for mixture, heads in zip(mixtures, (slice(0, 2), slice(2, 4)), strict=True):
        for head in range(2):
            positions = entries.positions[heads][head]
            kept = mixture.kept[head]
            left = sorted(set(range(N)) - set(positions[kept[kept >= 0]].tolist()))
            runs = [sorted(positions[row > 0].tolist()) for row in mixture.weights[head][mixture.changed[head] >= 0]]
            assert sorted(runs) == runs and sum(runs, []) == left


def test_weighted_kv_hands_values_to_the_right():
    policy = policy_of({"policy": "weightedkv"})
    entries, context = sample(policy)
    _, mixtures = compress(policy, entries, context)
    weights, changed, kept = (stacked(mixtures, name) for name in ("weights", "changed", "kept"))
    for head in range(HEADS):
        positions = entries.positions[head]
        stays = positions[kept[head]].sort().values
        for entry in set(range(N)) - set(kept[head].tolist()):
            (row,) = weights[head, :, entry].nonzero().flatten()
            target = positions[kept[head, changed[head, row]]]
            assert target == stays[torch.searchsorted(stays, positions[entry])]


@pytest.mark.parametrize("name", ["keepkv", "zsmerge", "grkv"])
def test_columns_in_several_runs_are_the_same(name, monkeypatch):
    policy = policy_of({"policy": name})
    entries, context = sample(policy, seed=3)
    _, whole = compress(policy, entries, context)
    monkeypatch.setattr(merge_map, "MAX_TAG_BYTES", 4 * HEADS * N * 25)
    assert len(list(merge_map._column_groups(entries))) == 4
    _, parts = compress(policy, entries, context)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-4, atol=1e-6)


def test_provenance_follows_tokens_through_compressions():
    provenance = Provenance(1)
    provenance.extend(4)
    assert torch.equal(provenance.shares[0], torch.eye(4))
    half = torch.tensor([[[0.0, 0.5, 0.5, 0.0]]])
    mixture = merge_map.Mixture(
        layer=0,
        kept=torch.tensor([[0, 2, DEAD]]),
        log_votes=torch.tensor([[0.0, 0.7, -torch.inf]]),
        positions=torch.tensor([[0, 2, DEAD]]),
        changed=torch.tensor([[1]]),
        weights=half,
        residual=0.0,
    )
    provenance.compress(mixture)
    before = provenance.snapshot()
    provenance.extend(5)
    assert provenance.shares[0].tolist() == [[1, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0], [0] * 5, [0, 0, 0, 0, 1]]
    assert provenance.origins.tolist() == [[0, 2, DEAD, 4]]
    assert provenance.survives.tolist() == [[True, False, True, False, True]]
    assert provenance.is_represented.tolist() == [[True, True, True, False, True]]
    assert provenance.num_tokens_of_each.tolist() == [[1, 2, 0, 1]]
    # Once more: the target goes into the newest entry, and what is in it with it.
    provenance.compress(
        merge_map.Mixture(
            layer=0,
            kept=torch.tensor([[3]]),
            log_votes=torch.zeros(1, 1),
            positions=torch.tensor([[4]]),
            changed=torch.tensor([[0]]),
            weights=torch.tensor([[[0.0, 0.8, 0.0, 0.2]]]),
            residual=0.0,
        )
    )
    torch.testing.assert_close(provenance.shares[0], torch.tensor([[0.0, 0.4, 0.4, 0.0, 0.2]]))
    assert before.shares.shape == (1, 3, 4)
