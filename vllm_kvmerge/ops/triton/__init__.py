"""The operators in Triton, with the signatures and semantics of ``reference``.

Of index arithmetic, only ``join_slots`` is here. Arguments are hardly checked: their values are on the GPU, and a check
would wait for it. With TRITON_INTERPRET=1, set before Triton is imported, they run on CPU tensors.
"""

from vllm_kvmerge.ops.triton.attention import paged_attention, score_prompt_queries, write_tokens
from vllm_kvmerge.ops.triton.backend import INTERPRETED, description, obstacle, runs_on
from vllm_kvmerge.ops.triton.entries import (
    fused_attention,
    gather_metadata,
    gather_rows,
    join_slots,
    merge_entries,
    most_similar,
    move_entries,
    write_metadata,
    write_rows,
)

__all__ = [
    "INTERPRETED",
    "description",
    "fused_attention",
    "gather_metadata",
    "gather_rows",
    "join_slots",
    "merge_entries",
    "most_similar",
    "move_entries",
    "obstacle",
    "paged_attention",
    "runs_on",
    "score_prompt_queries",
    "write_metadata",
    "write_rows",
    "write_tokens",
]
