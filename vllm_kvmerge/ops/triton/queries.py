"""Queries that are kept for later, in Triton."""

from torch import Tensor

from vllm_kvmerge.ops.triton import query_kernels
from vllm_kvmerge.ops.triton.plan import power_of_two

TILE = 4096
"""Most numbers that a program copies at a time."""


def keep_queries(query: Tensor, addresses: Tensor, layer: int, tokens: Tensor | None = None) -> None:
    """See ``reference.keep_queries``. A program that finds no address ends there."""
    if len(addresses) == 0:
        return
    num_heads, head_size = query.shape[1:]
    block_d = power_of_two(head_size)
    block_h = min(power_of_two(num_heads), max(1, TILE // block_d))
    query_kernels.keep[(len(addresses), -(-num_heads // block_h))](
        query, addresses, tokens, layer, *query.stride()[:2],
        NUM_HEADS=num_heads, HEAD_SIZE=head_size, BLOCK_H=block_h, BLOCK_D=block_d,
    )  # fmt: skip
