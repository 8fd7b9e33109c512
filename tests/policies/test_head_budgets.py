"""Budgets of heads that are known beforehand: how they are measured, read and divided."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.policies.sampling import SEEDS, as_worker, random_entries
from vllm_kvmerge.policies import CompressionContext, CompressionPolicy
from vllm_kvmerge.policies.allocators import Calibrated
from vllm_kvmerge.policies.errors import PartError
from vllm_kvmerge.policies.head_budgets import BUDGET, HeadBudgets, divided, measured_shares
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.policies.selectors import KeyDiff
from vllm_kvmerge.policies.trackers import NoTracker

SHARES = st.lists(st.floats(0.01, 64.0), min_size=1, max_size=40).map(np.array)


@given(SHARES, st.integers(1, 5000), st.integers(0, 50), st.integers(1, 8000))
def test_budgets_are_in_proportion_within_bounds(shares, budget, least, more):
    most = least + more
    counts = divided(shares, budget, least, most)
    assert counts.sum() == len(shares) * min(max(budget, least), most)
    assert (least <= counts).all() and (counts <= most).all()
    # In proportion, but for the rounding of a whole number, between those at a bound.
    free = (counts > least + 1) & (counts < most - 1)
    units = (counts[free, None] + [-1.0, 1.0]) / shares[free, None]
    assert not free.any() or units[:, 0].max() <= units[:, 1].min()
    order = np.argsort(shares)
    assert (np.diff(counts[order]) >= -1).all()


def test_what_is_measured_is_each_heads_part_of_the_largest_scores():
    scores = torch.rand(3, 2, 400, generator=torch.Generator().manual_seed(1)) ** torch.arange(1, 7).view(3, 2, 1)
    threshold = scores.flatten().topk(int(BUDGET * scores.numel())).values[-1]
    expected = (scores >= threshold).sum(2) / (BUDGET * 400)
    assert torch.allclose(measured_shares(scores), expected.double()) and expected.min() > 0.2
    scores[0, 1] *= 1e-6  # of which none is among the largest
    found = measured_shares(scores)
    assert found[0, 1] == 0.2 and found.mean() == 1.0


@pytest.mark.parametrize(
    "shares", [[], [[]], [[1.0, 2.0], [1.0]], [[0.0]], [[-1.0]], [[65.0]], [[float("nan")]], [["one"]]]
)
def test_files_that_make_no_sense(shares):
    with pytest.raises(ValidationError):
        HeadBudgets.model_validate_json(json.dumps({"fingerprint": "f", "shares": shares}))


@given(SEEDS, st.integers(8, 60))
def test_each_worker_divides_the_budget_between_its_own_heads(seed, budget):
    """All that it has is of its own heads, in any layer, and no statistic is read."""
    shares = np.random.default_rng(seed).uniform(0.1, 3.0, (3, 4))
    known, allocator = HeadBudgets(fingerprint="", shares=shares.tolist()), Calibrated()
    entries = random_entries(seed, num_heads=4, n=100)
    entries.scores.fill_(torch.nan)
    of_layers = []
    for layer in range(3):
        context = CompressionContext.of_layer(
            entries, budget, 100, True, layer=layer, num_layers=3, head_budgets=known, min_budget=2
        )
        of_layers.append(
            [
                allocator.head_budgets(entries.of_rows(rows), entries.scores[rows], as_worker(context, rows)).tolist()
                for rows in ([0], [1, 2, 3])
            ]
        )
    for worker, rows in enumerate(([0], [1, 2, 3])):
        expected = divided(shares[:, rows].flatten(), budget, 2, min(100, 8 * budget))
        assert [budgets[worker] for budgets in of_layers] == expected.reshape(3, -1).tolist()


def test_unknown_budgets_are_named():
    policy = CompressionPolicy(tracker=NoTracker(), allocator=Calibrated(), selector=KeyDiff(), merger=DropMerger())
    entries = random_entries(0, n=40)
    with pytest.raises(PartError, match="calibrated.*the budgets of the model's heads are not known"):
        policy.compress(entries, CompressionContext.of_layer(entries, 20, 40, True))
