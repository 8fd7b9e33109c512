"""Kernels that Triton compiles once, whatever changes from one launch to the next."""

import inspect
from collections.abc import Callable
from typing import Any

import triton


def for_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a kernel that is compiled once for all ``numbers``, and for tensors that begin anywhere."""

    def kernel(function: Callable[..., Any]) -> Any:
        names = list(inspect.signature(function).parameters)
        return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=names)

    return kernel
