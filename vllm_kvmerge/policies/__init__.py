"""Compression policies, as parts that combine and presets that name combinations.

Those of other packages are not there before ``load_plugins``.
"""

# Importing a module registers its parts.
from vllm_kvmerge.policies import allocators, mergers, presets, selectors, trackers
from vllm_kvmerge.policies.base import (
    DEAD,
    MAX_TOKENS,
    Allocator,
    CacheUpdate,
    CompressionContext,
    Entries,
    Heads,
    Merger,
    Queries,
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
from vllm_kvmerge.policies.update import CompressionResult

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
    "CacheUpdate",
    "CompressionContext",
    "CompressionPolicy",
    "CompressionResult",
    "Entries",
    "Heads",
    "Merger",
    "Preset",
    "Queries",
    "Selector",
    "Tracker",
    "allocators",
    "load_plugins",
    "mergers",
    "presets",
    "register",
    "register_preset",
    "selectors",
    "trackers",
]
