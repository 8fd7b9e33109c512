"""Memory of a machine without GPUs: how much a server may use, and whether that suffices."""

import argparse
import logging
import math
import os
from pathlib import Path

CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"

logger = logging.getLogger("vllm_kvmerge.server")


def pool_bytes(args: argparse.Namespace) -> int:
    """Bytes of the KV cache that a server is told to take; 0: not told."""
    return args.kv_cache_memory_bytes or int(float(os.environ.get(CPU_SPACE, 0)) * (1 << 30))


def fit_memory(args: argparse.Namespace) -> None:
    """On CPU, lowers the share of the memory that vLLM takes unless told, 0.92, to what is free: it would not start."""
    from vllm.config import CacheConfig

    default = CacheConfig.gpu_memory_utilization
    if pool_bytes(args) or args.gpu_memory_utilization != default or not (free := _free()):
        return
    share = fitting_share(free, _num_workers(args))
    if share < default:
        args.gpu_memory_utilization = share
        logger.info(
            "--gpu-memory-utilization %.2f: of the memory, what is free. --kv-cache-memory-bytes sets a pool", share
        )


def shortage(args: argparse.Namespace) -> str | None:
    """Why a server with these arguments would run out of memory on CPU, and what to do; None: nothing says so.

    Weights are known where they are files in a local folder.
    """
    from vllm.config import CacheConfig

    if not (free := _free()):
        return None
    num_workers, pool = _num_workers(args), pool_bytes(args)
    weights = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    available = sum(one for one, _ in free)
    if pool and weights + pool * num_workers > available:
        return (
            f"the weights take {_gib(weights)} and the KV cache {_gib(pool * num_workers)}, and {_gib(available)} are "
            "free: give a smaller --kv-cache-memory-bytes"
        )
    share, most = args.gpu_memory_utilization, fitting_share(free, num_workers)
    if not pool and share != CacheConfig.gpu_memory_utilization and share > most:
        return (
            f"--gpu-memory-utilization {share}: {_gib(available)} are free; allowed: up to {most}, or "
            "--kv-cache-memory-bytes"
        )
    if not pool and weights > available * 0.9:
        return f"the weights take {_gib(weights)}, and {_gib(available)} are free"
    return None


def fitting_share(free: list[tuple[int, int]], num_workers: int) -> float:
    """Share of a memory node that each worker may take: nine tenths of what is free, divided by those of one node.

    free: bytes that are free, and all, of each node.
    """
    least = min(available / total for available, total in free)
    return math.floor(90 * least / -(-num_workers // len(free))) / 100


def _free() -> list[tuple[int, int]]:
    """Bytes that are free, and all, of each memory node; none: workers do not run on CPU."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    if not current_platform.is_cpu():
        return []
    nodes = [get_memory_node_info(node) for node in get_visible_memory_node()]
    return [(node.available_memory, node.total_memory) for node in nodes]


def _num_workers(args: argparse.Namespace) -> int:
    return (args.data_parallel_size_local or args.data_parallel_size) * args.tensor_parallel_size


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
