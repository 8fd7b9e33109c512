"""The choice of the implementation that runs an operator.

On the CPU, native operators (``native``) run if their library was built and the cache suits them; on a GPU, CUDA C++
(``cuda``) or Triton (``triton``), as the table in ``choice.json`` says and if available; otherwise the PyTorch
reference. ``choose`` sets another for all operators, ``override`` for some.

An implementation is a module with some of the functions of ``reference``, and with ``runs_on(device)``,
``obstacle(operand)`` and ``description(device)``; ``library()``, if there is one, loads its library.
"""

import functools
import importlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_kvmerge.ops import choice, reference
from vllm_kvmerge.ops.layout import Operand
from vllm_kvmerge.ops.types import PagedKVCache, SequenceLayers

if TYPE_CHECKING:  # the operators below have the signatures of their definitions
    from vllm_kvmerge.ops.reference import *  # noqa: F403

logger = logging.getLogger(__name__)

OPERATORS: list[str] = []
"""Names of the operators on a cache."""

MODULES = {"native": "cpu", "triton": "triton", "cuda": "cuda"}

_chosen: str | None = None
_overrides: dict[str, str] = {}
_of_tensors: dict[tuple[torch.device, torch.dtype], dict[str, ModuleType]] = {}
_age = 0  # times that decisions were forgotten


def choose(name: str | None) -> None:
    """Makes ``reference``, ``native``, ``triton`` or ``cuda`` run wherever it can; None: choice by tensors.

    For tests, Triton's also run on CPU tensors in its interpreter, and CUDA's if their build for the CPU is in use.
    Raises ValueError for any other name, and OSError or ImportError if that implementation is not available.
    """
    global _chosen
    if name not in (None, *choice.IMPLEMENTATIONS):
        raise ValueError(f"there are no operators called {name!r}")
    if name in MODULES:
        _load(name)
    _chosen = name
    forget()


def override(implementations: Mapping[str, str]) -> None:
    """Replaces the table's implementations of operators, by name, wherever the new ones can run.

    Raises ValueError for an unknown operator or implementation.
    """
    global _overrides
    _overrides = choice.check_overrides(implementations, OPERATORS)
    _forget_decisions()


def forget() -> None:
    """Forgets the available implementations, and the decisions for tensors and caches."""
    failure.cache_clear()
    _forget_decisions()


def _forget_decisions() -> None:
    global _age
    _age += 1
    _of_tensors.clear()


def _decisions(operand: Operand) -> dict[str, ModuleType]:
    """The modules decided on so far, by operator, for a cache or for tensors like ``operand``."""
    if isinstance(operand, Tensor):
        return _of_tensors.setdefault((operand.device, operand.dtype), {})
    age, modules = operand.__dict__.get("_decisions", (None, {}))
    if age != _age:
        modules = {}
        operand.__dict__["_decisions"] = _age, modules
    return modules


@functools.cache
def _module(name: str) -> ModuleType:
    # Imported on demand: on the CPU, Triton need not be installed.
    return importlib.import_module(f"vllm_kvmerge.ops.{MODULES[name]}")


def _load(name: str) -> None:
    """Raises OSError or ImportError if an implementation is not available."""
    module = _module(name)
    if hasattr(module, "library"):
        module.library()


@functools.cache
def failure(name: str) -> str | None:
    """Says why an implementation is not available in this process; None if it is. Warns once."""
    try:
        _load(name)
    except (OSError, ImportError) as error:
        what = "no CUDA operators" if name == "cuda" else "KV cache operators run on PyTorch, which is slow"
        logger.warning("%s: %s", what, error)
        return str(error)
    return None


def _candidates(operator: str, device: torch.device, operand: Operand | None) -> tuple[str, ...]:
    """Implementations to try for an operator, in order, before the reference."""
    named = _chosen or _overrides.get(operator)
    on_gpu = device.type == "cuda"
    if on_gpu and named not in ("cuda", "triton", "reference"):
        head_size = getattr(operand, "head_size", 0)  # a plain tensor has none
        named = choice.choice(operator, choice.device_name(device), head_size)
    if named == "cuda":
        return ("cuda", "triton" if on_gpu else "native")
    return (named or "native",)


def _implementation(operator: str, device: torch.device, operand: Operand | None) -> tuple[ModuleType, str]:
    """The module that runs an operator on ``operand``, and, if that is the reference, why."""
    obstacle = "it was chosen"
    for name in _candidates(operator, device, operand):
        if name == "reference":
            break
        found = failure(name) or _obstacle(_module(name), operator, device, operand)
        if found is None:
            return _module(name), ""
        obstacle = found
    return reference, obstacle


def _obstacle(module: ModuleType, operator: str, device: torch.device, operand: Operand | None) -> str | None:
    if not hasattr(module, operator):
        return f"there is no {operator} in {module.__name__}"
    reason: str | None = module.runs_on(device) or (None if operand is None else module.obstacle(operand))
    return reason


def implementations(cache: PagedKVCache | None = None) -> dict[str, str]:
    """Describes the implementation of each operator on a cache (default: the CPU's), and why if it is the reference."""
    device = torch.device("cpu") if cache is None else cache.device
    descriptions = {}
    for operator in OPERATORS:
        module, obstacle = _implementation(operator, device, cache)
        is_reference = module is reference
        descriptions[operator] = f"PyTorch reference: {obstacle}" if is_reference else str(module.description(device))
    return descriptions


def is_native(operator: str, cache: PagedKVCache) -> bool:
    """True if the CPU's own version of an operator runs on a cache."""
    return _implementation(operator, cache.device, cache)[0] is _module("native")


def implementation(cache: PagedKVCache | None = None) -> str:
    """``implementations`` in a line: that of most operators, then operators with another."""
    table = implementations(cache)
    most = Counter(table.values()).most_common(1)[0][0]
    others = (f"{operator}: {name}" for operator, name in table.items() if name != most)
    return "; ".join([most, *others])


def _dispatched(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator on the implementation that suits its cache, or else its first argument, a plain tensor."""
    name = operator.__name__
    annotations = [parameter.annotation for parameter in inspect.signature(operator).parameters.values()]
    place = next((i for i, kind in enumerate(annotations) if kind in (PagedKVCache, SequenceLayers)), None)
    if place is not None:
        OPERATORS.append(name)
    index = place or 0
    parameter = list(inspect.signature(operator).parameters)[index]

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        operand = args[index] if len(args) > index else kwargs[parameter]
        modules = _decisions(operand)
        if name not in modules:
            modules[name], _ = _implementation(name, operand.device, operand)
        return getattr(modules[name], name)(*args, **kwargs)

    return run


for _name, _operator in vars(reference).items():
    if inspect.isfunction(_operator) and _operator.__module__ == reference.__name__ and not _name.startswith("_"):
        globals()[_name] = _dispatched(_operator)
