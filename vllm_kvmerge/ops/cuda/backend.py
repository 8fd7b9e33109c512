"""The library of operators in CUDA C++, and where it runs."""

from functools import cache as cached
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vllm_kvmerge.ops import reference
from vllm_kvmerge.ops.layout import layout_check, planes_obstacle
from vllm_kvmerge.ops.types import PagedKVCache

LIBRARY = Path(__file__).with_name("_cuda.so")

_path = LIBRARY


@cached
def load(path: Path) -> Any:
    if not path.exists():
        raise OSError(f"{path} is missing: python csrc/cuda/build.py builds it")
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path))
    except RuntimeError as error:
        raise OSError(f"{path} cannot be loaded: {error}") from error


def library() -> Any:
    """The loaded library. Raises OSError or ImportError where there is none that works."""
    return load(_path)


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


@cached
def _targets(path: Path) -> str:
    return str(load(path).targets())


def is_emulated() -> bool:
    """Whether the library runs on CPU tensors."""
    return _targets(_path) == "emulated"


def runs_on(device: torch.device) -> str | None:
    """Says why these operators do not run on a device; None where they do."""
    if is_emulated():
        return None if device.type == "cpu" else "the kernels were built for the CPU"
    if device.type != "cuda":
        return f"the tensors are on {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


@layout_check
def obstacle(cache: PagedKVCache) -> str | None:
    """Says why these operators cannot work on a cache; None if they can. The device is not looked at."""
    reason = planes_obstacle(cache)
    if reason is not None:
        return reason
    if cache.is_quantised:
        return f"the cache is {cache.keys.dtype}"
    if cache.keys.stride(2) != 1 or cache.keys.transpose(2, 3).stride() != cache.values.stride():
        return "keys do not lie row by row"
    item = cache.keys.element_size()
    if any(stride * item % 16 for stride in (*cache.values.stride()[:3], cache.head_size)):
        return "rows do not begin at multiples of 16 bytes"
    return None


def description(device: torch.device) -> str:
    """Describes what runs on a device, for logs."""
    return f"CUDA C++, {_targets(_path)}"


def attend_bytes(rows: int, bits: int, head_size: int, pages: bool) -> int:
    """Bytes of shared memory of a block of attention; pages: where heads of some rows have pages of their own."""
    return _attend_bytes(_path, rows, bits, head_size, pages)


@cached
def _attend_bytes(path: Path, rows: int, bits: int, head_size: int, pages: bool) -> int:
    return int(load(path).attend_bytes(rows, bits, head_size, pages))


def fallback(device: torch.device) -> ModuleType:
    """The operators that do what these cannot: Triton's on a GPU where they can be imported, else the reference."""
    if device.type == "cuda":
        try:
            from vllm_kvmerge.ops import triton
        except ImportError:
            return reference
        return triton
    return reference


def stream(device: torch.device) -> int:
    """The current stream, as the library takes it."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
