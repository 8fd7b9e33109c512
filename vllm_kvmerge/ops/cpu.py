"""The operators in C++ (csrc/cpu), with the signatures and semantics of ``reference``.

Arguments are checked on the native side: TypeError for a wrong dtype, ValueError for anything else.
"""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vllm_kvmerge.ops import reference
from vllm_kvmerge.ops.attention import Fusion
from vllm_kvmerge.ops.reference import merge_by_parts
from vllm_kvmerge.ops.types import Metadata, PagedKVCache, Rows, ScoreUpdate, SequenceLayers

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
    pages: PagedKVCache,
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
    num_queries: int | None = None,
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


def score_prompt_queries(
    query: Tensor,
    pages: PagedKVCache,
    blocks: Tensor,
    seq_len: int,
    update: ScoreUpdate,
    scale: float,
    scores: Tensor,
    aux: Tensor,
) -> None:
    mode = update.mode.code
    _function("score_prompt_queries")(query, pages.keys, blocks, seq_len, mode, update.decay, scale, scores, aux)


def _layers(units: SequenceLayers) -> tuple[list[Tensor], Tensor]:
    return [pages.keys for pages in units.layers], units.layer


def _located(units: SequenceLayers) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    return *_layers(units), units.blocks, units.segments


def gather_metadata(units: SequenceLayers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = units.num_heads, units.num_entries
    log_votes, scores, aux = (torch.empty(shape) for _ in range(3))
    positions = torch.empty(shape, dtype=torch.int64)
    _function("gather_metadata")(*_located(units), log_votes, scores, aux, positions)
    return log_votes, scores, aux, positions


def gather_rows(units: SequenceLayers, plane: Literal["keys", "values"], index: Tensor) -> Tensor:
    rows = torch.empty(*index.shape, units.layers[0].head_size)
    _function("gather_rows")(*_located(units), plane == "keys", index.contiguous(), rows)
    return rows


def most_similar(units: SequenceLayers, members: Tensor, carriers: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    similarity, best = torch.empty(members.shape), torch.empty(members.shape, dtype=torch.int64)
    arguments = members.contiguous(), carriers.contiguous(), usable.contiguous()
    _function("most_similar")(*_located(units), *arguments, similarity, best)
    return similarity, best


def fused_attention(
    units: SequenceLayers,
    queries: Tensor,
    query_positions: Tensor,
    log_votes: Tensor,
    positions: Tensor,
    scale: float,
    fusion: Fusion,
) -> Tensor:
    fused = torch.empty(positions.shape)
    arguments = (t.contiguous() for t in (queries, query_positions, log_votes, positions))
    _function("fused_attention")(*_located(units), *arguments, scale, fusion == "max", fused)
    return fused


def move_entries(units: SequenceLayers, destination: Tensor, kept: Tensor) -> None:
    _function("move_entries")(*_located(units), destination, kept.contiguous())


def write_rows(
    units: SequenceLayers, blocks: Tensor, places: Tensor, keys: Tensor | None, values: Tensor | None
) -> None:
    rows = (None if t is None else t.contiguous() for t in (keys, values))
    _function("write_rows")(*_layers(units), blocks, places.contiguous(), *rows)


def write_metadata(
    units: SequenceLayers, blocks: Tensor, log_votes: Tensor, scores: Tensor, aux: Tensor, positions: Tensor
) -> None:
    planes = (t.contiguous() for t in (log_votes, scores, aux, positions))
    _function("write_metadata")(*_layers(units), blocks, *planes)


def merge_entries(units: SequenceLayers, destination: Tensor, kept: Tensor, metadata: Metadata, rows: Rows) -> None:
    merge_by_parts(sys.modules[__name__], units, destination, kept, metadata, rows)


def write_tokens(pages: PagedKVCache, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    _function("write_tokens")(pages.keys, slot_mapping, key, value)


def largest(ranking: Tensor, count: int) -> Tensor:
    mask = torch.empty(ranking.shape, dtype=torch.bool)
    _function("largest")(ranking.contiguous(), count, mask)
    return mask


def top(ranking: Tensor, protected: Tensor, is_live: Tensor, count: int) -> Tensor:
    mask = torch.empty(ranking.shape, dtype=torch.bool)
    _function("top")(*(t.contiguous() for t in (ranking, protected, is_live)), count, mask)
    return mask


def in_place(mask: Tensor, count: int) -> Tensor:
    index = torch.empty(len(mask), count, dtype=torch.int64)
    _function("in_place")(mask.contiguous(), index)
    return index


def by_position(positions: Tensor) -> Tensor:
    order = torch.empty(positions.shape, dtype=torch.int64)
    _function("by_position")(positions.contiguous(), order)
    return order


def padded_nonzero(mask: Tensor, width: int | None = None) -> Tensor:
    mask = mask.contiguous()
    index = torch.empty(len(mask), _function("most_true")(mask) if width is None else width, dtype=torch.int64)
    _function("padded_nonzero")(mask, index)
    return index


def inverse(index: Tensor, size: int) -> Tensor:
    where = torch.empty(len(index), size, dtype=torch.int64)
    _function("inverse")(index.contiguous(), where)
    return where


def take(index: Tensor, planes: Sequence[Tensor]) -> list[Tensor]:
    if any(plane.dtype not in (torch.float32, torch.int64) for plane in planes):
        return reference.take(index, planes)
    taken = [torch.empty(index.shape, dtype=plane.dtype) for plane in planes]
    _function("take")([plane.contiguous() for plane in planes], index.contiguous(), taken)
    return taken


def free_places(index: Tensor, num_places: int) -> Tensor:
    place = torch.empty(index.shape, dtype=torch.int64)
    _function("free_places")(index.contiguous(), num_places, place)
    return place


def join_slots(
    products: Tensor, between: Tensor, member_weights: Tensor, slot_weights: Tensor
) -> tuple[Tensor, Tensor]:
    joined = torch.empty(member_weights.shape, dtype=torch.int64)
    products, total = (t.clone(memory_format=torch.contiguous_format) for t in (products, slot_weights))
    _function("join_slots")(products, between.contiguous(), member_weights.contiguous(), total, joined)
    return joined, total
