"""Reproducible random numbers: hashes of entries' places, equal on every tensor-parallel split and device."""

import torch
from torch import Tensor

from vllm_kvmerge.policies.context import CompressionContext
from vllm_kvmerge.policies.entries import Entries

_WRAP = 1 << 64
_STEP = 0x9E3779B97F4A7C15 - _WRAP
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - _WRAP, 0x94D049BB133111EB - _WRAP)
"""Constants of splitmix64, as the signed integers that int64 holds."""

_BITS = 24
"""A float32 holds every integer of this many bits."""


def uniform(seed: int, entries: Entries, context: CompressionContext) -> Tensor:
    """``[H, n]`` float32 in [0, 1), from the seed, the layer, the head's index among all heads and the position.

    An entry keeps its number as long as it keeps its position.
    """
    positions = entries.positions
    heads = torch.tensor(context.heads.indices, device=positions.device)
    layers = torch.tensor(context.heads.layers, device=positions.device)
    state = _mix(_mix(_mix(torch.full_like(heads, seed)) + layers) + heads)
    return (_mix(_mix(state.unsqueeze(1) + positions)) & ((1 << _BITS) - 1)).float() / (1 << _BITS)


def _mix(state: Tensor) -> Tensor:
    """splitmix64's first output from each seed; sums and products of int64 wrap around."""
    state = state + _STEP
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        # The mask makes an arithmetic shift a logical one.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return state ^ ((state >> 31) & ((1 << 33) - 1))
