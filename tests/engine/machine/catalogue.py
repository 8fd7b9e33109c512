"""Compressions of every kind, with parameters small enough for prompts of some tens of tokens."""

import random
from functools import cache
from typing import Any

from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.spec import CompressionError, parse_compression

NUM_FIELDS = 180

SMALL: dict[str, tuple[Any, ...]] = {
    "window_size": (1, 3, 5),
    "kernel_size": (3,),
    "score_window": (1, 4, "all"),
    "recent_window": (1, 3),
    "num_sink_tokens": (0, 2),
    "statistics_window": (6,),
    "attention_window": (6,),
    "matching_window": (6,),
    "regression_window": (6,),
    "zip_window": (4,),
    "num_fixed_sinks": (1,),
    "num_receivers": (3,),
    "chunk_size": (5, 11),
    "chunk_length": (1, 3),
    "num_prefix_tokens": (1,),
}
"""Values of the parts' own fields."""

CHANGES: tuple[dict[str, Any], ...] = (
    {"decode": "bounded"},
    {"decode": "grow"},
    {"budget": 0.3},
    {"budget": 0.8},
    {"budget": {"threshold": 0.01, "max": 14}},
    {"budget": {"threshold": 0.01, "max": 0.5}, "decode": "bounded"},
    {"allocator": "adaptive"},
    {"allocator": "pyramid"},
    {"skip_layers": 1},
    {"merger": "attention_matching"},
    {"merger": "zip"},
    {"prefill": {"chunk": 1}},
    {"prefill": {"chunk": 9}},
    {"prefill": {"chunk": 6}, "decode": "grow"},
    {"trigger": "pressure"},
    {"trigger": "pressure", "decode": "grow"},
    {"refresh": {"every": 7, "queries": 4}},
    {"refresh": {"every": 3, "queries": 2}, "decode": "grow"},
    {"reuse": "turns"},
    {"reuse": "turns", "decode": "bounded"},
    {"positions": "cache", "decode": "bounded"},
    {"interval": 1},
    {"interval": 6},
)
"""What requests may ask for beside a policy and a budget."""


REPEATED: list[dict[str, Any]] = [
    {"policy": "kvzip", "budget": budget, "chunk_size": 11, "num_prefix_tokens": 2}
    for budget in (9, 9, 12, 12, 0.4, 0.4)
] + [
    {"policy": policy, "budget": 12, "window_size": 3, "score_window": 4, "reuse": "turns"}
    for policy in ("snapkv", "adakv", "snapkv", "pyramidkv")
]
"""More of what several requests may share."""


@cache
def fields() -> list[dict[str, Any]]:
    """Valid values of ``kv_compression``: each policy, and each change, in several."""
    rng = random.Random(20)
    # kvzap needs a model of its own; others would move all draws, and are to the engine as expected_attention is.
    policies = sorted(set(PRESETS) - {"kvzap", "fused", "triattention", "kvzip_once", "calibrated"})
    found: list[dict[str, Any]] = []
    for index in range(NUM_FIELDS):
        policy = policies[index % len(policies)]
        one = {"policy": policy, "budget": rng.randint(9, 24)}
        for change in [CHANGES[index % len(CHANGES)], *rng.sample(CHANGES, rng.randint(0, 1))]:
            one = _with(one, change)
        for name, values in SMALL.items():
            one = _with(one, {name: rng.choice(values)})
        if _is_valid(one):
            found.append(one)
    return found


def _with(one: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """With a change, if the policy's other parts take it: small windows come later."""
    changed = one | change
    return changed if _is_valid(changed) or _is_valid(changed | {"window_size": 3}) else one


def _is_valid(one: dict[str, Any]) -> bool:
    try:
        parse_compression(one)
    except CompressionError:
        return False
    return True
