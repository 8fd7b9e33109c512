"""Memory that attention uses between its kernels."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from vllm_kvmerge.ops.types import PagedKVCache

Sizes = Callable[[PagedKVCache, int, int, int, int], dict[str, int]]
"""Elements of each buffer for (cache, query heads, queries, rows, blocks of a row)."""

_sizes: list[Sizes] = []


def uses_workspace(sizes: Sizes) -> Sizes:
    """Registers the needs of an implementation's attention, for which ``Workspace.reserve`` makes room."""
    _sizes.append(sizes)
    return sizes


class Workspace:
    """Float32 buffers of one device, shared by all layers: each call overwrites the last one's.

    They grow as needed, but not while a CUDA graph is captured, whose replays write to fixed addresses: ``reserve`` for
    the largest batch, or run it once before. Outgrown buffers are kept for graphs captured with them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def take(self, name: str, size: int) -> Tensor:
        """A buffer of at least ``size`` elements, of undefined content.

        Raises RuntimeError if it would have to grow while a graph is captured.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"workspace {name!r} must grow to {4 * size} bytes while a graph is captured")
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.float32, device=self.device)
        return buffer

    @property
    def num_bytes(self) -> int:
        return sum(4 * buffer.numel() for buffer in (*self._buffers.values(), *self._outgrown))

    def reserve(self, cache: PagedKVCache, num_heads: int, batches: list[tuple[int, int]], max_blocks: int) -> None:
        """Makes room for attention to layers like ``cache``, by all implementations that have been imported.

        num_heads: query heads. batches: pairs of the number of sequences, of ``max_blocks`` blocks, and of
        ``max_query_len``.
        """
        most: dict[str, int] = {}
        for rows, num_queries in batches:
            for sizes in _sizes:
                for name, size in sizes(cache, num_heads, num_queries, rows, max_blocks).items():
                    most[name] = max(size, most.get(name, 0))
        for name, size in most.items():
            self.take(name, size)


@cache
def workspace_of(device: torch.device) -> Workspace:
    """The workspace that all layers on a device share."""
    return Workspace(device)
