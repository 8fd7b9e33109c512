"""Index arithmetic over the entries of each row in Triton, launched by ``indexing``.

One program works on one row, which has ``n`` elements without gaps between them, tile by tile; where it reads what
another of its threads has written, there is a barrier before. Numbers that change from one compression to the next are
not specialised, nor is where a row or a tensor begins, so that a GPU needs one machine code for all of them.
"""

import triton
import triton.language as tl

from vllm_kvmerge.ops.triton.compiling import for_any

BLOCK: int = 1024
"""Elements of a tile, where a program has a row."""

TILE: int = 256
"""Elements of a tile, where each is a program's."""


@triton.jit
def ordered(x, WIDE: tl.constexpr):
    """Integers in the order of ``x``: themselves (WIDE, 64 bits), or of 32 bits for floating point, without NaN."""
    if WIDE:
        return x
    else:
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # 0 and -0 are equal
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_of(ranking, protected, is_live, at, inside, WIDE: tl.constexpr):
    """Integers by which the elements at some places are ordered. protected: bytes, or None; then no element is ordered
    by anything but itself."""
    x = tl.load(ranking + at, mask=inside, other=0)
    if protected is not None:
        limit = 3.4028234663852886e38
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -limit), limit), -limit)
        x = tl.where(tl.load(protected + at, mask=inside, other=0) != 0, float("inf"), x)
        x = tl.where(tl.load(is_live + at, mask=inside, other=0) != 0, x, float("-inf"))
    return ordered(x, WIDE)


@for_any("n", "count")
def select_largest(
    ranking, protected, is_live, counts, out, n, count,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Marks the ``count`` largest of a row, or ``counts[row]``; of equal ones the first. Grid: rows.

    The least of them is found eight bits at a time, from the highest on: how many elements share the bits found so far
    and have which next ones. ``count``: 0 to n.
    """
    row = tl.program_id(0).to(tl.int64)
    if counts is not None:
        count = tl.minimum(tl.maximum(tl.load(counts + row), 0), n).to(tl.int32)
    base = row * n
    remaining = count
    KEY: tl.constexpr = tl.int64 if WIDE else tl.int32
    PASSES: tl.constexpr = 8 if WIDE else 4
    prefix = tl.zeros([1], KEY)
    for step in tl.static_range(PASSES):
        shift = 8 * (PASSES - 1 - step)
        found = tl.zeros([256], tl.int32)
        for start in range(0, n, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < n
            key = rank_of(ranking, protected, is_live, base + place, inside, WIDE)
            digit = ((key >> shift) & 255).to(tl.int32)
            if step == 0:
                digit = digit ^ 128  # the sign
            else:
                inside = inside & ((key >> (shift + 8)) == prefix)
            found += tl.histogram(digit, 256, mask=inside)
        at_least = tl.sum(found, 0) - tl.cumsum(found, 0) + found
        least = tl.sum((at_least >= remaining).to(tl.int32), 0) - 1
        remaining -= tl.sum(tl.where(tl.arange(0, 256) == least, at_least - found, 0), 0)
        if step == 0:
            prefix += least - 128
        else:
            prefix = prefix * 256 + least
    level = tl.zeros([1], tl.int32)
    for start in range(0, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < n
        key = rank_of(ranking, protected, is_live, base + place, inside, WIDE)
        is_level = (inside & (key == prefix)).to(tl.int32)
        chosen = (key > prefix) | ((is_level != 0) & (level + tl.cumsum(is_level, 0) <= remaining))
        tl.store(out + base + place, chosen.to(tl.uint8), mask=inside)
        level += tl.sum(is_level, 0)


@for_any("n", "width", "first")
def list_places(mask, firsts, out, n, width, first, BLOCK: tl.constexpr):
    """Lists the places from ``first`` (or ``firsts[row]``) on where a row's mask is true, up to ``width``, then -1.
    Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if firsts is not None:
        first = tl.load(firsts + row).to(tl.int32)
    count = tl.zeros([1], tl.int32)
    for start in range(0, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        listed = (tl.load(mask + row * n + place, mask=place < n, other=0) != 0) & (place >= first)
        at = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(out + row * width + at, place.to(tl.int64), mask=listed & (at < width))
        count += tl.sum(listed.to(tl.int32), 0)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        nothing = tl.full([BLOCK], -1, tl.int64)
        tl.store(out + row * width + place, nothing, mask=(place < width) & (place >= count))


@for_any("n", "num_places", "count")
def keep_in_place(mask, others, counts, out, n, num_places, count, BLOCK: tl.constexpr):
    """Places below ``count`` (or ``counts[row]``): their own number where a row's mask is true, and elsewhere those of
    ``others`` in order; then -1. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if counts is not None:
        count = tl.load(counts + row).to(tl.int32)
    seen = tl.zeros([1], tl.int32)
    for start in range(0, num_places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        below = (place < count) & (place < num_places)
        stays = below & (tl.load(mask + row * n + place, mask=below & (place < n), other=0) != 0)
        vacant = below & (stays == 0)
        at = seen + tl.cumsum(vacant.to(tl.int32), 0) - 1
        comes = tl.load(others + row * num_places + at, mask=vacant, other=-1)
        tl.store(out + row * num_places + place, tl.where(stays, place.to(tl.int64), comes), mask=place < num_places)
        seen += tl.sum(vacant.to(tl.int32), 0)


@for_any("num_listed", "size")
def invert(index, out, num_listed, size, BLOCK: tl.constexpr):
    """Where each number is in a row of ``index``; -1: nowhere. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(out + row * size + place, tl.full([BLOCK], -1, tl.int64), mask=place < size)
    tl.debug_barrier()
    for start in range(0, num_listed, BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = tl.load(index + row * num_listed + place, mask=place < num_listed, other=-1)
        tl.store(out + row * size + number, place.to(tl.int64), mask=(number >= 0) & (number < size))


@triton.jit
def take_one(plane, out, blank, source, target, none, inside):
    if plane is not None:
        x = tl.load(plane + source, mask=inside & (none == 0), other=0)
        tl.store(out + target, tl.where(none, tl.full(x.shape, blank, x.dtype), x), mask=inside)


@for_any("n", "num_taken", "blank_0", "blank_1", "blank_2", "blank_3", "blank_4")
def take_planes(
    index, plane_0, plane_1, plane_2, plane_3, plane_4, out_0, out_1, out_2, out_3, out_4,
    blank_0, blank_1, blank_2, blank_3, blank_4, n, num_taken,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements of up to five planes at ``index``, or their blanks where that is negative. Grid: rows, tiles."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_taken
    target = row * num_taken + place
    number = tl.load(index + target, mask=inside, other=-1)
    source, none = row * n + number, number < 0
    take_one(plane_0, out_0, blank_0, source, target, none, inside)
    take_one(plane_1, out_1, blank_1, source, target, none, inside)
    take_one(plane_2, out_2, blank_2, source, target, none, inside)
    take_one(plane_3, out_3, blank_3, source, target, none, inside)
    take_one(plane_4, out_4, blank_4, source, target, none, inside)


@triton.jit
def put_one(plane, new, out, base, n, index, first, num_put, BLOCK: tl.constexpr):
    if plane is not None:
        for start in range(0, n, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(out + base + place, tl.load(plane + base + place, mask=place < n), mask=place < n)
        tl.debug_barrier()
        for start in range(0, num_put, BLOCK):
            place = start + tl.arange(0, BLOCK)
            number = tl.load(index + first + place, mask=place < num_put, other=-1)
            given = tl.load(new + first + place, mask=number >= 0)
            tl.store(out + base + number, given, mask=number >= 0)


@for_any("n", "num_put")
def put_planes(
    index, plane_0, plane_1, plane_2, plane_3, plane_4, new_0, new_1, new_2, new_3, new_4,
    out_0, out_1, out_2, out_3, out_4, n, num_put,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies of up to five planes with new elements at ``index`` where that is not negative. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    put_one(plane_0, new_0, out_0, row * n, n, index, row * num_put, num_put, BLOCK)
    put_one(plane_1, new_1, out_1, row * n, n, index, row * num_put, num_put, BLOCK)
    put_one(plane_2, new_2, out_2, row * n, n, index, row * num_put, num_put, BLOCK)
    put_one(plane_3, new_3, out_3, row * n, n, index, row * num_put, num_put, BLOCK)
    put_one(plane_4, new_4, out_4, row * n, n, index, row * num_put, num_put, BLOCK)


@triton.jit
def largest_of(rows, at, inside):
    """The largest absolute number of each of some rows; infinite if one is NaN."""
    x = tl.abs(tl.load(rows + at, mask=inside, other=0.0))
    return tl.max(tl.where(x == x, x, float("inf")), 1)


@for_any("num_rows", "most")
def mark_overflows(
    rows, others, out, num_rows, most,
    HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Which rows have a number beyond ``most``, or NaN. Grid: tiles of rows."""
    number = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)[None, :]
    at, inside = number[:, None] * HEAD_SIZE + dim, (number < num_rows)[:, None] & (dim < HEAD_SIZE)
    largest = largest_of(rows, at, inside)
    if others is not None:
        largest = tl.maximum(largest, largest_of(others, at, inside))
    tl.store(out + number, (largest >= most).to(tl.uint8), mask=number < num_rows)


@for_any("num_places")
def blank_places(
    positions, kept, log_votes, scores, aux, out_kept, out_votes, out_scores, out_aux, num_places,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``reference.empty_places``. Grid: rows, tiles."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = place < num_places, row * num_places + place
    dead = tl.load(positions + at, mask=inside, other=-1) == -1
    number = tl.load(kept + at, mask=inside, other=-1)
    tl.store(out_kept + at, tl.where(dead & (number != place), -1, number), mask=inside)
    votes = tl.load(log_votes + at, mask=inside, other=0.0)
    tl.store(out_votes + at, tl.where(dead, float("-inf"), votes), mask=inside)
    tl.store(out_scores + at, tl.where(dead, 0.0, tl.load(scores + at, mask=inside, other=0.0)), mask=inside)
    tl.store(out_aux + at, tl.where(dead, 0.0, tl.load(aux + at, mask=inside, other=0.0)), mask=inside)


@for_any("num_listed", "num_places")
def fill_places(index, taken, free, out, num_listed, num_places, BLOCK: tl.constexpr):
    """``reference.free_places``. taken: zeros, a byte for each place. free: room for as many numbers. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, num_listed, BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = tl.load(index + row * num_listed + place, mask=place < num_listed, other=-1)
        one = tl.full([BLOCK], 1, tl.uint8)
        tl.store(taken + row * num_places + number, one, mask=(number >= 0) & (number < num_places))
    tl.debug_barrier()
    count = tl.zeros([1], tl.int32)
    for start in range(0, num_places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_free = tl.load(taken + row * num_places + place, mask=place < num_places, other=1) == 0
        at = count + tl.cumsum(is_free.to(tl.int32), 0) - 1
        tl.store(free + row * num_places + at, place.to(tl.int64), mask=is_free)
        count += tl.sum(is_free.to(tl.int32), 0)
    tl.debug_barrier()
    seen = tl.zeros([1], tl.int32)
    for start in range(0, num_listed, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < num_listed
        number = tl.load(index + row * num_listed + place, mask=inside, other=-1)
        goes = inside & ((number < 0) | (number >= num_places))
        at = seen + tl.cumsum(goes.to(tl.int32), 0) - 1
        given = tl.load(free + row * num_places + at, mask=goes, other=-1)
        tl.store(out + row * num_listed + place, tl.where(goes, given, number), mask=inside)
        seen += tl.sum(goes.to(tl.int32), 0)
