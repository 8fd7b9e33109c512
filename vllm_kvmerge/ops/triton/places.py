"""Where entries lie, for Triton's kernels: in a sequence's blocks, or in pages that its heads have of their own.

``addresses`` is ``[layers, 6]`` int64, addresses of each layer's planes; all layers have the same strides. A table of
pages is a ``HeadPages.table``.
"""

import triton
import triton.language as tl

from vllm_kvmerge.ops.coded import slots_of
from vllm_kvmerge.ops.triton.descriptors import Entry, Head

KEYS = tl.constexpr(0)
VALUES = tl.constexpr(1)
LOG_VOTES = tl.constexpr(2)
SCORES = tl.constexpr(3)
AUX = tl.constexpr(4)
POSITIONS = tl.constexpr(5)
"""Places of a layer's planes in ``addresses``."""
PER_SLOT = tl.constexpr(slots_of("int8"))
"""Slots of a coded page for each of another."""


@triton.jit
def plane_of(addresses, layer, plane, ELEMENT: tl.constexpr):
    """Pointer to a plane of a layer, or pointers for several layers; planes are aligned to 16 bytes."""
    return tl.multiple_of(tl.load(addresses + layer * 6 + plane).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def codes_of(addresses, at, codes, PLANE: tl.constexpr):
    """Pointers to the first code of entries' keys or values in coded pages (``Codes``)."""
    first = plane_of(addresses, at.layer, KEYS, tl.int8)
    if PLANE == KEYS:
        return first + at.block * codes.k_block + at.head * codes.k_head + at.offset * codes.k_slot
    else:
        return first + codes.first_v + at.block * codes.v_block + at.head * codes.v_head + at.offset * codes.v_slot


@triton.jit
def scales_of(addresses, at, m_block, m_head, PLANE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Pointers to the scales of entries' keys or values in coded pages, behind the votes. m_block, m_head: strides of
    these."""
    first = plane_of(addresses, at.layer, LOG_VOTES, tl.float16) + 2 * (at.block * m_block + at.head * m_head)
    return first + (2 if PLANE == KEYS else 3) * (PER_SLOT * BLOCK_SIZE) + at.offset


@triton.jit
def place_of(entry, live, front, tail, table, BLOCK_SIZE: tl.constexpr):
    """(block ids int64, offsets) of entries; ``table`` points at the sequence's blocks."""
    slot = tl.where(entry < front, entry, entry + (tail - front))
    block = tl.load(table + slot // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    return block, slot % BLOCK_SIZE


@triton.jit
def list_of(table, number, has_list):
    """(entries, number of pages that there is room for, pointer to their ids) of the head's list of that number, which
    is not read unless ``has_list``: then there are no entries."""
    room = tl.load(table, mask=has_list, other=0)
    head = table + 1 + number.to(tl.int64) * (1 + room)
    return tl.load(head, mask=has_list, other=0), room, head + 1


@triton.jit
def is_coded(table, num_lists, has_list):
    """Whether the pages of a table with ``num_lists`` lists are coded ones; not, unless ``has_list``."""
    room = tl.load(table, mask=has_list, other=0)
    return tl.load(table + 1 + num_lists * (1 + room), mask=has_list, other=0) != 0


@triton.jit
def page_of(ids, page, live, num_heads, num_layers):
    """(layers, block ids int64, KV heads) of pages; ``page``: their places in a list."""
    number = tl.load(ids + page, mask=live, other=0)
    lane = number // num_heads
    return lane % num_layers, (lane // num_layers).to(tl.int64), number % num_heads


@triton.jit
def head_of(located, num_layers, stride_blocks):
    """``Head`` of the program, on axis 0."""
    seq_layer = tl.program_id(0) // located.num_heads
    front, tail = 0, 0
    if located.segments is not None:
        front = tl.load(located.segments + seq_layer * 3).to(tl.int32)
        tail = tl.load(located.segments + seq_layer * 3 + 1).to(tl.int32)
    blocks = located.blocks + seq_layer.to(tl.int64) * stride_blocks
    layer, head = tl.load(located.layers + seq_layer), tl.program_id(0) % located.num_heads
    return Head(front, tail, blocks, layer, head, located.num_heads, num_layers)


@triton.jit
def entry_place(entry, live, front, tail, pages, of, BLOCK_SIZE: tl.constexpr):
    """``Entry`` of entries of a head; and whether they are. pages: as in ``Located``; there is nothing behind the
    entries of the head's list."""
    if pages is None:
        block, offset = place_of(entry, live, front, tail, of.blocks, BLOCK_SIZE)
        return Entry(of.layer, block, of.head, offset), live
    else:
        num_entries, _, ids = list_of(pages, tl.program_id(0), True)
        in_front = entry < front
        in_page = live & (entry < num_entries)
        block, offset = place_of(entry, live & (entry >= front), front, tail, of.blocks, BLOCK_SIZE)
        of_layer, of_block, of_head = page_of(ids, entry // BLOCK_SIZE, in_page, of.num_heads, of.num_layers)
        layer = tl.where(in_front, of_layer, of.layer)
        block = tl.where(in_front, of_block, block)
        head = tl.where(in_front, of_head, of.head)
        return Entry(layer, block, head, offset), in_page | (live & (entry >= front))
