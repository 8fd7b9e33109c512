"""vLLM's FlashAttention for the plain rows of a batch that runs outside full graphs.

It reads our cache in place: of a page it asks only that rows of keys and values lie together.

One call takes the whole batch, with the tensors that stock vLLM passes. Rows with a front are in it too, because a call
has no gaps between its rows; ours attends to them afterwards, in the same places of the output. Meanwhile such a row
has as many entries as queries. It must not have none: where no query sees an entry, FlashAttention 2 writes the
log-sum-exp to where it would be if all rows were padded to the longest, which may lie behind its buffer
(``compute_attn_1rowblock_splitkv`` in csrc/flash_attn/src/flash_fwd_kernel.h). For a decoding row that is one tile of
one block, which need not be its own. A chunk of a compressed request is as much work as one that begins a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

from vllm_kvmerge.ops import AttentionBatch, PagedKVCache, Softmax

OPERATORS = {2: ("_vllm_fa2_C", "varlen_fwd"), 3: ("_vllm_fa3_C", "fwd")}
"""Where versions are implemented, as far as these are compiled with vLLM."""

DTYPES = (torch.float16, torch.bfloat16)
MOST_HEADS_WITH_SINKS = 64
"""Query heads that FlashAttention 3 takes with sinks."""


def version_for(head_size: int, cap: float, has_sinks: bool) -> int | None:
    """The version that vLLM takes for a layer, while its model is built; None: there is none on this platform."""
    version = get_flash_attn_version(head_size=head_size, has_sinks=has_sinks, requires_softcap=cap > 0.0)
    library, operator = OPERATORS.get(version or 0, ("", ""))
    # vLLM asks for no more than that the library can be imported, which may be an empty stand-in.
    is_missing = bool(library) and not hasattr(getattr(torch.ops, library), operator)
    return None if is_missing else version


def obstacle(
    impls: Sequence[Any], cache_dtype: torch.dtype, model_dtype: torch.dtype, may_hold_nan: bool
) -> str | None:
    """Says why FlashAttention does not suit a group of layers; None if it does.

    impls: their ``CUDAAttentionImpl``. may_hold_nan: blocks that a window has left behind may hold what is no number,
    such as a state's bits. Tiles begin before the window does, and hidden entries are multiplied by zero.
    """
    if not impls or any(impl.flash_version is None for impl in impls):
        return "vLLM has no FlashAttention for it here"
    if cache_dtype not in DTYPES or cache_dtype != model_dtype:
        return f"the model is {model_dtype} and the cache {cache_dtype}"
    if any(impl.chunked for impl in impls):
        return "attention is chunked"
    if may_hold_nan and any(impl.window for impl in impls):
        return "what lies before a window may be no number"
    for impl in impls:
        if impl.sinks is None:
            continue
        if impl.flash_version == 2:
            return "FlashAttention 2 has no sinks"
        if impl.sinks.dtype != torch.bfloat16 or impl.num_heads > MOST_HEADS_WITH_SINKS:
            return f"sinks are {impl.sinks.dtype}, of {impl.num_heads} heads"
    return None


@dataclass(frozen=True)
class FlashBatch:
    """A batch as FlashAttention takes it.

    num_tokens: of the batch. query_starts: ``[rows + 1]`` int32. max_query_len, max_seq_len: at least the largest.
    seq_lens: ``[rows]`` int32, entries of each row; of one with a front as many as it has queries. block_table:
    ``[rows, max_blocks]`` int32.
    """

    num_tokens: int
    query_starts: Tensor
    max_query_len: int
    seq_lens: Tensor
    max_seq_len: int
    block_table: Tensor

    @classmethod
    def of(
        cls, batch: AttentionBatch, query_starts: Tensor, num_tokens: int, max_seq_len: int, has_fronts: bool
    ) -> "FlashBatch":
        """``batch``: the whole batch. Waits for nothing."""
        assert batch.max_query_len is not None
        seq_lens = batch.seq_lens
        if has_fronts:
            seq_lens = torch.where(batch.fronts > 0, batch.query_lens, seq_lens)
        return cls(num_tokens, query_starts, batch.max_query_len, seq_lens, max_seq_len, batch.block_table)

    def attend(
        self,
        query: Tensor,
        cache: PagedKVCache,
        scale: float,
        output: Tensor,
        softmax: Softmax,
        sinks: Tensor | None,
        window: int,
        version: int,
    ) -> Tensor | None:
        """Attention of all rows, of those without a front as ``paged_attention``. sinks: ``softmax.sinks`` as the model
        has them.

        Returns the logarithms of the denominators of probabilities, ``[H * G, num_tokens]`` float32, of no use for rows
        with a front; None with sinks, which a version may not count there, and where each row has one token, for which
        version 2 has another layout.
        """
        from vllm.vllm_flash_attn import flash_attn_varlen_func  # not in vLLM's build for the CPU

        _, lse = flash_attn_varlen_func(
            q=query[: self.num_tokens],
            k=cache.keys.permute(0, 3, 1, 2),
            v=cache.values.transpose(1, 2),
            out=output[: self.num_tokens],
            cu_seqlens_q=self.query_starts,
            max_seqlen_q=self.max_query_len,
            seqused_k=self.seq_lens,
            max_seqlen_k=self.max_seq_len,
            softmax_scale=scale,
            causal=True,
            window_size=[window - 1, 0] if window else [-1, -1],
            block_table=self.block_table,
            softcap=softmax.cap,
            return_softmax_lse=True,  # they are computed in any case
            s_aux=sinks,
            fa_version=version,
        )
        return lse if sinks is None and self.max_query_len > 1 else None
