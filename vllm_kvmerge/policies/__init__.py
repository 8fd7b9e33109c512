"""Compression policies, as parts that combine and presets that name combinations."""

# Importing a module registers its parts.
from vllm_kvmerge.policies import mergers, presets, selectors, trackers
from vllm_kvmerge.policies.base import (
    DEAD,
    CompressionContext,
    CompressionResult,
    Entries,
    Merger,
    Selector,
    Tracker,
)
from vllm_kvmerge.policies.composition import CompressionPolicy
from vllm_kvmerge.policies.registry import (
    MERGERS,
    PRESETS,
    SELECTORS,
    TRACKERS,
    Preset,
    register,
    register_preset,
)

__all__ = [
    "DEAD",
    "MERGERS",
    "PRESETS",
    "SELECTORS",
    "TRACKERS",
    "CompressionContext",
    "CompressionPolicy",
    "CompressionResult",
    "Entries",
    "Merger",
    "Preset",
    "Selector",
    "Tracker",
    "mergers",
    "presets",
    "register",
    "register_preset",
    "selectors",
    "trackers",
]
