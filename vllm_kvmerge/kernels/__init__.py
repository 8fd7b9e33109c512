"""The operators over paged KV blocks, and the implementation that runs them."""

from vllm_kvmerge.kernels.page import METADATA_BYTES, Pages, cell_bytes
from vllm_kvmerge.kernels.reference import (
    ScoreUpdate,
    column_scores,
    gather_entries,
    gather_metadata,
    gather_rows,
    most_similar,
    move_entries,
    paged_attention,
    write_front,
    write_metadata,
    write_rows,
    write_tokens,
)

__all__ = [
    "METADATA_BYTES",
    "Pages",
    "ScoreUpdate",
    "cell_bytes",
    "column_scores",
    "gather_entries",
    "gather_metadata",
    "gather_rows",
    "most_similar",
    "move_entries",
    "paged_attention",
    "write_front",
    "write_metadata",
    "write_rows",
    "write_tokens",
]
