"""The operators in CUDA C++ (csrc/cuda): attention of decode steps, and compactions in one launch.

All others, and calls that these do not suit, are those of ``fallback``. The library is built by csrc/cuda/build.py. A
build for the CPU, which tests load with ``use``, runs the same kernels on CPU tensors.
"""

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm_kvmerge.ops import reference
from vllm_kvmerge.ops.choice import choice, device_name
from vllm_kvmerge.ops.cuda.plan import BYTES_STAGED, AttentionPlan, merge_bytes, shared_memory
from vllm_kvmerge.ops.types import Metadata, PagedKVCache, Rows, SequenceLayers, addresses_on, sent
from vllm_kvmerge.ops.workspace import Workspace, uses_workspace, workspace_of

LIBRARY = Path(__file__).with_name("_cuda.so")

OPERATORS = ("paged_attention", "merge_entries")

_path = LIBRARY


@cache
def _load(path: Path) -> Any:
    if not path.exists():
        raise OSError(f"{path} is missing: python csrc/cuda/build.py builds it")
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path))
    except RuntimeError as error:
        raise OSError(f"{path} cannot be loaded: {error}") from error


def library() -> Any:
    """The loaded library. Raises OSError or ImportError where there is none that works."""
    return _load(_path)


def use(path: Path | None) -> None:
    """Makes another build of the library run; None: the package's own. Raises OSError where it does not work."""
    global _path
    before, _path = _path, path or LIBRARY
    try:
        if path is not None:
            library()
    except (OSError, ImportError):
        _path = before
        raise


def is_emulated() -> bool:
    """Whether the library runs on CPU tensors."""
    return str(library().targets()) == "emulated"


def runs_on(device: torch.device) -> str | None:
    """Why these operators do not run on tensors of a device; None where they do."""
    if is_emulated():
        return None if device.type == "cpu" else "the kernels were built for the CPU"
    if device.type != "cuda":
        return f"the tensors are on {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


@cache
def has_bulk_copies(device: torch.device) -> bool:
    """Whether there is code for the bulk copy engine: sm_90a's, which no other GPU runs."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def description(device: torch.device) -> str:
    """Of what runs on a device, for logs."""
    return f"CUDA C++, {library().targets()}"


def fallback(device: torch.device) -> ModuleType:
    """The operators that do what these cannot: Triton's on a GPU where they can be imported, else the reference."""
    if device.type == "cuda":
        try:
            from vllm_kvmerge.ops import triton
        except ImportError:
            return reference
        return triton
    return reference


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def _is_aligned(rows: Tensor) -> bool:
    item = rows.element_size()
    return rows.stride(2) == 1 and not any(
        number % 16 for number in (rows.data_ptr(), rows.stride(0) * item, rows.stride(1) * item)
    )


def _obstacle(query: Tensor, pages: PagedKVCache, output: Tensor, num_queries: int) -> str | None:
    """Why these kernels cannot do a call of attention; None if they can."""
    if query.dtype != pages.keys.dtype or output.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "queries are not of the cache's dtype"
    if not _is_aligned(query) or output.stride(2) != 1:
        return "rows of queries do not begin at multiples of 16 bytes, or the output's do not lie together"
    return _plan_obstacle(pages, query.shape[1], num_queries)


@cache
def _attend_bytes(path: Path, rows: int, bits: int, head_size: int) -> int:
    return int(_load(path).attend_bytes(rows, bits, head_size, False))


def _plan_obstacle(pages: PagedKVCache, num_heads: int, num_queries: int) -> str | None:
    """``AttentionPlan.obstacle``, or that a block has no room on the GPU: many have 99 KiB for one."""
    reason = AttentionPlan.obstacle(pages, num_heads, num_queries)
    if reason is not None:
        return reason
    rows, bits = num_queries * num_heads // pages.num_kv_heads, 8 * pages.keys.element_size()
    needed = _attend_bytes(_path, rows, bits, AttentionPlan.padded(pages.head_size))
    room = shared_memory(pages.keys.device)
    return None if needed <= room else f"blocks take {needed} bytes of shared memory, and the GPU has {room}"


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
    bulk: bool | None = None,
) -> None:
    """See ``reference.paged_attention``, and for num_queries and workspace ``triton.paged_attention``.

    Up to 16 rows of queries and query heads of a KV head; longer chunks are the fallback's. bulk: from 3 such rows on,
    keys and values of 16 bits are loaded by the copy engine of a GPU of compute capability 9.0 instead of by threads;
    None: as the table of choices says.
    """
    if len(query_lens) == 0:
        return
    if query.shape[2] != pages.head_size or query.shape[1] % pages.num_kv_heads:
        raise ValueError(f"query of shape {tuple(query.shape)} does not suit {tuple(pages.values.shape)} values")
    if num_queries is None:
        num_queries = int(query_lens.max())
    if _obstacle(query, pages, output, num_queries) is not None:
        tensors = (query_starts, query_lens, seq_lens, fronts, tails, update_modes, update_decays)
        fallback(query.device).paged_attention(
            query, pages, block_table, *tensors, scale, output, num_queries=num_queries
        )
        return
    rows, blocks = block_table.shape
    plan = AttentionPlan.of(pages, query.shape[1], num_queries, rows, blocks)
    work = workspace or workspace_of(query.device)
    buffers = {name: work.take(name, size) for name, size in plan.sizes.items()}
    if bulk is None:
        bulk = choice("paged_attention", device_name(query.device), pages.head_size).bulk
    numbers = (query_starts, query_lens, seq_lens, fronts, tails, update_modes)
    library().attend(
        query,
        pages.keys,
        pages.values,
        pages.log_votes,
        pages.scores,
        pages.aux,
        output,
        block_table.to(torch.int32).contiguous(),
        *(tensor.to(torch.int32).contiguous() for tensor in numbers),
        update_decays.float().contiguous(),
        buffers.get("partial", buffers["lse"]),
        buffers["lse"],
        buffers["kept"],
        scale,
        num_queries,
        plan.splits,
        plan.least,
        plan.head_size,
        plan.kept,
        plan.num_combined,
        plan.num_parts,
        bulk and query.dtype != torch.float32 and has_bulk_copies(query.device),
        _stream(query.device),
    )


@uses_workspace
def _sizes(pages: PagedKVCache, num_heads: int, num_queries: int, rows: int, max_blocks: int) -> dict[str, int]:
    if AttentionPlan.obstacle(pages, num_heads, num_queries) is not None:
        return {}
    return AttentionPlan.of(pages, num_heads, num_queries, rows, max_blocks).sizes


def merge_entries(units: SequenceLayers, destination: Tensor, kept: Tensor, metadata: Metadata, rows: Rows) -> None:
    """See ``reference.merge_entries``. One launch, where a head's lists fit in a block's shared memory."""
    pages = units.layers[0]
    device = pages.keys.device
    layouts = {(layer.strides, layer.keys.shape[1:], layer.keys.dtype) for layer in units.layers}
    num_places, num_rows = kept.shape[1], rows.places.shape[1]
    capacity = max(BYTES_STAGED, 16 * num_places)
    shared_bytes = merge_bytes(capacity, num_places, num_rows)
    if len(layouts) > 1 or shared_bytes > shared_memory(device):
        fallback(device).merge_entries(units, destination, kept, metadata, rows)
        return

    def on_device(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return sent(tensor, device).to(dtype).contiguous()

    def given(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if tensor is None or num_rows == 0 else tensor.to(dtype).contiguous()

    library().merge(
        pages.keys,
        pages.values,
        pages.log_votes,
        addresses_on(device, tuple(layer.addresses for layer in units.layers)),
        on_device(units.layer, torch.int64),
        on_device(units.blocks, torch.int32),
        on_device(destination, torch.int32),
        on_device(units.segments, torch.int64),
        kept.to(torch.int64).contiguous(),
        *(plane.float().contiguous() for plane in metadata[:3]),
        metadata[3].to(torch.int64).contiguous(),
        given(rows.places, torch.int64),
        given(rows.keys, torch.float32),
        given(rows.values, torch.float32),
        units.num_entries,
        capacity,
        shared_bytes,
        _stream(device),
    )
