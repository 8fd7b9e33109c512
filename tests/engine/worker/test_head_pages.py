"""Fronts in pages of heads' own against ordinary fronts with the same shares and dead entries, over a generation."""

import math
import random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests import examples
from tests.policies.sampling import rope
from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.schedule import RequestCompression, Segments
from vllm_kvmerge.engine.worker.compaction import Compaction
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.engine.worker.head_pages import PageAssignment
from vllm_kvmerge.engine.worker.rows import score_update
from vllm_kvmerge.ops import (
    NO_UPDATE,
    AttentionBatch,
    HeadPages,
    PagedKVCache,
    cell_bytes,
    paged_attention,
    score_prompt_queries,
    write_tokens,
)
from vllm_kvmerge.policies import Allocator, CompressionPolicy
from vllm_kvmerge.request.limits import Limits, ModelShape
from vllm_kvmerge.request.spec import parse_compression

LAYERS, HEADS, GROUP, SIZE, BLOCK, SCALE = 4, 2, 2, 32, 16, 32**-0.5
PROMPT, GENERATED, NUM_BLOCKS = 203, 300 // examples.share, 48
SHAPE = ModelShape(LAYERS, HEADS, GROUP, SIZE, HEADS * GROUP * SIZE, 4)
LIMITS = Limits(None, 1 << 30, 1e9, SHAPE, BLOCK, 4096, head_pages=True)


class Dealt(Allocator):
    """The shares that the side with head pages came to."""

    name = "dealt"
    source = "the other side"
    splits_heads = True
    shares: ClassVar[list[list[int]]] = []

    def capacity(self, budget: int) -> int | None:
        return None

    def head_budgets(self, entries: Any, importance: Any, context: Any) -> list[int]:
        return [self.shares[at][head] for at, head in zip(context.heads.layers, context.heads.indices, strict=True)]


class Side:
    """One request's cache, in blocks of its own."""

    def __init__(self, compression: RequestCompression, seed: int) -> None:
        cell = cell_bytes(SIZE, torch.float32) // 4
        self.layers = [
            PagedKVCache.of(torch.full((NUM_BLOCKS, HEADS, BLOCK, cell), torch.nan), SIZE) for _ in range(LAYERS)
        ]
        weights = torch.randn(LAYERS, HEADS, GROUP, 48, SIZE, generator=torch.Generator().manual_seed(3))
        self.compactor = Compactor(
            self.layers, SCALE, list(range(HEADS)), output_weights=lambda layer: weights[layer], group_size=GROUP,
            rotation=rope(SIZE),
            max_bytes=1 << 28 if compression.config.decode == "bounded" else 1,  # all layers together, or each alone
        )  # fmt: skip
        order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.blocks = order[: -(-(PROMPT + GENERATED) // BLOCK)]
        self.compression, self.config = compression, compression.config
        self.segments, self.pages, self.num_blocks = Segments(), None, []
        window = max(1, self.config.query_window)
        self.ring = QueryRing.empty(LAYERS, window, HEADS * GROUP, SIZE, torch.float32)
        self.scores = PromptScores.empty(LAYERS, HEADS, PROMPT)

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """``[layers, tokens, H, d]`` each."""
        slots = torch.arange(start, start + keys.shape[1])
        slots = self.blocks[slots // BLOCK] * BLOCK + slots % BLOCK
        for cache, key, value in zip(self.layers, keys, values, strict=True):
            write_tokens(cache, slots, key, value)

    def attend(self, queries: Tensor, seq_len: int) -> Tensor:
        """``[layers, 1, H * G, d]``: attention of the newest token; ``queries`` likewise."""
        update = score_update(self.config) if self.config.tracks_decode else NO_UPDATE
        places, tail = (0, self.segments.tail) if self.pages else (self.segments.front, self.segments.tail)
        outputs = torch.empty_like(queries)
        for layer, cache in enumerate(self.layers):
            batch = AttentionBatch.single(self.blocks, 1, seq_len, places, tail, update)
            if self.pages is not None:
                ids, fronts = self.pages.ids[layer][None], self.pages.fronts[layer][None]
                batch = AttentionBatch(*batch.tensors, 1, HeadPages(self.layers, ids, fronts))
            paged_attention(queries[layer], cache, batch, SCALE, outputs[layer])
        return outputs

    def compact(self, num_tokens: int, policy: CompressionPolicy, has_pages: bool) -> None:
        size, front = self.compression.new_front(self.segments, num_tokens), self.segments.num_places
        assert size.has_pages
        blocks = self.blocks[: size.num_blocks if has_pages else -(-size.places // BLOCK)].tolist()
        sizes = num_tokens, num_tokens, self.compression.budget, size.places
        plan = Compress("r", "", "growth", *sizes, blocks, size.share_blocks if has_pages else 0)
        scores = self.scores if front == 0 and self.config.policy.needs_scores else None
        ring = self.ring if self.config.policy.query_window else None
        own = {"pages": self.pages, "front": front, "tail": self.segments.tail, "has_pages": has_pages}
        moves_keys = self.config.positions == "cache"
        compaction = Compaction(plan, policy, self.blocks, scores, ring, moves_keys=moves_keys, **own)
        done = self.compactor.execute([compaction])
        assert not done.failures
        self.pages = done.pages.get(0)
        if size.may_shrink and self.pages:
            report, used = done.fronts[0], set().union(*used_pages(self.pages))
            assert report.entries == math.ceil(self.pages.fronts.double().mean())
            assert {page // (LAYERS * HEADS) for page in used} <= set(blocks[: report.num_blocks])
            self.num_blocks.append(report.num_blocks)
        entries = size.entries if has_pages else size.places
        self.segments = Segments(entries, num_tokens, num_tokens, size.places if has_pages else 0)


def under(most: int) -> dict[str, Any]:
    return {"budget": {"threshold": 0.012, "max": most}}


# Without max-pooling, in which neighbours of a large score tie: of equal ones the first in the cache stays.
POLICIES: list[dict[str, Any]] = [
    {"policy": "adakv", "kernel_size": 1},
    {"policy": "pyramidkv", "kernel_size": 1},
    {"policy": "pyramidinfer"},
    {"policy": "d2o", "selector": "h2o"},
    {"policy": "criticalkv", "allocator": "adaptive", "kernel_size": 1},
    {"policy": "snapkv", "skip_layers": 1, "kernel_size": 1},
    {"policy": "keepkv", "kernel_size": 1, "allocator": "adaptive"},
    {"policy": "zsmerge", "kernel_size": 1, "allocator": "adaptive"},
    {"policy": "weightedkv", "kernel_size": 1, "allocator": "pyramid"},
    {"policy": "grkv", "allocator": "adaptive", "kernel_size": 1, "lambda_v": 0.1, "components": "v"},
    {"policy": "asymkv", "allocator": "adaptive"},
    {"policy": "morphkv", "skip_layers": 1},
    {"policy": "snapkv", "kernel_size": 1, **under(70)},
    {"policy": "zsmerge", "selector": "h2o", "num_sink_tokens": 0, "recent_share": 0.25, **under(60)},
    {"policy": "snapkv", "allocator": "global", "kernel_size": 1},
    {"policy": "adakv", "kernel_size": 1, "positions": "cache"},
    {"policy": "keepkv", "kernel_size": 1, "allocator": "pyramid", "positions": "cache"},
    {"policy": "snapkv", "kernel_size": 1, **under(70), "positions": "cache"},
]


@pytest.mark.parametrize("decode", ["bounded", "grow"])
@pytest.mark.parametrize("fields", POLICIES, ids=lambda fields: "-".join(map(str, fields.values())))
def test_the_same_outputs_as_with_dead_entries(fields, decode):
    config = parse_compression({"budget": 70, "decode": decode, **fields})
    assert config is not None
    one = RequestCompression.of(config, PROMPT, GENERATED, LIMITS)
    last = PROMPT + (GENERATED if decode == "bounded" else 40)  # afterwards it is not compressed again
    paged, masked = Side(one, 1), Side(one, 2)
    oracle = config.policy.model_copy(update={"allocator": Dealt()})
    generator = torch.Generator().manual_seed(5)
    # Heads differ in how much of their attention goes to few tokens.
    scales = torch.linspace(0.3, 4.0, LAYERS * HEADS * GROUP).view(LAYERS, 1, HEADS * GROUP, 1)
    keys, values = torch.randn(2, LAYERS, PROMPT + GENERATED, HEADS, SIZE, generator=generator)
    queries = torch.randn(LAYERS, PROMPT + GENERATED, HEADS * GROUP, SIZE, generator=generator) * scales
    counts = set()
    for side in (paged, masked):
        side.write(0, keys[:, :PROMPT], values[:, :PROMPT])
        window = 0 if one.window == "all" else PROMPT - one.window
        for layer, cache in enumerate(side.layers):
            side.ring.write(layer, queries[layer, PROMPT - side.ring.window : PROMPT], PROMPT)
            if window < PROMPT:
                planes = side.scores.scores[layer], side.scores.aux[layer]
                score_prompt_queries(
                    queries[layer, window:PROMPT], cache, side.blocks, score_update(config), SCALE, *planes
                )
    for end in range(PROMPT, last):
        due = one.next_compression(paged.segments)
        if due is not None and end >= due:
            paged.compact(end, config.policy, has_pages=True)
            Dealt.shares, before = paged.pages.fronts.tolist(), masked.segments
            masked.segments = Segments(before.front, before.tail, before.changed_at)
            masked.compact(end, oracle, has_pages=False)
            counts.add(tuple(paged.pages.fronts.flatten().tolist()))
            assert len(paged.pages.ids.unique()) >= -(-paged.pages.fronts // BLOCK).sum()
        outputs = []
        for side in (paged, masked):
            side.write(end, keys[:, end : end + 1], values[:, end : end + 1])
            for layer in range(LAYERS):
                side.ring.write(layer, queries[layer, end : end + 1], end + 1)
            outputs.append(side.attend(queries[:, end : end + 1], end + 1))
        assert float((outputs[0] - outputs[1]).abs().max()) < 2e-4, end
    assert any(len(set(shares)) > 1 for shares in counts)
    assert not one.may_shrink or min(paged.num_blocks) < -(-one.budget // BLOCK)
    assert decode == "grow" or len(counts) > 1 or config.policy.allocator.layer_budgets(70, 200, LAYERS, 1) is not None


def used_pages(pages: HeadPages) -> list[set[int]]:
    """Those of each head of each layer."""
    heads = zip(pages.ids.flatten(0, 1), pages.fronts.flatten().tolist(), strict=True)
    return [set(ids[: -(-front // BLOCK)].tolist()) for ids, front in heads]


def test_pages_are_dealt_without_harm():
    """No page twice; none is written by a head while another, in this round or a later one, may read it."""
    cache, lanes = PagedKVCache.planned(99, HEADS, BLOCK, SIZE, torch.float32, torch.device("cpu")), LAYERS * HEADS
    for seed in range(400):
        draw = random.Random(seed)
        before, blocks, within = None, draw.sample(range(21), draw.randint(1, 4)), seed % 2 == 0
        for step in range(4):
            shares: list[int] = []
            size = HEADS if within else lanes
            for _ in range(lanes // size):
                marks = sorted(draw.sample(range(1, len(blocks) * size + 1), size))
                counts = [b - a for a, b in zip([0, *marks], marks, strict=False)]
                shares += [count * BLOCK - draw.randrange(BLOCK) for count in counts]
            assigned = PageAssignment.of([cache] * LAYERS, shares, max(shares), blocks, before, within_layers=within)
            assert assigned.pages.fronts.flatten().tolist() == shares
            used = used_pages(assigned.pages)
            assert len(set().union(*used)) == sum(map(len, used))
            assert {page // lanes for page in set().union(*used)} <= set(blocks)
            # What heads may read: their pages, and their lanes of blocks that were not of the front.
            sources = [set() for _ in used] if before is None else used_pages(before)
            fronts = {page // lanes for page in set().union(*sources)}
            for lane, pages in enumerate(sources):
                pages |= {block * lanes + lane for block in {*blocks, 90} - fronts}
            grows = assigned.grows.flatten().tolist()
            for lane, pages in enumerate(used):
                others = [sources[i] for i in range(lanes) if i != lane and (grows[i] or not grows[lane])]
                assert not pages & set().union(*others), (seed, step)
                assert not within or {page % lanes // HEADS for page in pages} == {lane // HEADS}
            before = assigned.pages
            if draw.random() < 0.5:
                stay = draw.sample(blocks, len(blocks) - (len(blocks) > 1))
                blocks = stay + draw.sample([b for b in range(50) if b not in blocks], draw.randint(1, 2))
