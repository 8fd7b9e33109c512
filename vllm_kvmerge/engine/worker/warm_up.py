"""Warm-up: launches every kernel that serving may need, so that none is compiled while requests wait."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from vllm.logger import init_logger

from vllm_kvmerge import ops
from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.worker.cache_positions import turn_blocks
from vllm_kvmerge.engine.worker.compaction import Compaction, Execution
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.ops import (
    ROW_PLANES,
    AttentionBatch,
    Changes,
    HeadPages,
    PagedKVCache,
    ScoreMode,
    ScoreUpdate,
    SequenceLayers,
    Softmax,
)
from vllm_kvmerge.ops.attention import Fusion
from vllm_kvmerge.ops.coded import number_of
from vllm_kvmerge.ops.types import PageTables, cell_bytes
from vllm_kvmerge.ops.zipping import ZipPlanes
from vllm_kvmerge.policies import CompressionPolicy
from vllm_kvmerge.policies.rotation import Rotation

logger = init_logger(__name__)

BUDGET, PROMPT, INTERVAL = 160, 360, 16
"""Entries and tokens of the compactions: enough for each preset to have something to do."""

SCORED = ScoreUpdate(ScoreMode.SUM, 0.9), ScoreUpdate(ScoreMode.LOG_EMA, 0.9)
"""Updates of a prompt's scores, one for each way of computing them."""

FUSIONS: tuple[Fusion, ...] = ("sum", "max")


@dataclass(frozen=True)
class AttentionKind:
    """What the attention of some layers has in common.

    cache: of one of them. dtype: of queries. table_layers: the caches of all compressed layers if heads may have pages
    of their own in them. chunk: queries of a batch of chunks, at least. has_scores: queries of prompts are scored.
    may_be_coded: heads' pages may be coded ones.
    """

    cache: PagedKVCache
    num_heads: int
    dtype: torch.dtype
    scale: float
    softmax: Softmax
    window: int
    chunked: bool
    table_layers: Sequence[PagedKVCache] | None
    chunk: int
    has_scores: bool
    may_be_coded: bool

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for kinds with the same kernels."""
        cache, softmax = self.cache, self.softmax
        traits = self.num_heads, cache.values.shape[1:], cache.strides, cache.keys.dtype, softmax.cap, self.window
        has = softmax.sinks is None, self.table_layers is None, self.has_scores, self.may_be_coded
        return *traits, self.chunked, *has


def attention(kinds: Iterable[AttentionKind], max_blocks: int) -> None:
    """Launches the kernels that write tokens, attend, and score prompts, each with all that distinguishes them.

    They read the null block, and write nothing to the cache. max_blocks: of a sequence.
    """
    for kind in {kind.key: kind for kind in kinds}.values():
        heads, kv_heads, head_size = kind.num_heads, kind.cache.num_kv_heads, kind.cache.head_size
        device = kind.cache.device
        blocks = torch.zeros(max_blocks, dtype=torch.int32, device=device)
        nowhere = torch.full((kind.chunk,), -1, dtype=torch.int64, device=device)
        # Models pass queries, keys and values as parts of one projection, or each by itself.
        for heads_of_row in (heads, heads + 2 * kv_heads):
            rows = torch.zeros(kind.chunk, heads_of_row, head_size, dtype=kind.dtype, device=device)
            query, tokens = rows[:, :heads], rows.view(kind.chunk, -1)
            tokens = tokens[:, : kv_heads * head_size].unflatten(1, (kv_heads, head_size))
            ops.write_tokens(kind.cache, nowhere, tokens, tokens)
            for count in (1, kind.chunk):
                _attend(kind, query[:count], blocks)
                if kind.has_scores:
                    _score(kind, query[:count], blocks)
            if kind.has_scores:
                no_rings = torch.zeros(1, dtype=torch.int64, device=device)
                for listed in (None, no_rings):  # queries of all tokens, and of some
                    ops.keep_queries(query[:1], no_rings, 0, listed)


def _attend(kind: AttentionKind, query: Tensor, blocks: Tensor) -> None:
    count, output = len(query), torch.empty_like(query, memory_format=torch.contiguous_format)
    batch = AttentionBatch.single(blocks, count, count)
    given = kind.scale, output, kind.softmax, kind.window, kind.chunked
    ops.paged_attention(query, kind.cache, batch, *given)
    if kind.table_layers is not None:
        no_pages = torch.zeros(1, dtype=torch.int64, device=query.device)
        for coded in (False, True) if kind.may_be_coded else (False,):
            batch = replace(batch, tables=PageTables(kind.table_layers, 0, no_pages, coded))
            ops.paged_attention(query, kind.cache, batch, *given)


def _score(kind: AttentionKind, query: Tensor, blocks: Tensor) -> None:
    cache, count, device = kind.cache, len(query), query.device
    for update in SCORED:
        scores, aux = torch.zeros(2, cache.num_kv_heads, count, device=device)
        ops.score_prompt_queries(query, cache, blocks, update, kind.scale, scores, aux, kind.softmax)
    # One token of a context of one, which the queries repeat.
    for num_rows, weights in ((cache.num_kv_heads, None), (kind.num_heads, torch.ones(count, device=device))):
        scores = torch.zeros(num_rows, 1, device=device)
        ops.score_repetition(
            query, cache, blocks, kind.scale, 1 + count, 1, 0, 0, scores, weights, softmax=kind.softmax
        )


def scratch_like(cache: PagedKVCache, num_blocks: int) -> PagedKVCache:
    """A small cache of zeros with the layout of ``cache``."""
    num_bytes = cell_bytes(cache.head_size, cache.keys.dtype)
    shape = num_blocks, cache.num_kv_heads, cache.block_size, num_bytes
    memory = torch.zeros(shape, dtype=torch.uint8, device=cache.device).view(cache.keys.dtype)
    options = cache.keys.stride(3) != 1, cache.key_scale, cache.value_scale, cache.is_interleaved
    return PagedKVCache.of(memory, cache.head_size, *options)


def compactions(
    compactor: Compactor,
    policies: Iterable[CompressionPolicy],
    dtype: torch.dtype,
    head_pages: bool,
    may_be_coded: bool,
) -> None:
    """Compresses a small cache of its own by each policy: at a prompt's end, and after an interval.

    dtype: of queries. head_pages: heads may have pages of their own. may_be_coded: and coded ones.
    """
    size, heads, device = compactor.block_size, compactor.num_kv_heads, compactor.device
    group_size = compactor.group_size
    num_blocks = -(-(PROMPT + INTERVAL) // size)
    target = list(range(1 + num_blocks, 1 + 2 * num_blocks))
    layers = [scratch_like(cache, 1 + 2 * num_blocks) for cache in compactor.layers]
    # The model's projections, which some policies read, would be kept for good.
    weights = torch.zeros(heads, group_size, 1, layers[0].head_size, device=device)
    compactor = replace(compactor, layers=layers, output_weights=lambda layer: weights, max_seconds=None)
    shape = 2, len(layers), heads, PROMPT
    numbers = (torch.arange(math.prod(shape), device=device) * 37 % 97 / 97.0).view(shape)
    blocks = torch.arange(1, 1 + num_blocks, dtype=torch.int32, device=device)
    for policy in policies:
        ring = None
        if policy.query_window:
            of_query = heads * group_size, layers[0].head_size
            ring = QueryRing.empty(len(layers), policy.query_window, *of_query, dtype, device)
        most = policy.capacity(BUDGET)
        capacity = PROMPT if most is None else min(most, PROMPT)
        plan = Compress("", "", "growth", PROMPT, PROMPT, BUDGET, capacity, target)
        first = Compaction(plan, policy, blocks, PromptScores(*numbers.clone()), ring)
        later = replace(plan, num_tokens=PROMPT + INTERVAL, seq_len=PROMPT + INTERVAL)
        second = replace(first, plan=later, front=capacity, tail=PROMPT, prompt_scores=None)
        _run(compactor, [first, second])
        if compactor.rotation is not None:
            _run(compactor, [replace(one, moves_keys=True) for one in (first, second)])
        if head_pages and (most != BUDGET or not policy.allocator.fills_budget):
            shared = target[: -(-BUDGET // size)]
            paged = [
                replace(one, plan=replace(one.plan, blocks=shared, share_blocks=len(shared)), has_pages=True)
                for one in (first, second)
            ]
            _run(compactor, paged)
    _read_entries(compactor, blocks, head_pages)
    if may_be_coded:
        cache = layers[0]
        ids = HeadPages.even(1, 0, heads, blocks.cpu())[None]
        pages = HeadPages((cache,), ids, torch.ones(1, heads, dtype=torch.int64), torch.tensor([number_of("int8")]))
        rows = torch.zeros(heads, 1, cache.head_size, device=device)
        ops.write_codes(SequenceLayers.of(cache, blocks.long(), 0, 0, 0), pages, rows, rows, rows[..., 0])


def windows(groups: Iterable[tuple[Sequence[PagedKVCache], Rotation | None]]) -> None:
    """Turns keys as compressions with ``positions: cache`` do in layers with a window.

    groups: the caches of each group of such layers, which are alike, and their RoPE if keys can be turned by it.
    """
    for caches, rotation in groups:
        if rotation is not None:
            turn_blocks([scratch_like(caches[0], 1)], rotation, [0], caches[0].block_size, 1)


def _run(compactor: Compactor, steps: list[Compaction]) -> None:
    """Compactions of one request, one after the other."""
    pages: HeadPages | None = None
    for step in steps:
        pages = _run_together(compactor, [replace(step, pages=pages)]).pages.get(0)


def _run_together(compactor: Compactor, step: list[Compaction]) -> Execution:
    done = compactor.execute(step)
    for error in done.failures.values():  # policies that the model does not allow
        logger.debug("Warming up: %s", error)
    return done


def _read_entries(compactor: Compactor, blocks: Tensor, head_pages: bool) -> None:
    """Reads entries in all ways that a policy may, which can depend on its parameters and on the entries."""
    cache, device = compactor.layers[0], compactor.device
    located = SequenceLayers.of(cache, blocks, 0, 0, PROMPT)
    places = [located]
    if head_pages:
        ids = HeadPages.even(1, 0, compactor.num_kv_heads, blocks.cpu())[None]
        places.append(replace(located, pages=HeadPages((cache,), ids, torch.full(ids.shape[:2], PROMPT))))
    places += [seq_layers.of_heads([0]) for seq_layers in places]
    for seq_layers in places:
        num_heads = seq_layers.num_heads
        queries = torch.zeros(num_heads, compactor.group_size, 1, cache.head_size, device=device)
        index = torch.zeros(num_heads, 1, dtype=torch.int64, device=device)
        log_votes, _, _, positions = ops.gather_metadata(seq_layers)
        new = torch.zeros(num_heads, 1, cache.head_size, device=device)
        for changes in (None, Changes(index, index, new, new), Changes(index, index, None, None)):
            for plane in ROW_PLANES:
                ops.gather_rows(seq_layers, plane, index, changes)
            ops.most_similar(seq_layers, index, index, index == 0, changes)
        for fusion in FUSIONS:
            softmax = compactor.softmax(0).of_heads(slice(num_heads))
            ops.fused_attention(
                seq_layers, queries, index + PROMPT, log_votes, positions, compactor.scale, fusion, softmax
            )
        for num_scores in (1, compactor.group_size):
            logits = torch.zeros(num_heads, num_scores, PROMPT, device=device)
            planes = log_votes, log_votes, log_votes, positions, positions < 0, logits, logits[..., :1]
            ops.zip_groups(index, index, index < 0, ZipPlanes(*planes), ScoreMode.MEAN, "auto", softmax)
