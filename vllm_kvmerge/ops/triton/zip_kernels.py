"""ZIP-merging of entries in Triton (``reference.zip_groups``), launched by ``zipping``.

A group's place in the list of targets is that of its first source, so nothing has to be listed before. Whatever a group
comes to is computed by each of its sources, which goes through all sources of its head for that: while generating these
are as many as tokens came in an interval.
"""

import triton
import triton.language as tl

from vllm_kvmerge.ops.triton.compiling import for_any
from vllm_kvmerge.ops.types import ScoreMode
from vllm_kvmerge.ops.zipping import AUTO_TOLERANCE, MAX_SCALE, ZIP_MODES

SUM = tl.constexpr(ScoreMode.SUM.code)
MEAN = tl.constexpr(ScoreMode.MEAN.code)
LOG_EMA = tl.constexpr(ScoreMode.LOG_EMA.code)
SCALE = tl.constexpr(ZIP_MODES.index("scale"))
VOTES = tl.constexpr(ZIP_MODES.index("votes"))
MOST = tl.constexpr(MAX_SCALE)
TOLERANCE = tl.constexpr(AUTO_TOLERANCE)


@triton.jit
def capped(logits, CAP: tl.constexpr):
    """CAP * tanh(logits / CAP); CAP 0: none."""
    if CAP > 0.0:
        return CAP * (1.0 - 2.0 / (tl.exp(logits * (2.0 / CAP)) + 1.0))
    else:
        return logits


@triton.jit
def uncapped(logits, CAP: tl.constexpr):
    """The inverse of ``capped``, finite up to the cap."""
    if CAP > 0.0:
        limit = 1.0 - 0.00000095367431640625
        x = tl.minimum(tl.maximum(logits / CAP, -limit), limit)
        return 0.5 * CAP * tl.log((1.0 + x) / (1.0 - x))
    else:
        return logits


@triton.jit
def column(plane, heads, g):
    """Column ``g`` of ``plane``, ``[m, heads]``."""
    return tl.sum(tl.where(heads[None, :] == g, plane, 0.0), 1)


@triton.jit
def joining(sources, targets, joins, base, start, m, target, BLOCK_K: tl.constexpr):
    """(numbers of some sources, their entries, whether they join, whether they join each row's ``target``)."""
    k = start + tl.arange(0, BLOCK_K)
    joins_too = tl.load(joins + base + k, mask=k < m, other=0) != 0
    entry = tl.load(sources + base + k, mask=joins_too, other=0)
    theirs = tl.load(targets + base + k, mask=joins_too, other=-2)
    return k, entry, joins_too, target[:, None] == theirs[None, :]


@triton.jit
def log_sum(values, heads, G: tl.constexpr):
    """Of each row over its heads."""
    values = tl.where(heads[None, :] < G, values, float("-inf"))
    top = tl.max(values, 1)
    return top + tl.log(tl.sum(tl.exp(values - top[:, None]), 1))


@for_any("n", "m", "mode", "zip_mode")
def zip_groups(
    sources, targets, joins, log_votes, scores, query_counts, positions, protected, log_scores, log_norms,
    out_targets, out_sources, out_groups, out_shares, out_factors, out_votes, out_scores, out_positions,
    n, m, mode, zip_mode,
    G: tl.constexpr, BLOCK_G: tl.constexpr, CAP: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Results for some sources of a head, and groups of which they are the first. Grid: heads, tiles of sources.

    G: rows of ``log_scores``. mode, zip_mode: as numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    base, entries, planes = row * m, row * n, row * G * n
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    heads = tl.arange(0, BLOCK_G)
    is_head = heads < G
    joins_own = tl.load(joins + base + i, mask=i < m, other=0) != 0
    target = tl.load(targets + base + i, mask=joins_own, other=-1)
    source = tl.load(sources + base + i, mask=joins_own, other=-1)
    given = joins_own[:, None] & is_head[None, :]
    own_votes = tl.load(log_votes + entries + target, mask=joins_own, other=0.0)
    own_scores = tl.load(log_scores + planes + heads[None, :] * n + target[:, None], mask=given, other=0.0)
    own_weights = own_votes[:, None] + own_scores

    first = tl.zeros([BLOCK_I], tl.int32) + m
    newest = tl.load(positions + entries + target, mask=joins_own, other=-1)
    is_protected = tl.load(protected + entries + target, mask=joins_own, other=0) != 0
    gained = tl.zeros([BLOCK_I], tl.float32)
    top_votes = own_votes
    top_weights = own_weights
    for start in range(0, m, BLOCK_K):
        k, entry, live, same = joining(sources, targets, joins, base, start, m, target, BLOCK_K)
        first = tl.minimum(first, tl.min(tl.where(same, k[None, :], m), 1))
        position = tl.load(positions + entries + entry, mask=live, other=-1)
        theirs = tl.max(tl.where(same, position[None, :], -1), 1)
        newest = tl.where(is_protected, newest, tl.maximum(newest, theirs))
        if (mode == SUM) | (mode == MEAN):
            score = tl.load(scores + entries + entry, mask=live, other=0.0)
            if mode == MEAN:
                score = score / tl.load(query_counts + entries + entry, mask=live, other=1.0)
            gained += tl.sum(tl.where(same, score[None, :], 0.0), 1)
        votes = tl.load(log_votes + entries + entry, mask=live, other=0.0)
        top_votes = tl.maximum(top_votes, tl.max(tl.where(same, votes[None, :], float("-inf")), 1))
        for g in range(G):
            weight = votes + tl.load(log_scores + planes + g * n + entry, mask=live, other=0.0)
            top = tl.max(tl.where(same, weight[None, :], float("-inf")), 1)
            top_weights = tl.where(heads[None, :] == g, tl.maximum(top_weights, top[:, None]), top_weights)

    sum_votes = tl.exp(own_votes - top_votes)
    sum_weights = tl.exp(own_weights - top_weights)
    for start in range(0, m, BLOCK_K):
        k, entry, live, same = joining(sources, targets, joins, base, start, m, target, BLOCK_K)
        votes = tl.load(log_votes + entries + entry, mask=live, other=0.0)
        sum_votes += tl.sum(tl.where(same, tl.exp(votes[None, :] - top_votes[:, None]), 0.0), 1)
        for g in range(G):
            weight = votes + tl.load(log_scores + planes + g * n + entry, mask=live, other=0.0)
            terms = tl.exp(weight[None, :] - column(top_weights, heads, g)[:, None])
            added = tl.sum(tl.where(same, terms, 0.0), 1)
            sum_weights += tl.where(heads[None, :] == g, added[:, None], 0.0)
    log_sum_votes = top_votes + tl.log(sum_votes)
    log_total = top_weights + tl.log(sum_weights)

    norms = tl.load(log_norms + row * G + heads, mask=is_head, other=0.0)
    level = tl.where(is_head[None, :], 2.0 * (log_total - norms[None, :]), float("-inf"))
    head_shares = tl.exp(level - tl.max(level, 1)[:, None])
    head_shares = head_shares / tl.sum(head_shares, 1)[:, None]
    own_share = tl.sum(tl.where(is_head[None, :], head_shares * tl.exp(own_weights - log_total), 0.0), 1)
    mean_logit = own_share[:, None] * uncapped(own_scores, CAP)
    for start in range(0, m, BLOCK_K):
        k, entry, live, same = joining(sources, targets, joins, base, start, m, target, BLOCK_K)
        votes = tl.load(log_votes + entries + entry, mask=live, other=0.0)
        shares = tl.zeros([BLOCK_I, BLOCK_K], tl.float32)
        for g in range(G):
            weight = votes + tl.load(log_scores + planes + g * n + entry, mask=live, other=0.0)
            terms = tl.exp(weight[None, :] - column(log_total, heads, g)[:, None])
            shares += column(head_shares, heads, g)[:, None] * tl.where(same, terms, 0.0)
        for g in range(G):
            logit = uncapped(tl.load(log_scores + planes + g * n + entry, mask=live, other=0.0), CAP)
            added = tl.sum(tl.where(same, shares * logit[None, :], 0.0), 1)
            mean_logit += tl.where(heads[None, :] == g, added[:, None], 0.0)

    mean_score = capped(mean_logit, CAP)
    log_mean_score = log_total - log_sum_votes[:, None]
    squares = tl.where(is_head[None, :], head_shares * mean_logit * mean_logit, 0.0)
    ratio = uncapped(log_mean_score, CAP) / mean_logit
    factor = tl.sum(tl.where(is_head[None, :], squares / tl.sum(squares, 1)[:, None] * ratio, 0.0), 1)
    scales = tl.abs(factor - 1.0) <= TOLERANCE
    if zip_mode == SCALE:
        scales = (factor > 0.0) & (factor <= MOST)
    scales = scales & (zip_mode != VOTES)
    in_votes = tl.sum(tl.where(is_head[None, :], head_shares * (log_total - mean_score), 0.0), 1)
    if mode == MEAN:
        gained = gained * tl.load(query_counts + entries + target, mask=joins_own, other=0.0)
    if mode == LOG_EMA:
        after = tl.where(scales[:, None], log_mean_score, mean_score)
        gained = log_sum(after, heads, G) - log_sum(own_scores, heads, G)

    their_votes = tl.load(log_votes + entries + source, mask=joins_own, other=0.0)
    their_scores = tl.load(log_scores + planes + heads[None, :] * n + source[:, None], mask=given, other=0.0)
    share = tl.where(is_head[None, :], head_shares * tl.exp(their_votes[:, None] + their_scores - log_total), 0.0)
    is_first = joins_own & (first == i)
    inside = i < m
    at = base + i
    own_score = tl.load(scores + entries + target, mask=joins_own, other=0.0)
    tl.store(out_targets + at, tl.where(is_first, target, -1), mask=inside)
    tl.store(out_sources + at, source, mask=inside)
    tl.store(out_groups + at, tl.where(joins_own, first, 0).to(tl.int64), mask=inside)
    tl.store(out_shares + at, tl.where(joins_own, tl.sum(share, 1), 0.0), mask=inside)
    tl.store(out_factors + at, tl.where(is_first & scales, factor, 1.0), mask=inside)
    tl.store(out_votes + at, tl.where(scales, log_sum_votes, in_votes), mask=inside)
    tl.store(out_scores + at, own_score + gained, mask=inside)
    tl.store(out_positions + at, newest, mask=inside)
