"""Kernels over single entries of many sequence layers in Triton, launched by ``entries``.

A grid's first axis is a head of a sequence layer, ``seq_layer * num_heads + head``. ``located``: where the entries of
all of them lie. ``stride_blocks``: that of its blocks.
"""

import triton
import triton.language as tl

from vllm_kvmerge.ops.coded import LARGEST_CODE
from vllm_kvmerge.ops.triton.attention_kernels import LOG2E, capped
from vllm_kvmerge.ops.triton.descriptors import Head
from vllm_kvmerge.ops.triton.places import (
    AUX,
    KEYS,
    LOG_VOTES,
    PER_SLOT,
    POSITIONS,
    SCORES,
    VALUES,
    codes_of,
    entry_place,
    head_of,
    plane_of,
    scales_of,
)

LARGEST = tl.constexpr(float(LARGEST_CODE))
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)
"""A float32 near it has no places behind the point: adding it and taking it away rounds to the nearest, to even."""

CHANGING = ["num_layers", "num_entries", "num_rows", "num_slots", "num_sources", "num_targets", "window"]
CHANGING += ["num_places", "num_new", "stride_blocks", "stride_to_blocks"]
"""Numbers that change from one compaction to the next: one machine code serves them all, so none is compiled while
requests wait."""


@triton.jit(do_not_specialize=CHANGING)
def read_metadata(
    located, log_votes, scores, aux, positions, num_layers, num_entries, stride_blocks, stride_m_block, stride_m_head,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copies metadata of some entries. Grid: heads, tiles of entries."""
    of = head_of(located, num_layers, stride_blocks)
    front, tail = of.front, of.tail
    entry = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = entry < num_entries
    at, exists = entry_place(entry, live, front, tail, located.pages, of, BLOCK_SIZE)
    addresses, layer = located.addresses, at.layer
    plane = at.block * stride_m_block + at.head * stride_m_head + at.offset
    out = tl.program_id(0).to(tl.int64) * num_entries + entry
    compressed = exists & (entry < front)
    implied = tl.where(entry < front, float("-inf"), 0.0)
    votes = tl.load(plane_of(addresses, layer, LOG_VOTES, tl.float32) + plane, mask=compressed, other=implied)
    score = tl.load(plane_of(addresses, layer, SCORES, tl.float32) + plane, mask=exists, other=0.0)
    second = tl.load(plane_of(addresses, layer, AUX, tl.float32) + plane, mask=exists, other=0.0)
    tl.store(log_votes + out, votes, mask=live)
    tl.store(scores + out, score, mask=live)
    tl.store(aux + out, second, mask=live)
    position = tl.load(plane_of(addresses, layer, POSITIONS, tl.int32) + plane, mask=compressed, other=-1)
    position = tl.where(entry < front, position, entry + (tail - front))
    tl.store(positions + out, position.to(tl.int64), mask=live)


@triton.jit(do_not_specialize=CHANGING)
def write_metadata(
    located, log_votes, scores, aux, positions, num_layers, num_slots, stride_blocks, stride_m_block, stride_m_head,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes metadata of slots from 0 on. Grid: heads, tiles of slots."""
    of = head_of(located, num_layers, stride_blocks)
    slot = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    to, live = entry_place(slot, slot < num_slots, num_slots, num_slots, located.pages, of, BLOCK_SIZE)
    addresses, layer = located.addresses, to.layer
    plane = to.block * stride_m_block + to.head * stride_m_head + to.offset
    at = tl.program_id(0).to(tl.int64) * num_slots + slot
    tl.store(plane_of(addresses, layer, LOG_VOTES, tl.float32) + plane, tl.load(log_votes + at, mask=live), mask=live)
    tl.store(plane_of(addresses, layer, SCORES, tl.float32) + plane, tl.load(scores + at, mask=live), mask=live)
    tl.store(plane_of(addresses, layer, AUX, tl.float32) + plane, tl.load(aux + at, mask=live), mask=live)
    position = tl.load(positions + at, mask=live).to(tl.int32)
    tl.store(plane_of(addresses, layer, POSITIONS, tl.int32) + plane, position, mask=live)


@triton.jit
def cells_at(located, at, strides, plane, ELEMENT: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[n, BLOCK_D]``: pointers to the rows of keys or values of entries."""
    row = at.block * strides.block + at.head * strides.head + at.offset * strides.slot
    first = plane_of(located.addresses, at.layer, plane, ELEMENT) + row
    return first[:, None] + tl.arange(0, BLOCK_D)[None, :] * strides.dim


@triton.jit
def rows_at(
    located, of, index, live, strides,
    PLANE: tl.constexpr, ELEMENT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``[n, BLOCK_D]``: keys or values of the entries at ``index``; zeros where not live, and behind the head size."""
    at, exists = entry_place(index, live, of.front, of.tail, located.pages, of, BLOCK_SIZE)
    mask = exists[:, None] & (tl.arange(0, BLOCK_D) < HEAD_SIZE)[None, :]
    return tl.load(cells_at(located, at, strides, PLANE, ELEMENT, BLOCK_D), mask=mask, other=0.0)


@triton.jit
def changed_rows_at(
    located, of, index, live, changed, num_places, num_new, strides,
    PLANE: tl.constexpr, ELEMENT: tl.constexpr, OUT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``rows_at`` as OUT, where ``index`` is of places if there is an ``origin``, of which some may be ``new``
    (``Changes``)."""
    if changed.origin is None:
        return rows_at(located, of, index, live, strides, PLANE, ELEMENT, HEAD_SIZE, BLOCK_SIZE, BLOCK_D).to(OUT)
    else:
        at = tl.program_id(0).to(tl.int64) * num_places + index
        entry = tl.load(changed.origin + at, mask=live, other=-1).to(tl.int32)
        number = tl.full(index.shape, -1, tl.int64)
        if changed.new is not None:
            number = tl.load(changed.row + at, mask=live, other=-1)
        is_new = number >= 0
        is_old = (entry >= 0) & (is_new == 0)
        rows = rows_at(located, of, entry, is_old, strides, PLANE, ELEMENT, HEAD_SIZE, BLOCK_SIZE, BLOCK_D).to(OUT)
        if changed.new is None:
            return rows
        else:
            dims = tl.arange(0, BLOCK_D)[None, :]
            first = changed.new + (tl.program_id(0).to(tl.int64) * num_new + number) * HEAD_SIZE
            found = tl.load(first[:, None] + dims, mask=is_new[:, None] & (dims < HEAD_SIZE), other=0.0)
            return tl.where(is_new[:, None], found.to(OUT), rows)


@triton.jit(do_not_specialize=CHANGING)
def read_rows(
    located, changed, index, out, strides, num_layers, num_rows, num_places, num_new, stride_blocks,
    PLANE: tl.constexpr, ELEMENT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copies keys or values of the entries or places at ``index`` as float32. Grid: heads, tiles."""
    of = head_of(located, num_layers, stride_blocks)
    number = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = number < num_rows
    at = tl.program_id(0).to(tl.int64) * num_rows + number
    entry = tl.load(index + at, mask=wanted, other=-1).to(tl.int32)
    rows = changed_rows_at(
        located, of, entry, wanted & (entry >= 0), changed, num_places, num_new, strides, PLANE, ELEMENT, tl.float32,
        HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_D)[None, :]
    tl.store(out + at[:, None] * HEAD_SIZE + dims, rows, mask=wanted[:, None] & (dims < HEAD_SIZE))


@triton.jit(do_not_specialize=CHANGING)
def write_rows(
    located, places, rows, strides, num_layers, num_rows, stride_blocks,
    PLANE: tl.constexpr, ELEMENT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes keys or values to slots; none where the place is negative. Grid: heads, tiles of rows."""
    of = head_of(located, num_layers, stride_blocks)
    number = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.program_id(0).to(tl.int64) * num_rows + number
    slot = tl.load(places + at, mask=number < num_rows, other=-1).to(tl.int32)
    # All of them are in the front.
    to, live = entry_place(slot, slot >= 0, slot + 1, 0, located.pages, of, BLOCK_SIZE)
    dims = tl.arange(0, BLOCK_D)[None, :]
    wanted = live[:, None] & (dims < HEAD_SIZE)
    found = tl.load(rows + at[:, None] * HEAD_SIZE + dims, mask=wanted)
    tl.store(cells_at(located, to, strides, PLANE, ELEMENT, BLOCK_D), found.to(ELEMENT), mask=wanted)


@triton.jit
def coded(rows):
    """Codes and scales, ``[n, BLOCK_D]`` and ``[n]``, of rows (``coded.scaled``)."""
    scales = tl.div_rn(tl.max(tl.abs(rows), 1), LARGEST)
    scales = tl.clamp(scales, 2.0**-14, 65504.0).to(tl.float16)  # float16's least normal number and its largest
    exact = tl.div_rn(rows, scales.to(tl.float32)[:, None])
    return tl.clamp((exact + TO_WHOLE) - TO_WHOLE, -LARGEST, LARGEST).to(tl.int8), scales


@triton.jit(do_not_specialize=CHANGING)
def write_codes(
    located, keys, values, log_votes, codes, num_layers, num_slots, stride_blocks, stride_m_block, stride_m_head,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes entries to slots of coded pages, from 0 on. Grid: heads, tiles of slots."""
    of = head_of(located, num_layers, stride_blocks)
    slot = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    to, live = entry_place(slot, slot < num_slots, num_slots, 0, located.pages, of, BLOCK_SIZE * PER_SLOT)
    at = tl.program_id(0).to(tl.int64) * num_slots + slot
    dims = tl.arange(0, BLOCK_D)[None, :]
    wanted = live[:, None] & (dims < HEAD_SIZE)
    for plane in tl.static_range(KEYS, VALUES + 1):
        rows = (keys if plane == KEYS else values) + at[:, None] * HEAD_SIZE + dims
        found, scales = coded(tl.load(rows, mask=wanted, other=0.0))
        cells = codes_of(located.addresses, to, codes, plane)[:, None] + dims * (codes.k_dim if plane == KEYS else 1)
        tl.store(cells, found, mask=wanted)
        scales_at = scales_of(located.addresses, to, stride_m_block, stride_m_head, plane, BLOCK_SIZE)
        tl.store(scales_at, scales, mask=live)
    votes_at = plane_of(located.addresses, to.layer, LOG_VOTES, tl.float32)
    votes_at += to.block * stride_m_block + to.head * stride_m_head + to.offset
    tl.store(votes_at, tl.load(log_votes + at, mask=live), mask=live)


@triton.jit(do_not_specialize=CHANGING)
def move_rows(
    located, to_blocks, to_pages, kept, staging, strides, num_layers, num_slots, stride_blocks, stride_to_blocks,
    FIRST_PLANE: tl.constexpr, WRITE: tl.constexpr, ELEMENT: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Half of a move: copies rows that leave their place to ``staging``, or (WRITE) from there to their new place.

    The halves are two launches, so that everything is read before anything is written. Grid: heads, tiles of slots,
    planes from FIRST_PLANE on.
    """
    plane = FIRST_PLANE + tl.program_id(2)
    slot = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = slot < num_slots
    row = tl.program_id(0).to(tl.int64) * num_slots + slot
    entry = tl.load(kept + row, mask=inside, other=-1).to(tl.int32)
    of = head_of(located, num_layers, stride_blocks)
    to_table = to_blocks + (tl.program_id(0) // located.num_heads).to(tl.int64) * stride_to_blocks
    of_new = Head(0, 0, to_table, of.layer, of.head, of.num_heads, of.num_layers)
    old, live = entry_place(entry, inside & (entry >= 0), of.front, of.tail, located.pages, of, BLOCK_SIZE)
    new, inside = entry_place(slot, inside, num_slots, 0, to_pages, of_new, BLOCK_SIZE)
    leaves = (old.block != new.block) | (old.offset != new.offset)
    if (located.pages is not None) | (to_pages is not None):
        leaves = leaves | (old.layer != new.layer) | (old.head != new.head)
    moves = live & inside & leaves
    dims = tl.arange(0, BLOCK_D)[None, :]
    at = (tl.program_id(2) * tl.num_programs(0).to(tl.int64) * num_slots + row)[:, None] * HEAD_SIZE + dims
    moving = moves[:, None] & (dims < HEAD_SIZE)
    if WRITE:
        found = tl.load(staging + at, mask=moving, other=0.0)
        to = cells_at(located, new, strides, plane, ELEMENT, BLOCK_D)
        tl.store(to, found, mask=(moves | (inside & ~live))[:, None] & (dims < HEAD_SIZE))
    else:
        source = cells_at(located, old, strides, plane, ELEMENT, BLOCK_D)
        tl.store(staging + at, tl.load(source, mask=moving), mask=moving)


@triton.jit(do_not_specialize=CHANGING)
def find_similar(
    located, changed, sources, targets, usable, similarity, best, strides, num_layers, num_sources, num_targets,
    num_places, num_new, stride_blocks,
    ELEMENT: tl.constexpr, COMPUTE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The most similar target of some sources. Grid: heads, tiles of sources.

    Products of keys in their stored type, to which new ones are rounded, are exact except for the order of the sum;
    they are divided by norms afterwards.
    """
    of = head_of(located, num_layers, stride_blocks)
    number = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(0).to(tl.int64) * num_sources + number
    source = tl.load(sources + at, mask=number < num_sources, other=-1).to(tl.int32)
    m = changed_rows_at(
        located, of, source, source >= 0, changed, num_places, num_new, strides, KEYS, ELEMENT, COMPUTE, HEAD_SIZE,
        BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip
    m_norm = tl.sqrt(tl.sum(m.to(tl.float32) * m.to(tl.float32), 1))
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK_M], tl.int32)
    base = tl.program_id(0).to(tl.int64) * num_targets
    for start in range(0, num_targets, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        live = place < num_targets
        target = tl.load(targets + base + place, mask=live, other=-1).to(tl.int32)
        allowed = tl.load(usable + base + place, mask=live, other=0) != 0
        c = changed_rows_at(
            located, of, target, allowed & (target >= 0), changed, num_places, num_new, strides, KEYS, ELEMENT, COMPUTE,
            HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
        )  # fmt: skip
        c_norm = tl.sqrt(tl.sum(c.to(tl.float32) * c.to(tl.float32), 1))
        products = tl.dot(m, tl.trans(c), input_precision="ieee")
        cosine = products / tl.maximum(m_norm, 1e-12)[:, None] / tl.maximum(c_norm, 1e-12)[None, :]
        cosine = tl.where(allowed[None, :], cosine, float("-inf"))
        most = tl.max(cosine, 1)
        # The first of equal ones, in this tile and over all.
        first = tl.min(tl.where(cosine == most[:, None], place[None, :], num_targets), 1)
        where = tl.where(most > top, first, where)
        top = tl.maximum(top, most)
    top = tl.where(source >= 0, tl.minimum(top, 1.0), float("-inf"))
    tl.store(similarity + at, top, mask=number < num_sources)
    tl.store(best + at, tl.load(targets + base + where), mask=number < num_sources)


@triton.jit
def seen_logits(
    queries, query_positions, k, votes, position, live, rows, group, window, scale,
    G: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """``[m, n]``: logits of the queries ``rows`` of a query head, times log2(e); -inf where the entry is not seen."""
    flat = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    wanted = rows < window
    at = ((flat * G + group) * window + rows)[:, None] * HEAD_SIZE + dims[None, :]
    q = tl.load(queries + at, mask=wanted[:, None] & (dims < HEAD_SIZE)[None, :], other=0.0)
    own = tl.load(query_positions + flat * window + rows, mask=wanted, other=-1)
    logits = capped(tl.dot(q, k, input_precision="ieee") * (scale * LOG2E), CAP) + (votes * LOG2E)[None, :]
    seen = live[None, :] & (position >= 0)[None, :] & (position[None, :] <= own[:, None])
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def entries_at(
    located, log_votes, positions, entry, strides, num_layers, num_entries, stride_blocks,
    ELEMENT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(keys ``[BLOCK_D, n]`` float32, votes, positions, whether there is one) of some entries of a head."""
    of = head_of(located, num_layers, stride_blocks)
    live = entry < num_entries
    rows = rows_at(located, of, entry, live, strides, KEYS, ELEMENT, HEAD_SIZE, BLOCK_SIZE, BLOCK_D)
    at = tl.program_id(0).to(tl.int64) * num_entries + entry
    votes = tl.load(log_votes + at, mask=live, other=0.0)
    position = tl.load(positions + at, mask=live, other=-1)
    return tl.trans(rows.to(tl.float32)), votes, position, live


@triton.jit(do_not_specialize=CHANGING)
def newest_lse(
    located, queries, query_positions, log_votes, positions, lse, sinks, scale, strides, num_layers, num_entries,
    window, stride_blocks,
    G: tl.constexpr, ELEMENT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of some of the newest queries over all entries, and over ``sinks``. Grid: heads, query heads,
    tiles."""
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + tl.program_id(0) * G + tl.program_id(1)) * LOG2E
        top = tl.full([BLOCK_M], 0.0, tl.float32) + sink
        total += 1.0
    for start in range(0, num_entries, BLOCK_N):
        k, votes, position, live = entries_at(
            located, log_votes, positions, start + tl.arange(0, BLOCK_N), strides, num_layers, num_entries,
            stride_blocks, ELEMENT, HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
        )  # fmt: skip
        logits = seen_logits(
            queries, query_positions, k, votes, position, live, rows, tl.program_id(1), window, scale, G, HEAD_SIZE,
            BLOCK_D, CAP,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(logits - safe[:, None]), 1)
        top = new_top
    at = (tl.program_id(0).to(tl.int64) * G + tl.program_id(1)) * window + rows
    # A query that sees nothing gives no weight to anything.
    tl.store(lse + at, tl.where(total > 0, top + tl.log2(total), 0.0), mask=rows < window)


@triton.jit(do_not_specialize=CHANGING)
def newest_columns(
    located, queries, query_positions, log_votes, positions, lse, fused, scale, strides, num_layers, num_entries,
    window, stride_blocks,
    MAX: tl.constexpr, G: tl.constexpr, ELEMENT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attention to some entries, summed over query heads, then sum or largest over queries. Grid: heads, tiles."""
    entry = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k, votes, position, live = entries_at(
        located, log_votes, positions, entry, strides, num_layers, num_entries, stride_blocks, ELEMENT, HEAD_SIZE,
        BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip
    result = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, window, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for group in range(0, G):
            logits = seen_logits(
                queries, query_positions, k, votes, position, live, rows, group, window, scale, G, HEAD_SIZE, BLOCK_D,
                CAP,
            )  # fmt: skip
            at = (tl.program_id(0).to(tl.int64) * G + group) * window + rows
            level = tl.load(lse + at, mask=rows < window, other=0.0)
            weights += tl.exp2(logits - level[:, None])
        if MAX:
            result = tl.maximum(result, tl.max(weights, 0))
        else:
            result += tl.sum(weights, 0)
    tl.store(fused + tl.program_id(0).to(tl.int64) * num_entries + entry, result, mask=live)


@triton.jit(do_not_specialize=CHANGING)
def join(
    products, between, source_weights, totals, joined, num_sources, num_slots,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Joins the sources of one head to slots, one after the other (``reference.join_slots``). Grid: heads.

    products ``[H, m, s]`` is written to. BLOCK_S: at least ``s``. BLOCK_M: sources whose products change at a time.
    """
    head = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_S)
    inside = slots < num_slots
    total = tl.load(totals + head * num_slots + slots, mask=inside, other=0.0)
    exists = inside & (total > 0)
    base = products + head * num_sources * num_slots
    for i in range(0, num_sources):
        row = tl.load(base + i * num_slots + slots, mask=exists, other=float("-inf"))
        most = tl.max(row, 0)
        # If all products are NaN none is the largest, and the last slot is taken.
        slot = tl.min(tl.where((row == most) & inside, slots, num_slots - 1), 0)
        tl.store(joined + head * num_sources + i, slot.to(tl.int64))
        weight = tl.load(source_weights + head * num_sources + i)
        total = tl.where(slots == slot, total + weight, total)
        share = weight / tl.maximum(tl.sum(tl.where(slots == slot, total, 0.0), 0), 1.0)
        # All threads must read their products before any changes them, and see the changes of others afterwards.
        tl.debug_barrier()
        for start in range(i + 1, num_sources, BLOCK_M):
            source = start + tl.arange(0, BLOCK_M)
            later = source < num_sources
            at = base + source * num_slots + slot
            column = tl.load(at, mask=later, other=0.0)
            other = tl.load(between + (head * num_sources + source) * num_sources + i, mask=later, other=0.0)
            tl.store(at, column + share * (other - column), mask=later)
        tl.debug_barrier()
    tl.store(totals + head * num_slots + slots, total, mask=inside)
