"""The operators in Triton, with the signatures and semantics of ``reference``.

Index arithmetic stays on PyTorch, all but ``join_slots``. Arguments are hardly checked: their values are on the GPU,
and a check would wait for it. With TRITON_INTERPRET=1, set before Triton is imported, they run on CPU tensors.
"""

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from vllm_kvmerge.ops.attention import Fusion
from vllm_kvmerge.ops.reference import (
    by_position,
    free_places,
    in_place,
    inverse,
    largest,
    merge_by_parts,
    padded_nonzero,
    take,
    top,
)
from vllm_kvmerge.ops.triton import attention_kernels, entry_kernels
from vllm_kvmerge.ops.triton.plan import AttentionPlan, device_name, power_of_two, settings_for, shares
from vllm_kvmerge.ops.triton.tuning import is_tuned
from vllm_kvmerge.ops.triton.workspace import Workspace, workspace_of
from vllm_kvmerge.ops.types import Metadata, PagedKVCache, Rows, ScoreUpdate, SequenceLayers, addresses_on, sent

__all__ = [
    "Workspace",
    "by_position",
    "score_prompt_queries",
    "free_places",
    "fused_attention",
    "gather_metadata",
    "gather_rows",
    "in_place",
    "inverse",
    "join_slots",
    "largest",
    "merge_entries",
    "most_similar",
    "move_entries",
    "padded_nonzero",
    "paged_attention",
    "take",
    "top",
    "workspace_of",
    "write_metadata",
    "write_rows",
    "write_tokens",
]

INTERPRETED = not isinstance(attention_kernels.attend, JITFunction)
"""Whether kernels run in Triton's interpreter, on the CPU."""

LOG2E = attention_kernels.LOG2E.value
STAGING_BYTES = 64 << 20
"""Of keys or values that are moved at a time."""

_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def description(device: torch.device) -> str:
    """Of what runs on a device, for logs."""
    name = device_name(device)
    where = "interpreted" if INTERPRETED else f"{name}, {'tuned' if is_tuned(name) else 'default tile sizes'}"
    return f"Triton {triton.__version__}, {where}"


def _product_type(*types: torch.dtype) -> Any:
    """The type of products: that of both sides if they agree. The interpreter knows no products of bfloat16."""
    return tl.float32 if len(set(types)) > 1 or INTERPRETED else _ELEMENTS[types[0]]


def _rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``rows`` as a kernel is given them to store: the interpreter truncates to bfloat16 where a GPU rounds."""
    return rows.to(dtype) if INTERPRETED else rows


def _check(query: Tensor, pages: PagedKVCache) -> None:
    if query.shape[2] != pages.head_size or query.shape[1] % pages.num_kv_heads:
        raise ValueError(f"query of shape {tuple(query.shape)} does not suit {tuple(pages.values.shape)} values")
    if query.stride(2) != 1:
        raise ValueError("query and output must be contiguous in their last dimension")


@dataclass(frozen=True)
class _Rows:
    """Sequences of a batch, as kernels take them: all of the GPU's numbers about them."""

    block_table: Tensor
    query_starts: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    fronts: Tensor
    tails: Tensor
    modes: Tensor
    decays: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        numbers = (self.query_starts, self.query_lens, self.seq_lens, self.fronts, self.tails, self.modes, self.decays)
        return (self.block_table, *numbers)


def _attend(
    query: Tensor, pages: PagedKVCache, rows: _Rows, scale: float, output: Tensor, plan: AttentionPlan, work: Workspace,
    values: bool,
) -> Tensor:  # fmt: skip
    """Launches ``attend``; returns the log-sum-exp of its splits. Without ``values`` nothing else is found."""
    groups = query.shape[1] // pages.num_kv_heads
    buffers = {name: work.take(name, size) for name, size in plan.sizes.items()}
    lse = buffers["lse"]
    attention_kernels.attend[(len(rows.query_lens) * plan.tiles, pages.num_kv_heads, plan.splits)](
        query,
        pages.keys,
        pages.values,
        pages.log_votes,
        pages.scores,
        pages.aux,
        output,
        *rows.arguments,
        buffers.get("partial", lse),
        lse,
        buffers.get("kept", lse),
        scale * LOG2E,
        plan.tiles,
        query.stride(0),
        query.stride(1),
        output.stride(0),
        output.stride(1),
        rows.block_table.stride(0),
        *pages.strides,
        G=groups,
        HEAD_SIZE=pages.head_size,
        BLOCK_SIZE=pages.block_size,
        VALUES=values,
        KEEP=plan.kept,
        SPLITS=plan.splits,
        LEAST=plan.settings.least,
        COMPUTE=_product_type(query.dtype, pages.keys.dtype),
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.settings.block_n,
        BLOCK_D=power_of_two(pages.head_size),
        **plan.settings.launch,
    )
    return lse


def _update_columns(
    query: Tensor, pages: PagedKVCache, rows: _Rows, scale: float, scores: Tensor, aux: Tensor, lse: Tensor,
    plan: AttentionPlan, paged: bool,
) -> None:  # fmt: skip
    groups = query.shape[1] // pages.num_kv_heads
    chosen = settings_for("columns", pages, groups)
    num_rows, max_entries = len(rows.query_lens), rows.block_table.shape[1] * pages.block_size
    parts = shares(chosen.programs, num_rows * pages.num_kv_heads, -(-max_entries // chosen.block_n), pages)
    attention_kernels.update_columns[(num_rows, pages.num_kv_heads, parts)](
        query,
        pages.keys,
        pages.log_votes,
        scores,
        aux,
        *rows.arguments,
        lse,
        scale * LOG2E,
        plan.tiles,
        query.stride(0),
        query.stride(1),
        rows.block_table.stride(0),
        *pages.keys.stride(),
        *pages.log_votes.stride()[:2],
        scores.stride(0) if paged else 0,
        scores.stride(1) if paged else scores.stride(0),
        G=groups,
        HEAD_SIZE=pages.head_size,
        BLOCK_SIZE=pages.block_size,
        PAGED=paged,
        SPLITS=plan.splits,
        LEAST=plan.settings.least,
        COMPUTE=_product_type(query.dtype, pages.keys.dtype),
        BLOCK_M=plan.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_D=power_of_two(pages.head_size),
        LSE_BLOCK_N=plan.settings.block_n,
        **chosen.launch,
    )


def paged_attention(
    query: Tensor,
    pages: PagedKVCache,
    block_table: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    fronts: Tensor,
    tails: Tensor,
    update_modes: Tensor,
    update_decays: Tensor,
    scale: float,
    output: Tensor,
    num_queries: int | None = None,
    workspace: Workspace | None = None,
) -> None:
    """See ``reference.paged_attention``.

    num_queries: at least the largest of ``query_lens``; without it, that is read from the GPU, which waits for it and
    cannot be captured. What is launched depends on it and on shapes alone; a sequence of no queries is skipped, and
    sequences may be shorter than their row of the block table. workspace: the device's own if not given.

    Up to 16 rows of queries and query heads, logits of sequences that update scores are kept in the workspace at their
    slots, 4 bytes each; no two such sequences may share a block, as none share a score.
    """
    if len(query_lens) == 0:
        return
    _check(query, pages)
    _check(output, pages)
    if num_queries is None:
        num_queries = int(query_lens.max())
    numbers = (query_starts, query_lens, seq_lens, fronts, tails, update_modes, update_decays)
    rows = _Rows(block_table.contiguous(), *(tensor.contiguous() for tensor in numbers))
    plan = AttentionPlan.of(pages, query.shape[1], num_queries, len(query_lens), block_table.shape[1])
    work = workspace or workspace_of(query.device)
    lse = _attend(query, pages, rows, scale, output, plan, work, values=True)
    groups = query.shape[1] // pages.num_kv_heads
    chosen = settings_for("finish", pages, groups)
    max_entries = block_table.shape[1] * pages.block_size
    num_combined = plan.kept or plan.block_m // groups * groups
    num_combined = num_combined if plan.splits > 1 else 0
    parts = 0
    if plan.kept:
        most = -(-max_entries // chosen.block_n)
        parts = shares(chosen.programs, len(query_lens) * pages.num_kv_heads, most, pages)
    if num_combined + parts:
        attention_kernels.finish[(len(query_lens) * plan.tiles, pages.num_kv_heads, num_combined + parts)](
            pages.scores,
            pages.aux,
            output,
            *rows.arguments,
            work.take("partial", 1),
            lse,
            work.take("kept", 1),
            plan.tiles,
            num_combined,
            output.stride(0),
            output.stride(1),
            rows.block_table.stride(0),
            *pages.log_votes.stride()[:2],
            G=groups,
            HEAD_SIZE=pages.head_size,
            BLOCK_SIZE=pages.block_size,
            KEEP=plan.kept,
            SPLITS=plan.splits,
            LEAST=plan.settings.least,
            BLOCK_M=plan.block_m,
            BLOCK_N=plan.settings.block_n,
            BLOCK_D=power_of_two(pages.head_size),
            BLOCK_S=min(plan.splits, 16),
            BLOCK_U=chosen.block_n,
            **chosen.launch,
        )
    if not plan.kept:
        _update_columns(query, pages, rows, scale, pages.scores, pages.aux, lse, plan, paged=True)


@lru_cache(maxsize=64)
def _one_row(device: torch.device, num_queries: int, seq_len: int, mode: int, decay: float) -> tuple[Tensor, ...]:
    """Numbers of one sequence without a front; all layers of a step ask for the same."""
    numbers = torch.tensor([[0], [num_queries], [seq_len], [0], [0], [mode]], dtype=torch.int32)
    return *sent(numbers, device).unbind(), sent(torch.tensor([decay]), device)


def score_prompt_queries(
    query: Tensor,
    pages: PagedKVCache,
    blocks: Tensor,
    seq_len: int,
    update: ScoreUpdate,
    scale: float,
    scores: Tensor,
    aux: Tensor,
) -> None:
    if query.shape[0] == 0:
        return
    _check(query, pages)
    if scores.stride() != aux.stride() or scores.stride(1) != 1:
        raise ValueError("scores and aux must have the same strides and be contiguous in their last dimension")
    mode = update.mode.code
    block_table = blocks[: -(-seq_len // pages.block_size)].contiguous().unsqueeze(0)
    rows = _Rows(block_table, *_one_row(query.device, query.shape[0], seq_len, mode, update.decay))
    plan = AttentionPlan.of(pages, query.shape[1], query.shape[0], 1, block_table.shape[1], keeps=False)
    if update.mode == "log_ema":
        lse = scores  # not read
    else:
        lse = _attend(query, pages, rows, scale, query, plan, workspace_of(query.device), values=False)
    _update_columns(query, pages, rows, scale, scores, aux, lse, plan, paged=False)


def write_tokens(pages: PagedKVCache, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    if len(slot_mapping) == 0:
        return
    dtype = pages.keys.dtype
    key, value = (_rounded(t if t.stride(2) == 1 else t.contiguous(), dtype) for t in (key, value))
    chosen = settings_for("write", pages)
    attention_kernels.write[(len(slot_mapping), -(-pages.num_kv_heads // chosen.block_n))](
        slot_mapping,
        key,
        value,
        pages.keys,
        pages.values,
        pages.num_kv_heads,
        slot_mapping.stride(0),
        *key.stride()[:2],
        *value.stride()[:2],
        *pages.keys.stride(),
        *pages.values.stride()[:3],
        HEAD_SIZE=pages.head_size,
        BLOCK_SIZE=pages.block_size,
        BLOCK_H=chosen.block_n,
        BLOCK_D=power_of_two(pages.head_size),
        **chosen.launch,
    )


class _Located:
    """Where units are, as kernels are told. Raises ValueError where layers differ in more than their address."""

    def __init__(self, units: SequenceLayers) -> None:
        self.pages = pages = units.layers[0]
        if len({(layer.strides, layer.keys.shape[1:], layer.keys.dtype) for layer in units.layers}) > 1:
            raise ValueError("layers differ in layout")
        self.device = pages.keys.device
        self.num_heads = units.num_heads
        self.blocks = self.on_device(units.blocks)
        self.layers = (
            addresses_on(self.device, tuple(layer.addresses for layer in units.layers)),
            self.on_device(units.layer),
            self.blocks,
        )
        self.segments = self.on_device(units.segments)

    def on_device(self, tensor: Tensor) -> Tensor:
        return sent(tensor, self.device).contiguous()

    @property
    def keys(self) -> tuple[int, ...]:
        return self.pages.keys.stride()

    def strides(self, plane: str) -> tuple[int, ...]:
        """For block, head, dimension and slot."""
        block, head, slot, dim = self.pages.values.stride()
        return self.keys if plane == "keys" else (block, head, dim, slot)

    def grid(self, size: int, block: int) -> tuple[int, int]:
        return self.num_heads, -(-size // block)

    @property
    def shape(self) -> dict[str, Any]:
        pages = self.pages
        return {
            "HEAD_SIZE": pages.head_size,
            "BLOCK_SIZE": pages.block_size,
            "BLOCK_D": power_of_two(pages.head_size),
            "ELEMENT": _ELEMENTS[pages.keys.dtype],
        }


_PLANES = {"keys": entry_kernels.KEYS.value, "values": entry_kernels.VALUES.value}


def gather_metadata(units: SequenceLayers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    at, n = _Located(units), units.num_entries
    log_votes, scores, aux = (torch.empty(at.num_heads, n, device=at.device) for _ in range(3))
    positions = torch.empty(at.num_heads, n, dtype=torch.int64, device=at.device)
    chosen = settings_for("metadata", at.pages)
    if log_votes.numel():
        entry_kernels.read_metadata[at.grid(n, chosen.block_n)](
            *at.layers,
            at.segments,
            log_votes,
            scores,
            aux,
            positions,
            at.pages.num_kv_heads,
            n,
            at.blocks.stride(0),
            *at.pages.log_votes.stride()[:2],
            BLOCK_SIZE=at.pages.block_size,
            BLOCK_N=chosen.block_n,
            **chosen.launch,
        )
    return log_votes, scores, aux, positions


def _read_rows(at: _Located, plane: str, index: Tensor | None, count: int) -> Tensor:
    """``[H, count, d]`` float32: of the entries at ``index`` (``[H, count]``), or of all."""
    rows = torch.empty(at.num_heads, count, at.pages.head_size, device=at.device)
    chosen = settings_for("rows", at.pages)
    if rows.numel():
        entry_kernels.read_rows[at.grid(count, chosen.block_n)](
            *at.layers,
            at.segments,
            at.segments if index is None else index.contiguous(),
            rows,
            at.pages.num_kv_heads,
            count,
            at.blocks.stride(0),
            *at.strides(plane),
            PLANE=_PLANES[plane],
            ALL=index is None,
            BLOCK_N=chosen.block_n,
            **at.shape,
            **chosen.launch,
        )
    return rows


def gather_rows(units: SequenceLayers, plane: Literal["keys", "values"], index: Tensor) -> Tensor:
    return _read_rows(_Located(units), plane, index, index.shape[1])


def write_rows(
    units: SequenceLayers, blocks: Tensor, places: Tensor, keys: Tensor | None, values: Tensor | None
) -> None:
    at = _Located(units)
    blocks, places = at.on_device(blocks), places.contiguous()
    chosen = settings_for("rows", at.pages)
    for plane, rows in (("keys", keys), ("values", values)):
        if rows is None or rows.numel() == 0:
            continue
        entry_kernels.write_rows[at.grid(places.shape[1], chosen.block_n)](
            *at.layers[:2],
            blocks,
            places,
            _rounded(rows, at.pages.keys.dtype).contiguous(),
            at.pages.num_kv_heads,
            places.shape[1],
            blocks.stride(0),
            *at.strides(plane),
            PLANE=_PLANES[plane],
            BLOCK_N=chosen.block_n,
            **at.shape,
            **chosen.launch,
        )


def write_metadata(
    units: SequenceLayers, blocks: Tensor, log_votes: Tensor, scores: Tensor, aux: Tensor, positions: Tensor
) -> None:
    at = _Located(units)
    blocks, count = at.on_device(blocks), log_votes.shape[1]
    chosen = settings_for("metadata", at.pages)
    if count:
        entry_kernels.write_metadata[at.grid(count, chosen.block_n)](
            *at.layers[:2],
            blocks,
            *(plane.contiguous() for plane in (log_votes, scores, aux, positions)),
            at.pages.num_kv_heads,
            count,
            blocks.stride(0),
            *at.pages.log_votes.stride()[:2],
            BLOCK_SIZE=at.pages.block_size,
            BLOCK_N=chosen.block_n,
            **chosen.launch,
        )


def move_entries(units: SequenceLayers, destination: Tensor, kept: Tensor) -> None:
    num_heads, count = kept.shape
    if count == 0:
        return
    pages = units.layers[0]
    unit_bytes = pages.num_kv_heads * count * pages.head_size * pages.keys.element_size()
    step = max(1, STAGING_BYTES // unit_bytes)
    for first in range(0, len(units.layer), step):
        some = slice(first, first + step)
        heads = slice(first * pages.num_kv_heads, (first + step) * pages.num_kv_heads)
        part = SequenceLayers(units.layers, units.layer[some], units.blocks[some], units.segments[some])
        _move_entries(_Located(part), destination[some], kept[heads].contiguous())


def _move_entries(at: _Located, destination: Tensor, kept: Tensor) -> None:
    destination, count = at.on_device(destination), kept.shape[1]
    staging = torch.empty(at.num_heads, count, at.pages.head_size, dtype=at.pages.keys.dtype, device=at.device)
    chosen = settings_for("rows", at.pages)
    for plane in _PLANES:
        for write in (False, True):
            entry_kernels.move_rows[at.grid(count, chosen.block_n)](
                *at.layers,
                destination,
                at.segments,
                kept,
                staging,
                at.pages.num_kv_heads,
                count,
                at.blocks.stride(0),
                destination.stride(0),
                *at.strides(plane),
                PLANE=_PLANES[plane],
                WRITE=write,
                BLOCK_N=chosen.block_n,
                **at.shape,
                **chosen.launch,
            )


def merge_entries(units: SequenceLayers, destination: Tensor, kept: Tensor, metadata: Metadata, rows: Rows) -> None:
    merge_by_parts(sys.modules[__name__], units, destination, kept, metadata, rows)


def most_similar(units: SequenceLayers, members: Tensor, carriers: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    at = _Located(units)
    members, carriers = members.contiguous(), carriers.contiguous()
    similarity = torch.empty(members.shape, device=at.device)
    best = torch.empty(members.shape, dtype=torch.int64, device=at.device)
    chosen = settings_for("similar", at.pages)
    if best.numel():
        entry_kernels.find_similar[at.grid(members.shape[1], chosen.block_m)](
            *at.layers,
            at.segments,
            members,
            carriers,
            usable.contiguous().view(torch.uint8),
            similarity,
            best,
            at.pages.num_kv_heads,
            members.shape[1],
            carriers.shape[1],
            at.blocks.stride(0),
            *at.keys,
            COMPUTE=_product_type(at.pages.keys.dtype),
            BLOCK_M=chosen.block_m,
            BLOCK_N=chosen.block_n,
            **at.shape,
            **chosen.launch,
        )
    return similarity, best


def fused_attention(
    units: SequenceLayers,
    queries: Tensor,
    query_positions: Tensor,
    log_votes: Tensor,
    positions: Tensor,
    scale: float,
    fusion: Fusion,
) -> Tensor:
    at = _Located(units)
    num_heads, groups, window, _ = queries.shape
    n = positions.shape[1]
    lse = torch.empty(num_heads, groups, window, device=at.device)
    fused = torch.empty(num_heads, n, device=at.device)
    if fused.numel() == 0 or lse.numel() == 0:
        return fused.zero_()
    chosen = settings_for("newest", at.pages, groups)
    before = (
        *at.layers,
        at.segments,
        *(t.contiguous() for t in (queries, query_positions, log_votes, positions)),
        lse,
    )
    after = (scale, at.pages.num_kv_heads, n, window, at.blocks.stride(0), *at.keys)
    tiles = {"G": groups, "BLOCK_M": chosen.block_m, "BLOCK_N": chosen.block_n, **at.shape, **chosen.launch}
    entry_kernels.newest_lse[(num_heads, groups, -(-window // chosen.block_m))](*before, *after, **tiles)
    entry_kernels.newest_columns[at.grid(n, chosen.block_n)](*before, fused, *after, MAX=fusion == "max", **tiles)
    return fused


def join_slots(
    products: Tensor, between: Tensor, member_weights: Tensor, slot_weights: Tensor
) -> tuple[Tensor, Tensor]:
    joined = torch.empty(member_weights.shape, dtype=torch.int64, device=products.device)
    products, total = (t.clone(memory_format=torch.contiguous_format) for t in (products, slot_weights))
    if joined.numel():
        entry_kernels.join[(len(products),)](
            products,
            between.contiguous(),
            member_weights.contiguous(),
            total,
            joined,
            products.shape[1],
            products.shape[2],
            BLOCK_M=64,
            BLOCK_S=power_of_two(max(16, products.shape[2])),
            num_warps=4,
            num_stages=1,  # nothing is loaded ahead: what is stored in one turn of the loop is read in the next
        )
    return joined, total
