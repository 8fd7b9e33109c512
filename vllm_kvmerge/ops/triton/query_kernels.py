"""The kernel that keeps queries, launched by ``queries``."""

import triton
import triton.language as tl


# A batch's addresses may begin anywhere, and layers have any number: neither may ask for machine code of its own.
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["addresses", "tokens"])
def keep(
    query, addresses, tokens, layer, stride_token, stride_head,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copies some heads of one query, if it is kept. Grid: addresses, tiles of heads."""
    number = tl.program_id(0)
    address = tl.load(addresses + number)
    if address == 0:
        return
    token = number.to(tl.int64)
    if tokens is not None:
        token = tl.load(tokens + number)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    wanted = (head < NUM_HEADS) & (dims < HEAD_SIZE)
    place = tl.multiple_of(address.to(tl.pointer_type(query.dtype.element_ty)), 16)
    place += layer.to(tl.int64) * (NUM_HEADS * HEAD_SIZE)
    row = tl.load(query + token * stride_token + head * stride_head + dims, mask=wanted)
    tl.store(place + head * HEAD_SIZE + dims, row, mask=wanted)
