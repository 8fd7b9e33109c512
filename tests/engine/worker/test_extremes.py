"""Caches at the limits of their dtype, and entries that stand for tens of thousands of tokens."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.worker.test_batches import BLOCK_SIZE, GROUPS, HEAD_SIZE, NUM_HEADS, NUM_LAYERS, Worker
from vllm_kvmerge.engine.attention.rows import QueryRing
from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.worker.compaction import Compaction
from vllm_kvmerge.ops import AttentionBatch, PagedKVCache, ScoreUpdate, dispatch, paged_attention
from vllm_kvmerge.policies import PRESETS

LARGE = {torch.float16: 6e4, torch.bfloat16: 1e38}
KINDS = ["keys", "equal keys", "no keys", "nothing", "subnormal", "values", "one head", "one token"]
LENGTH = 150


def fill(pages: PagedKVCache, kind: str) -> None:
    dtype = pages.keys.dtype
    generator = torch.Generator().manual_seed(1)
    sign = torch.rand(pages.keys.shape, generator=generator).round() * 2 - 1
    large, tiny = (sign * size for size in (LARGE[dtype], torch.finfo(dtype).smallest_normal / 4))
    if kind in ("no keys", "nothing", "equal keys"):
        pages.keys.fill_(LARGE[dtype] if kind == "equal keys" else 0.0)
        if kind == "nothing":
            pages.values.zero_()
    elif kind == "one head":
        pages.keys[:, 0].copy_(large[:, 0])
    elif kind == "one token":
        for plane in (pages.keys, pages.values):
            plane[:, :, 3].copy_(large[:, :, 3])
    else:
        plane = pages.values if kind == "values" else pages.keys
        plane.copy_(tiny if kind == "subnormal" else large)


def attend(worker: Worker, compaction: Compaction, segments: tuple[int, int], end: int) -> Tensor:
    """Output of all layers, whose statistics are updated as generation does."""
    tracker = worker.config.policy.tracker
    outputs = []
    for pages in worker.layers:
        query = torch.randn(1, NUM_HEADS * GROUPS, HEAD_SIZE, generator=torch.Generator().manual_seed(5))
        output = torch.full_like(query, torch.nan, dtype=pages.keys.dtype)
        update = ScoreUpdate(tracker.mode, tracker.update_decay)
        batch = AttentionBatch.single(compaction.source_blocks.int(), 1, end, *segments, update)
        paged_attention(query.to(pages.keys.dtype), pages, batch, HEAD_SIZE**-0.5, output)
        outputs.append(output)
    return torch.stack(outputs)


@pytest.fixture(params=["native", "reference"])
def operators(request) -> Iterator[None]:
    dispatch.choose(request.param)
    yield
    dispatch.choose(None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LARGE, ids=str)
def test_what_is_finite_stays_finite(operators: None, dtype: torch.dtype, kind: str) -> None:
    """Every policy compresses the cache, attention reads it and updates its statistics, and it is compressed again."""
    for policy in PRESETS:
        worker = Worker(policy, (LENGTH,), dtype, num_blocks=20)
        for pages in worker.layers:
            fill(pages, kind)
        end = LENGTH
        for segments, (compaction,) in (((0, 0), worker.first), ((worker.capacity, LENGTH), worker.second)):
            end = compaction.plan.num_tokens
            assert attend(worker, compaction, segments, end).isfinite().all(), policy
            assert not worker.compactor.execute([compaction]).failures, policy
            for front in worker.fronts(compaction):
                live = front.positions >= 0
                assert live.any(), policy
                for plane in ("keys", "values", "log_votes", "scores", "aux"):
                    assert getattr(front, plane)[live].isfinite().all(), (policy, plane)
            assert attend(worker, compaction, (worker.capacity, end), end).isfinite().all(), policy


@pytest.mark.parametrize("exponent", [-30, 30])
@pytest.mark.parametrize("policy", ["keepkv", "knorm", "keydiff", "rkv", "d2o", "kvmerger", "asymkv", "zsmerge"])
def test_choices_by_direction_or_order_of_lengths_do_not_depend_on_the_unit(policy: str, exponent: int) -> None:
    kept = []
    for factor in (1.0, 2.0**exponent):
        worker = Worker(policy, (LENGTH,), num_blocks=20)
        for pages in worker.layers:
            pages.keys.mul_(factor)
        worker.compactor.execute(worker.first)
        kept.append([front.positions.sort().values for front in worker.fronts(worker.first[0])])
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))


class LongRequest:
    """A request that has generated ``num_tokens`` after its first compression, in a cache of a few blocks: those behind
    the front are used again and again."""

    def __init__(self, policy: str, interval: int, **fields: Any) -> None:
        self.interval = interval
        self.worker = Worker(policy, (LENGTH,), torch.float32, num_blocks=2 + 20 + -(-interval // BLOCK_SIZE), **fields)
        (first,) = self.worker.first
        self.worker.compactor.run([first])
        used = set(first.source_blocks.tolist())
        self.front_blocks = first.plan.blocks
        self.tail_blocks = [block for block in range(1, len(self.worker.caches[0])) if block not in used]
        self.num_tokens, self.num_merged = LENGTH, 0
        self.generator = torch.Generator().manual_seed(7)
        self.blocks: list[int] = []

    def step(self, score: float | None = None) -> None:
        """Generates ``interval`` tokens of random keys and values, and scores (None: random), and compresses them."""
        start, end = self.num_tokens, self.num_tokens + self.interval
        while len(self.blocks) < -(-end // BLOCK_SIZE):
            self.blocks.append(self.tail_blocks[len(self.blocks) % len(self.tail_blocks)])
        self.blocks[: len(self.front_blocks)] = self.front_blocks
        slots = torch.arange(start, end)
        block, offset = torch.tensor(self.blocks)[slots // BLOCK_SIZE], slots % BLOCK_SIZE
        for pages in self.worker.layers:
            for plane in (pages.keys, pages.values):
                plane[block, :, offset] = torch.rand(end - start, NUM_HEADS, HEAD_SIZE, generator=self.generator)
            random = torch.rand(end - start, NUM_HEADS, generator=self.generator)
            pages.scores[block, :, offset] = random if score is None else torch.full_like(random, score)
            pages.aux[block, :, offset] = 4.0 if self.worker.config.policy.tracker.mode != "sum" else 0.0
        front = self.worker.capacity
        plan = Compress("0", self.worker.text, "growth", end, end, 50, front, self.front_blocks)
        policy = self.worker.config.policy
        ring = None
        if window := policy.query_window:
            ring = QueryRing.empty(NUM_LAYERS, window, NUM_HEADS * GROUPS, HEAD_SIZE, torch.float32)
            for layer in range(NUM_LAYERS):
                queries = torch.randn(window, NUM_HEADS * GROUPS, HEAD_SIZE, generator=self.generator)
                ring.write(layer, queries, end)
        self.last = Compaction(plan, policy, torch.tensor(self.blocks), None, ring, front=front, tail=start)
        done = self.worker.compactor.execute([self.last])
        assert not done.failures
        self.num_merged += int(done.counts[0, 0])
        self.num_tokens = end


TOLERANCE = {256: 1e-4, 1: 3e-4}
"""Of votes, relative to the number of tokens, by tokens at a time: each merge rounds a logarithm in float32."""

EVERY_TOKEN = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.slow
@pytest.mark.parametrize("interval", [256, pytest.param(1, marks=EVERY_TOKEN)])
@pytest.mark.parametrize(
    ("policy", "fields"),
    [("keepkv", {"merge_threshold": -1.0, "zip_mode": "scale"}), ("zsmerge", {}), ("asymkv", {})],
    ids=["keepkv", "zsmerge", "asymkv"],
)
def test_votes_after_50_000_merges(policy: str, fields: dict[str, Any], interval: int) -> None:
    """None is lost: they add up to the number of tokens, in float64."""
    request = LongRequest(policy, interval, **fields)
    while request.num_merged < 50_000 * NUM_LAYERS * NUM_HEADS:
        request.step()
    for front in request.worker.fronts(request.last):
        assert (front.positions >= 0).all()
        for plane in ("keys", "values", "log_votes", "scores", "aux"):
            assert getattr(front, plane).isfinite().all()
        if policy == "zsmerge":  # counts tokens as they are; an entry that is no slot of its own counts 0
            assert (front.aux.double().clamp(min=1).sum(1) == request.num_tokens).all()
        else:
            votes = front.log_votes.double().exp().sum(1)
            assert (votes / request.num_tokens - 1).abs().max() < TOLERANCE[interval]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["weightedkv", "d2o", "kvmerger"])
def test_means_of_50_000_values_stay_between_them(policy: str) -> None:
    """Each merge is a convex combination, whose rounding must not add up; an entry keeps its own vote."""
    request = LongRequest(policy, 256)
    for pages in request.worker.layers:
        pages.values[request.front_blocks] = 0.5
    for _ in range(-(-50_000 // request.interval)):
        request.step()
    assert request.num_merged > 20_000 * NUM_LAYERS * NUM_HEADS
    for front in request.worker.fronts(request.last):
        live = front.positions >= 0
        assert (front.log_votes[live] == 0.0).all()
        values = front.values[live]
        assert values.min() > -1e-5 and values.max() < 1 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cam", "grkv"])
def test_values_after_50_000_merges_are_no_larger_than_after_5_000(policy: str) -> None:
    """What is spread over entries, or fitted to them, finds a balance with what leaves them. Votes stay 1."""
    request = LongRequest(policy, 256)
    largest = []
    for num_merged in (5_000, 50_000):
        while request.num_merged < num_merged * NUM_LAYERS * NUM_HEADS:
            request.step()
        seen = []
        for _ in range(10):
            request.step()
            for front in request.worker.fronts(request.last):
                live = front.positions >= 0
                assert front.keys[live].isfinite().all() and (front.log_votes[live] == 0.0).all()
                seen.append(front.values[live].abs().max())
        largest.append(max(seen))
    assert largest[1] < 1.5 * largest[0]
