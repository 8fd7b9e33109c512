"""What groups of merged entries come to, on every implementation, against loops in float64."""

import math

import pytest
import torch

from vllm_kvmerge.ops import ScoreMode, Softmax, cpu
from vllm_kvmerge.ops.zipping import ZIP_MODES, ZipPlanes


def drawn(heads, n, m, num_scores, seed, share=0.7):
    """Sources, targets, which join, and planes; what does not take part is no number."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(heads)])
    sources, rest = order[:, :m], order[:, m:]
    targets = rest.gather(1, torch.randint(0, max(1, min(n - m, m // 2)), (heads, m), generator=generator))
    joins = torch.rand(heads, m, generator=generator) < share
    joins[-1, : m // 2] = False
    log_votes, scores = torch.rand(2, heads, n, generator=generator) * 2
    log_scores = torch.randn(heads, num_scores, n, generator=generator) * 2
    counts = torch.randint(1, 9, (heads, n), generator=generator).float()
    used = torch.zeros(heads, n + 1, dtype=torch.bool)
    used.scatter_(1, sources.where(joins, n), True).scatter_(1, targets.where(joins, n), True)
    unused = ~used[:, :n]
    for plane in (log_votes, scores, counts):
        plane[unused] = torch.nan
    log_scores.masked_fill_(unused.unsqueeze(1), torch.nan)
    positions = torch.randint(0, 99, (heads, n), generator=generator)
    protected = torch.rand(heads, n, generator=generator) < 0.3
    log_norms = torch.randn(heads, num_scores, 1, generator=generator) + 6
    return sources, targets, joins, ZipPlanes(log_votes, scores, counts, positions, protected, log_scores, log_norms)


def log_sum(values):
    return math.log(sum(map(math.exp, values)))


def by_hand(head, sources, targets, joins, planes, mode, zip_mode, cap):
    """By target: (factor, votes, score, position), and by source: (target, share)."""

    def uncapped(x):
        return math.atanh(max(-(1 - 2**-20), min(1 - 2**-20, x / cap))) * cap if cap else x

    votes, scores, counts, positions, protected, log_scores, norms = (plane[head].tolist() for plane in planes)
    groups, members = {}, {}
    for source, target, is_in in zip(sources[head].tolist(), targets[head].tolist(), joins[head].tolist(), strict=True):
        if is_in:
            members.setdefault(target, []).append(source)
    of_sources = {}
    for target, others in members.items():
        entries, heads = [target, *others], range(len(log_scores))
        totals = [log_sum([votes[e] + log_scores[g][e] for e in entries]) for g in heads]
        weights = [math.exp(2 * (totals[g] - norms[g][0])) for g in heads]
        of_heads = [weight / sum(weights) for weight in weights]
        shares = [sum(of_heads[g] * math.exp(votes[e] + log_scores[g][e] - totals[g]) for g in heads) for e in entries]
        sum_votes = log_sum([votes[e] for e in entries])
        logits = [sum(s * uncapped(log_scores[g][e]) for s, e in zip(shares, entries, strict=True)) for g in heads]
        means = [math.tanh(x / cap) * cap if cap else x for x in logits]
        squares = [weights[g] * logits[g] ** 2 for g in heads]
        ratios = [uncapped(totals[g] - sum_votes) / logits[g] for g in heads]
        factor = sum(squares[g] / sum(squares) * ratios[g] for g in heads)
        scales = {"votes": False, "scale": 0 < factor <= 10, "auto": abs(factor - 1) <= 0.1}[zip_mode]
        new = [totals[g] - sum_votes if scales else means[g] for g in heads]
        score = scores[target]
        if mode == ScoreMode.LOG_EMA:
            score += log_sum(new) - log_sum([log_scores[g][target] for g in heads])
        elif mode == ScoreMode.SUM:
            score += sum(scores[e] for e in others)
        elif mode == ScoreMode.MEAN:
            score += counts[target] * sum(scores[e] / counts[e] for e in others)
        in_votes = sum(of_heads[g] * (totals[g] - means[g]) for g in heads)
        position = positions[target] if protected[target] else max(positions[e] for e in entries)
        merged_votes = sum_votes if scales else in_votes
        groups[target] = factor if scales else 1.0, merged_votes, score, position
        of_sources |= {e: (target, s) for e, s in zip(others, shares[1:], strict=True)}
    return groups, of_sources


@pytest.mark.parametrize(("heads", "n", "m"), [(2, 9, 1), (3, 40, 17), (2, 300, 130)])
@pytest.mark.parametrize("num_scores", [1, 3])
@pytest.mark.parametrize("cap", [0.0, 6.0])
@pytest.mark.parametrize(("mode", "zip_mode"), [*zip(ScoreMode, ("auto", *ZIP_MODES), strict=True)])
def test_groups_come_to_what_the_paper_says(operators, heads, n, m, num_scores, cap, mode, zip_mode):
    sources, targets, joins, planes = drawn(heads, n, m, num_scores, seed=n)
    found = operators.zip_groups(sources, targets, joins, planes, mode, zip_mode, Softmax(cap))
    for head in range(heads):
        groups, of_sources = by_hand(head, sources, targets, joins, planes, mode, zip_mode, cap)
        listed = found.targets[head].tolist()
        assert sorted(one for one in listed if one >= 0) == sorted(groups)
        for place, target in enumerate(listed):
            if target < 0:
                assert found.factors[head, place] == 1.0
                continue
            planes_of_targets = found.factors, found.log_votes, found.scores, found.positions
            numbers = [plane[head, place].item() for plane in planes_of_targets]
            assert numbers == pytest.approx(groups[target], rel=1e-3, abs=1e-4)
        joined = {}
        for place, source in enumerate(found.sources[head].tolist()):
            share = found.shares[head, place].item()
            if source < 0:
                assert share == 0.0
            else:
                joined[source] = listed[found.groups[head, place]], pytest.approx(share, rel=1e-3, abs=1e-5)
        assert joined == of_sources


def test_nothing_joins(operators):
    sources, targets, joins, planes = drawn(2, 20, 5, 1, seed=1, share=0.0)
    found = operators.zip_groups(sources, targets, joins, planes, ScoreMode.SUM, "auto")
    assert not (found.targets >= 0).any() and not (found.sources >= 0).any()
    empty = [plane[:, :0] for plane in (sources, targets, joins)]
    assert operators.zip_groups(*empty, planes, ScoreMode.SUM, "auto").targets.shape == (2, 0)


def test_native_arguments_are_checked():
    sources, targets, joins, planes = drawn(2, 20, 5, 1, seed=1)
    joins[:] = True
    for wrong in ((sources + 20, targets), (sources - 21, targets), (sources, sources + 20), (sources, sources - 21)):
        with pytest.raises(IndexError, match="not among 20"):
            cpu.zip_groups(*wrong, joins, planes, ScoreMode.SUM, "auto")
