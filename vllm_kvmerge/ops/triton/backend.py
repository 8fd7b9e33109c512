"""Triton on this machine: devices that its operators run on, and types that kernels compute in."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from vllm_kvmerge.ops.coded import Int8Pages
from vllm_kvmerge.ops.layout import layout_check, planes_obstacle
from vllm_kvmerge.ops.triton import attention_kernels
from vllm_kvmerge.ops.triton.descriptors import Codes
from vllm_kvmerge.ops.triton.plan import device_name
from vllm_kvmerge.ops.triton.tuning import is_tuned
from vllm_kvmerge.ops.types import QUANTISED, PagedKVCache, addresses_on, stored

INTERPRETED = not isinstance(attention_kernels.attend, JITFunction)
"""True if kernels run in Triton's interpreter, on the CPU."""

ELEMENTS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}

E4M3_CAPABILITY = (8, 9)
"""The least compute capability that Triton converts ``float8_e4m3fn`` for."""


def runs_on(device: torch.device) -> str | None:
    """Says why these operators do not run on a device; None if they do."""
    if device.type == "cuda" or INTERPRETED:
        return None
    return f"Triton's run on {device} with TRITON_INTERPRET=1 only"


@layout_check
def obstacle(cache: PagedKVCache) -> str | None:
    """Says why these operators cannot work on a cache; None if they can."""
    on_gpu = cache.device.type == "cuda"
    is_e4m3 = cache.keys.dtype == torch.float8_e4m3fn
    if on_gpu and is_e4m3 and torch.cuda.get_device_capability(cache.device) < E4M3_CAPABILITY:
        return f"the cache is {cache.keys.dtype}, and the GPU older than compute capability 8.9"
    return planes_obstacle(cache)


def description(device: torch.device) -> str:
    """Describes these operators on a device, for logs."""
    name = device_name(device)
    where = "interpreted" if INTERPRETED else f"{name}, {'tuned' if is_tuned(name) else 'default tile sizes'}"
    return f"Triton {triton.__version__}, {where}"


def layer_addresses(layers: Sequence[PagedKVCache]) -> Tensor:
    """``[layers, 6]`` int64 on their device. Raises ValueError if layers differ in more than their addresses."""
    if len({(layer.strides, layer.head_size, layer.keys.dtype) for layer in layers}) > 1:
        raise ValueError("layers differ in layout")
    return addresses_on(layers[0].device, tuple(layer.addresses for layer in layers))


def codes_of(cache: PagedKVCache) -> Codes:
    """Where those of a cache's pages in 8 bits lie, as kernels take it, made once."""
    found: Codes | None = cache.__dict__.get("_kernel_codes")
    if found is None:
        pages = Int8Pages.of(cache)
        keys, values = pages.keys, pages.values
        first = values.data_ptr() - keys.data_ptr()
        found = cache.__dict__["_kernel_codes"] = Codes._make((*keys.stride(), first, *values.stride()[:3]))
    return found


def product_type(*types: torch.dtype) -> Any:
    """Type of products: that of both sides if they agree. Numbers of 8 bits become the other side's, or float16, which
    are exact. The interpreter has no products of bfloat16."""
    wide = set(types).difference(QUANTISED) or {torch.float16}
    return tl.float32 if len(wide) > 1 or INTERPRETED else ELEMENTS[wide.pop()]


def rounded(rows: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """``rows`` as passed to a kernel that stores them over ``scale``: the interpreter truncates to bfloat16 and to 8
    bits, whereas a GPU rounds."""
    if not INTERPRETED:
        return rows
    return stored(rows.float() / scale, dtype).float() * scale if dtype in QUANTISED else rows.to(dtype)
