"""The reference operators against dense attention in float64, and against vLLM's own CPU operators."""

import itertools
import math
import zlib
from dataclasses import replace

import pytest
import torch

from tests import vllm_library
from tests.ops.conftest import (
    EMA,
    MEAN,
    SUM,
    TOLERANCE,
    CacheMaker,
    batch_of,
    first_in_window,
    relative_error,
    softmax_of,
    statistics,
)
from vllm_kvmerge.ops import PLAIN_SOFTMAX, AttentionBatch, PagedKVCache
from vllm_kvmerge.ops.types import QUANTISED


def dense_probabilities(logits, votes, softmax):
    """logits: ``[H, G, n]`` float64, capped; votes: ``[H, n]`` or None."""
    weights = (logits if votes is None else logits + votes.unsqueeze(1)).exp()
    sinks = 0.0 if softmax.sinks is None else softmax.sinks.double().exp().unsqueeze(-1)
    return weights / (weights.sum(-1, keepdim=True) + sinks)


def dense_logits(products, softmax):
    return products if softmax.cap == 0 else softmax.cap * torch.tanh(products / softmax.cap)


def dense_attention(query, sequence, scale, softmax=PLAIN_SOFTMAX):
    """(output, capped logits, probabilities) in float64, one query at a time; query ``[q, H * G, d]``."""
    num_queries, heads = query.shape[0], sequence.keys.shape[0]
    groups = query.shape[1] // heads
    outputs, all_logits, all_probabilities = [], [], []
    for i in range(num_queries):
        n = sequence.keys.shape[1] - num_queries + i + 1
        rows = query[i].double().view(heads, groups, -1)
        logits = dense_logits(scale * torch.einsum("hgd,hnd->hgn", rows, sequence.keys[:, :n]), softmax)
        probabilities = dense_probabilities(logits, sequence.log_votes[:, :n], softmax)
        outputs.append(torch.einsum("hgn,hnd->hgd", probabilities, sequence.values[:, :n]).flatten(0, 1))
        all_logits.append(logits)
        all_probabilities.append(probabilities)
    return torch.stack(outputs), all_logits, all_probabilities


def dense_scores(update, all_logits, all_probabilities, scores, aux, num_new):
    """The statistics after the queries, by the definitions; entries are lists of per-query tensors."""
    scores, aux = scores.double().clone(), aux.double().clone()
    scores[:, scores.shape[1] - num_new :] = 0
    aux[:, aux.shape[1] - num_new :] = 0
    for logits, probabilities in zip(all_logits, all_probabilities, strict=True):
        n = logits.shape[2]
        if update.mode in ("sum", "mean"):
            scores[:, :n] = update.decay * scores[:, :n] + probabilities.sum(1)
            aux[:, :n] += update.mode == "mean"
        else:
            level = torch.logsumexp(logits, 1) - math.log(logits.shape[1])
            old = torch.where(aux[:, :n] > 0, scores[:, :n] + math.log(update.decay), -torch.inf)
            scores[:, :n] = torch.logaddexp(old, level + math.log(1 - update.decay))
            aux[:, :n] += 1
    return scores, aux


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *QUANTISED], ids=str)
@pytest.mark.parametrize(
    ("num_kv_heads", "groups", "head_size", "block_size"),
    [(2, 1, 32, 128), (1, 8, 64, 32), (3, 2, 128, 16), (2, 7, 80, 48), (1, 2, 256, 64), (2, 4, 512, 32)],
)
@pytest.mark.parametrize(
    ("num_queries", "kind"),
    [(1, "plain"), (5, "plain"), (1, "capped"), (1, "capped-sinks"), (5, "sinks"), (40, "plain")],
)
def test_attention_over_front_and_tail(
    operators, dtype, num_kv_heads, groups, head_size, block_size, num_queries, kind, request
):
    seed, interleaved = zlib.crc32(request.node.name.encode()), num_queries > 1
    maker = CacheMaker(seed, num_kv_heads, head_size, block_size, dtype, interleaved)
    sequences = [
        maker.sequence(front=0, tail=0, seq_len=77),  # never compressed
        maker.sequence(front=37, tail=200, seq_len=241, num_dead=7),  # a hole, odd lengths
        maker.sequence(front=32, tail=64, seq_len=64 + num_queries, num_dead=32),  # only new tokens live
        maker.sequence(front=50, tail=50, seq_len=90),  # no hole
        maker.sequence(front=129, tail=330, seq_len=530),
    ]
    updates = [None, SUM, EMA, MEAN, EMA]
    scale = head_size**-0.5
    query = maker.randn(len(sequences) * num_queries, num_kv_heads * groups, head_size).to(maker.query_dtype)
    softmax = softmax_of(maker, kind, num_kv_heads, groups)
    output = torch.full_like(query, torch.nan)
    before = []
    for sequence in sequences:
        scores = maker.randn(*sequence.log_votes.shape)
        before.append((scores, torch.randint(0, 3, scores.shape, generator=maker.generator).float()))
        _write_statistics(maker.pages, sequence, *before[-1])
    batch = batch_of(sequences, [num_queries] * len(sequences), updates)
    operators.paged_attention(query, maker.pages, batch, scale, output, softmax)
    for row, (sequence, update) in enumerate(zip(sequences, updates, strict=True)):
        rows = slice(row * num_queries, (row + 1) * num_queries)
        expected, logits, probabilities = dense_attention(query[rows], sequence, scale, softmax)
        assert relative_error(output[rows], expected) < TOLERANCE[dtype]
        if update is None:
            continue
        scores, aux = dense_scores(update, logits, probabilities, *before[row], num_queries)
        found = statistics(maker.pages, [sequence])
        assert relative_error(found[0], scores) < 1e-4 and torch.equal(found[1].double(), aux)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("spread", "before"), [(1.0, 300.0), (1.0, -300.0), (200.0, 0.0), (30.0, 100.0)])
def test_ema_of_logits_far_apart(operators, dtype, spread, before):
    """Beyond what the probabilities, or their sum with what was before, hold in float32."""
    maker = CacheMaker(17, 2, 64, 32, dtype)
    sequence = maker.sequence(front=70, tail=128, seq_len=300, num_dead=2)
    scores = before * maker.randn(2, 242).abs() + maker.randn(2, 242)
    _write_statistics(maker.pages, sequence, scores, torch.ones(2, 242))
    query, scale = (spread * maker.randn(2, 8, 64)).to(dtype), 64**-0.5
    output = torch.empty_like(query)
    operators.paged_attention(query, maker.pages, batch_of([sequence], [2], [EMA]), scale, output)
    _, logits, probabilities = dense_attention(query, sequence, scale)
    expected, _ = dense_scores(EMA, logits, probabilities, scores, torch.ones(2, 242), 2)
    after, _ = statistics(maker.pages, [sequence])
    torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-4 * max(1.0, spread))


def attention_in_a_window(query, sequence, window, chunked, scale, softmax):
    """In float64, one query at a time. sequence: never compressed; of its tokens those from ``tail`` on are there."""
    length, outputs = len(query), []
    for number in range(length):
        position = sequence.seq_len - length + number
        first, end = first_in_window(position, window, chunked), position + 1
        seen = slice(first - sequence.tail, end - sequence.tail)
        planes = {name: getattr(sequence, name)[:, seen] for name in ("keys", "values", "log_votes")}
        outputs.append(dense_attention(query[number : number + 1], replace(sequence, **planes), scale, softmax)[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *QUANTISED], ids=str)
@pytest.mark.parametrize(("groups", "head_size", "block_size"), [(1, 32, 32), (8, 64, 32), (4, 80, 16)])
@pytest.mark.parametrize("kind", ["plain", "capped-sinks"])
@pytest.mark.parametrize("lens", [[1, 1, 1], [3, 1, 40]], ids=str)
@pytest.mark.parametrize(("window", "chunked"), [(1, False), (100, False), (48, True)])
def test_attention_in_a_window(operators, dtype, groups, head_size, block_size, kind, lens, window, chunked, request):
    """Blocks of tokens before it belong to others: here they are poison, and in part the null block."""
    maker = CacheMaker(zlib.crc32(request.node.name.encode()), 2, head_size, block_size, dtype)
    seq_lens = [333, 5, 145]
    sequences = [
        maker.sequence(0, first_in_window(seq_len - length, window, chunked), seq_len)
        for seq_len, length in zip(seq_lens, lens, strict=True)
    ]
    batch = batch_of(sequences, lens, [None] * 3)
    batch = replace(batch, tails=torch.zeros_like(batch.tails))
    query = maker.randn(sum(lens), 2 * groups, head_size).to(maker.query_dtype)
    softmax, output = softmax_of(maker, kind, 2, groups), torch.full_like(query, torch.nan)
    operators.paged_attention(query, maker.pages, batch, head_size**-0.5, output, softmax, window, chunked)
    for sequence, of_row, found in zip(sequences, query.split(lens), output.split(lens), strict=True):
        expected = attention_in_a_window(of_row, sequence, window, chunked, head_size**-0.5, softmax)
        assert relative_error(found, expected) < TOLERANCE[dtype]


def _write_statistics(pages, sequence, scores, aux):
    slots = torch.tensor([*range(sequence.front), *range(sequence.tail, sequence.seq_len)])
    where = sequence.blocks[slots // pages.block_size].long(), slice(None), slots % pages.block_size
    pages.scores[where], pages.aux[where] = scores.T, aux.T


@pytest.mark.parametrize("update", [SUM, MEAN, EMA], ids=["sum", "mean", "log_ema"])
@pytest.mark.parametrize("window", [1, 40, 150])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("plain", torch.float32), ("capped-sinks", torch.float32), ("plain", QUANTISED[0])], ids=str
)
def test_prompt_scores_do_not_depend_on_chunks(operators, update, window, kind, dtype):
    maker = CacheMaker(7, 2, 32, 32, dtype)
    sequence = maker.sequence(front=0, tail=0, seq_len=150)
    query = maker.randn(window, 4, 32)
    scale, softmax = 32**-0.5, softmax_of(maker, kind, 2, 2)
    _, logits, probabilities = dense_attention(query, sequence, scale, softmax)
    expected = dense_scores(update, logits, probabilities, torch.zeros(2, 150), torch.zeros(2, 150), 0)
    for chunk in (1, 7, 64, 150):
        scores, aux = torch.zeros(2, 150), torch.zeros(2, 150)
        for start in range(0, window, chunk):
            stop = min(start + chunk, window)
            seq_len = 150 - window + stop
            so_far = scores[:, :seq_len], aux[:, :seq_len]
            operators.score_prompt_queries(
                query[start:stop], maker.pages, sequence.blocks, update, scale, *so_far, softmax
            )
        assert relative_error(scores, expected[0]) < 1e-5
        assert torch.equal(aux.double(), expected[1])


def check_repetition(
    operators, dtype, start, stop, sinks, weighted=False, per_head=False, kind="plain", groups=3, head_size=64
):
    """Probabilities among sinks, chunk and repetition, whatever lies between; in any parts."""
    maker, context, scale = CacheMaker(8, 2, head_size, 32, dtype), 101, 0.3
    sequence = maker.sequence(front=0, tail=0, seq_len=150)
    query, own = maker.randn(2, 150 - context, 2 * groups, head_size).to(maker.query_dtype)
    softmax = softmax_of(maker, kind, 2, groups)
    weights = maker.randn(len(query)).exp() if weighted else None
    before = (0.1 * maker.randn(2 * groups if per_head else 2, 200) - 0.1).clamp(min=0.0)  # some are larger already
    expected = torch.zeros(2, 2, groups, stop - start, dtype=torch.float64)
    for i in range(len(query)):
        for within in (0, 1) if i >= 20 else (0,):  # the queries of the context's own tokens
            seen = [*range(min(sinks, start)), *range(start, stop)]
            after = range(start, context - len(query) + i + 1) if within else range(context, context + i + 1)
            parts = (query, seen), (own if within else query, after)
            logits = [
                torch.einsum("hgd,hnd->hgn", rows[i].double().unflatten(0, (2, groups)), sequence.keys[:, tokens])
                for rows, tokens in parts
            ]
            logits = dense_logits(scale * torch.cat(logits, 2), softmax)
            first, weight = min(sinks, start), 1.0 if weights is None else weights[i].double()
            probabilities = dense_probabilities(logits, None, softmax)[..., first : first + stop - start]
            expected[within] = expected[within].maximum(probabilities * weight)
    expected = expected.flatten(1, 2) if per_head else expected.amax(2)
    expected = expected.maximum(before[:, 17 : 17 + stop - start])
    for part, within in ((20, 0), (48, 0), (49, 0), (29, 1)):
        plane = before.clone()
        scores = plane[:, 17 : 17 + stop - start]  # of a wider plane, as the engine has them
        for first in [20] if within else range(0, 150 - context, part):
            some = slice(first, first + part)
            where = (context if within else min(150, context + first + part)), context, start, sinks
            operators.score_repetition(
                query[some],
                maker.pages,
                sequence.blocks,
                scale,
                *where,
                scores,
                None if weights is None else weights[some],
                softmax,
                own[some] if within else None,
            )
        assert relative_error(scores, expected[within]) < 1e-5
        scores.copy_(before[:, 17 : 17 + stop - start])
        assert torch.equal(plane, before)
    scores = torch.full_like(scores, 0.5)
    operators.score_repetition(
        torch.full_like(query, torch.nan), maker.pages, sequence.blocks, scale, 150, *where[1:], scores
    )
    assert (scores == 0.5).all()


REPETITIONS = [(4, 60, 4), (70, 101, 9), (0, 33, 5)]


@pytest.mark.parametrize(("start", "stop", "sinks"), REPETITIONS)
@pytest.mark.parametrize("per_head", [False, True], ids=["", "per-head"])
@pytest.mark.parametrize(
    ("dtype", "weighted", "kind"),
    [
        *itertools.product([torch.float32, torch.bfloat16], [False, True], ["plain"]),
        (torch.bfloat16, False, "capped"),
        (torch.bfloat16, False, "sinks"),
        *((dtype, False, "plain") for dtype in QUANTISED),
    ],
    ids=str,
)
def test_scores_of_a_repetition(operators, dtype, start, stop, sinks, weighted, per_head, kind):
    check_repetition(operators, dtype, start, stop, sinks, weighted, per_head, kind)


@pytest.fixture
def vllm_ops():
    """vLLM's operators for the CPU, loaded as vLLM does: its libraries register the same names, so two abort."""
    vllm_ops = pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed")
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        pytest.skip("this build of vLLM has no operators for the CPU")
    return vllm_ops


@pytest.mark.slow
@pytest.mark.engine
def test_vllm_loads_the_library_that_is_asked_for(vllm_ops, request):
    expected = request.config.getoption("--vllm-library", default=None) or [*vllm_library.runnable(), "_C"][0]
    assert vllm_library.loaded() == [expected.removesuffix("_AMX")]  # the same file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_size", "kind"),
    [(32, "plain"), (64, "capped"), (64, "sinks"), (80, "plain"), (128, "capped"), (256, "plain")],
)
def test_vllm_operators_work_on_our_pages(operators, vllm_ops, dtype, head_size, kind):
    """vLLM's operators pack K and V as our pages do, leave the metadata alone and give the same attention."""
    heads, groups, seq_len = 2, 3, 75
    isa = "vec" if head_size % 32 == 0 else "vec16"
    maker = CacheMaker(head_size, heads, head_size, 32, dtype)
    maker.cache.zero_()
    softmax, caches = softmax_of(maker, kind, heads, groups), (maker.cache, maker.cache.clone())
    maker.pages, stock = (PagedKVCache.of(cache, head_size, row_major_keys=False) for cache in caches)
    for view in (maker.pages, stock):
        view.scores.fill_(1.5)
    sequence, slots = maker.sequence(0, 0, seq_len), torch.arange(seq_len)
    slot_mapping = sequence.blocks[slots // 32].long() * 32 + slots % 32
    key, value = (rows.transpose(0, 1).to(dtype) for rows in (sequence.keys, sequence.values))
    vllm_ops.cpu_attn_reshape_and_cache(key, value, stock.stock_keys, stock.values, slot_mapping, isa)
    assert torch.equal(*caches)
    for num_queries in (1, seq_len):
        query = maker.randn(num_queries, heads * groups, head_size).to(dtype)
        start_loc = torch.tensor([0, num_queries], dtype=torch.int32)
        seq_lens = torch.tensor([seq_len], dtype=torch.int32)
        scale = head_size**-0.5
        metadata = vllm_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=heads * groups, num_kv_heads=heads, head_dim=head_size, seq_lens=seq_lens,
            dtype=dtype, query_start_loc=start_loc, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
        )  # fmt: skip
        expected, output = torch.empty_like(query), torch.empty_like(query)
        vllm_ops.cpu_attention_with_kv_cache(
            query, stock.stock_keys, stock.values, expected, start_loc, seq_lens, scale, True, None, -1,
            sequence.blocks[None], softmax.cap, metadata, None if softmax.sinks is None else softmax.sinks.flatten(),
        )  # fmt: skip
        batch = AttentionBatch.single(sequence.blocks, num_queries, seq_len)
        operators.paged_attention(query, maker.pages, batch, scale, output, softmax)
        assert relative_error(output, expected) < TOLERANCE[dtype]
