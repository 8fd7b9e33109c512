"""Kernels of least-squares fits to the attention of a window of queries, launched by ``regression``.

Tensors are float32 and have no gaps; ``r`` rows are the window's queries of all query heads of a KV head.
"""

import triton
import triton.language as tl

PRODUCTS: tl.constexpr = tl.constexpr("tf32x3")
"""Of float32, on tensor cores: as exact as float32 but for the last bit or two."""

CHANGING = ["num_rows", "num_entries", "num_queries", "scale", "ridge", "tolerance"]
"""Numbers that change from one compaction to the next: one machine code serves them all."""


@triton.jit(do_not_specialize=CHANGING)
def seen_softmax(
    logits, query_positions, log_votes, positions, num_rows, num_queries, num_entries, BLOCK: tl.constexpr
):
    """Replaces logits ``[H, r, n]`` by ``reference.attention_weights``. Grid: rows of all heads."""
    row = tl.program_id(0).to(tl.int64)
    head, query = row // num_rows, row % num_queries
    until = tl.load(query_positions + head * num_queries + query)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    sees = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_entries, BLOCK):
        x, seen, _ = seen_logits(logits, log_votes, positions, head, row, until, num_entries, start, BLOCK)
        top, sees = tl.maximum(top, x), sees | seen.to(tl.int32)
    sees_any = tl.max(sees, 0) != 0
    highest = tl.where(sees_any, tl.max(top, 0), 0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_entries, BLOCK):
        x, _, _ = seen_logits(logits, log_votes, positions, head, row, until, num_entries, start, BLOCK)
        total += tl.exp(x - highest)
    share = 1.0 / tl.where(sees_any, tl.sum(total, 0), 1.0)
    for start in range(0, num_entries, BLOCK):
        x, _, inside = seen_logits(logits, log_votes, positions, head, row, until, num_entries, start, BLOCK)
        at = logits + row * num_entries + start + tl.arange(0, BLOCK)
        tl.store(at, tl.exp(x - highest) * share, mask=inside)


@triton.jit
def seen_logits(logits, log_votes, positions, head, row, until, num_entries, start, BLOCK: tl.constexpr):
    """Logits of a row's entries from ``start`` on, -inf where it does not see one; which it sees; which there are."""
    entry = start + tl.arange(0, BLOCK)
    inside = entry < num_entries
    position = tl.load(positions + head * num_entries + entry, mask=inside, other=-1)
    seen = (position >= 0) & (position <= until)
    x = tl.load(logits + row * num_entries + entry, mask=inside, other=0.0)
    x += tl.load(log_votes + head * num_entries + entry, mask=inside, other=0.0)
    return tl.where(seen, x, float("-inf")), seen, inside


@triton.jit
def row_mask(inside, first: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    return inside[:, None] & (first + tl.arange(0, BLOCK_D) < HEAD_SIZE)[None, :]


@triton.jit
def load_rows(plane, at, inside, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, first: tl.constexpr = 0):
    """``[n, BLOCK_D]``: rows of a plane, from one dimension on; zeros where there is nothing."""
    dim = first + tl.arange(0, BLOCK_D)
    mask = row_mask(inside, first, HEAD_SIZE, BLOCK_D)
    return tl.load(plane + at[:, None] * HEAD_SIZE + dim[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(plane, at, inside, rows, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, first: tl.constexpr = 0):
    dim = first + tl.arange(0, BLOCK_D)
    mask = row_mask(inside, first, HEAD_SIZE, BLOCK_D)
    tl.store(plane + at[:, None] * HEAD_SIZE + dim[None, :], rows, mask=mask)


@triton.jit(do_not_specialize=CHANGING)
def begin_solving(
    right, fit, tickets, tolerance, num_rows,
    HEAD_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The state of conjugate gradients before the first iteration. numbers: ``[H, 2]``, the residual's square and that
    at which a head stops. mean: ``[H, r]``, the products of direction and output. tickets: ``[H]``. Grid: heads."""
    head = tl.program_id(0).to(tl.int64)
    size = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, num_rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside, at = row < num_rows, head * num_rows + row
        x = load_rows(right, at, inside, HEAD_SIZE, BLOCK_D)
        store_rows(fit.residual, at, inside, x, HEAD_SIZE, BLOCK_D)
        store_rows(fit.direction, at, inside, x, HEAD_SIZE, BLOCK_D)
        store_rows(fit.solution, at, inside, tl.zeros_like(x), HEAD_SIZE, BLOCK_D)
        weighted = x * load_rows(fit.output, at, inside, HEAD_SIZE, BLOCK_D)
        tl.store(fit.mean + at, tl.sum(weighted, 1), mask=inside)
        size += tl.sum(x * x, 1)
    total = tl.sum(size, 0)
    tl.store(tickets + head, 0)
    tl.store(fit.numbers + head * 2, total)
    tl.store(fit.numbers + head * 2 + 1, tolerance * tolerance * total)


@triton.jit
def product(
    rows, columns, row, has_row, column, has_column, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    first: tl.constexpr,
):  # fmt: skip
    """``[n, m]``: products of rows of two planes over some dimensions."""
    x = load_rows(rows, row, has_row, HEAD_SIZE, BLOCK_D, first)
    y = load_rows(columns, column, has_column, HEAD_SIZE, BLOCK_D, first)
    return tl.dot(x, tl.trans(y), input_precision=PRODUCTS)


@triton.jit
def step_towards(parts, fit, ridge, num_rows, HEAD_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rest of a head's iteration, once all parts of the direction's image are known."""
    head = tl.program_id(0).to(tl.int64)
    size = tl.load(fit.numbers + head * 2)
    bend = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, num_rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside, at = row < num_rows, head * num_rows + row
        x = load_rows(fit.direction, at, inside, HEAD_SIZE, BLOCK_D)
        image = ridge * x
        for part in range(0, tl.num_programs(1)):
            number = part * tl.num_programs(0).to(tl.int64) + head
            image += load_rows(parts, number * num_rows + row, inside, HEAD_SIZE, BLOCK_D)
        store_rows(parts, at, inside, image, HEAD_SIZE, BLOCK_D)
        bend += tl.sum(x * image, 1)
    length = size / tl.sum(bend, 0)
    tl.debug_barrier()
    left = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, num_rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside, at = row < num_rows, head * num_rows + row
        x = load_rows(fit.direction, at, inside, HEAD_SIZE, BLOCK_D)
        new = load_rows(fit.solution, at, inside, HEAD_SIZE, BLOCK_D) + length * x
        store_rows(fit.solution, at, inside, new, HEAD_SIZE, BLOCK_D)
        image = load_rows(parts, at, inside, HEAD_SIZE, BLOCK_D)
        new = load_rows(fit.residual, at, inside, HEAD_SIZE, BLOCK_D) - length * image
        store_rows(fit.residual, at, inside, new, HEAD_SIZE, BLOCK_D)
        left += tl.sum(new * new, 1)
    new_size = tl.sum(left, 0)
    tl.debug_barrier()
    for start in range(0, num_rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside, at = row < num_rows, head * num_rows + row
        x = load_rows(fit.direction, at, inside, HEAD_SIZE, BLOCK_D) * (new_size / size)
        x += load_rows(fit.residual, at, inside, HEAD_SIZE, BLOCK_D)
        store_rows(fit.direction, at, inside, x, HEAD_SIZE, BLOCK_D)
        weighted = x * load_rows(fit.output, at, inside, HEAD_SIZE, BLOCK_D)
        tl.store(fit.mean + at, tl.sum(weighted, 1), mask=inside)
    tl.store(fit.numbers + head * 2, new_size)


@triton.jit(do_not_specialize=CHANGING)
def iterate(
    weights, values, queries, free, parts, tickets, fit, scale, ridge, num_rows, num_entries,
    HEAD_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ALL_D: tl.constexpr,
):  # fmt: skip
    """One iteration of conjugate gradients, of heads that have not come to their end. Grid: heads, parts.

    A program computes what its entries, tile by tile, add to J J^T of the head's direction, ``parts[program, head]``
    (``[r, d]``). The one that is done last, as ``tickets`` (a number of each head) tell, adds them up and takes the
    step: no other one reads what it changes any more, and in its order sums do not depend on which it was.

    BLOCK_D: dimensions of a tile, all or half of them. Rows are loaded where they are needed, not kept in registers.
    """
    head = tl.program_id(0).to(tl.int64)
    TWO: tl.constexpr = HEAD_SIZE > BLOCK_D
    if tl.load(fit.numbers + head * 2) > tl.load(fit.numbers + head * 2 + 1):
        number = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + head) * num_rows
        later = tl.num_programs(1) * BLOCK_N
        for first in range(tl.program_id(1) * BLOCK_N, num_entries, tl.num_programs(1) * BLOCK_N):
            entry = first + tl.arange(0, BLOCK_N)
            there, place = entry < num_entries, head * num_entries + entry
            moves = there & (tl.load(free + place, mask=there, other=0) != 0)
            # How the direction moves keys, by dimension.
            keys = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
            others = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
            for start in range(0, num_rows, BLOCK_R):
                row = start + tl.arange(0, BLOCK_R)
                inside, at = row < num_rows, head * num_rows + row
                b = product(fit.direction, values, at, inside, place, there, HEAD_SIZE, BLOCK_D, 0)
                if TWO:
                    b += product(fit.direction, values, at, inside, place, there, HEAD_SIZE, BLOCK_D, BLOCK_D)
                mask = inside[:, None] & moves[None, :]
                a = tl.load(weights + at[:, None] * num_entries + entry[None, :], mask=mask, other=0.0)
                b = (b - tl.load(fit.mean + at, mask=inside, other=0.0)[:, None]) * a
                q = load_rows(queries, at, inside, HEAD_SIZE, BLOCK_D)
                keys += tl.dot(tl.trans(q), b, input_precision=PRODUCTS)
                if TWO:
                    q = load_rows(queries, at, inside, HEAD_SIZE, BLOCK_D, BLOCK_D)
                    others += tl.dot(tl.trans(q), b, input_precision=PRODUCTS)
            keys *= scale * scale
            others *= scale * scale
            for start in range(0, num_rows, BLOCK_R):
                row = start + tl.arange(0, BLOCK_R)
                inside, at = row < num_rows, head * num_rows + row
                q = load_rows(queries, at, inside, HEAD_SIZE, BLOCK_D)
                moved = tl.dot(q, keys, input_precision=PRODUCTS)
                if TWO:
                    q = load_rows(queries, at, inside, HEAD_SIZE, BLOCK_D, BLOCK_D)
                    moved += tl.dot(q, others, input_precision=PRODUCTS)
                mask = inside[:, None] & there[None, :]
                moved *= tl.load(weights + at[:, None] * num_entries + entry[None, :], mask=mask, other=0.0)
                total = tl.sum(moved, 1)[:, None]
                v = load_rows(values, place, there, HEAD_SIZE, BLOCK_D)
                f = load_rows(fit.output, at, inside, HEAD_SIZE, BLOCK_D)
                change = tl.dot(moved, v, input_precision=PRODUCTS) - total * f
                if first >= later:  # what the same threads have stored
                    change += load_rows(parts, number + row, inside, HEAD_SIZE, BLOCK_D)
                store_rows(parts, number + row, inside, change, HEAD_SIZE, BLOCK_D)
                if TWO:
                    v = load_rows(values, place, there, HEAD_SIZE, BLOCK_D, BLOCK_D)
                    f = load_rows(fit.output, at, inside, HEAD_SIZE, BLOCK_D, BLOCK_D)
                    change = tl.dot(moved, v, input_precision=PRODUCTS) - total * f
                    if first >= later:
                        change += load_rows(parts, number + row, inside, HEAD_SIZE, BLOCK_D, BLOCK_D)
                    store_rows(parts, number + row, inside, change, HEAD_SIZE, BLOCK_D, BLOCK_D)
        tl.debug_barrier()  # all threads' parts are there before the ticket is taken
        ticket = tl.atomic_add(tickets + head, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if ticket % tl.num_programs(1) == tl.num_programs(1) - 1:
            step_towards(parts, fit, ridge, num_rows, HEAD_SIZE, BLOCK_R, ALL_D)
