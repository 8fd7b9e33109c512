"""The operators over paged KV blocks, and the implementation that runs them.

Native operators (``native``) run where their library was built and the cache suits them, the PyTorch reference
elsewhere.
"""

import functools
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


@functools.cache
def _native_failure() -> str | None:
    """Why there are no native operators in this process; None if there are. Warns once."""
    try:
        native.library()
    except (OSError, ImportError) as error:
        logger.warning("KV cache operators run on PyTorch, which is slow: %s", error)
        return str(error)
    return None


def implementation(pages: Pages | None = None) -> str:
    """Which implementation runs, and why not the native one; for ``pages`` if given."""
    obstacle = _native_failure() or (pages.native_obstacle if pages is not None else None)
    return f"native, {native.level()}" if obstacle is None else f"PyTorch reference: {obstacle}"


def _module(pages: Pages | Units) -> ModuleType:
    return reference if _native_failure() or pages.native_obstacle else native


def _suits(tensor: torch.Tensor) -> bool:
    """Whether the native operators take an argument of index arithmetic."""
    return tensor.is_cpu and tensor.dtype in (torch.float32, torch.int64, torch.bool) and not _native_failure()


def _index_operator(operator: Operator) -> Operator:
    """The operator on the implementation that suits its first argument, a plain tensor."""
    name = operator.__name__

    @functools.wraps(operator)
    def run(*args: Any) -> Any:
        return getattr(native if _suits(args[0]) else reference, name)(*args)

    return cast(Operator, run)


def _dispatched(operator: Operator, pages_at: int = 0) -> Operator:
    """The operator on the implementation that suits its ``pages_at``-th argument, ``pages`` or ``units``."""
    name = operator.__name__

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        pages = args[pages_at] if len(args) > pages_at else kwargs.get("pages") or kwargs["units"]
        return getattr(_module(pages), name)(*args, **kwargs)

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
