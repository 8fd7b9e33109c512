"""Attention, scores of queries and writes of tokens in Triton."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vllm_kvmerge.ops.pieces import Lists
from vllm_kvmerge.ops.triton import attention_kernels
from vllm_kvmerge.ops.triton.backend import codes_of, layer_addresses, product_type, rounded
from vllm_kvmerge.ops.triton.descriptors import Cache, Rows, Tokens
from vllm_kvmerge.ops.triton.plan import AttentionPlan, power_of_two, settings_for, shares
from vllm_kvmerge.ops.types import PLAIN_SOFTMAX, AttentionBatch, PagedKVCache, ScoreMode, ScoreUpdate, Softmax
from vllm_kvmerge.ops.workspace import Workspace, workspace_of

LOG2E = attention_kernels.LOG2E.value

PIECES_AT_ONCE = 16
"""Pieces whose results are combined at a time."""

COLUMN_PIECES = 2
"""The same for tiles of many queries, which have few pieces; more would cost registers."""


def _check(query: Tensor, cache: PagedKVCache) -> None:
    if query.shape[2] != cache.head_size or query.shape[1] % cache.num_kv_heads:
        raise ValueError(f"query of shape {tuple(query.shape)} does not suit {tuple(cache.values.shape)} values")
    if query.stride(2) != 1:
        raise ValueError("query and output must be contiguous in their last dimension")


def _tokens(tensor: Tensor) -> Tokens:
    return Tokens(tensor, *tensor.stride()[:2])


def _planes(cache: PagedKVCache) -> Cache:
    """Those of a cache, as kernels take them, made once."""
    found: Cache | None = cache.__dict__.get("_kernel_planes")
    if found is None:
        planes = cache.keys, cache.values, cache.log_votes, cache.scores, cache.aux
        found = cache.__dict__["_kernel_planes"] = Cache(*planes, *cache.strides)
    return found


@dataclass(frozen=True)
class _Call:
    """The launches of one call of attention, and their common arguments."""

    query: Tensor
    cache: PagedKVCache
    batch: AttentionBatch
    scale: float
    softmax: Softmax
    plan: AttentionPlan
    work: Workspace
    window: int = 0
    chunked: bool = False

    @cached_property
    def rows(self) -> Rows:
        table, *numbers = (tensor.contiguous() for tensor in self.batch.tensors)
        tables, pages = self.batch.tables, (None, None, 0)
        if tables is not None:
            pages = tables.addresses.contiguous(), layer_addresses(tables.layers), tables.layer
        return Rows._make((table, *numbers, *pages, table.stride(0)))

    @cached_property
    def given(self) -> tuple[Tokens, Cache]:
        return _tokens(self.query), _planes(self.cache)

    @property
    def groups(self) -> int:
        return self.query.shape[1] // self.cache.num_kv_heads

    @property
    def max_entries(self) -> int:
        return self.batch.block_table.shape[1] * self.cache.block_size

    @property
    def logit_scale(self) -> float:
        """What products of queries and stored keys are multiplied by, to the base 2."""
        return self.scale * LOG2E * self.cache.key_scale

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Constants of the call's kernels, including those of ``attend``'s tiles."""
        return {
            "G": self.groups,
            "HEAD_SIZE": self.cache.head_size,
            "BLOCK_SIZE": self.cache.block_size,
            "BLOCK_M": self.plan.block_m,
            "BLOCK_D": power_of_two(self.cache.head_size),
            "LAYERS": 0 if self.batch.tables is None else len(self.batch.tables.layers),
            "COMPUTE": product_type(self.query.dtype, self.cache.keys.dtype),
            "CAP": self.softmax.cap * LOG2E,
        }

    @property
    def piece_constants(self) -> dict[str, Any]:
        """``constants``, and those of the kernels whose programs have pieces."""
        return self.constants | {"HEADS": self.cache.num_kv_heads, "WINDOW": self.window, "CHUNKED": self.chunked}

    @cached_property
    def pieces(self) -> Lists:
        """The lists that ``divide`` makes, of this call or of an earlier one for the same rows."""
        plan, settings, queries = self.plan, self.plan.settings, self.plan.block_m // self.groups

        def divide(*lists: Tensor) -> None:
            attention_kernels.divide[(plan.num_tiles,)](
                *self.rows[2:6], *lists, plan.num_tiles, plan.tiles, plan.num_pieces, plan.slots, settings.least,
                queries, self.window, int(self.chunked), settings.block_n,
                BLOCK=1024, num_warps=8, num_stages=1,
            )  # fmt: skip

        return plan.lists(self.batch, self.cache, (settings, queries, self.window, self.chunked), divide)

    def attend(self, output: Tensor, values: bool) -> Tensor:
        """Launches ``attend`` and returns the log-sum-exp of its pieces, its only result without ``values``."""
        cache, plan = self.cache, self.plan
        buffers = {name: self.work.take(name, size) for name, size in plan.sizes.items()}
        lse = buffers["lse"]
        tables = self.batch.tables
        codes = codes_of(cache) if tables is not None and tables.coded else None
        attention_kernels.attend[(plan.num_pieces * cache.num_kv_heads,)](
            *self.given, codes, _tokens(output), *self.rows, *self.pieces[:2], self.softmax.sinks,
            buffers.get("partial", lse), lse, buffers.get("kept", lse), self.logit_scale, cache.value_scale, plan.tiles,
            plan.kept,
            VALUES=values, KEEP=plan.kept > 0, BLOCK_N=plan.settings.block_n, **self.piece_constants,
            **plan.settings.launch,
        )  # fmt: skip
        return lse

    def finish(self, output: Tensor, lse: Tensor) -> None:
        """Launches ``finish`` if tiles may have several pieces or logits are kept."""
        cache, plan = self.cache, self.plan
        chosen = settings_for("finish", cache, self.groups)
        rows_combined = plan.kept or plan.block_m // self.groups * self.groups
        num_combined = plan.split_tiles * rows_combined
        programs = num_combined + (plan.num_pieces if plan.kept else 0)
        if programs == 0:
            return
        attention_kernels.finish[(programs * cache.num_kv_heads,)](
            *self.given, _tokens(output), *self.rows, *self.pieces,
            self.work.take("partial", 1), lse, self.work.take("kept", 1), self.logit_scale, plan.tiles, plan.kept,
            num_combined, rows_combined,
            KEEP=plan.kept > 0, BLOCK_N=plan.settings.block_n, BLOCK_S=PIECES_AT_ONCE, BLOCK_U=chosen.block_n,
            **self.piece_constants, **chosen.launch,
        )  # fmt: skip

    def update_columns(
        self, scores: Tensor, aux: Tensor, lse: Tensor | None, in_cache: bool, parts: Tensor | None = None
    ) -> None:
        """Launches ``update_columns``. scores, aux: planes of the cache (``in_cache``), or ``[H, entries]``. lse: what
        ``attend`` returned; None where no row needs it. parts: of each tile in ``lse``, if not as ``divide`` has it."""
        cache, plan = self.cache, self.plan
        if parts is None:
            parts = self.rows.query_starts if lse is None else self.pieces[1]
        lse = self.work.take("lse", 1) if lse is None else lse
        chosen = settings_for("columns", cache, self.groups)
        most = len(self.batch) * -(-self.max_entries // chosen.block_n)
        programs = shares(chosen.programs, cache.num_kv_heads, most, cache)
        attention_kernels.update_columns[(programs, cache.num_kv_heads)](
            *self.given, scores, aux, *self.rows, parts, lse, self.logit_scale,
            len(self.batch), plan.tiles, *(scores.stride()[:2] if in_cache else (0, scores.stride(0))),
            IN_CACHE=in_cache, BLOCK_N=chosen.block_n, BLOCK_S=COLUMN_PIECES, LSE_BLOCK_N=plan.settings.block_n,
            **self.constants, **chosen.launch,
        )  # fmt: skip


def paged_attention(
    query: Tensor,
    cache: PagedKVCache,
    batch: AttentionBatch,
    scale: float,
    output: Tensor,
    softmax: Softmax = PLAIN_SOFTMAX,
    window: int = 0,
    chunked: bool = False,
    workspace: Workspace | None = None,
) -> None:
    """See ``reference.paged_attention``.

    Without ``batch.max_query_len`` a call waits for the GPU and cannot be captured. The launches depend on that number
    and on shapes alone; a sequence may be shorter than its row of the block table. workspace: default the device's own.

    With up to 16 rows of queries and query heads, logits of sequences that update scores are kept in the workspace at
    their slots, 4 bytes each; no two such sequences may share a block, just as none share a score. Those of entries in
    pages (``batch.tables``) are computed twice instead. Raises ValueError if the tables' layers differ in layout.
    """
    if len(batch) == 0:
        return
    _check(query, cache)
    _check(output, cache)
    num_queries = int(batch.query_lens.max()) if batch.max_query_len is None else batch.max_query_len
    num_rows, num_blocks = batch.block_table.shape
    plan = AttentionPlan.of(cache, query.shape[1], num_queries, num_rows, num_blocks, window)
    work = workspace or workspace_of(query.device)
    call = _Call(query, cache, batch, scale, softmax, plan, work, window, chunked)
    lse = call.attend(output, values=True)
    call.finish(output, lse)
    if not plan.kept and not window:
        call.update_columns(cache.scores, cache.aux, lse, in_cache=True)


def score_prompt_queries(
    query: Tensor,
    cache: PagedKVCache,
    blocks: Tensor,
    update: ScoreUpdate,
    scale: float,
    scores: Tensor,
    aux: Tensor,
    softmax: Softmax = PLAIN_SOFTMAX,
    lse: Tensor | None = None,
) -> None:
    if query.shape[0] == 0:
        return
    _check(query, cache)
    if scores.stride() != aux.stride() or scores.stride(1) != 1:
        raise ValueError("scores and aux must have the same strides and be contiguous in their last dimension")
    seq_len = scores.shape[1]
    blocks = blocks.int()  # kernels are compiled for each type
    batch = AttentionBatch.single(blocks[: -(-seq_len // cache.block_size)], query.shape[0], seq_len, update=update)
    plan = AttentionPlan.of(cache, query.shape[1], query.shape[0], 1, batch.block_table.shape[1], is_prompt=True)
    call = _Call(query, cache, batch, scale, softmax, plan, workspace_of(query.device))
    if update.mode == ScoreMode.LOG_EMA:  # only probabilities need the log-sum-exp
        call.update_columns(scores, aux, None, in_cache=False)
    elif lse is None:
        call.update_columns(scores, aux, call.attend(query, values=False), in_cache=False)
    else:
        numbers = torch.arange(plan.tiles, dtype=torch.int32, device=query.device)
        parts = torch.stack([numbers, torch.ones_like(numbers)], 1)
        call.update_columns(scores, aux, _by_tile(lse, plan, cache.num_kv_heads), in_cache=False, parts=parts)


def _by_tile(lse: Tensor, plan: AttentionPlan, num_kv_heads: int) -> Tensor:
    """``[H * G, q]``, natural logarithms, as ``attend`` leaves them where each tile is one piece: ``[tiles, H,
    block_m]``, to the base 2."""
    groups = len(lse) // num_kv_heads
    queries = plan.block_m // groups
    padded = torch.nn.functional.pad(lse * LOG2E, (0, plan.tiles * queries - lse.shape[1]))
    rows = padded.view(num_kv_heads, groups, plan.tiles, queries).permute(2, 0, 3, 1).flatten(2)
    return torch.nn.functional.pad(rows, (0, plan.block_m - rows.shape[2]))


def score_repetition(
    query: Tensor,
    cache: PagedKVCache,
    blocks: Tensor,
    scale: float,
    seq_len: int,
    context: int,
    start: int,
    sinks: int,
    scores: Tensor,
    weights: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
    own: Tensor | None = None,
) -> None:
    (num_queries, num_heads), (num_rows, num_scored) = query.shape[:2], scores.shape
    if num_queries == 0 or num_scored == 0:
        return
    _check(query, cache)
    if scores.stride(1) != 1 or num_rows not in (cache.num_kv_heads, num_heads):
        raise ValueError(f"scores of shape {tuple(scores.shape)} and strides {scores.stride()} do not suit the heads")
    groups = num_heads // cache.num_kv_heads
    constants = {
        "G": groups,
        "HEAD_SIZE": cache.head_size,
        "BLOCK_SIZE": cache.block_size,
        "COMPUTE": product_type(query.dtype, cache.keys.dtype),
        "CAP": softmax.cap * LOG2E,
        "BLOCK_D": power_of_two(cache.head_size),
    }
    rows, columns = settings_for("prefill", cache, groups), settings_for("columns", cache, groups)
    block_m = power_of_two(max(16, groups, rows.block_m))
    blocks, weights = blocks.int().contiguous(), None if weights is None else weights.contiguous()
    lse = torch.empty(num_queries, num_heads, device=query.device)
    given = _tokens(query), _planes(cache), blocks
    scale = scale * LOG2E * cache.key_scale
    attention_kernels.normalize_repetition[(-(-num_queries // (block_m // groups)), cache.num_kv_heads)](
        given[0], None if own is None else _tokens(own), *given[1:], weights, softmax.sinks, lse, scale, num_queries,
        seq_len, context, start, min(sinks, start), num_scored,
        BLOCK_M=block_m, BLOCK_N=rows.block_n, **constants, **rows.launch,
    )  # fmt: skip
    attention_kernels.raise_scores[(-(-num_scored // columns.block_n), num_rows)](
        *given, lse, scores, scale, num_queries, num_heads, start, num_scored, scores.stride(0),
        PER_SCORE=num_heads // num_rows, BLOCK_M=block_m, BLOCK_N=columns.block_n, **constants, **columns.launch,
    )  # fmt: skip


def write_tokens(cache: PagedKVCache, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    if len(slot_mapping) == 0:
        return
    dtype = cache.keys.dtype
    scales = cache.key_scale, cache.value_scale
    key, value = (
        rounded(rows if rows.stride(2) == 1 else rows.contiguous(), dtype, scale)
        for rows, scale in zip((key, value), scales, strict=True)
    )
    chosen = settings_for("write", cache)
    attention_kernels.write[(len(slot_mapping), -(-cache.num_kv_heads // chosen.block_n))](
        slot_mapping, _tokens(key), _tokens(value), _planes(cache), *scales, cache.num_kv_heads, slot_mapping.stride(0),
        HEAD_SIZE=cache.head_size, BLOCK_SIZE=cache.block_size, BLOCK_H=chosen.block_n,
        BLOCK_D=power_of_two(cache.head_size), LIMIT=torch.finfo(dtype).max if cache.is_quantised else 0.0,
        **chosen.launch,
    )  # fmt: skip
