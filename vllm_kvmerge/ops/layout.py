"""Checks of a cache's layout against the needs of an implementation."""

from collections.abc import Callable
from functools import wraps
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_kvmerge.ops.types import QUANTISED, PagedKVCache, SequenceLayers

Operand: TypeAlias = PagedKVCache | SequenceLayers | Tensor
"""An operator's argument that decides which implementation runs it."""


def layout_check(check: Callable[[PagedKVCache], str | None]) -> Callable[[Operand], str | None]:
    """Runs ``check``, which says why an implementation cannot work on a cache, only once per cache.

    ``SequenceLayers`` take the answer of the first layer that has one. A plain tensor has no layout.
    """
    name = f"{check.__module__}.{check.__name__}"

    @wraps(check)
    def ask(operand: Operand) -> str | None:
        if isinstance(operand, Tensor):
            return None
        answers = operand.__dict__  # beside cached properties
        if name not in answers:
            if isinstance(operand, PagedKVCache):
                answers[name] = check(operand)
            else:
                answers[name] = next((reason for reason in map(ask, operand.layers) if reason), None)
        found: str | None = answers[name]
        return found

    return ask


def planes_obstacle(cache: PagedKVCache) -> str | None:
    """Says why kernels that take the planes' addresses and strides cannot work on a cache; None if they can."""
    if cache.keys.dtype not in (torch.float32, torch.bfloat16, torch.float16, *QUANTISED):
        return f"the cache is {cache.keys.dtype}"
    if not 16 <= cache.head_size <= 256:
        return f"head size {cache.head_size} is not from 16 to 256"
    if cache.values.stride(3) != 1:
        return "values do not lie together"
    if len({plane.stride() for plane in cache.metadata}) != 1 or cache.log_votes.stride(2) != 1:
        return "metadata planes differ in layout"
    if any(address % 16 for address in cache.addresses):
        return "planes are not aligned to 16 bytes"
    return None
