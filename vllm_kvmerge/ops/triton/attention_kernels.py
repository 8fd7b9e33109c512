"""Kernels of attention over a paged cache in Triton, launched by ``attention``.

A program's tile has ``BLOCK_M`` rows, the G query heads of a KV head for ``BLOCK_M // G`` queries: row m is head
``m % G`` of the tile's query ``m // G``. Logits are kept times log2(e), because a GPU has exp2.

A tile's entries are cut into pieces, more for longer sequences. ``divide`` lists them: ``pieces`` has each one's tile,
``parts`` the first piece of each tile and how many it has, and ``order`` the tiles, longest first, as pieces are.

Rows may have fronts in pages (``PageTables``): ``page_tables``, None where no row has, are the addresses of their
tables. LAYERS: number of layers that the pages are of; 0: no row has any, and nothing below costs anything. Entries in
pages, the first ones of a row, have loops of their own, which are empty for other rows.
"""

import triton
import triton.language as tl

from vllm_kvmerge.ops.triton.places import AUX, KEYS, LOG_VOTES, SCORES, list_of, page_of, place_of, plane_of
from vllm_kvmerge.ops.triton.places import VALUES as V_PLANE
from vllm_kvmerge.ops.types import ScoreMode

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
def front_of(fronts, page_tables, row, layer, head, num_heads, LAYERS: tl.constexpr):
    """(entries of a row's front, those of them that lie in pages, pointer to the ids of these); all of them or none."""
    front = tl.load(fronts + row).to(tl.int32)
    if LAYERS > 0:
        address = tl.load(page_tables + row)
        has_pages = address != 0
        num_paged, _, ids = list_of(address.to(tl.pointer_type(tl.int32)), layer * num_heads + head, has_pages)
        return tl.where(has_pages, num_paged, front), num_paged, ids
    else:
        return front, 0, fronts


@triton.jit
def part_of(first, end, num_paged, paged: tl.constexpr, LAYERS: tl.constexpr):
    """The part of ``[first, end)`` that lies in pages (``paged``), or elsewhere."""
    if paged:
        return first, tl.minimum(end, num_paged)
    elif LAYERS > 0:
        return tl.maximum(first, num_paged), end
    else:
        return first, end


@triton.jit
def find(
    entry, live, front, tail, table, ids, layer, head, num_heads,
    paged: tl.constexpr, BLOCK_SIZE: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """(layers, block ids int64, KV heads, offsets) of entries in pages (``paged``), or elsewhere."""
    if paged:
        of_layer, block, of_head = page_of(ids, entry // BLOCK_SIZE, live, num_heads, LAYERS)
        return of_layer, block, of_head, entry % BLOCK_SIZE
    else:
        block, offset = place_of(entry, live, front, tail, table, BLOCK_SIZE)
        return layer, block, head, offset


@triton.jit
def plane_in(plane, addresses, layer, PLANE: tl.constexpr, paged: tl.constexpr):
    """``plane``, or (``paged``) those like it of other layers."""
    if paged:
        return plane_of(addresses, layer, PLANE, plane.dtype.element_ty)
    else:
        return plane


@triton.jit
def piece_size(num_entries, num_pieces, BLOCK_N: tl.constexpr):
    """Entries of one of a tile's pieces, but for the last ones: a multiple of BLOCK_N."""
    share = (num_entries + num_pieces - 1) // num_pieces
    return (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N


@triton.jit
def lengths(tile, num_tiles, tiles_per_row, queries, query_lens, seq_lens, fronts, tails, window, chunked):
    """Entries that tiles of ``queries`` queries read, 0 where they have no query. Of a front in pages: as ``fronts``
    has it, whatever each head holds."""
    exists = tile < num_tiles
    row = tile // tiles_per_row
    first_query = (tile % tiles_per_row) * queries
    num_queries = tl.load(query_lens + row, mask=exists, other=0).to(tl.int32)
    num_entries = tl.load(fronts + row, mask=exists, other=0).to(tl.int32)
    num_entries += tl.load(seq_lens + row, mask=exists, other=0).to(tl.int32)
    num_entries -= tl.load(tails + row, mask=exists, other=0).to(tl.int32)
    old = num_entries - num_queries
    seen = tl.minimum(num_entries, old + first_query + queries)
    query_entry = old + first_query
    in_window = tl.where(chunked != 0, query_entry // tl.maximum(window, 1) * window, query_entry - window + 1)
    skipped = tl.where(window > 0, tl.maximum(in_window, 0), 0)
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
    tile = tl.program_id(0)
    longest = 0
    total = 0.0
    for start in range(0, num_tiles, BLOCK):
        found = lengths(
            start + tl.arange(0, BLOCK), num_tiles, tiles_per_row, queries, query_lens, seq_lens, fronts, tails, window,
            chunked,
        )  # fmt: skip
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
            found = lengths(
                start + tl.arange(0, BLOCK), num_tiles, tiles_per_row, queries, query_lens, seq_lens, fronts, tails,
                window, chunked,
            )  # fmt: skip
            is_split = found > share
            taken += tl.sum(tl.where(is_split, (found + share - 1) // share, 0), 0)
            rest += tl.sum(tl.where(is_split, 0, found).to(tl.float32), 0)
        fits = rest <= (slots - taken).to(tl.float32) * share
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    share = high * block_n

    length = lengths(tile, num_tiles, tiles_per_row, queries, query_lens, seq_lens, fronts, tails, window, chunked)
    first = 0
    rank = 0
    for start in range(0, num_tiles, BLOCK):
        other = start + tl.arange(0, BLOCK)
        found = lengths(other, num_tiles, tiles_per_row, queries, query_lens, seq_lens, fronts, tails, window, chunked)
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
    query, keys, values, log_votes, scores, aux, output, block_table, query_starts, query_lens, seq_lens, fronts,
    tails, score_modes, score_decays, page_tables, addresses, layer, pieces, parts, sinks, partial, lse, kept, scale,
    value_scale, tiles_per_row, kept_rows, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_table, stride_k_block, stride_k_head, stride_k_dim, stride_k_slot, stride_v_block, stride_v_head,
    stride_v_slot, stride_m_block, stride_m_head,
    G: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, VALUES: tl.constexpr,
    KEEP: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    LAYERS: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """One piece of a tile's entries and one KV head. Grid: pieces times heads, of which the heads come first.

    VALUES: attend to values, beyond the log-sum-exp. KEEP: ``kept_rows`` rows of logits are kept for ``finish``;
    then all queries of a sequence are one tile, and ``log_ema`` is done here, since it needs no sum over entries.
    Logits are kept at their slots, of which ``kept`` has those of one layer: those of entries in pages, which may be of
    any, are not kept. COMPUTE: the type of the products. scale, value_scale: include what keys and values that are
    quantised are stored over. sinks: ``[H * G]``, which count in the first piece; None:
    there are none. WINDOW, CHUNKED: as in ``first_seen``; with a window, no row has a front.
    """
    place = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    tile = tl.load(pieces + place)
    if tile < 0:
        return
    piece = place - tl.load(parts + 2 * tile)
    num_pieces = tl.load(parts + 2 * tile + 1)
    row = tile // tiles_per_row
    first_query = (tile % tiles_per_row) * (BLOCK_M // G)
    num_queries = tl.load(query_lens + row).to(tl.int32)
    front, num_paged, ids = front_of(fronts, page_tables, row, layer, head, HEADS, LAYERS)
    tail = tl.load(tails + row).to(tl.int32)
    old = front + tl.load(seq_lens + row).to(tl.int32) - tail - num_queries
    seen = tl.minimum(old + num_queries, old + first_query + BLOCK_M // G)
    skipped = tl.maximum(first_seen(old + first_query, WINDOW, CHUNKED), 0)
    size = piece_size(seen - skipped, num_pieces, BLOCK_N)
    first = skipped + piece * size
    if first >= seen:
        return
    end = tl.minimum(first + size, seen)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    number = first_query + rows // G
    wanted = (rows < BLOCK_M // G * G) & (number < num_queries)
    in_head = dims < HEAD_SIZE
    token = tl.load(query_starts + row).to(tl.int64) + number
    q_head = head * G + rows % G
    q_row = token * stride_q_token + q_head * stride_q_head
    q_mask = wanted[:, None] & in_head[None, :]
    q = tl.load(query + q_row[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE)
    mode = 0
    decay = 1.0
    if KEEP:
        mode = tl.load(score_modes + row).to(tl.int32)
        decay = tl.load(score_decays + row).to(tl.float32)
    kept_end = tl.where((mode == SUM) | (mode == MEAN), end, 0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        top = tl.where(piece == 0, tl.load(sinks + q_head, mask=wanted, other=0.0) * LOG2E, top)
        total += tl.where(piece == 0, 1.0, 0.0)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_table + row.to(tl.int64) * stride_table
    for paged in tl.static_range(LAYERS > 0, -1, -1):
        begin, stop = part_of(first, end, num_paged, paged, LAYERS)
        for start in range(begin, stop, BLOCK_N):
            entry = start + tl.arange(0, BLOCK_N)
            live = entry < stop
            of_layer, block, of_head, offset = find(
                entry, live, front, tail, table, ids, layer, head, HEADS, paged, BLOCK_SIZE, LAYERS
            )
            k_slot = block * stride_k_block + of_head * stride_k_head + offset * stride_k_slot
            k_mask = in_head[:, None] & live[None, :]
            k_plane = plane_in(keys, addresses, of_layer, KEYS, paged)
            k = tl.load((k_plane + k_slot)[None, :] + (dims * stride_k_dim)[:, None], mask=k_mask, other=0.0)
            k = k.to(COMPUTE)
            plane = block * stride_m_block + of_head * stride_m_head + offset
            votes_at = plane_in(log_votes, addresses, of_layer, LOG_VOTES, paged) + plane
            votes = tl.load(votes_at, mask=live & (entry < front), other=0.0)
            plain = capped(tl.dot(q, k, input_precision="ieee") * scale, CAP)
            visible = wanted[:, None] & live[None, :] & (entry[None, :] <= (old + number)[:, None])
            if WINDOW > 0:
                visible &= entry[None, :] >= first_seen(old + number, WINDOW, CHUNKED)[:, None]
            logits = tl.where(visible, plain + (votes * LOG2E)[None, :], float("-inf"))
            if KEEP:
                if not paged:
                    at = ((block * HEADS + head) * kept_rows * BLOCK_SIZE + offset)[None, :]
                    is_kept = wanted[:, None] & (entry < kept_end)[None, :]
                    tl.store(kept + at + (rows * BLOCK_SIZE)[:, None], logits, mask=is_kept)
                if mode == LOG_EMA:
                    weight = (num_queries - 1 - number) * tl.log2(decay) + tl.log2((1.0 - decay) / G)
                    level = log2_sum(tl.where(visible, plain + weight[:, None], float("-inf")))
                    scores_at = plane_in(scores, addresses, of_layer, SCORES, paged) + plane
                    aux_at = plane_in(aux, addresses, of_layer, AUX, paged) + plane
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
            if VALUES:
                v_slot = block * stride_v_block + of_head * stride_v_head + offset * stride_v_slot
                v_mask = live[:, None] & in_head[None, :]
                v_plane = plane_in(values, addresses, of_layer, V_PLANE, paged)
                v = tl.load((v_plane + v_slot)[:, None] + dims[None, :], mask=v_mask, other=0.0).to(COMPUTE)
                sums = sums * shrink[:, None] + tl.dot(weights.to(COMPUTE), v, input_precision="ieee")

    at = tl.program_id(0).to(tl.int64) * BLOCK_M + rows
    tl.store(lse + at, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=wanted)
    if VALUES:
        sums = sums * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
        if num_pieces == 1:
            o_row = token * stride_o_token + q_head * stride_o_head
            tl.store(output + o_row[:, None] + dims[None, :], sums, mask=q_mask)
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
    query, keys, log_votes, scores, aux, output, block_table, query_starts, query_lens, seq_lens, fronts, tails,
    score_modes, score_decays, page_tables, addresses, layer, pieces, parts, order, partial, lse, kept, scale,
    tiles_per_row, kept_rows, num_combined, rows_combined, stride_q_token, stride_q_head, stride_o_token,
    stride_o_head, stride_table, stride_k_block, stride_k_head, stride_k_dim, stride_k_slot, stride_m_block,
    stride_m_head,
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
    row = tile // tiles_per_row
    first_query = (tile % tiles_per_row) * (BLOCK_M // G)
    num_queries = tl.load(query_lens + row).to(tl.int32)
    front, num_paged, ids = front_of(fronts, page_tables, row, layer, head, HEADS, LAYERS)
    tail = tl.load(tails + row).to(tl.int32)
    old = front + tl.load(seq_lens + row).to(tl.int32) - tail - num_queries
    seen = tl.minimum(old + num_queries, old + first_query + BLOCK_M // G)
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
        token = tl.load(query_starts + row).to(tl.int64) + number
        at = token * stride_o_token + (head * G + part % G) * stride_o_head
        tl.store(output + at + dims, sums / tl.where(total > 0, total, 1.0), mask=dims < HEAD_SIZE)
    elif KEEP:
        mode = tl.load(score_modes + row).to(tl.int32)
        if (mode != SUM) & (mode != MEAN):
            return
        decay = tl.load(score_decays + row).to(tl.float32)
        start_token = tl.load(query_starts + row).to(tl.int64)
        rows = tl.arange(0, BLOCK_M)
        wanted = rows < num_queries * G
        level = whole_lse(lse, first_piece, num_filled, head, HEADS, wanted, BLOCK_S, BLOCK_M)
        weight = tl.where(wanted, power(decay, num_queries - 1 - rows // G), 0.0)
        table = block_table + row.to(tl.int64) * stride_table
        dims = tl.arange(0, BLOCK_D)
        first = (place - num_combined - first_piece) * size
        end = tl.minimum(first + size, seen)
        for paged in tl.static_range(LAYERS > 0, -1, -1):
            begin, stop = part_of(first, end, num_paged, paged, LAYERS)
            step = BLOCK_N if paged else BLOCK_U
            for start in range(begin, stop, step):
                entry = start + tl.arange(0, BLOCK_N if paged else BLOCK_U)
                live = entry < stop
                of_layer, block, of_head, offset = find(
                    entry, live, front, tail, table, ids, layer, head, HEADS, paged, BLOCK_SIZE, LAYERS
                )
                plane = block * stride_m_block + of_head * stride_m_head + offset
                if paged:
                    k_slot = block * stride_k_block + of_head * stride_k_head + offset * stride_k_slot
                    k_mask = (dims < HEAD_SIZE)[:, None] & live[None, :]
                    k_at = (plane_in(keys, addresses, of_layer, KEYS, paged) + k_slot)[None, :]
                    k = tl.load(k_at + (dims * stride_k_dim)[:, None], mask=k_mask, other=0.0).to(COMPUTE)
                    votes_at = plane_in(log_votes, addresses, of_layer, LOG_VOTES, paged) + plane
                    votes = tl.load(votes_at, mask=live, other=0.0)
                    logits, _, _ = tile_logits(
                        query, k, votes, entry, live, first_query, num_queries, old, start_token, head,
                        stride_q_token, stride_q_head, scale, G, HEAD_SIZE, COMPUTE, BLOCK_M, BLOCK_D, CAP,
                    )  # fmt: skip
                else:
                    at = ((block * HEADS + head) * kept_rows * BLOCK_SIZE + offset)[None, :]
                    is_kept = wanted[:, None] & live[None, :]
                    logits = tl.load(kept + at + (rows * BLOCK_SIZE)[:, None], mask=is_kept, other=float("-inf"))
                added = tl.sum(tl.exp2(logits - level[:, None]) * weight[:, None], 0)
                scores_at = plane_in(scores, addresses, of_layer, SCORES, paged) + plane
                aux_at = plane_in(aux, addresses, of_layer, AUX, paged) + plane
                # A new token's statistics start from nothing, regardless of its place's content.
                score = tl.load(scores_at, mask=live & (entry < old), other=0.0)
                tl.store(scores_at, score * power(decay, num_queries) + added, mask=live)
                aux_before = tl.load(aux_at, mask=live & (entry < old), other=0.0)
                counted = tl.where(mode == MEAN, num_queries - tl.maximum(entry - old, 0), 0)
                tl.store(aux_at, aux_before + counted, mask=live)


@triton.jit
def tile_logits(
    query, k, votes, entry, live, first_query, num_queries, old, start_token, head,
    stride_q_token, stride_q_head,
    scale,
    G: tl.constexpr, HEAD_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """(logits with votes where the row's query sees the entry and -inf elsewhere, its number, whether it is one)."""
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    number = first_query + rows // G
    wanted = (rows < BLOCK_M // G * G) & (number < num_queries)
    at = (start_token + number) * stride_q_token + (head * G + rows % G) * stride_q_head
    q_mask = wanted[:, None] & (dims < HEAD_SIZE)[None, :]
    q = tl.load(query + at[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE)
    visible = wanted[:, None] & live[None, :] & (entry[None, :] <= (old + number)[:, None])
    logits = capped(tl.dot(q, k, input_precision="ieee") * scale, CAP) + (votes * LOG2E)[None, :]
    return tl.where(visible, logits, float("-inf")), number, wanted


@triton.jit
def blocks_of(rows, num_rows, query_lens, seq_lens, fronts, tails, score_modes, BLOCK_N: tl.constexpr):
    """How many times BLOCK_N entries rows have that update scores; of a front in pages: as ``fronts`` has it."""
    exists = rows < num_rows
    mode = tl.load(score_modes + rows, mask=exists, other=0)
    num_queries = tl.load(query_lens + rows, mask=exists, other=0)
    num_entries = tl.load(fronts + rows, mask=exists, other=0).to(tl.int32)
    num_entries += tl.load(seq_lens + rows, mask=exists, other=0).to(tl.int32)
    num_entries -= tl.load(tails + rows, mask=exists, other=0).to(tl.int32)
    return tl.where((mode != 0) & (num_queries > 0), (num_entries + BLOCK_N - 1) // BLOCK_N, 0)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=[*BY_ROW, "scores", "aux"])
def update_columns(
    query, keys, log_votes, scores, aux, block_table, query_starts, query_lens, seq_lens, fronts, tails, score_modes,
    score_decays, page_tables, addresses, layer, parts, lse, scale, num_rows, tiles_per_row,
    stride_q_token, stride_q_head, stride_table, stride_k_block, stride_k_head, stride_k_dim, stride_k_slot,
    stride_m_block, stride_m_head, stride_s_block, stride_s_head,
    G: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, IN_CACHE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    LSE_BLOCK_N: tl.constexpr, LAYERS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Updates statistics for many queries: a program keeps the keys of some entries, and queries pass by.

    Grid: any number that share the entries of all sequences, BLOCK_N at a time; heads. IN_CACHE: statistics lie in the
    cache, where those of new tokens start from nothing; else entry by entry. BLOCK_M, LSE_BLOCK_N: those that
    ``attend`` had when it made ``lse``. BLOCK_S: pieces at a time.
    """
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    QUERIES: tl.constexpr = BLOCK_M // G
    ROWS: tl.constexpr = 128
    num_items = 0
    for first in range(0, num_rows, ROWS):
        num_items += tl.sum(
            blocks_of(
                first + tl.arange(0, ROWS), num_rows, query_lens, seq_lens, fronts, tails, score_modes, BLOCK_N
            ), 0,
        )  # fmt: skip
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = 0
        place = item  # among its row's, of which there are
        count = 0
        behind = 0
        for first in range(0, num_rows, ROWS):
            blocks = blocks_of(
                first + tl.arange(0, ROWS), num_rows, query_lens, seq_lens, fronts, tails, score_modes, BLOCK_N
            )
            ends = behind + tl.cumsum(blocks, 0)
            row += tl.sum((ends <= item).to(tl.int32), 0)
            place -= tl.sum(tl.where(ends <= item, blocks, 0), 0)
            count += tl.sum(tl.where((ends > item) & (ends - blocks <= item), blocks, 0), 0)
            behind += tl.sum(blocks, 0)
        mode = tl.load(score_modes + row).to(tl.int32)
        num_queries = tl.load(query_lens + row).to(tl.int32)
        decay = tl.load(score_decays + row).to(tl.float32)
        front, num_paged, ids = front_of(fronts, page_tables, row, layer, head, tl.num_programs(1), LAYERS)
        tail = tl.load(tails + row).to(tl.int32)
        num_entries = front + tl.load(seq_lens + row).to(tl.int32) - tail
        old = num_entries - num_queries
        start_token = tl.load(query_starts + row).to(tl.int64)
        table = block_table + tl.cast(row, tl.int64) * stride_table
        for paged in tl.static_range(LAYERS > 0, -1, -1):
            begin, stop = part_of(0, num_entries, num_paged, paged, LAYERS)
            begin += place * BLOCK_N
            # Once, unless a head has more entries than ``fronts`` says; loops cost registers.
            end = stop if LAYERS > 0 else begin + 1
            for start in range(begin, end, count * BLOCK_N if LAYERS > 0 else 1):
                entry = start + tl.arange(0, BLOCK_N)
                live = entry < stop
                of_layer, block, of_head, offset = find(
                    entry, live, front, tail, table, ids, layer, head, tl.num_programs(1), paged, BLOCK_SIZE, LAYERS
                )
                k_slot = block * stride_k_block + of_head * stride_k_head + offset * stride_k_slot
                k_mask = (dims < HEAD_SIZE)[:, None] & live[None, :]
                k_at = (plane_in(keys, addresses, of_layer, KEYS, paged) + k_slot)[None, :]
                k = tl.load(k_at + (dims * stride_k_dim)[:, None], mask=k_mask, other=0.0).to(COMPUTE)
                first_tile = tl.maximum(start - old, 0) // QUERIES
                num_tiles = (num_queries + QUERIES - 1) // QUERIES
                counted = (num_queries - tl.maximum(entry - old, 0)).to(tl.float32)
                if IN_CACHE:
                    at = block * stride_s_block + of_head * stride_s_head + offset
                    known = live & (entry < old)
                else:
                    at = head * stride_s_head + entry.to(tl.int64)
                    known = live
                scores_at = plane_in(scores, addresses, of_layer, SCORES, paged) + at
                aux_at = plane_in(aux, addresses, of_layer, AUX, paged) + at
                aux_before = tl.load(aux_at, mask=known, other=0.0)
                score = tl.load(scores_at, mask=known, other=0.0)
                if mode == LOG_EMA:
                    level = tl.full([BLOCK_N], float("-inf"), tl.float32)
                    for tile in range(first_tile, num_tiles):
                        logits, number, _ = tile_logits(
                            query, k, tl.zeros([BLOCK_N], tl.float32), entry, live, tile * QUERIES, num_queries, old,
                            start_token, head, stride_q_token, stride_q_head, scale, G, HEAD_SIZE, COMPUTE, BLOCK_M,
                            BLOCK_D, CAP,
                        )  # fmt: skip
                        weight = (num_queries - 1 - number) * tl.log2(decay) + tl.log2((1.0 - decay) / G)
                        level = log2_add(level, log2_sum(logits + weight[:, None]))
                    after = averaged(level, score, aux_before, num_queries, counted, decay)
                    tl.store(scores_at, after, mask=live)
                    tl.store(aux_at, aux_before + counted, mask=live)
                else:
                    plane = block * stride_m_block + of_head * stride_m_head + offset
                    votes_at = plane_in(log_votes, addresses, of_layer, LOG_VOTES, paged) + plane
                    votes = tl.load(votes_at, mask=live & (entry < front), other=0.0)
                    added = tl.zeros([BLOCK_N], tl.float32)
                    for tile in range(first_tile, num_tiles):
                        logits, number, wanted = tile_logits(
                            query, k, votes, entry, live, tile * QUERIES, num_queries, old, start_token, head,
                            stride_q_token, stride_q_head, scale, G, HEAD_SIZE, COMPUTE, BLOCK_M, BLOCK_D, CAP,
                        )  # fmt: skip
                        seen = tl.minimum(num_entries, old + (tile + 1) * QUERIES)
                        of_tile = parts + 2 * (row * tiles_per_row + tile)
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
    query, first_query, num_queries, head, stride_q_token, stride_q_head,
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
    at = number.to(tl.int64) * stride_q_token + q_head * stride_q_head
    mask = wanted[:, None] & (dims < HEAD_SIZE)[None, :]
    q = tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)
    return q, number, q_head, wanted


@triton.jit
def keys_of(
    keys, blocks, token, live, head, stride_k_block, stride_k_head, stride_k_dim, stride_k_slot,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_D, n]``: keys of a head of a never compressed sequence's tokens."""
    dims = tl.arange(0, BLOCK_D)
    block, offset = place_of(token, live, 0, 0, blocks, BLOCK_SIZE)
    slot = block * stride_k_block + head * stride_k_head + offset * stride_k_slot
    mask = (dims < HEAD_SIZE)[:, None] & live[None, :]
    return tl.load((keys + slot)[None, :] + (dims * stride_k_dim)[:, None], mask=mask, other=0.0).to(COMPUTE)


REPETITION = ["num_queries", "seq_len", "context", "start", "num_first", "num_scored", "stride_s_head"]
"""Numbers that differ from call to call, by which no kernel is to be compiled anew."""


@triton.jit(do_not_specialize=REPETITION, do_not_specialize_on_alignment=["blocks", "weights", "sinks"])
def normalize_repetition(
    query, keys, blocks, weights, sinks, lse, scale, num_queries, seq_len, context, start, num_first, num_scored,
    stride_q_token, stride_q_head, stride_k_block, stride_k_head, stride_k_dim, stride_k_slot,
    G: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """What a logit lacks to the logarithm of a weighed probability, of one tile of queries and one KV head.

    Grid: tiles, heads. lse: ``[num_queries, H * G]``, to the base 2. Entries are numbered without what lies between:
    the first ones, the chunk, and the tokens behind the context. sinks: ``[H * G]`` or None, as in ``attend``.
    """
    head = tl.program_id(1)
    first_query = tl.program_id(0) * (BLOCK_M // G)
    q, number, q_head, wanted = queries_of(
        query, first_query, num_queries, head, stride_q_token, stride_q_head, G, HEAD_SIZE, COMPUTE, BLOCK_M, BLOCK_D
    )
    position = seq_len - num_queries + number
    last = tl.minimum(first_query + BLOCK_M // G, num_queries)
    counted = num_first + num_scored
    end = counted + seq_len - num_queries + last - context
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + q_head, mask=wanted, other=0.0) * LOG2E
        total += 1.0
    for first in range(0, end, BLOCK_N):
        entry = first + tl.arange(0, BLOCK_N)
        live = entry < end
        token = tl.where(entry < num_first, entry, start + entry - num_first)
        token = tl.where(entry < counted, token, context + entry - counted)
        k = keys_of(
            keys, blocks, token, live, head, stride_k_block, stride_k_head, stride_k_dim, stride_k_slot, HEAD_SIZE,
            BLOCK_SIZE, COMPUTE, BLOCK_D,
        )  # fmt: skip
        visible = live[None, :] & (token[None, :] <= position[:, None])
        logits = capped(tl.dot(q, k, input_precision="ieee") * scale, CAP)
        logits = tl.where(visible, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(logits - safe[:, None]), 1)
        top = new_top
    level = top + tl.log2(total)
    if weights is not None:
        level -= tl.log2(tl.load(weights + number, mask=wanted, other=1.0))
    at = number * (tl.num_programs(1) * G) + q_head
    tl.store(lse + at, level, mask=wanted)


@triton.jit(do_not_specialize=REPETITION, do_not_specialize_on_alignment=["blocks", "scores"])
def raise_scores(
    query, keys, blocks, lse, scores, scale, num_queries, num_heads, start, num_scored,
    stride_q_token, stride_q_head, stride_k_block, stride_k_head, stride_k_dim, stride_k_slot, stride_s_head,
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
    k = keys_of(
        keys, blocks, start + entry, live, head * PER_SCORE // G, stride_k_block, stride_k_head, stride_k_dim,
        stride_k_slot, HEAD_SIZE, BLOCK_SIZE, COMPUTE, BLOCK_D,
    )  # fmt: skip
    largest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for first_query in range(0, num_queries, BLOCK_M // PER_SCORE):
        q, number, q_head, wanted = queries_of(
            query, first_query, num_queries, head, stride_q_token, stride_q_head, PER_SCORE, HEAD_SIZE, COMPUTE,
            BLOCK_M, BLOCK_D,
        )  # fmt: skip
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
    slot_mapping, key, value, keys, values, key_scale, value_scale, num_heads,
    stride_slot, stride_key_token, stride_key_head, stride_value_token, stride_value_head, stride_k_block,
    stride_k_head, stride_k_dim, stride_k_slot, stride_v_block, stride_v_head, stride_v_slot,
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
    k = tl.load(key + token * stride_key_token + head * stride_key_head + dims, mask=wanted)
    v = tl.load(value + token * stride_value_token + head * stride_value_head + dims, mask=wanted)
    if LIMIT > 0.0:
        k = quantised(k, key_scale, LIMIT)
        v = quantised(v, value_scale, LIMIT)
    k_at = block * stride_k_block + head * stride_k_head + dims * stride_k_dim + offset * stride_k_slot
    tl.store(keys + k_at, k, mask=wanted)
    tl.store(values + block * stride_v_block + head * stride_v_head + offset * stride_v_slot + dims, v, mask=wanted)
