"""The operators in C++ (csrc/cpu), with the signatures and semantics of ``reference``.

Arguments are checked on the native side: TypeError for a wrong dtype, ValueError for anything else.
"""

from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_kvmerge.kernels.page import Pages
from vllm_kvmerge.kernels.reference import UPDATE_MODES, ScoreUpdate

LIBRARY = Path(__file__).with_name("_native.so")


@cache
def library() -> Any:
    """The loaded library. Raises OSError or ImportError where there is none that works.

    PyTorch, imported above, has loaded the OpenMP runtime that the library's threads come from.
    """
    if not LIBRARY.exists():
        raise OSError(f"{LIBRARY} is missing: it was not built when the package was installed")
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(LIBRARY))
    except RuntimeError as error:
        raise OSError(f"{LIBRARY} cannot be loaded: {error}") from error


def levels() -> list[str]:
    """Instruction set levels that the library has and this machine runs, the best first."""
    return list(library().levels().split())


def level() -> str:
    """The level in use: the best one, unless ``set_level`` chose another."""
    return str(library().level())


def set_level(name: str) -> None:
    """Makes all operators run on another level. Raises ValueError if the machine cannot."""
    library().set_level(name)


@cache
def _function(name: str) -> Any:
    return library()[name]


def paged_attention(
    query: Tensor,
    pages: Pages,
    block_table: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    fronts: Tensor,
    tails: Tensor,
    update_modes: Tensor,
    update_decays: Tensor,
    scale: float,
    output: Tensor,
) -> None:
    _function("paged_attention")(
        query,
        pages.keys,
        block_table,
        query_starts,
        query_lens,
        seq_lens,
        fronts,
        tails,
        update_modes,
        update_decays,
        scale,
        output,
    )


def column_scores(
    query: Tensor,
    pages: Pages,
    blocks: Tensor,
    seq_len: int,
    update: ScoreUpdate,
    scale: float,
    scores: Tensor,
    aux: Tensor,
) -> None:
    mode = UPDATE_MODES.index(update.mode)
    _function("column_scores")(query, pages.keys, blocks, seq_len, mode, update.decay, scale, scores, aux)
