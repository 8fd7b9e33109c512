"""The operators in C++ (csrc/cpu), with the signatures and semantics of ``reference``.

Arguments are checked on the native side: TypeError for a wrong dtype, ValueError for anything else.
"""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vllm_kvmerge.kernels.page import Pages
from vllm_kvmerge.kernels.reference import UPDATE_MODES, ScoreUpdate
from vllm_kvmerge.policies.base import Entries

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


def gather_metadata(
    pages: Pages, blocks: Tensor, front: int, tail: int, seq_len: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = pages.num_kv_heads, front + seq_len - tail
    log_votes, scores, aux = (torch.empty(shape) for _ in range(3))
    positions = torch.empty(shape, dtype=torch.int64)
    _function("gather_metadata")(pages.keys, blocks, front, tail, seq_len, log_votes, scores, aux, positions)
    return log_votes, scores, aux, positions


def gather_rows(
    pages: Pages, plane: Literal["keys", "values"], blocks: Tensor, front: int, tail: int, index: Tensor
) -> Tensor:
    rows = torch.empty(*index.shape, pages.head_size)
    _function("gather_rows")(pages.keys, plane == "keys", blocks, front, tail, index.contiguous(), rows)
    return rows


def gather_entries(pages: Pages, blocks: Tensor, front: int, tail: int, seq_len: int) -> Entries:
    metadata = gather_metadata(pages, blocks, front, tail, seq_len)
    keys, values = (torch.empty(*metadata[0].shape, pages.head_size) for _ in range(2))
    _function("gather_all")(pages.keys, blocks, front, tail, seq_len, keys, values)
    return Entries(keys, values, *metadata)


def most_similar(
    pages: Pages, blocks: Tensor, front: int, tail: int, members: Tensor, carriers: Tensor, usable: Tensor
) -> tuple[Tensor, Tensor]:
    similarity, best = torch.empty(members.shape), torch.empty(members.shape, dtype=torch.int64)
    arguments = members.contiguous(), carriers.contiguous(), usable.contiguous()
    _function("most_similar")(pages.keys, blocks, front, tail, *arguments, similarity, best)
    return similarity, best


def move_entries(
    pages: Pages, source_blocks: Tensor, front: int, tail: int, destination_blocks: Tensor, kept: Tensor
) -> None:
    _function("move_entries")(pages.keys, source_blocks, front, tail, destination_blocks, kept.contiguous())


def write_rows(pages: Pages, blocks: Tensor, places: Tensor, keys: Tensor | None, values: Tensor | None) -> None:
    rows = (None if t is None else t.contiguous() for t in (keys, values))
    _function("write_rows")(pages.keys, blocks, places.contiguous(), *rows)


def write_metadata(
    pages: Pages, blocks: Tensor, log_votes: Tensor, scores: Tensor, aux: Tensor, positions: Tensor
) -> None:
    planes = (t.contiguous() for t in (log_votes, scores, aux, positions))
    _function("write_metadata")(pages.keys, blocks, *planes)


def write_tokens(pages: Pages, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    _function("write_tokens")(pages.keys, slot_mapping, key, value)
