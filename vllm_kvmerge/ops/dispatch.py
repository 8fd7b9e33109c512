"""The operators over paged KV blocks, and the implementation that runs them.

On the CPU, native operators (``native``) run where their library was built and the cache suits them; on a GPU, what
the table in ``choice.json`` says, CUDA C++ (``cuda``) or Triton (``triton``), where that is there; elsewhere the
PyTorch reference. ``choose`` takes another for all operators, ``override`` for some.
"""

import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

from vllm_kvmerge.ops import choice, cpu, reference
from vllm_kvmerge.ops.types import PagedKVCache, SequenceLayers

logger = logging.getLogger(__name__)


Operator = TypeVar("Operator", bound=Callable[..., Any])


_chosen: str | None = None
_overrides: dict[str, str] = {}
OPERATORS: list[str] = []
"""Names of the operators on pages."""


def choose(name: str | None) -> None:
    """Makes ``reference``, ``native``, ``triton`` or ``cuda`` run wherever it can; None: what suits the tensors.

    On CPU tensors Triton's run in its interpreter and CUDA's where their build for the CPU is in use, for tests. Raises
    ValueError for any other name, and OSError or ImportError where that implementation is not there.
    """
    global _chosen
    if name not in (None, *choice.IMPLEMENTATIONS):
        raise ValueError(f"there are no operators called {name!r}")
    if name == "native":
        cpu.library()
    elif name == "triton":
        _triton()
    elif name == "cuda":
        _cuda().library()
    _chosen = name


def override(implementations: Mapping[str, str]) -> None:
    """Puts implementations of operators, by name, in the place of those in the table, wherever they can run.

    Raises ValueError where there is no such operator or implementation.
    """
    global _overrides
    _overrides = choice.check_overrides(implementations, OPERATORS)


@functools.cache
def _native_failure() -> str | None:
    """Why there are no native operators in this process; None if there are. Warns once."""
    try:
        cpu.library()
    except (OSError, ImportError) as error:
        logger.warning("KV cache operators run on PyTorch, which is slow: %s", error)
        return str(error)
    return None


def _triton() -> ModuleType:
    """Triton's operators. Imported when they are needed: on the CPU, Triton need not be installed."""
    return importlib.import_module("vllm_kvmerge.ops.triton")


@functools.cache
def _triton_failure() -> str | None:
    """Why there are no Triton operators in this process; None if there are. Warns once."""
    try:
        _triton()
    except ImportError as error:
        logger.warning("KV cache operators run on PyTorch, which is slow: %s", error)
        return str(error)
    return None


def _cuda() -> ModuleType:
    """The operators in CUDA C++."""
    return importlib.import_module("vllm_kvmerge.ops.cuda")


@functools.cache
def _cuda_failure() -> str | None:
    """Why there are no CUDA operators in this process; None if there are. Warns once."""
    try:
        _cuda().library()
    except (OSError, ImportError) as error:
        logger.warning("no CUDA operators: %s", error)
        return str(error)
    return None


def _cuda_obstacle(operator: str, device: torch.device, pages: PagedKVCache | SequenceLayers | None) -> str | None:
    if _chosen != "cuda" and _cuda_failure():
        return _cuda_failure()
    if operator not in _cuda().OPERATORS or pages is None:
        return f"there is no {operator} in CUDA C++"
    return _cuda().runs_on(device) or pages.cuda_obstacle


def _wanted(operator: str, device: torch.device, pages: PagedKVCache | SequenceLayers | None) -> str | None:
    """The implementation that is asked for; None: what suits the CPU."""
    named = _chosen or _overrides.get(operator)
    if device.type != "cuda" or named in ("cuda", "triton", "reference"):
        return named
    layer = pages.layers[0] if isinstance(pages, SequenceLayers) else pages
    head_size = 0 if layer is None else layer.head_size
    return choice.choice(operator, choice.device_name(device), head_size).implementation


def _module(
    operator: str, device: torch.device, pages: PagedKVCache | SequenceLayers | None = None
) -> tuple[ModuleType, str]:
    """The implementation for tensors on ``device`` and for ``pages``, and, if it is the reference, why."""
    wanted = _wanted(operator, device, pages)
    if wanted == "reference":
        return reference, "it was chosen"
    if wanted == "cuda":
        if _cuda_obstacle(operator, device, pages) is None:
            return _cuda(), ""
        wanted = "triton" if device.type == "cuda" else None
    if wanted == "triton":
        obstacle = _triton_failure() or (pages.triton_obstacle if pages is not None else None)
        if obstacle is None and device.type != "cuda" and not _triton().INTERPRETED:
            obstacle = f"Triton's run on {device} with TRITON_INTERPRET=1 only"
        return (reference, obstacle) if obstacle else (_triton(), "")
    obstacle = _native_failure() or (pages.native_obstacle if pages is not None else None)
    return (reference, obstacle) if obstacle else (cpu, "")


def implementations(pages: PagedKVCache | None = None) -> dict[str, str]:
    """Which implementation runs each operator on pages, and why if that is the reference; for ``pages`` if given, else
    on the CPU."""
    device = torch.device("cpu") if pages is None else pages.keys.device
    return {operator: _description(operator, device, pages) for operator in OPERATORS}


def _description(operator: str, device: torch.device, pages: PagedKVCache | None) -> str:
    module, obstacle = _module(operator, device, pages)
    if module is reference:
        return f"PyTorch reference: {obstacle}"
    return f"native, {cpu.level()}" if module is cpu else str(module.description(device))


def implementation(pages: PagedKVCache | None = None) -> str:
    """``implementations`` in a line: what runs most operators, then those that run on another."""
    table = implementations(pages)
    most = Counter(table.values()).most_common(1)[0][0]
    others = (f"{operator}: {name}" for operator, name in table.items() if name != most)
    return "; ".join([most, *others])


def _index_operator(operator: Operator) -> Operator:
    """The operator on the implementation that suits its first argument, a plain tensor."""
    name = operator.__name__

    @functools.wraps(operator)
    def run(*args: Any) -> Any:
        tensor = args[0]
        module, _ = _module(name, tensor.device)
        if module is cpu and (not tensor.is_cpu or tensor.dtype not in (torch.float32, torch.int64, torch.bool)):
            module = reference
        return getattr(module, name)(*args)

    return cast(Operator, run)


def _dispatched(operator: Operator, pages_at: int = 0) -> Operator:
    """The operator on the implementation that suits its ``pages_at``-th argument, ``pages`` or ``units``."""
    name = operator.__name__
    OPERATORS.append(name)

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        pages = args[pages_at] if len(args) > pages_at else kwargs.get("pages") or kwargs["units"]
        layer = pages if isinstance(pages, PagedKVCache) else pages.layers[0]
        return getattr(_module(name, layer.keys.device, pages)[0], name)(*args, **kwargs)

    return cast(Operator, run)


paged_attention = _dispatched(reference.paged_attention, pages_at=1)
score_prompt_queries = _dispatched(reference.score_prompt_queries, pages_at=1)
gather_metadata = _dispatched(reference.gather_metadata)
gather_rows = _dispatched(reference.gather_rows)
most_similar = _dispatched(reference.most_similar)
fused_attention = _dispatched(reference.fused_attention)
move_entries = _dispatched(reference.move_entries)
merge_entries = _dispatched(reference.merge_entries)
write_rows = _dispatched(reference.write_rows)
write_metadata = _dispatched(reference.write_metadata)
write_tokens = _dispatched(reference.write_tokens)

largest = _index_operator(reference.largest)
top = _index_operator(reference.top)
in_place = _index_operator(reference.in_place)
by_position = _index_operator(reference.by_position)
padded_nonzero = _index_operator(reference.padded_nonzero)
inverse = _index_operator(reference.inverse)
free_places = _index_operator(reference.free_places)
join_slots = _index_operator(reference.join_slots)
take = _index_operator(reference.take)
