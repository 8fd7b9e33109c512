"""vLLM's FlashAttention where there is no GPU: its compiled operators in plain PyTorch, below vLLM's own functions.

They demand what ``csrc/flash_attn/flash_api.cpp`` (version 2) and ``hopper/flash_api.cpp`` (version 3) of vLLM's
flash-attention demand, of a paged cache. Nothing is defined where the real operators are.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from vllm_kvmerge.engine.attention import flash

VARLEN_FWD = """varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
    Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, int max_seqlen_q, int max_seqlen_k,
    float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left,
    int window_size_right, float softcap, bool return_softmax, int num_splits, Tensor? gen) -> Tensor[]"""
FWD = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
    Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
    bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,
    Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""

CAPABILITIES = {2: DeviceCapability(8, 0), 3: DeviceCapability(9, 0)}
"""Of GPUs for which vLLM takes a version."""

calls: list[int] = []
"""Versions of the calls so far."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    starts: Tensor,
    used: Tensor,
    table: Tensor,
    longest: tuple[int, int],
    scale: float,
    causal: bool,
    left: int,
    cap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Fills ``out`` and returns the log-sum-exp, ``[heads, tokens]`` float32. longest: of queries and of keys."""
    assert {q.dtype, k.dtype, v.dtype, out.dtype} == {q.dtype} and q.dtype in flash.DTYPES, "fp16 and bf16 data type"
    for tensor in (starts, used, table):
        assert tensor.dtype == torch.int32, "must have dtype int32"
    assert starts.is_contiguous() and used.is_contiguous() and table.stride(-1) == 1
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v, out)), "must have contiguous last dimension"
    (total, heads, size), (pages, page_size, kv_heads, _) = q.shape, k.shape
    assert k.shape == v.shape == (pages, page_size, kv_heads, size) and out.shape == q.shape
    assert size % 8 == 0 and size <= 256 and page_size % 16 == 0 and heads % kv_heads == 0
    rows = len(starts) - 1
    assert used.shape == (rows,) and table.shape[0] == rows and rows > 0
    lens = starts.diff().tolist()
    assert max(lens) <= longest[0] and max(used.tolist()) <= longest[1] and starts[-1] <= total
    for tensor in (k, v):
        assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:3]), "16 bytes at a time"
    lse = torch.full((heads, total), torch.nan)
    for row, (start, count, length) in enumerate(zip(starts.tolist(), lens, used.tolist(), strict=False)):
        if count == 0:
            continue
        assert length >= count, "version 2 writes behind its log-sum-exp where a tile of queries sees no entry"
        slots = torch.arange(length)
        blocks = table[row].long()[slots // page_size]
        keys, values = (cache[blocks, slots % page_size].float() for cache in (k, v))
        keys, values = (one.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for one in (keys, values))
        tokens = slice(start, start + count)
        logits = q[tokens].float().transpose(0, 1) @ keys.mT * scale
        if cap > 0.0:
            logits = torch.tanh(logits / cap) * cap
        behind = torch.arange(length - count, length).unsqueeze(1) - slots
        hidden = (behind < 0) & causal
        if left >= 0:
            hidden |= behind > left
        logits = logits.masked_fill(hidden, -torch.inf)
        norms = logits.logsumexp(-1, keepdim=True)
        if sinks is not None:
            norms = norms.logaddexp(sinks.float().view(-1, 1, 1))
        out[tokens] = ((logits - norms).exp() @ values).transpose(0, 1).to(out.dtype)
        lse[:, tokens] = norms.squeeze(-1)
    return lse


def _varlen_fwd(
    q, k, v, out, starts, starts_k, used, leftpad, table, alibi, most_q, most_k, dropout, scale, zero, causal, left,
    right, cap, with_softmax, splits, generator,
):  # fmt: skip
    calls.append(2)
    assert leftpad is None and alibi is None and generator is None and splits <= 1 and dropout == 0.0
    assert starts_k.shape == starts.shape and right in (-1, 0)
    if most_q == 1 and q.shape[1] > k.shape[2] and left < 0:
        # Queries become rows, wherever they are said to begin.
        assert len(q) == len(starts) - 1, "shape '[rows, heads, group, size]' is invalid"
    return [out, attend(q, k, v, out, starts, used, table, (most_q, most_k), scale, causal, left, cap)]


def _fwd(
    q, k, v, k_new, v_new, q_v, out, starts, starts_k, starts_new, used_q, used, most_q, most_k, table, indices,
    leftpad, cos, sin, rotary, q_descale, k_descale, v_descale, scale, causal, left, right, cap, interleaved,
    scheduled, splits, pack, margin, sinks, world, rank, total_used,
):  # fmt: skip
    calls.append(3)
    assert all(one is None for one in (k_new, v_new, q_v, starts_k, starts_new, used_q, indices, leftpad, scheduled))
    assert right in (-1, 0) and (world, rank) == (1, 0)
    if sinks is not None:
        assert sinks.dtype == torch.bfloat16 and sinks.shape == q.shape[1:2] and q.shape[1] <= 64
    lse = attend(q, k, v, out, starts, used, table, (most_q, most_k), scale, causal, left, cap, sinks)
    return [out, lse, lse.new_empty(0), lse.new_empty(0)]


_libraries = []


def define() -> None:
    """Defines the operators, once, and makes vLLM take them for its own."""
    if _libraries:
        return
    for (namespace, name), schema, function in zip(
        flash.OPERATORS.values(), (VARLEN_FWD, FWD), (_varlen_fwd, _fwd), strict=True
    ):
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        _libraries.append(library)
    package = "vllm.vllm_flash_attn"
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]  # which did not find them
    sys.modules |= {f"{package}.{namespace}": ModuleType(namespace) for namespace, _ in flash.OPERATORS.values()}


@contextmanager
def installed(version: int, also: torch.dtype | None = None) -> Iterator[list[int]]:
    """Meanwhile vLLM finds that version on this platform, as on a GPU of its kind. Yields ``calls``, from now on.

    also: another dtype that it takes, which the real one does not, so that tokens can be compared.
    """
    define()
    calls.clear()
    capability = classmethod(lambda cls, device_id=0: CAPABILITIES[version])
    dtypes = flash.DTYPES if also is None else (*flash.DTYPES, also)
    with (
        mock.patch.object(type(current_platform), "get_device_capability", capability),
        mock.patch.object(flash, "DTYPES", dtypes),
    ):
        yield calls
