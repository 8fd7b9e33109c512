"""Compression policies, as parts that combine and presets that name combinations."""

# Importing a module registers its parts.
from vllm_kvmerge.policies import allocators, mergers, presets, selectors, trackers
from vllm_kvmerge.policies.base import (
    DEAD,
    MAX_TOKENS,
    Allocator,
    CacheUpdate,
    CompressionContext,
    CompressionResult,
    Entries,
    Merger,
    Selector,
    Tracker,
)
from vllm_kvmerge.policies.composition import CompressionPolicy
from vllm_kvmerge.policies.plugins import load_plugins
from vllm_kvmerge.policies.registry import (
    ALLOCATORS,
    MERGERS,
    PARTS,
    PRESETS,
    SELECTORS,
    TRACKERS,
    Preset,
    register,
    register_preset,
)

__all__ = [
    "ALLOCATORS",
    "DEAD",
    "MAX_TOKENS",
    "MERGERS",
    "PARTS",
    "PRESETS",
    "SELECTORS",
    "TRACKERS",
    "Allocator",
    "CompressionContext",
    "CompressionPolicy",
    "CompressionResult",
    "Entries",
    "Merger",
    "CacheUpdate",
    "Preset",
    "Selector",
    "Tracker",
    "allocators",
    "mergers",
    "presets",
    "register",
    "register_preset",
    "selectors",
    "trackers",
]

# Last: plugins import from here.
load_plugins()
