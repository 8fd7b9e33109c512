"""The operators over paged KV blocks, and the implementation that runs them.

On the CPU, native operators (``native``) run where their library was built and the cache suits them; on a card,
Triton's (``triton``) where it is installed; elsewhere the PyTorch reference. ``choose`` takes another.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

from vllm_kvmerge.kernels import native, reference
from vllm_kvmerge.kernels.page import METADATA_BYTES, Pages, Units, cell_bytes
from vllm_kvmerge.kernels.reference import UPDATE_MODES, ScoreUpdate, write_front

logger = logging.getLogger(__name__)

__all__ = [
    "by_position",
    "choose",
    "in_place",
    "inverse",
    "join_slots",
    "largest",
    "padded",
    "take",
    "top",
    "METADATA_BYTES",
    "UPDATE_MODES",
    "Pages",
    "ScoreUpdate",
    "Units",
    "cell_bytes",
    "column_scores",
    "fused_attention",
    "free_places",
    "gather_entries",
    "gather_metadata",
    "gather_rows",
    "implementation",
    "most_similar",
    "move_entries",
    "paged_attention",
    "write_front",
    "write_metadata",
    "write_rows",
    "write_tokens",
]

Operator = TypeVar("Operator", bound=Callable[..., Any])


_chosen: str | None = None


def choose(name: str | None) -> None:
    """Makes ``reference``, ``native`` or ``triton`` run wherever it can; None: what suits the tensors.

    Triton's then run on CPU tensors too, in its interpreter, for tests. Raises ValueError for any other name, and
    OSError or ImportError where that implementation is not there.
    """
    global _chosen
    if name not in (None, "reference", "native", "triton"):
        raise ValueError(f"there are no operators called {name!r}")
    if name == "native":
        native.library()
    elif name == "triton":
        _triton()
    _chosen = name


@functools.cache
def _native_failure() -> str | None:
    """Why there are no native operators in this process; None if there are. Warns once."""
    try:
        native.library()
    except (OSError, ImportError) as error:
        logger.warning("KV cache operators run on PyTorch, which is slow: %s", error)
        return str(error)
    return None


def _triton() -> ModuleType:
    """Triton's operators. Imported when they are needed: on the CPU, Triton need not be installed."""
    return importlib.import_module("vllm_kvmerge.kernels.triton")


@functools.cache
def _triton_failure() -> str | None:
    """Why there are no Triton operators in this process; None if there are. Warns once."""
    try:
        _triton()
    except ImportError as error:
        logger.warning("KV cache operators run on PyTorch, which is slow: %s", error)
        return str(error)
    return None


def _module(device: torch.device, pages: Pages | Units | None = None) -> tuple[ModuleType, str]:
    """The implementation for tensors on ``device`` and for ``pages``, and, if it is the reference, why."""
    if _chosen == "reference":
        return reference, "it was chosen"
    if device.type == "cuda" or _chosen == "triton":
        obstacle = _triton_failure() or (pages.triton_obstacle if pages is not None else None)
        if obstacle is None and device.type != "cuda" and not _triton().INTERPRETED:
            obstacle = f"Triton's run on {device} with TRITON_INTERPRET=1 only"
        return (reference, obstacle) if obstacle else (_triton(), "")
    obstacle = _native_failure() or (pages.native_obstacle if pages is not None else None)
    return (reference, obstacle) if obstacle else (native, "")


def implementation(pages: Pages | None = None) -> str:
    """Which implementation runs, and why if that is the reference; for ``pages`` if given, else on the CPU."""
    device = torch.device("cpu") if pages is None else pages.keys.device
    module, obstacle = _module(device, pages)
    if module is reference:
        return f"PyTorch reference: {obstacle}"
    return f"native, {native.level()}" if module is native else str(module.description(device))


def _index_operator(operator: Operator) -> Operator:
    """The operator on the implementation that suits its first argument, a plain tensor."""
    name = operator.__name__

    @functools.wraps(operator)
    def run(*args: Any) -> Any:
        tensor = args[0]
        module, _ = _module(tensor.device)
        if module is native and (not tensor.is_cpu or tensor.dtype not in (torch.float32, torch.int64, torch.bool)):
            module = reference
        return getattr(module, name)(*args)

    return cast(Operator, run)


def _dispatched(operator: Operator, pages_at: int = 0) -> Operator:
    """The operator on the implementation that suits its ``pages_at``-th argument, ``pages`` or ``units``."""
    name = operator.__name__

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        pages = args[pages_at] if len(args) > pages_at else kwargs.get("pages") or kwargs["units"]
        layer = pages if isinstance(pages, Pages) else pages.layers[0]
        return getattr(_module(layer.keys.device, pages)[0], name)(*args, **kwargs)

    return cast(Operator, run)


paged_attention = _dispatched(reference.paged_attention, pages_at=1)
column_scores = _dispatched(reference.column_scores, pages_at=1)
gather_metadata = _dispatched(reference.gather_metadata)
gather_rows = _dispatched(reference.gather_rows)
gather_entries = _dispatched(reference.gather_entries)
most_similar = _dispatched(reference.most_similar)
fused_attention = _dispatched(reference.fused_attention)
move_entries = _dispatched(reference.move_entries)
write_rows = _dispatched(reference.write_rows)
write_metadata = _dispatched(reference.write_metadata)
write_tokens = _dispatched(reference.write_tokens)

largest = _index_operator(reference.largest)
top = _index_operator(reference.top)
in_place = _index_operator(reference.in_place)
by_position = _index_operator(reference.by_position)
padded = _index_operator(reference.padded)
inverse = _index_operator(reference.inverse)
free_places = _index_operator(reference.free_places)
join_slots = _index_operator(reference.join_slots)
take = _index_operator(reference.take)
