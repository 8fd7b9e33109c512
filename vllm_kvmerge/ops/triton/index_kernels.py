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


@for_any("n", "count", "num_sinks")
def select_largest(
    ranking, protected, is_live, counts, out, n, count, num_sinks,
    WIDE: tl.constexpr, NEWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Marks the ``count`` largest of a row, or ``counts[row]``; of equal ones the first. NEWEST: those that are not
    negative, and those below ``num_sinks`` (``reference.newest``). Grid: rows.

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
        if NEWEST:
            chosen = (key >= 0) & (chosen | (key < num_sinks))
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
    """Places below ``count`` (or ``counts[row]``): their own number where a row's mask is true, and elsewhere those
    behind in order, which ``others`` has room for; then -1. Grid: rows."""
    list_places(mask, counts, others, n, num_places, count, BLOCK)
    tl.debug_barrier()
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


@for_any("n")
def count_live(positions, out, n, BLOCK: tl.constexpr):
    """How many of a row's positions are not negative. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.zeros([1], tl.int64)
    for start in range(0, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        live = tl.load(positions + row * n + place, mask=place < n, other=-1) >= 0
        count += tl.sum(live.to(tl.int64), 0)
    tl.store(out + row + tl.arange(0, 1), count)


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


@for_any("num_places", "num_changed", "num_earlier", "num_entries", "width")
def join_changed(
    kept, positions, changed, earlier, own, before, places, rows, num_places, num_changed, num_earlier, num_entries,
    width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``reference.join_changes``. own: room for a number for each place, before: for each entry. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    invert(changed, own, num_changed, num_places, BLOCK)
    invert(earlier, before, num_earlier, num_entries, BLOCK)
    tl.debug_barrier()
    count = tl.zeros([1], tl.int32)
    for start in range(0, num_places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < num_places
        mine = tl.load(own + row * num_places + place, mask=inside, other=-1)
        entry = tl.load(kept + row * num_places + place, mask=inside, other=-1)
        live = tl.load(positions + row * num_places + place, mask=inside, other=-1) >= 0
        theirs = tl.load(before + row * num_entries + entry, mask=live & (entry >= 0), other=-1)
        number = tl.where(mine >= 0, mine, tl.where(theirs >= 0, theirs + num_changed, -1))
        listed = inside & (number >= 0)
        at = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        fits = listed & (at < width)
        tl.store(places + row * width + at, place.to(tl.int64), mask=fits)
        tl.store(rows + row * width + at, number, mask=fits)
        count += tl.sum(listed.to(tl.int32), 0)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        nothing, behind = tl.full([BLOCK], -1, tl.int64), (place < width) & (place >= count)
        tl.store(places + row * width + place, nothing, mask=behind)
        tl.store(rows + row * width + place, nothing, mask=behind)


@for_any("num_taken", "num_rows", "num_others")
def pick_rows(
    index, rows, others, out, num_taken, num_rows, num_others,
    HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``reference.take_rows``. Grid: rows, tiles."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = row * num_taken + number
    which = tl.load(index + at, mask=number < num_taken, other=-1)
    dims = tl.arange(0, BLOCK_D)[None, :]
    is_first, inside = which < num_rows, (which >= 0)[:, None] & (dims < HEAD_SIZE)
    here = (row * num_rows + which)[:, None] * HEAD_SIZE + dims
    there = (row * num_others + which - num_rows)[:, None] * HEAD_SIZE + dims
    found = tl.load(rows + here, mask=inside & is_first[:, None], other=0.0)
    found += tl.load(others + there, mask=inside & (is_first == 0)[:, None], other=0.0)
    tl.store(out + at[:, None] * HEAD_SIZE + dims, found, mask=(number < num_taken)[:, None] & (dims < HEAD_SIZE))


@for_any("size", "log_decay")
def log_corrected(log_votes, scores, counts, out, size, log_decay, BLOCK: tl.constexpr):
    """``reference.log_contributions``. Grid: tiles of all elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    count = tl.load(counts + at, mask=inside, other=0.0)
    x = count * log_decay
    # 1 - exp(x): by a series where both are nearly equal.
    near = x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040 + x / 40320)))))
    share = tl.where(x > -0.5, -x * (1.0 + x * (0.5 + near)), 1.0 - tl.exp(x))
    value = tl.load(log_votes + at, mask=inside, other=0.0) + tl.load(scores + at, mask=inside, other=0.0)
    value = tl.where(count > 0.0, value - tl.log(share), float("-inf"))
    tl.store(out + at, value, mask=inside)


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


@for_any("num_rows", "count", "num_places", "least")
def list_overflows(
    places, log_votes, keys, values, out, num_rows, count, num_places, least,
    HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``reference.overflowing``; least: the least number that overflows. Grid: tiles of rows."""
    number = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    place = tl.load(places + number, mask=number < num_rows, other=-1)
    exists = place >= 0
    votes = tl.load(log_votes + number // count * num_places + place, mask=exists, other=0.0)
    overflows = (votes < float("inf")) == 0
    dim = tl.arange(0, BLOCK_D)[None, :]
    at, inside = number[:, None] * HEAD_SIZE + dim, exists[:, None] & (dim < HEAD_SIZE)
    if keys is not None:
        overflows = overflows | (largest_of(keys, at, inside) >= least)
    if values is not None:
        overflows = overflows | (largest_of(values, at, inside) >= least)
    tl.store(out + number, tl.where(overflows, place, -1), mask=number < num_rows)


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
def fill_places(index, positions, taken, free, out, num_listed, num_places, BLOCK: tl.constexpr):
    """``reference.free_places``. taken: zeros, a byte for each place. free: room for as many numbers. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    index, positions, out = index + row * num_listed, positions + row * num_listed, out + row * num_listed
    taken, free = taken + row * num_places, free + row * num_places
    for start in range(0, num_listed, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < num_listed
        number = tl.load(index + place, mask=inside, other=-1)
        live = tl.load(positions + place, mask=inside, other=-1) >= 0
        one = tl.full([BLOCK], 1, tl.uint8)
        tl.store(taken + number, one, mask=live & (number >= 0) & (number < num_places))
    tl.debug_barrier()
    count = tl.zeros([1], tl.int32)
    for start in range(0, num_places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_free = tl.load(taken + place, mask=place < num_places, other=1) == 0
        at = count + tl.cumsum(is_free.to(tl.int32), 0) - 1
        tl.store(free + at, place.to(tl.int64), mask=is_free)
        count += tl.sum(is_free.to(tl.int32), 0)
    tl.debug_barrier()
    seen = tl.zeros([1], tl.int32)
    for start in range(0, num_listed, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < num_listed
        number = tl.load(index + place, mask=inside, other=-1)
        live = tl.load(positions + place, mask=inside, other=-1) >= 0
        goes = live & ((number < 0) | (number >= num_places))
        at = seen + tl.cumsum(goes.to(tl.int32), 0) - 1
        given = tl.load(free + at, mask=goes, other=-1)
        tl.store(out + place, tl.where(goes, given, tl.where(live, number, -1)), mask=inside)
        seen += tl.sum(goes.to(tl.int32), 0)


@triton.jit
def departs(order, place, is_live, rank, inside):
    """Whether the entries at some ranks leave. order, place, is_live: of a row."""
    entry = tl.load(order + rank, mask=inside, other=0)
    live = tl.load(is_live + entry, mask=inside, other=0) != 0
    return entry, inside & live & (tl.load(place + entry, mask=inside, other=0) < 0)


@triton.jit
def nearest_above(tree, leaf, room, levels, least, active, LEFT: tl.constexpr):
    """The nearest leaf to one side of some of a row's tree of maxima (``hand_over``) that is above ``least``; -1: none.

    A walk up to the first node beside the path that has such a leaf, and down to the nearest one.
    """
    node = room + leaf
    found = node < 0
    for _ in range(0, 2 * levels):
        down = active & found & (node < room)
        beside = active & (found == 0) & (node > 1) & ((node & 1) == LEFT)
        next_node = tl.where(down, 2 * node + LEFT, node ^ 1)
        is_above = tl.load(tree + next_node, mask=down | beside, other=-1) > least
        found_here = beside & is_above
        up = tl.where(found, node, node >> 1)
        node = tl.where(down, tl.where(is_above, next_node, next_node ^ 1), tl.where(found_here, next_node, up))
        found = found | found_here
    return tl.where(active & found, node - room, -1)


@triton.jit
def divided(part, total, otherwise):
    return tl.where(total > 0.0, part / tl.where(total > 0.0, total, 1.0), otherwise)


@for_any("n", "width", "room", "levels")
def hand_values_over(
    order, place, is_live, importance, index, target, shares, places, counts, tree, links, factors, n, width, room,
    levels,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``reference.hand_over``. Grid: rows.

    tree: room for ``2 * room`` keys of a row, links for 3, factors for 5 times ``width``. room: ``1 << levels``, more
    than ``width``. Entries that take part are leaves of a tree of maxima of what orders their departures: score, then
    number; what stays is above all.
    """
    row = tl.program_id(0).to(tl.int64)
    order, place, is_live, importance = order + row * n, place + row * n, is_live + row * n, importance + row * n
    index, target, shares, places = (
        index + row * width,
        target + row * width,
        shares + row * width,
        places + row * width,
    )
    tree, links, factors = tree + row * 2 * room, links + row * 3 * width, factors + row * 5 * width
    scores, moved, remained = factors, factors + width, factors + 2 * width
    STAYS: tl.constexpr = 0x7FFFFFFFFFFFFFFF

    # The last entry that stays: what lies behind it is lost.
    last = tl.full([1], -1, tl.int32)
    for start in range(0, n, BLOCK):
        rank = start + tl.arange(0, BLOCK)
        _, leaves = departs(order, place, is_live, rank, rank < n)
        last = tl.maximum(last, tl.max(tl.where((rank < n) & (leaves == 0), rank, -1), 0))

    # Those that leave, and those that follow one.
    size = tl.zeros([1], tl.int32)
    count = tl.zeros([1], tl.int64)
    for start in range(0, n, BLOCK):
        rank = start + tl.arange(0, BLOCK)
        entry, leaves = departs(order, place, is_live, rank, rank <= last)
        _, follows = departs(order, place, is_live, rank - 1, (rank > 0) & (rank <= last))
        takes_part = leaves | follows
        at = size + tl.cumsum(takes_part.to(tl.int32), 0) - 1
        takes_part = takes_part & (at < width)
        tl.store(index + at, entry, mask=takes_part)
        stays_at = tl.load(place + entry, mask=takes_part, other=-1)
        tl.store(places + at, tl.where(leaves, -1, stays_at), mask=takes_part)
        score = tl.load(importance + entry, mask=takes_part, other=0.0)
        score = tl.where(score <= 0.0, 0.0, score)
        tl.store(scores + at, score, mask=takes_part)
        bits = tl.where(score == score, score.to(tl.int32, bitcast=True), 0x7FFFFFFF)  # NaN last
        key = (bits.to(tl.int64) << 32) | at.to(tl.int64)
        tl.store(tree + room + at, tl.where(leaves, key, STAYS), mask=takes_part)
        size += tl.sum(takes_part.to(tl.int32), 0)
        count += tl.sum(leaves.to(tl.int64), 0)
    tl.store(counts + row + tl.arange(0, 1), count)
    for start in range(0, room, TILE):
        i = start + tl.arange(0, TILE)
        behind = (i >= size) & (i < room)
        tl.store(tree + room + i, tl.full([TILE], STAYS, tl.int64), mask=behind)
        behind = behind & (i < width)
        tl.store(index + i, tl.full([TILE], -1, tl.int64), mask=behind)
        tl.store(places + i, tl.full([TILE], -1, tl.int64), mask=behind)
        tl.store(scores + i, tl.zeros([TILE], tl.float32), mask=behind)
    tl.debug_barrier()
    half = room >> 1
    for _ in range(0, levels):
        for start in range(0, half, TILE):
            i = start + tl.arange(0, TILE)
            node, inside = half + i, i < half
            one = tl.load(tree + 2 * node, mask=inside, other=0)
            tl.store(tree + node, tl.maximum(one, tl.load(tree + 2 * node + 1, mask=inside, other=0)), mask=inside)
        tl.debug_barrier()
        half = half >> 1

    # Who takes each one's value as it leaves, in links, and where it ends.
    for start in range(0, width, TILE):
        i = start + tl.arange(0, TILE)
        inside = i < width
        key = tl.load(tree + room + i, mask=inside, other=STAYS)
        leaves = inside & (key != STAYS)
        taker = nearest_above(tree, i, room, levels, key, leaves, LEFT=0)
        stays = tl.full([TILE], STAYS - 1, tl.int64)
        end = nearest_above(tree, i, room, levels, stays, leaves, LEFT=0)
        tl.store(target + i, tl.where(leaves, end, i).to(tl.int64), mask=inside)
        tl.store(links + i, taker, mask=inside)
        own = tl.load(scores + i, mask=inside, other=0.0)
        others = tl.load(scores + taker, mask=leaves, other=0.0)
        total = own + others
        tl.store(moved + i, divided(own, total, 0.0), mask=inside)
        tl.store(remained + i, divided(others, total, 1.0), mask=inside)
    tl.debug_barrier()

    # The departure that follows: of the nearest to the left with the same taker, else the taker's own.
    for start in range(0, width, TILE):
        i = start + tl.arange(0, TILE)
        inside = i < width
        key = tl.load(tree + room + i, mask=inside, other=STAYS)
        leaves = inside & (key != STAYS)
        taker = tl.load(links + i, mask=inside, other=-1)
        left = nearest_above(tree, i, room, levels, key, leaves, LEFT=1)
        shares_taker = leaves & (left >= 0) & (tl.load(links + left, mask=left >= 0, other=-2) == taker)
        following = tl.where(shares_taker, left, taker)
        goes = leaves & (tl.load(tree + room + following, mask=leaves, other=STAYS) != STAYS)
        factor = tl.load(tl.where(shares_taker, remained + left, moved + taker), mask=goes, other=1.0)
        tl.store(links + width + i, tl.where(goes, following, -1), mask=inside)
        tl.store(factors + 3 * width + i, factor, mask=inside)
    tl.debug_barrier()
    origin = 0
    for _ in range(0, levels):
        for start in range(0, width, TILE):
            i = start + tl.arange(0, TILE)
            inside = i < width
            following = tl.load(links + (1 + origin) * width + i, mask=inside, other=-1)
            goes = following >= 0
            factor = tl.load(factors + (3 + origin) * width + i, mask=inside, other=1.0)
            factor *= tl.load(factors + (3 + origin) * width + following, mask=goes, other=1.0)
            following = tl.load(links + (1 + origin) * width + following, mask=goes, other=-1)
            tl.store(links + (2 - origin) * width + i, following, mask=inside)
            tl.store(factors + (4 - origin) * width + i, factor, mask=inside)
        tl.debug_barrier()
        origin = 1 - origin

    # An entry's value first goes through its own sources' departures, beginning with its left neighbour's.
    for start in range(0, width, TILE):
        i = start + tl.arange(0, TILE)
        inside = i < width
        leaves = tl.load(links + i, mask=inside, other=-1) >= 0
        has_sources = inside & (i > 0) & (tl.load(links + i - 1, mask=inside & (i > 0), other=-1) == i)
        at = tl.where(has_sources, i - 1, i)
        changes = leaves | has_sources
        share = tl.load(tl.where(has_sources, remained, moved) + at, mask=changes, other=1.0)
        share *= tl.load(factors + (3 + origin) * width + at, mask=changes, other=1.0)
        tl.store(shares + i, share, mask=inside)


@for_any("n", "count")
def line_entries_up(
    place, positions, aux, scores, out_index, out_positions, out_weights, out_scores, entries, keys, n, count,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``reference.line_up``. entries, keys: room for ``count`` numbers of a row. Grid: rows.

    An entry's turn is the number of keys below its own, and of equal ones before it.
    """
    row = tl.program_id(0).to(tl.int64)
    place, positions, aux, scores = place + row * n, positions + row * n, aux + row * n, scores + row * n
    entries, keys = entries + row * count, keys + row * count
    LAST: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    size = tl.zeros([1], tl.int32)
    for start in range(0, n, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        goes = (entry < n) & (tl.load(place + entry, mask=entry < n, other=0) < 0)
        at = size + tl.cumsum(goes.to(tl.int32), 0) - 1
        position = tl.load(positions + entry, mask=goes, other=-1)
        is_slot = tl.load(aux + entry, mask=goes, other=0.0) >= 1.0
        key = tl.where(position < 0, LAST, tl.where(is_slot, position - LAST, position))
        goes = goes & (at < count)
        tl.store(keys + at, key, mask=goes)
        tl.store(entries + at, entry, mask=goes)
        size += tl.sum(goes.to(tl.int32), 0)
    tl.debug_barrier()
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        inside = i < count
        key = tl.load(keys + i, mask=inside, other=LAST)
        turn = tl.zeros([TILE], tl.int32)
        for first in range(0, count, TILE):
            j = first + tl.arange(0, TILE)
            other = tl.load(keys + j, mask=j < count, other=LAST)
            before = (other[None, :] < key[:, None]) | ((other[None, :] == key[:, None]) & (j[None, :] < i[:, None]))
            turn += tl.sum((before & (j < count)[None, :]).to(tl.int32), 1)
        entry = tl.load(entries + i, mask=inside, other=0)
        to, live = row * count + turn, inside & (key != LAST)
        tl.store(out_index + to, tl.where(live, entry, -1).to(tl.int64), mask=inside)
        tl.store(out_positions + to, tl.load(positions + entry, mask=inside, other=-1), mask=inside)
        weight = tl.load(aux + entry, mask=live, other=0.0)
        tl.store(out_weights + to, tl.where(live, tl.maximum(weight, 1.0), 0.0), mask=inside)
        tl.store(out_scores + to, tl.load(scores + entry, mask=live, other=0.0), mask=inside)


@for_any("num_sources", "num_places", "width")
def list_joined_places(places, joins, joined, rows, numbers, num_sources, num_places, width, BLOCK: tl.constexpr):
    """``reference.list_joined``. numbers: room for ``num_places`` of a row. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    places, joins, rows = places + row * num_sources, joins + row * num_sources, rows + row * num_sources
    numbers, joined = numbers + row * num_places, joined + row * width
    for start in range(0, num_places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(numbers + place, tl.full([BLOCK], -1, tl.int32), mask=place < num_places)
    tl.debug_barrier()
    for start in range(0, num_sources, BLOCK):
        i = start + tl.arange(0, BLOCK)
        does = tl.load(joins + i, mask=i < num_sources, other=0) != 0
        tl.store(numbers + tl.load(places + i, mask=does, other=0), tl.zeros([BLOCK], tl.int32), mask=does)
    tl.debug_barrier()
    size = tl.zeros([1], tl.int32)
    for start in range(0, num_places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_joined = tl.load(numbers + place, mask=place < num_places, other=-1) >= 0
        at = size + tl.cumsum(is_joined.to(tl.int32), 0) - 1
        tl.store(numbers + place, at, mask=is_joined)
        tl.store(joined + at, place.to(tl.int64), mask=is_joined)
        size += tl.sum(is_joined.to(tl.int32), 0)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(joined + at, tl.full([BLOCK], -1, tl.int64), mask=(at < width) & (at >= size))
    tl.debug_barrier()
    for start in range(0, num_sources, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < num_sources
        does = tl.load(joins + i, mask=inside, other=0) != 0
        number = tl.load(numbers + tl.load(places + i, mask=does, other=0), mask=does, other=-1)
        tl.store(rows + i, number.to(tl.int64), mask=inside)


@for_any("count", "num_mixed")
def mix_rows_in(
    joining, rows, shares, own, mixed, count, num_mixed,
    HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``reference.mix_in``; mixed: a copy of ``own``, or zeros. Grid: rows, tiles of what joins."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = row * count + number
    to = tl.load(rows + at, mask=number < count, other=-1)
    joins = to >= 0
    share = tl.load(shares + at, mask=joins, other=0.0)
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = joins[:, None] & (dim < HEAD_SIZE)
    target = (row * num_mixed + to)[:, None] * HEAD_SIZE + dim
    moved = tl.load(joining + at[:, None] * HEAD_SIZE + dim, mask=inside, other=0.0)
    if own is not None:
        moved -= tl.load(own + target, mask=inside, other=0.0)
    tl.atomic_add(mixed + target, share[:, None] * moved, mask=inside, sem="relaxed")
