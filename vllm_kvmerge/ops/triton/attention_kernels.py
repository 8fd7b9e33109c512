"""Kernels of attention over a paged cache in Triton, launched by ``attention``.

A program's tile has ``BLOCK_M`` rows, the G query heads of a KV head for ``BLOCK_M // G`` queries: row m is head
``m % G`` of the tile's query ``m // G``. Logits are kept times log2(e), because a GPU has exp2.

A tile's entries are cut into pieces, more for longer sequences. ``divide`` lists them: ``pieces`` has each one's tile,
``parts`` the first piece of each tile and how many it has, and ``order`` the tiles, longest first, as pieces are.

Rows may have fronts in pages (``PageTables``). LAYERS: number of layers that the pages are of; 0: no row has any, and
nothing below costs anything. Entries in pages, the first ones of a row, have loops of their own, which are empty for
other rows. So have those in coded pages: of what a loop reads, ``paged`` is 0 for entries in blocks, 1 in pages, CODED
in coded ones.
"""

import triton
import triton.language as tl

from vllm_kvmerge.ops.triton.descriptors import Entry, Lengths, Row, Rows, Tiling
from vllm_kvmerge.ops.triton.places import (
    AUX,
    KEYS,
    LOG_VOTES,
    PER_SLOT,
    SCORES,
    codes_of,
    is_coded,
    list_of,
    page_of,
    place_of,
    plane_of,
    scales_of,
)
from vllm_kvmerge.ops.triton.places import VALUES as V_PLANE
from vllm_kvmerge.ops.types import ScoreMode

CODED = tl.constexpr(2)

SUM = tl.constexpr(ScoreMode.SUM.code)
MEAN = tl.constexpr(ScoreMode.MEAN.code)
LOG_EMA = tl.constexpr(ScoreMode.LOG_EMA.code)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

BY_ROW = [
    "block_table", "query_starts", "query_lens", "seq_lens", "fronts", "tails", "score_modes", "score_decays",
    "page_tables", "sinks", "pieces", "parts", "order",
]  # fmt: skip
"""Numbers and block ids of sequences, read one by one from anywhere in a batch. Their alignment must not specialise the
kernel, which would be compiled anew while requests wait."""

VARYING = [
    "layer", "num_rows", "tiles_per_row", "stride_table", "stride_s_head", "kept_rows", "num_combined", "rows_combined"
]  # fmt: skip
"""Nor may these numbers, which differ from call to call."""


@triton.jit
def row_of(rows, number, head, num_heads, LAYERS: tl.constexpr):
    """``Row``, of a KV head."""
    front = tl.load(rows.fronts + number).to(tl.int32)
    if LAYERS > 0:
        address = tl.load(rows.page_tables + number)
        has_pages = address != 0
        table = address.to(tl.pointer_type(tl.int32))
        num_paged, _, ids = list_of(table, rows.layer * num_heads + head, has_pages)
        front = tl.where(has_pages, num_paged, front)
    else:
        num_paged, ids = 0, rows.fronts
    tail = tl.load(rows.tails + number).to(tl.int32)
    num_queries = tl.load(rows.query_lens + number).to(tl.int32)
    num_entries = front + tl.load(rows.seq_lens + number).to(tl.int32) - tail
    first_token = tl.load(rows.query_starts + number).to(tl.int64)
    table = rows.block_table + tl.cast(number, tl.int64) * rows.stride_table
    old = num_entries - num_queries
    return Row(
        number, front, tail, num_queries, num_entries, old, first_token, table, num_paged, ids, rows.layer, head,
        num_heads,
    )  # fmt: skip


@triton.jit
def coded_entries(rows, row, LAYERS: tl.constexpr):
    """How many of a row's entries in pages are coded: all or none."""
    address = tl.load(rows.page_tables + row.number)
    table = address.to(tl.pointer_type(tl.int32))
    return tl.where(is_coded(table, LAYERS * row.num_heads, address != 0), row.num_paged, 0)


@triton.jit
def part_of(first, end, row, paged: tl.constexpr, LAYERS: tl.constexpr):
    """The part of ``[first, end)`` that lies in pages (``paged``), or elsewhere."""
    if paged:
        return first, tl.minimum(end, row.num_paged)
    elif LAYERS > 0:
        return tl.maximum(first, row.num_paged), end
    else:
        return first, end


@triton.jit
def find(entry, live, row, paged: tl.constexpr, BLOCK_SIZE: tl.constexpr, LAYERS: tl.constexpr):
    """``Entry`` of entries in pages (``paged``), or elsewhere."""
    if paged:
        SIZE: tl.constexpr = BLOCK_SIZE * PER_SLOT if paged == CODED else BLOCK_SIZE
        of_layer, block, of_head = page_of(row.ids, entry // SIZE, live, row.num_heads, LAYERS)
        return Entry(of_layer, block, of_head, entry % SIZE)
    else:
        block, offset = place_of(entry, live, row.front, row.tail, row.table, BLOCK_SIZE)
        return Entry(row.layer, block, row.head, offset)


@triton.jit
def plane_in(plane, rows, at, PLANE: tl.constexpr, paged: tl.constexpr):
    """``plane``, or (``paged``) those like it of other layers."""
    if paged:
        return plane_of(rows.addresses, at.layer, PLANE, plane.dtype.element_ty)
    else:
        return plane


@triton.jit
def number_at(cache, at):
    """Where entries' metadata lie in their planes."""
    return at.block * cache.m_block + at.head * cache.m_head + at.offset


@triton.jit
def keys_at(
    cache, rows, at, live, paged: tl.constexpr, HEAD_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """``[BLOCK_D, n]``: keys of entries."""
    dims = tl.arange(0, BLOCK_D)
    slot = at.block * cache.k_block + at.head * cache.k_head + at.offset * cache.k_slot
    first = (plane_in(cache.k, rows, at, KEYS, paged) + slot)[None, :]
    mask = (dims < HEAD_SIZE)[:, None] & live[None, :]
    return tl.load(first + (dims * cache.k_dim)[:, None], mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def codes_at(
    codes, rows, at, live, PLANE: tl.constexpr, HEAD_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Codes of entries in coded pages: of keys ``[BLOCK_D, n]``, of values ``[n, BLOCK_D]``."""
    dims = tl.arange(0, BLOCK_D)
    first = codes_of(rows.addresses, at, codes, PLANE)
    if PLANE == KEYS:
        mask = (dims < HEAD_SIZE)[:, None] & live[None, :]
        return tl.load(first[None, :] + (dims * codes.k_dim)[:, None], mask=mask, other=0).to(COMPUTE)
    else:
        mask = live[:, None] & (dims < HEAD_SIZE)[None, :]
        return tl.load(first[:, None] + dims[None, :], mask=mask, other=0).to(COMPUTE)


@triton.jit
def scales_at(cache, rows, at, live, PLANE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """``[n]`` float32, those of entries' coded keys or values."""
    first = scales_of(rows.addresses, at, cache.m_block, cache.m_head, PLANE, BLOCK_SIZE)
    return tl.load(first, mask=live, other=0.0).to(tl.float32)


@triton.jit
def piece_size(num_entries, num_pieces, BLOCK_N: tl.constexpr):
    """Entries of one of a tile's pieces, but for the last ones: a multiple of BLOCK_N."""
    share = (num_entries + num_pieces - 1) // num_pieces
    return (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N


@triton.jit
def entries_of(rows, number, exists):
    """Entries that rows have, 0 where none exists. Of a front in pages: as ``fronts`` has it, whatever each head
    holds."""
    num_entries = tl.load(rows.fronts + number, mask=exists, other=0).to(tl.int32)
    num_entries += tl.load(rows.seq_lens + number, mask=exists, other=0).to(tl.int32)
    return num_entries - tl.load(rows.tails + number, mask=exists, other=0).to(tl.int32)


@triton.jit
def lengths(tile, rows, tiling):
    """Entries (``entries_of``) that tiles read, 0 where they have no query."""
    exists = tile < tiling.num_tiles
    row = tile // tiling.tiles_per_row
    first_query = (tile % tiling.tiles_per_row) * tiling.queries
    num_queries = tl.load(rows.query_lens + row, mask=exists, other=0).to(tl.int32)
    num_entries = entries_of(rows, row, exists)
    old = num_entries - num_queries
    seen = tl.minimum(num_entries, old + first_query + tiling.queries)
    query_entry = old + first_query
    chunk = query_entry // tl.maximum(tiling.window, 1) * tiling.window
    in_window = tl.where(tiling.chunked != 0, chunk, query_entry - tiling.window + 1)
    skipped = tl.where(tiling.window > 0, tl.maximum(in_window, 0), 0)
    return tl.where(first_query < num_queries, seen - skipped, 0)


DIVIDED = [
    "num_tiles", "tiles_per_row", "num_pieces", "slots", "least", "queries", "window", "chunked", "block_n"
]  # fmt: skip


@triton.jit(
    do_not_specialize=DIVIDED,
    do_not_specialize_on_alignment=["query_lens", "seq_lens", "fronts", "tails", "pieces", "parts", "order"],
)
def divide(
    query_lens, seq_lens, fronts, tails, pieces, parts, order, num_tiles, tiles_per_row, num_pieces, slots, least,
    queries, window, chunked, block_n, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the pieces of all tiles (see above). Grid: tiles, each of which finds the same share for itself.

    pieces: ``[num_pieces]`` int32, -1 behind the last one. parts: ``[num_tiles, 2]`` int32. order: ``[num_tiles]``
    int32. No piece is longer than the share, the smallest with which ``slots`` programs could do all at a time: one for
    each piece of a tile longer than the share, and the others for the rest together. It is a multiple of ``block_n``,
    as ``least`` is, its lower bound.
    """
    rows = Lengths(query_lens, seq_lens, fronts, tails)
    tiling = Tiling(num_tiles, tiles_per_row, queries, window, chunked)
    tile = tl.program_id(0)
    longest = 0
    total = 0.0
    for start in range(0, num_tiles, BLOCK):
        found = lengths(start + tl.arange(0, BLOCK), rows, tiling)
        longest = tl.maximum(longest, tl.max(found, 0))
        total += tl.sum(found.to(tl.float32), 0)
    even = (total / slots).to(tl.int32) + 1
    low = least // block_n
    high = tl.maximum(low, (tl.maximum(longest, even) + block_n - 1) // block_n)
    while low < high:
        middle = (low + high) // 2
        share = middle * block_n
        taken = 0
        rest = 0.0
        for start in range(0, num_tiles, BLOCK):
            found = lengths(start + tl.arange(0, BLOCK), rows, tiling)
            is_split = found > share
            taken += tl.sum(tl.where(is_split, (found + share - 1) // share, 0), 0)
            rest += tl.sum(tl.where(is_split, 0, found).to(tl.float32), 0)
        fits = rest <= (slots - taken).to(tl.float32) * share
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    share = high * block_n

    length = lengths(tile, rows, tiling)
    first = 0
    rank = 0
    for start in range(0, num_tiles, BLOCK):
        other = start + tl.arange(0, BLOCK)
        found = lengths(other, rows, tiling)
        is_before = (found > length) | ((found == length) & (other < tile))
        first += tl.sum(tl.where(is_before, (found + share - 1) // share, 0), 0)
        rank += tl.sum(is_before.to(tl.int32), 0)
    count = (length + share - 1) // share
    tl.store(parts + 2 * tile, first)
    tl.store(parts + 2 * tile + 1, count)
    tl.store(order + rank, tile)
    for start in range(0, count, BLOCK):
        piece = start + tl.arange(0, BLOCK)
        tl.store(pieces + first + piece, tile + piece * 0, mask=piece < count)
    if rank == num_tiles - 1:
        for start in range(first + count, num_pieces, BLOCK):
            piece = start + tl.arange(0, BLOCK)
            tl.store(pieces + piece, piece * 0 - 1, mask=piece < num_pieces)


@triton.jit
def first_seen(query_entry, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first entry that a query sees, of the entry of its own token; may be negative. WINDOW: entries that it sees;
    0: all. CHUNKED: those from the last multiple of WINDOW on."""
    if WINDOW == 0:
        return 0
    elif CHUNKED:
        return query_entry // WINDOW * WINDOW
    else:
        return query_entry - WINDOW + 1


@triton.jit
def log2_sum(values):
    """log2 of the sum of 2 ** values over axis 0; -inf if all are -inf."""
    top = tl.max(values, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return safe + tl.log2(tl.sum(tl.exp2(values - safe[None, :]), 0))


@triton.jit
def log2_add(a, b):
    top = tl.maximum(a, b)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return safe + tl.log2(tl.exp2(a - safe) + tl.exp2(b - safe))


@triton.jit
def capped(logits, CAP: tl.constexpr):
    """CAP * tanh(logits / CAP); CAP: times log2(e), as logits are; 0: none."""
    if CAP > 0.0:
        return CAP * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2E / CAP)) + 1.0))
    else:
        return logits


@triton.jit
def power(decay, age):
    """decay ** age for age >= 0; 0 ** 0 is 1."""
    return tl.where(age == 0, 1.0, tl.exp2(tl.maximum(age, 1) * tl.log2(decay)))


@triton.jit
def averaged(level, score, aux, num_queries, counted, decay):
    """The score that ``log_ema`` gives; level: log2 of the weighted sum of this call's exponentials, -inf if none."""
    before = tl.where(aux > 0, score * LOG2E + num_queries * tl.log2(decay), float("-inf"))
    return tl.where(aux + counted > 0, log2_add(before, level) * LN2, 0.0)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BY_ROW)
def attend(
    query, cache, codes, output,
    block_table, query_starts, query_lens, seq_lens, fronts, tails, score_modes, score_decays, page_tables, addresses,
    layer, stride_table,
    pieces, parts, sinks, partial, lse, kept, scale, value_scale, tiles_per_row, kept_rows,
    G: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, VALUES: tl.constexpr,
    KEEP: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    LAYERS: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """One piece of a tile's entries and one KV head. Grid: pieces times heads, of which the heads come first.

    VALUES: attend to values, beyond the log-sum-exp. KEEP: ``kept_rows`` rows of logits are kept for ``finish``;
    then all queries of a sequence are one tile, and ``log_ema`` is done here, since it needs no sum over entries.
    Logits are kept at their slots, of which ``kept`` has those of one layer: those of entries in pages, which may be of
    any, are not kept. codes: where those of coded pages lie, whose rows update no scores; None: no row has any.
    COMPUTE: the type of the products. scale, value_scale: include what keys and values that are quantised are stored
    over. sinks: ``[H * G]``, which count in the first piece; None:
    there are none. WINDOW, CHUNKED: as in ``first_seen``; with a window, no row has a front.
    """
    rows = Rows(
        block_table, query_starts, query_lens, seq_lens, fronts, tails, score_modes, score_decays, page_tables,
        addresses, layer, stride_table,
    )  # fmt: skip
    place = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    tile = tl.load(pieces + place)
    if tile < 0:
        return
    piece = place - tl.load(parts + 2 * tile)
    num_pieces = tl.load(parts + 2 * tile + 1)
    row = row_of(rows, tile // tiles_per_row, head, HEADS, LAYERS)
    first_query = (tile % tiles_per_row) * (BLOCK_M // G)
    num_queries, old = row.num_queries, row.old
    seen = tl.minimum(row.num_entries, old + first_query + BLOCK_M // G)
    skipped = tl.maximum(first_seen(old + first_query, WINDOW, CHUNKED), 0)
    size = piece_size(seen - skipped, num_pieces, BLOCK_N)
    first = skipped + piece * size
    if first >= seen:
        return
    end = tl.minimum(first + size, seen)

    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    number = first_query + m // G
    wanted = (m < BLOCK_M // G * G) & (number < num_queries)
    in_head = dims < HEAD_SIZE
    token = row.first_token + number
    q_head = head * G + m % G
    q_row = token * query.token + q_head * query.head
    q_mask = wanted[:, None] & in_head[None, :]
    q = tl.load(query.first + q_row[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE)
    mode = 0
    decay = 1.0
    if KEEP:
        mode = tl.load(rows.score_modes + row.number).to(tl.int32)
        decay = tl.load(rows.score_decays + row.number).to(tl.float32)
    kept_end = tl.where((mode == SUM) | (mode == MEAN), end, 0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        top = tl.where(piece == 0, tl.load(sinks + q_head, mask=wanted, other=0.0) * LOG2E, top)
        total += tl.where(piece == 0, 1.0, 0.0)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    num_coded = 0
    if codes is not None:
        num_coded = coded_entries(rows, row, LAYERS)
    for paged in tl.static_range(CODED if codes is not None else LAYERS > 0, -1, -1):
        if paged == CODED:
            begin, stop = first, tl.minimum(end, num_coded)
        elif codes is not None:
            begin, stop = part_of(tl.maximum(first, num_coded), end, row, paged, LAYERS)
        else:
            begin, stop = part_of(first, end, row, paged, LAYERS)
        for start in range(begin, stop, BLOCK_N):
            entry = start + tl.arange(0, BLOCK_N)
            live = entry < stop
            at = find(entry, live, row, paged, BLOCK_SIZE, LAYERS)
            if paged == CODED:
                k = codes_at(codes, rows, at, live, KEYS, HEAD_SIZE, COMPUTE, BLOCK_D)
            else:
                k = keys_at(cache, rows, at, live, paged, HEAD_SIZE, COMPUTE, BLOCK_D)
            votes_at = plane_in(cache.log_votes, rows, at, LOG_VOTES, paged) + number_at(cache, at)
            votes = tl.load(votes_at, mask=live & (entry < row.front), other=0.0)
            plain = tl.dot(q, k, input_precision="ieee") * scale
            if paged == CODED:
                plain *= scales_at(cache, rows, at, live, KEYS, BLOCK_SIZE)[None, :]
            plain = capped(plain, CAP)
            visible = wanted[:, None] & live[None, :] & (entry[None, :] <= (old + number)[:, None])
            if WINDOW > 0:
                visible &= entry[None, :] >= first_seen(old + number, WINDOW, CHUNKED)[:, None]
            logits = tl.where(visible, plain + (votes * LOG2E)[None, :], float("-inf"))
            if KEEP and paged != CODED:
                if not paged:
                    slot = ((at.block * HEADS + head) * kept_rows * BLOCK_SIZE + at.offset)[None, :]
                    is_kept = wanted[:, None] & (entry < kept_end)[None, :]
                    tl.store(kept + slot + (m * BLOCK_SIZE)[:, None], logits, mask=is_kept)
                if mode == LOG_EMA:
                    weight = (num_queries - 1 - number) * tl.log2(decay) + tl.log2((1.0 - decay) / G)
                    level = log2_sum(tl.where(visible, plain + weight[:, None], float("-inf")))
                    scores_at = plane_in(cache.scores, rows, at, SCORES, paged) + number_at(cache, at)
                    aux_at = plane_in(cache.aux, rows, at, AUX, paged) + number_at(cache, at)
                    # A new token's statistics start from nothing.
                    aux_before = tl.load(aux_at, mask=live & (entry < old), other=0.0)
                    score = tl.load(scores_at, mask=live & (entry < old), other=0.0)
                    counted = (num_queries - tl.maximum(entry - old, 0)).to(tl.float32)
                    after = averaged(level, score, aux_before, num_queries, counted, decay)
                    tl.store(scores_at, after, mask=live)
                    tl.store(aux_at, aux_before + counted, mask=live)
            new_top = tl.maximum(top, tl.max(logits, 1))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(logits - safe[:, None])
            shrink = tl.exp2(top - safe)
            total = total * shrink + tl.sum(weights, 1)
            top = new_top
            if VALUES and paged == CODED:
                # Of small values, weights times scales would be nothing in float16.
                PRODUCT: tl.constexpr = tl.bfloat16 if k.dtype == tl.float16 else k.dtype
                weights *= scales_at(cache, rows, at, live, V_PLANE, BLOCK_SIZE)[None, :]
                v = codes_at(codes, rows, at, live, V_PLANE, HEAD_SIZE, PRODUCT, BLOCK_D)
                sums = sums * shrink[:, None] + tl.dot(weights.to(PRODUCT), v, input_precision="ieee")
            elif VALUES:
                v_slot = at.block * cache.v_block + at.head * cache.v_head + at.offset * cache.v_slot
                v_mask = live[:, None] & in_head[None, :]
                v_plane = plane_in(cache.v, rows, at, V_PLANE, paged)
                v = tl.load((v_plane + v_slot)[:, None] + dims[None, :], mask=v_mask, other=0.0).to(COMPUTE)
                sums = sums * shrink[:, None] + tl.dot(weights.to(COMPUTE), v, input_precision="ieee")

    at = tl.program_id(0).to(tl.int64) * BLOCK_M + m
    tl.store(lse + at, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=wanted)
    if VALUES:
        sums = sums * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
        if num_pieces == 1:
            o_row = token * output.token + q_head * output.head
            tl.store(output.first + o_row[:, None] + dims[None, :], sums, mask=q_mask)
        else:
            tl.store(partial + at[:, None] * BLOCK_D + dims[None, :], sums, mask=wanted[:, None])


@triton.jit
def whole_lse(lse, first, num_pieces, head, num_heads, wanted, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr):
    """``[BLOCK_M]``: log-sum-exp of a tile's rows from those of its pieces; 0 where that is -inf."""
    level = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in range(0, num_pieces, BLOCK_S):
        piece = start + tl.arange(0, BLOCK_S)
        at = ((first + piece).to(tl.int64) * num_heads + head)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        live = (piece < num_pieces)[:, None] & wanted[None, :]
        level = log2_add(level, log2_sum(tl.load(lse + at, mask=live, other=float("-inf"))))
    return tl.where(level == float("-inf"), 0.0, level)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BY_ROW)
def finish(
    query, cache, output,
    block_table, query_starts, query_lens, seq_lens, fronts, tails, score_modes, score_decays, page_tables, addresses,
    layer, stride_table,
    pieces, parts, order, partial, lse, kept, scale, tiles_per_row, kept_rows, num_combined, rows_combined,
    G: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEEP: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_U: tl.constexpr, LAYERS: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Combines pieces, and updates scores from the kept logits; from keys again where these are in pages.

    Grid: as ``attend``'s, but first ``num_combined`` programs of each head, for ``rows_combined`` rows of each of the
    longest tiles, which alone may have several pieces; then (KEEP) those that update the scores of a piece's entries.
    BLOCK_M, BLOCK_N, WINDOW and CHUNKED: as ``attend`` had them. BLOCK_S: pieces at a time. BLOCK_U: entries at a time,
    of those whose logits were kept.
    """
    rows = Rows(
        block_table, query_starts, query_lens, seq_lens, fronts, tails, score_modes, score_decays, page_tables,
        addresses, layer, stride_table,
    )  # fmt: skip
    place = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    is_combined = place < num_combined
    part = place % rows_combined
    tile = tl.load(order + place // rows_combined, mask=is_combined, other=-1)
    if KEEP:
        tile = tl.maximum(tile, tl.load(pieces + place - num_combined, mask=place >= num_combined, other=-1))
    if tile < 0:
        return
    first_piece = tl.load(parts + 2 * tile)
    num_pieces = tl.load(parts + 2 * tile + 1)
    if num_pieces == 0:
        return
    row = row_of(rows, tile // tiles_per_row, head, HEADS, LAYERS)
    first_query = (tile % tiles_per_row) * (BLOCK_M // G)
    num_queries, old = row.num_queries, row.old
    seen = tl.minimum(row.num_entries, old + first_query + BLOCK_M // G)
    attended = seen - tl.maximum(first_seen(old + first_query, WINDOW, CHUNKED), 0)
    size = piece_size(attended, num_pieces, BLOCK_N)
    num_filled = (attended + size - 1) // size
    if is_combined:
        if num_pieces == 1:
            return
        number = first_query + part // G
        if number >= num_queries:
            return
        dims = tl.arange(0, BLOCK_D)
        top = float("-inf")
        total = 0.0
        sums = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, num_filled, BLOCK_S):
            piece = start + tl.arange(0, BLOCK_S)
            at = ((first_piece + piece).to(tl.int64) * HEADS + head) * BLOCK_M + part
            levels = tl.load(lse + at, mask=piece < num_filled, other=float("-inf"))
            new_top = tl.maximum(top, tl.max(levels, 0))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(levels - safe)
            shrink = tl.exp2(top - safe)
            total = total * shrink + tl.sum(weights, 0)
            found = tl.load(
                partial + at[:, None] * BLOCK_D + dims[None, :], mask=(piece < num_filled)[:, None], other=0.0
            )
            sums = sums * shrink + tl.sum(found * weights[:, None], 0)
            top = new_top
        at = (row.first_token + number) * output.token + (head * G + part % G) * output.head
        tl.store(output.first + at + dims, sums / tl.where(total > 0, total, 1.0), mask=dims < HEAD_SIZE)
    elif KEEP:
        mode = tl.load(rows.score_modes + row.number).to(tl.int32)
        if (mode != SUM) & (mode != MEAN):
            return
        decay = tl.load(rows.score_decays + row.number).to(tl.float32)
        m = tl.arange(0, BLOCK_M)
        wanted = m < num_queries * G
        level = whole_lse(lse, first_piece, num_filled, head, HEADS, wanted, BLOCK_S, BLOCK_M)
        weight = tl.where(wanted, power(decay, num_queries - 1 - m // G), 0.0)
        first = (place - num_combined - first_piece) * size
        end = tl.minimum(first + size, seen)
        for paged in tl.static_range(LAYERS > 0, -1, -1):
            begin, stop = part_of(first, end, row, paged, LAYERS)
            step = BLOCK_N if paged else BLOCK_U
            for start in range(begin, stop, step):
                entry = start + tl.arange(0, BLOCK_N if paged else BLOCK_U)
                live = entry < stop
                at = find(entry, live, row, paged, BLOCK_SIZE, LAYERS)
                if paged:
                    k = keys_at(cache, rows, at, live, paged, HEAD_SIZE, COMPUTE, BLOCK_D)
                    votes_at = plane_in(cache.log_votes, rows, at, LOG_VOTES, paged) + number_at(cache, at)
                    votes = tl.load(votes_at, mask=live, other=0.0)
                    logits, _, _ = tile_logits(
                        query, k, votes, entry, live, first_query, row, scale, G, HEAD_SIZE, COMPUTE, BLOCK_M, BLOCK_D,
                        CAP,
                    )  # fmt: skip
                else:
                    slot = ((at.block * HEADS + head) * kept_rows * BLOCK_SIZE + at.offset)[None, :]
                    is_kept = wanted[:, None] & live[None, :]
                    logits = tl.load(kept + slot + (m * BLOCK_SIZE)[:, None], mask=is_kept, other=float("-inf"))
                added = tl.sum(tl.exp2(logits - level[:, None]) * weight[:, None], 0)
                scores_at = plane_in(cache.scores, rows, at, SCORES, paged) + number_at(cache, at)
                aux_at = plane_in(cache.aux, rows, at, AUX, paged) + number_at(cache, at)
                # A new token's statistics start from nothing, regardless of its place's content.
                score = tl.load(scores_at, mask=live & (entry < old), other=0.0)
                tl.store(scores_at, score * power(decay, num_queries) + added, mask=live)
                aux_before = tl.load(aux_at, mask=live & (entry < old), other=0.0)
                counted = tl.where(mode == MEAN, num_queries - tl.maximum(entry - old, 0), 0)
                tl.store(aux_at, aux_before + counted, mask=live)


@triton.jit
def tile_logits(
    query, k, votes, entry, live, first_query, row, scale,
    G: tl.constexpr, HEAD_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """(logits with votes where the row's query sees the entry and -inf elsewhere, its number, whether it is one)."""
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    number = first_query + m // G
    wanted = (m < BLOCK_M // G * G) & (number < row.num_queries)
    at = (row.first_token + number) * query.token + (row.head * G + m % G) * query.head
    q_mask = wanted[:, None] & (dims < HEAD_SIZE)[None, :]
    q = tl.load(query.first + at[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE)
    visible = wanted[:, None] & live[None, :] & (entry[None, :] <= (row.old + number)[:, None])
    if BLOCK_M > 16:  # a thread holds few rows of a product, many columns: fewer registers if entries are the rows
        products = tl.trans(tl.dot(tl.trans(k), tl.trans(q), input_precision="ieee"))
    else:
        products = tl.dot(q, k, input_precision="ieee")
    logits = capped(products * scale, CAP) + (votes * LOG2E)[None, :]
    return tl.where(visible, logits, float("-inf")), number, wanted


@triton.jit
def blocks_of(rows, number, num_rows, BLOCK_N: tl.constexpr):
    """How many times BLOCK_N entries (``entries_of``) rows have that update scores."""
    exists = number < num_rows
    mode = tl.load(rows.score_modes + number, mask=exists, other=0)
    num_queries = tl.load(rows.query_lens + number, mask=exists, other=0)
    num_blocks = (entries_of(rows, number, exists) + BLOCK_N - 1) // BLOCK_N
    return tl.where((mode != 0) & (num_queries > 0), num_blocks, 0)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=[*BY_ROW, "scores", "aux"])
def update_columns(
    query, cache, scores, aux,
    block_table, query_starts, query_lens, seq_lens, fronts, tails, score_modes, score_decays, page_tables, addresses,
    layer, stride_table,
    parts, lse, scale, num_rows, tiles_per_row, stride_s_block, stride_s_head,
    G: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, IN_CACHE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    LSE_BLOCK_N: tl.constexpr, LAYERS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Updates statistics for many queries: a program keeps the keys of some entries, and queries pass by.

    Grid: any number that share the entries of all sequences, BLOCK_N at a time; heads. IN_CACHE: statistics lie in the
    cache, where those of new tokens start from nothing; else entry by entry. BLOCK_M, LSE_BLOCK_N: those that
    ``attend`` had when it made ``lse``. BLOCK_S: pieces at a time.
    """
    rows = Rows(
        block_table, query_starts, query_lens, seq_lens, fronts, tails, score_modes, score_decays, page_tables,
        addresses, layer, stride_table,
    )  # fmt: skip
    head = tl.program_id(1)
    QUERIES: tl.constexpr = BLOCK_M // G
    ROWS: tl.constexpr = 128
    num_items = 0
    for first in range(0, num_rows, ROWS):
        num_items += tl.sum(blocks_of(rows, first + tl.arange(0, ROWS), num_rows, BLOCK_N), 0)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner = 0
        place = item  # among its row's, of which there are
        count = 0
        behind = 0
        for first in range(0, num_rows, ROWS):
            blocks = blocks_of(rows, first + tl.arange(0, ROWS), num_rows, BLOCK_N)
            ends = behind + tl.cumsum(blocks, 0)
            owner += tl.sum((ends <= item).to(tl.int32), 0)
            place -= tl.sum(tl.where(ends <= item, blocks, 0), 0)
            count += tl.sum(tl.where((ends > item) & (ends - blocks <= item), blocks, 0), 0)
            behind += tl.sum(blocks, 0)
        mode = tl.load(rows.score_modes + owner).to(tl.int32)
        decay = tl.load(rows.score_decays + owner).to(tl.float32)
        row = row_of(rows, owner, head, tl.num_programs(1), LAYERS)
        num_queries, old = row.num_queries, row.old
        for paged in tl.static_range(LAYERS > 0, -1, -1):
            begin, stop = part_of(0, row.num_entries, row, paged, LAYERS)
            begin += place * BLOCK_N
            # Once, unless a head has more entries than ``fronts`` says; loops cost registers.
            end = stop if LAYERS > 0 else begin + 1
            for start in range(begin, end, count * BLOCK_N if LAYERS > 0 else 1):
                entry = start + tl.arange(0, BLOCK_N)
                live = entry < stop
                at = find(entry, live, row, paged, BLOCK_SIZE, LAYERS)
                k = keys_at(cache, rows, at, live, paged, HEAD_SIZE, COMPUTE, BLOCK_D)
                first_tile = tl.maximum(start - old, 0) // QUERIES
                num_tiles = (num_queries + QUERIES - 1) // QUERIES
                counted = (num_queries - tl.maximum(entry - old, 0)).to(tl.float32)
                if IN_CACHE:
                    cell = at.block * stride_s_block + at.head * stride_s_head + at.offset
                    known = live & (entry < old)
                else:
                    cell = head * stride_s_head + entry.to(tl.int64)
                    known = live
                scores_at = plane_in(scores, rows, at, SCORES, paged) + cell
                aux_at = plane_in(aux, rows, at, AUX, paged) + cell
                aux_before = tl.load(aux_at, mask=known, other=0.0)
                score = tl.load(scores_at, mask=known, other=0.0)
                if mode == LOG_EMA:
                    level = tl.full([BLOCK_N], float("-inf"), tl.float32)
                    for tile in range(first_tile, num_tiles):
                        logits, number, _ = tile_logits(
                            query, k, tl.zeros([BLOCK_N], tl.float32), entry, live, tile * QUERIES, row, scale, G,
                            HEAD_SIZE, COMPUTE, BLOCK_M, BLOCK_D, CAP,
                        )  # fmt: skip
                        weight = (num_queries - 1 - number) * tl.log2(decay) + tl.log2((1.0 - decay) / G)
                        level = log2_add(level, log2_sum(logits + weight[:, None]))
                    after = averaged(level, score, aux_before, num_queries, counted, decay)
                    tl.store(scores_at, after, mask=live)
                    tl.store(aux_at, aux_before + counted, mask=live)
                else:
                    votes_at = plane_in(cache.log_votes, rows, at, LOG_VOTES, paged) + number_at(cache, at)
                    votes = tl.load(votes_at, mask=live & (entry < row.front), other=0.0)
                    added = tl.zeros([BLOCK_N], tl.float32)
                    for tile in range(first_tile, num_tiles):
                        logits, number, wanted = tile_logits(
                            query, k, votes, entry, live, tile * QUERIES, row, scale, G, HEAD_SIZE, COMPUTE, BLOCK_M,
                            BLOCK_D, CAP,
                        )  # fmt: skip
                        seen = tl.minimum(row.num_entries, old + (tile + 1) * QUERIES)
                        of_tile = parts + 2 * (owner * tiles_per_row + tile)
                        size = piece_size(seen, tl.load(of_tile + 1), LSE_BLOCK_N)
                        total = whole_lse(
                            lse, tl.load(of_tile), (seen + size - 1) // size, head, tl.num_programs(1), wanted, BLOCK_S,
                            BLOCK_M,
                        )  # fmt: skip
                        weight = tl.where(wanted, power(decay, num_queries - 1 - number), 0.0)
                        added += tl.sum(tl.exp2(logits - total[:, None]) * weight[:, None], 0)
                    tl.store(scores_at, score * power(decay, num_queries) + added, mask=live)
                    tl.store(aux_at, aux_before + tl.where(mode == MEAN, counted, 0.0), mask=live)


@triton.jit
def queries_of(
    query, first_query, num_queries, head,
    PER_QUERY: tl.constexpr, HEAD_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(queries of a tile's rows, ``PER_QUERY`` heads of each, of which ``head`` is the number of the first
    divided by that; numbers of the rows' queries; their query heads; whether they are any)."""
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    number = first_query + rows // PER_QUERY
    q_head = head * PER_QUERY + rows % PER_QUERY
    wanted = (rows < BLOCK_M // PER_QUERY * PER_QUERY) & (number < num_queries)
    at = number.to(tl.int64) * query.token + q_head * query.head
    mask = wanted[:, None] & (dims < HEAD_SIZE)[None, :]
    q = tl.load(query.first + at[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)
    return q, number, q_head, wanted


@triton.jit
def keys_of(
    cache, blocks, token, live, head,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``keys_at``, of a head of a never compressed sequence's tokens."""
    block, offset = place_of(token, live, 0, 0, blocks, BLOCK_SIZE)
    return keys_at(cache, None, Entry(0, block, head, offset), live, False, HEAD_SIZE, COMPUTE, BLOCK_D)


REPETITION = ["num_queries", "seq_len", "context", "start", "num_first", "num_scored", "stride_s_head"]
"""Numbers that differ from call to call, by which no kernel is to be compiled anew."""


@triton.jit
def normalizer_with(top, total, q, k, visible, scale, CAP: tl.constexpr):
    """The largest logit of each query so far and the sum of exponentials relative to it, to the base 2, of what is
    ``visible`` of some keys as well."""
    logits = tl.where(visible, capped(tl.dot(q, k, input_precision="ieee") * scale, CAP), float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, total * tl.exp2(top - safe) + tl.sum(tl.exp2(logits - safe[:, None]), 1)


@triton.jit(do_not_specialize=REPETITION, do_not_specialize_on_alignment=["blocks", "weights", "sinks"])
def normalize_repetition(
    query, own, cache, blocks, weights, sinks, lse, scale, num_queries, seq_len, context, start, num_first, num_scored,
    G: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """What a logit lacks to the logarithm of a weighed probability, of one tile of queries and one KV head.

    Grid: tiles, heads. lse: ``[num_queries, H * G]``, to the base 2. Entries are numbered without what lies between:
    the first ones, and the chunk; then come the tokens behind the context, or, attended to by ``own`` if it is not
    None, those from ``start`` on. sinks: ``[H * G]`` or None, as in ``attend``.
    """
    head = tl.program_id(1)
    first_query = tl.program_id(0) * (BLOCK_M // G)
    q, number, q_head, wanted = queries_of(
        query, first_query, num_queries, head, G, HEAD_SIZE, COMPUTE, BLOCK_M, BLOCK_D
    )
    position = seq_len - num_queries + number
    last = tl.minimum(first_query + BLOCK_M // G, num_queries)
    counted = num_first + num_scored
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + q_head, mask=wanted, other=0.0) * LOG2E
        total += 1.0
    for first in range(0, counted, BLOCK_N):
        entry = first + tl.arange(0, BLOCK_N)
        live = entry < counted
        token = tl.where(entry < num_first, entry, start + entry - num_first)
        k = keys_of(cache, blocks, token, live, head, HEAD_SIZE, BLOCK_SIZE, COMPUTE, BLOCK_D)
        top, total = normalizer_with(top, total, q, k, live[None, :], scale, CAP)
    begin = context
    if own is not None:
        begin = start
        q, _, _, _ = queries_of(own, first_query, num_queries, head, G, HEAD_SIZE, COMPUTE, BLOCK_M, BLOCK_D)
    end = seq_len - num_queries + last
    for first in range(begin, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        live = token < end
        k = keys_of(cache, blocks, token, live, head, HEAD_SIZE, BLOCK_SIZE, COMPUTE, BLOCK_D)
        visible = live[None, :] & (token[None, :] <= position[:, None])
        top, total = normalizer_with(top, total, q, k, visible, scale, CAP)
    level = top + tl.log2(total)
    if weights is not None:
        level -= tl.log2(tl.load(weights + number, mask=wanted, other=1.0))
    at = number * (tl.num_programs(1) * G) + q_head
    tl.store(lse + at, level, mask=wanted)


@triton.jit(do_not_specialize=REPETITION, do_not_specialize_on_alignment=["blocks", "scores"])
def raise_scores(
    query, cache, blocks, lse, scores, scale, num_queries, num_heads, start, num_scored, stride_s_head,
    PER_SCORE: tl.constexpr, G: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Raises scores of some entries to the largest probability that any query gives them.

    Grid: tiles of entries, rows of ``scores``. PER_SCORE: query heads of a row, G or 1. lse: as
    ``normalize_repetition`` leaves it. All queries are behind the entries, so each sees all of them.
    """
    head = tl.program_id(1)
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = entry < num_scored
    of_head = head * PER_SCORE // G
    k = keys_of(cache, blocks, start + entry, live, of_head, HEAD_SIZE, BLOCK_SIZE, COMPUTE, BLOCK_D)
    largest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for first_query in range(0, num_queries, BLOCK_M // PER_SCORE):
        q, number, q_head, wanted = queries_of(
            query, first_query, num_queries, head, PER_SCORE, HEAD_SIZE, COMPUTE, BLOCK_M, BLOCK_D
        )
        level = tl.load(lse + number * num_heads + q_head, mask=wanted, other=float("inf"))
        logits = capped(tl.dot(q, k, input_precision="ieee") * scale, CAP) - level[:, None]
        largest = tl.maximum(largest, tl.max(logits, 0))
    at = scores + head * stride_s_head + entry
    before = tl.load(at, mask=live, other=0.0)
    probability = tl.exp2(largest)
    # Not where it is no number.
    tl.store(at, tl.where(probability > before, probability, before), mask=live)


@triton.jit
def quantised(rows, scale, LIMIT: tl.constexpr):
    """``rows`` over ``scale``, at most LIMIT; NaN stays NaN."""
    return tl.clamp(rows.to(tl.float32) / scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def write(
    slot_mapping, key, value, cache, key_scale, value_scale, num_heads, stride_slot,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Stores one token's keys and values of some heads. Grid: tokens, tiles of heads.

    LIMIT: the largest number that a quantised cache holds, over scales; 0: it is not quantised.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * stride_slot).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    wanted = (head < num_heads) & (dims < HEAD_SIZE)
    k = tl.load(key.first + token * key.token + head * key.head + dims, mask=wanted)
    v = tl.load(value.first + token * value.token + head * value.head + dims, mask=wanted)
    if LIMIT > 0.0:
        k = quantised(k, key_scale, LIMIT)
        v = quantised(v, value_scale, LIMIT)
    k_at = block * cache.k_block + head * cache.k_head + dims * cache.k_dim + offset * cache.k_slot
    v_at = block * cache.v_block + head * cache.v_head + offset * cache.v_slot + dims
    tl.store(cache.k + k_at, k, mask=wanted)
    tl.store(cache.v + v_at, v, mask=wanted)
