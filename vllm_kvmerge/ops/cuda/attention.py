"""Attention of decode steps in CUDA C++."""

from functools import lru_cache

import torch
from torch import Tensor

from vllm_kvmerge.ops.cuda import backend
from vllm_kvmerge.ops.cuda.plan import LEAST_ENTRIES, AttentionPlan, shared_memory
from vllm_kvmerge.ops.types import PLAIN_SOFTMAX, AttentionBatch, PagedKVCache, PageTables, Softmax, addresses_on
from vllm_kvmerge.ops.workspace import Workspace, workspace_of


def _is_aligned(rows: Tensor) -> bool:
    item = rows.element_size()
    return rows.stride(2) == 1 and not any(
        number % 16 for number in (rows.data_ptr(), rows.stride(0) * item, rows.stride(1) * item)
    )


@lru_cache(maxsize=64)
def _are_alike(layers: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> bool:
    """Whether layers, addresses and strides of each, differ in nothing but where they begin; cached, because the same
    ones recur."""
    return len({(*(place - planes[0] for place in planes), *strides) for planes, strides in layers}) == 1


def _call_obstacle(
    query: Tensor, cache: PagedKVCache, output: Tensor, num_queries: int, tables: PageTables | None
) -> str | None:
    """Says why these kernels cannot do a call of attention; None if they can."""
    if query.dtype != cache.keys.dtype or output.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "queries are not of the cache's dtype"
    if not _is_aligned(query) or output.stride(2) != 1:
        return "rows of queries do not begin at multiples of 16 bytes, or the output's do not lie together"
    if tables is not None and tables.coded:
        return "fronts may be coded"
    reason = AttentionPlan.obstacle(cache, query.shape[1], num_queries)
    if reason is not None:
        return reason
    if tables is not None and not _are_alike(tuple((layer.addresses, layer.strides) for layer in tables.layers)):
        return "the layers' planes do not lie alike"
    # Many GPUs have 99 KiB for a block.
    rows, bits = num_queries * query.shape[1] // cache.num_kv_heads, 8 * cache.keys.element_size()
    needed = backend.attend_bytes(rows, bits, AttentionPlan.padded(cache.head_size), tables is not None)
    room = shared_memory(cache.device)
    return None if needed <= room else f"blocks take {needed} bytes of shared memory, and the GPU has {room}"


def _pages(tables: PageTables, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """The tables' addresses, the layers' and the number of the layer that attends, as the library takes them."""
    layers = addresses_on(device, tuple(layer.addresses for layer in tables.layers))
    return tables.addresses.to(torch.int64).contiguous(), layers, tables.layer


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
    """See ``reference.paged_attention``, and for the workspace ``triton.paged_attention``.

    Up to 16 rows of queries and query heads of a KV head; longer chunks, windows and coded fronts are the fallback's.
    """
    if len(batch) == 0:
        return
    if query.shape[2] != cache.head_size or query.shape[1] % cache.num_kv_heads:
        raise ValueError(f"query of shape {tuple(query.shape)} does not suit {tuple(cache.values.shape)} values")
    num_queries = batch.max_query_len
    if num_queries is None:
        num_queries = int(batch.query_lens.max())
    tables = batch.tables
    if window or _call_obstacle(query, cache, output, num_queries, tables) is not None:
        backend.fallback(query.device).paged_attention(query, cache, batch, scale, output, softmax, window, chunked)
        return
    plan = AttentionPlan.of(cache, query.shape[1], num_queries, *batch.block_table.shape)
    work = workspace or workspace_of(query.device)
    buffers = {name: work.take(name, size) for name, size in plan.sizes.items()}
    *integers, decays = batch.tensors
    rows = [tensor.to(torch.int32).contiguous() for tensor in integers]
    library, stream = backend.library(), backend.stream(query.device)

    def divide(*lists: Tensor) -> None:
        library.divide(*rows[2:6], *lists, plan.slots, LEAST_ENTRIES, stream)

    library.attend(
        query,
        cache.keys,
        cache.values,
        cache.log_votes,
        cache.scores,
        cache.aux,
        output,
        *rows,
        decays.float().contiguous(),
        *((None, None, 0) if tables is None else _pages(tables, query.device)),
        *plan.lists(batch, cache, ("cuda",), divide),
        buffers.get("partial", buffers["lse"]),
        buffers["lse"],
        buffers["kept"],
        scale,
        softmax.cap,
        softmax.sinks,
        num_queries,
        plan.num_split,
        plan.split_tiles,
        plan.head_size,
        plan.kept,
        stream,
    )
