"""Kernels that Triton compiles once, whatever their arguments."""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def for_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a kernel that is compiled once for all ``numbers``, and for tensors that begin anywhere."""

    def kernel(function: Callable[..., Any]) -> Any:
        parameters = inspect.signature(function).parameters.items()
        names = [name for name, parameter in parameters if parameter.annotation is not tl.constexpr]
        return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=names)

    return kernel
