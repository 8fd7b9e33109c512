"""Index arithmetic over the entries of each row in Triton: one launch where PyTorch takes five to ten."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvmerge.ops import reference
from vllm_kvmerge.ops.triton import index_kernels
from vllm_kvmerge.ops.triton.index_kernels import BLOCK, TILE
from vllm_kvmerge.ops.triton.plan import power_of_two
from vllm_kvmerge.ops.types import least_overflow

MOST_PLANES = 5
"""That are taken or put at once: a cache's metadata, and what a place holds."""


def _tiles(rows: int, size: int) -> tuple[int, int]:
    return rows, -(-size // TILE)


def _bytes(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


def _select(ranking: Tensor, count: int | Tensor, *masks: Tensor, num_sinks: int | None = None) -> Tensor:
    out = torch.empty(ranking.shape, dtype=torch.bool, device=ranking.device)
    counts, number = (count, 0) if isinstance(count, Tensor) else (None, min(max(0, count), ranking.shape[1]))
    if out.numel():
        protected, is_live = map(_bytes, masks) if masks else (None, None)
        index_kernels.select_largest[(len(out),)](
            ranking.contiguous(), protected, is_live, counts, out.view(torch.uint8), ranking.shape[1], number,
            num_sinks or 0,
            WIDE=ranking.dtype == torch.int64, NEWEST=num_sinks is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def largest(ranking: Tensor, count: int | Tensor) -> Tensor:
    if ranking.dtype not in (torch.float32, torch.int64):
        return reference.largest(ranking, count)
    return _select(ranking, count)


def top(ranking: Tensor, protected: Tensor, is_live: Tensor, count: int | Tensor) -> Tensor:
    if ranking.dtype != torch.float32:
        return reference.top(ranking, protected, is_live, count)
    return _select(ranking, count, protected, is_live)


def newest(positions: Tensor, count: int | Tensor, num_sinks: int) -> Tensor:
    return _select(positions, count, num_sinks=num_sinks)


def in_place(mask: Tensor, count: int | Tensor, num_places: int | None = None) -> Tensor:
    num_places = int(count) if num_places is None else num_places
    counts, number = (count, 0) if isinstance(count, Tensor) else (None, count)
    others, out = (torch.empty(len(mask), num_places, dtype=torch.int64, device=mask.device) for _ in range(2))
    if out.numel():
        index_kernels.keep_in_place[(len(out),)](
            _bytes(mask), others, counts, out, mask.shape[1], num_places, number, BLOCK=BLOCK, num_warps=4
        )
    return out


def padded_nonzero(mask: Tensor, width: int | None = None) -> Tensor:
    if width is None:
        width = int(mask.sum(1).max()) if len(mask) else 0
    out = torch.empty(len(mask), width, dtype=torch.int64, device=mask.device)
    if out.numel():
        index_kernels.list_places[(len(out),)](
            _bytes(mask), None, out, mask.shape[1], width, 0, BLOCK=BLOCK, num_warps=4
        )
    return out


def num_live(positions: Tensor) -> Tensor:
    out = torch.empty(len(positions), dtype=torch.int64, device=positions.device)
    if out.numel():
        index_kernels.count_live[(len(out),)](positions.contiguous(), out, positions.shape[1], BLOCK=BLOCK, num_warps=4)
    return out


def inverse(index: Tensor, size: int) -> Tensor:
    out = torch.empty(len(index), size, dtype=torch.int64, device=index.device)
    if out.numel():
        index_kernels.invert[(len(out),)](index.contiguous(), out, index.shape[1], size, BLOCK=BLOCK, num_warps=4)
    return out


def take(index: Tensor, planes: Sequence[Tensor], blanks: Sequence[float]) -> list[Tensor]:
    taken = [torch.empty(index.shape, dtype=plane.dtype, device=index.device) for plane in planes]
    if index.numel():
        missing = [None] * (MOST_PLANES - len(planes))
        index_kernels.take_planes[_tiles(*index.shape)](
            index.contiguous(), *(plane.contiguous() for plane in planes), *missing, *taken, *missing,
            *map(float, blanks), *[0.0] * len(missing), planes[0].shape[1], index.shape[1], BLOCK=TILE, num_warps=4,
        )  # fmt: skip
    return taken


def join_changes(
    kept: Tensor, positions: Tensor, changed: Tensor, earlier: Tensor, num_entries: int, width: int | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, num_places = kept.shape
    width = min(num_places, changed.shape[1] + earlier.shape[1]) if width is None else width
    own, before, places, rows = (
        torch.empty(num_rows, size, dtype=torch.int64, device=kept.device)
        for size in (num_places, num_entries, width, width)
    )
    if places.numel():
        index_kernels.join_changed[(num_rows,)](
            *(plane.contiguous() for plane in (kept, positions, changed, earlier)), own, before, places, rows,
            num_places, changed.shape[1], earlier.shape[1], num_entries, width, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return places, rows


def take_rows(index: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    head_size = rows.shape[2]
    taken = torch.empty(*index.shape, head_size, dtype=rows.dtype, device=rows.device)
    if taken.numel():
        size = power_of_two(head_size)
        tile = max(1, 2048 // size)
        index_kernels.pick_rows[(len(index), -(-index.shape[1] // tile))](
            index.contiguous(), rows.contiguous(), others.contiguous(), taken, index.shape[1], rows.shape[1],
            others.shape[1], HEAD_SIZE=head_size, BLOCK_N=tile, BLOCK_D=size, num_warps=4,
        )  # fmt: skip
    return taken


def log_contributions(log_votes: Tensor, scores: Tensor, counts: Tensor, decay: float) -> Tensor:
    out = torch.empty(scores.shape, device=scores.device)
    if out.numel():
        given = (plane.contiguous() for plane in (log_votes, scores, counts))
        index_kernels.log_corrected[(-(-out.numel() // TILE),)](
            *given, out, out.numel(), math.log(decay), BLOCK=TILE, num_warps=4
        )
    return out


def put(index: Tensor, planes: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    changed = [torch.empty(plane.shape, dtype=plane.dtype, device=index.device) for plane in planes]
    if planes[0].numel():
        given = [[*(plane.contiguous() for plane in some)] for some in (planes, new)]
        missing = [None] * (MOST_PLANES - len(planes))
        index_kernels.put_planes[(len(index),)](
            index.contiguous(), *given[0], *missing, *given[1], *missing, *changed, *missing, planes[0].shape[1],
            index.shape[1], BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return changed


def overflowing(
    places: Tensor, log_votes: Tensor, keys: Tensor | None, values: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = torch.empty(places.shape, dtype=torch.int64, device=places.device)
    if out.numel():
        rows = [None if plane is None else plane.contiguous() for plane in (keys, values)]
        head_size = max((plane.shape[2] for plane in rows if plane is not None), default=1)
        size = power_of_two(head_size)
        tile = max(1, 2048 // size)
        index_kernels.list_overflows[(-(-out.numel() // tile),)](
            places.contiguous(), log_votes.contiguous(), *rows, out, out.numel(), out.shape[1], log_votes.shape[1],
            least_overflow(dtype), HEAD_SIZE=head_size, BLOCK_N=tile, BLOCK_D=size, num_warps=4,
        )  # fmt: skip
    return out


def empty_places(
    positions: Tensor, kept: Tensor, log_votes: Tensor, scores: Tensor, aux: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = kept, log_votes, scores, aux
    out_kept, *planes = (torch.empty(plane.shape, dtype=plane.dtype, device=plane.device) for plane in given)
    if kept.numel():
        index_kernels.blank_places[_tiles(*kept.shape)](
            positions.contiguous(), *(plane.contiguous() for plane in given), out_kept, *planes, kept.shape[1],
            BLOCK=TILE, num_warps=4,
        )  # fmt: skip
    return out_kept, planes[0], planes[1], planes[2]


def free_places(index: Tensor, positions: Tensor, num_places: int) -> Tensor:
    out = torch.empty(index.shape, dtype=torch.int64, device=index.device)
    if out.numel():
        taken = torch.zeros(len(index), num_places, dtype=torch.uint8, device=index.device)
        free = torch.empty(len(index), num_places, dtype=torch.int64, device=index.device)
        index_kernels.fill_places[(len(out),)](
            index.contiguous(), positions.contiguous(), taken, free, out, index.shape[1], num_places,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def hand_over(
    order: Tensor, place: Tensor, is_live: Tensor, importance: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if importance.dtype != torch.float32:
        return reference.hand_over(order, place, is_live, importance, width)
    (rows, n), device = order.shape, order.device
    index, target, places = (torch.empty(rows, width, dtype=torch.int64, device=device) for _ in range(3))
    shares = torch.empty(rows, width, device=device)
    counts = torch.empty(rows, dtype=torch.int64, device=device)
    if counts.numel():
        levels = width.bit_length()
        tree = torch.empty(rows, 2 << levels, dtype=torch.int64, device=device)
        links = torch.empty(rows, 3 * width, dtype=torch.int32, device=device)
        factors = torch.empty(rows, 5 * width, device=device)
        index_kernels.hand_values_over[(rows,)](
            order.contiguous(), place.contiguous(), _bytes(is_live), importance.contiguous(), index, target, shares,
            places, counts, tree, links, factors, n, width, 1 << levels, levels,
            BLOCK=BLOCK, TILE=TILE, num_warps=4, num_stages=1,
        )  # fmt: skip
    return index, target, shares, places, counts


def by_position(positions: Tensor) -> Tensor:
    return positions.argsort(dim=1, stable=True)


def line_up(
    place: Tensor, positions: Tensor, aux: Tensor, scores: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, device = (len(place), count), place.device
    index, newest, keys = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(3))
    weights, sums = (torch.empty(shape, device=device) for _ in range(2))
    if index.numel():
        entries = torch.empty(shape, dtype=torch.int32, device=device)
        given = (plane.contiguous() for plane in (place, positions, aux, scores))
        index_kernels.line_entries_up[shape[:1]](
            *given, index, newest, weights, sums, entries, keys, place.shape[1], count,
            BLOCK=BLOCK, TILE=64, num_warps=4, num_stages=1,
        )  # fmt: skip
    return index, newest, weights, sums


def list_joined(places: Tensor, joins: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    rows, count = places.shape
    width = min(num_places, count)
    joined = torch.empty(rows, width, dtype=torch.int64, device=places.device)
    row = torch.empty(rows, count, dtype=torch.int64, device=places.device)
    if row.numel():
        numbers = torch.empty(rows, num_places, dtype=torch.int32, device=places.device)
        index_kernels.list_joined_places[(rows,)](
            places.contiguous(), _bytes(joins), joined, row, numbers, count, num_places, width,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return joined, row


def mix_in(joining: Tensor, row: Tensor, shares: Tensor, own: Tensor | None) -> Tensor:
    mixed = torch.zeros_like(joining) if own is None else own.clone(memory_format=torch.contiguous_format)
    if joining.numel() and mixed.numel():
        rows, count, head_size = joining.shape
        size = power_of_two(head_size)
        tile = max(1, 2048 // size)
        index_kernels.mix_rows_in[(rows, -(-count // tile))](
            joining.contiguous(), row.contiguous(), shares.contiguous(), None if own is None else own.contiguous(),
            mixed, count, mixed.shape[1], HEAD_SIZE=head_size, BLOCK_N=tile, BLOCK_D=size, num_warps=4,
        )  # fmt: skip
    return mixed
