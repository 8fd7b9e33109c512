"""Operators of a GPU behind CPU tensors, so that the tests of all operators run on a GPU as they are."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm_kvmerge.ops import AttentionBatch, HeadPages, PagedKVCache, SequenceLayers, cell_bytes
from vllm_kvmerge.ops.types import PLANES


class OnGPU:
    """A module of operators, each of which works on copies of its arguments on ``device`` and brings back what changed.

    Copied caches have a GPU's layout, keys row by row; strides of all other tensors stay. Of
    ``SequenceLayers``, layer and segments stay where they are, as in a compaction, and of ``HeadPages`` all but layers.
    """

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module, self.device = module, device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return wraps(found)(partial(self._call, found)) if callable(found) and not isinstance(found, type) else found

    def _call(self, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        there: dict[int, tuple[Any, Any]] = {}
        moved = {name: self._moved(value, there) for name, value in kwargs.items()}
        result = operator(*[self._moved(value, there) for value in args], **moved)
        for here, copy in there.values():
            names = PLANES if isinstance(here, PagedKVCache) else ["data"]
            for plane, changed in ((getattr(here, name), getattr(copy, name)) for name in names):
                if not _overlaps(plane):
                    plane.copy_(changed)
        return _on_cpu(result)

    def _moved(self, value: Any, there: dict[int, tuple[Any, Any]]) -> Any:
        if id(value) in there:
            return there[id(value)][1]
        if isinstance(value, PagedKVCache | Tensor):
            copy = self._pages(value) if isinstance(value, PagedKVCache) else self._tensor(value)
            there[id(value)] = value, copy
            return copy
        if isinstance(value, AttentionBatch):
            moved = value.map(lambda tensor: self._moved(tensor, there), value.max_query_len)
            return replace(moved, tables=self._moved(value.tables, there))
        if isinstance(value, SequenceLayers):
            layers = [self._moved(pages, there) for pages in value.layers]
            return replace(value, layers=layers, blocks=self._moved(value.blocks, there))
        if isinstance(value, HeadPages):
            return replace(value, layers=[self._moved(pages, there) for pages in value.layers], _sent={})
        if isinstance(value, tuple | list):
            return type(value)(self._moved(one, there) for one in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self._moved(getattr(value, f.name), there) for f in fields(value)})
        return value

    def _pages(self, pages: PagedKVCache) -> PagedKVCache:
        num_blocks, num_heads, block_size, head_size = pages.values.shape
        dtype = pages.values.dtype
        cell = cell_bytes(head_size, dtype) // dtype.itemsize
        cache = torch.empty(num_blocks, num_heads, block_size, cell, dtype=dtype, device=self.device)
        scales = {"key_scale": pages.key_scale, "value_scale": pages.value_scale} if pages.is_quantised else {}
        there = PagedKVCache.of(cache, head_size, row_major_keys=True, **scales)
        for name in PLANES:
            getattr(there, name).copy_(getattr(pages, name))
        return there

    def _tensor(self, tensor: Tensor) -> Tensor:
        if _overlaps(tensor):
            return tensor.to(self.device, copy=True)
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        room = torch.empty(tensor.storage_offset() + max(span, 0), dtype=tensor.dtype, device=self.device)
        return room.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(tensor)


def _overlaps(tensor: Tensor) -> bool:
    """Whether it has been expanded, so that it cannot be written to."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, tuple | list):
        return type(value)(_on_cpu(one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _on_cpu(getattr(value, field.name)) for field in fields(value)})
    return value
