"""The operators in Triton, with the signatures and semantics of ``reference``.

Arguments are hardly checked, because a check of values would wait for the GPU. With TRITON_INTERPRET=1, set before
Triton is imported, operators run on CPU tensors.
"""

from vllm_kvmerge.ops.triton.attention import (
    paged_attention,
    score_prompt_queries,
    score_repetition,
    write_tokens,
)
from vllm_kvmerge.ops.triton.backend import INTERPRETED, description, obstacle, runs_on
from vllm_kvmerge.ops.triton.entries import (
    fused_attention,
    gather_metadata,
    gather_rows,
    join_entries,
    join_slots,
    merge_entries,
    mix_entries,
    most_similar,
    move_entries,
    turn_keys,
    write_codes,
    write_metadata,
    write_rows,
)
from vllm_kvmerge.ops.triton.indexing import (
    by_position,
    empty_places,
    free_places,
    hand_over,
    in_place,
    inverse,
    join_changes,
    largest,
    line_up,
    list_joined,
    log_contributions,
    mix_in,
    newest,
    num_live,
    overflowing,
    padded_nonzero,
    put,
    take,
    take_rows,
    top,
)
from vllm_kvmerge.ops.triton.queries import keep_queries
from vllm_kvmerge.ops.triton.regression import attention_weights, solve_outputs
from vllm_kvmerge.ops.triton.zipping import zip_groups

# fmt: off
__all__ = [
    "INTERPRETED", "attention_weights", "by_position", "description", "empty_places", "free_places", "fused_attention",
    "gather_metadata", "gather_rows", "hand_over", "in_place", "inverse", "join_changes", "join_entries", "join_slots",
    "keep_queries", "largest", "line_up", "list_joined", "log_contributions", "merge_entries", "mix_entries", "mix_in",
    "most_similar", "move_entries", "newest", "num_live", "obstacle", "overflowing", "padded_nonzero",
    "paged_attention", "put", "runs_on", "score_prompt_queries", "score_repetition", "solve_outputs", "take",
    "take_rows", "top", "turn_keys", "write_codes", "write_metadata", "write_rows", "write_tokens", "zip_groups",
]
# fmt: on
