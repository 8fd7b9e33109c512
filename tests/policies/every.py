"""Every policy with small windows, and contexts with all that any of them may ask for."""

from dataclasses import replace
from typing import Any

import torch

from tests.policies.sampling import newest_queries, random_entries, rope
from vllm_kvmerge.policies import PRESETS, CompressionContext, CompressionPolicy, Entries, Heads
from vllm_kvmerge.policies.head_budgets import HeadBudgets
from vllm_kvmerge.request.spec import parse_compression

REQUESTS = [
    *({"policy": name} for name in PRESETS),
    {"policy": "snapkv", "merger": "attention_matching"},
    {"policy": "snapkv", "merger": "zip", "merge_threshold": -1.0},
    {"policy": "keepkv", "selector": "h2o", "merge_threshold": -1.0, "zip_mode": "scale", "merge_first": False},
    {"policy": "kvmerger", "merge_threshold": -1.0},
    {"policy": "asymkv", "merge_first": False},
    {"policy": "cam", "merge_prompt": True, "selector": "h2o", "allocator": "adaptive"},
    {"policy": "snapkv", "allocator": "threshold", "threshold": 0.02},
    {"policy": "zsmerge", "selector": "h2o", "residual_share": 0.9, "alpha": 0.0},
    {"policy": "zsmerge", "allocator": "adaptive"},
    {"policy": "streaming_llm", "merger": "zip", "allocator": "pyramid", "ratio": 5.0},
    {"policy": "expected_attention", "selector": "fused", "allocator": "adaptive"},
    {"policy": "keydiff", "allocator": "calibrated", "before_rope": True},
    {"policy": "rkv", "selector": "fused", "of": ["rkv", "top_scores", "knorm"], "by": "sum_rank"},
]
"""Every preset, and parts that no preset combines."""

SMALL = {"window_size": 4, "recent_window": 3, "num_sink_tokens": 2, "score_window": 8}


def name_of(request: dict[str, Any]) -> str:
    return "-".join(map(str, request.values()))


def policy_of(request: dict[str, Any]) -> CompressionPolicy:
    """The policy that a value of ``kv_compression`` asks for."""
    config = parse_compression(request)
    assert config is not None
    return config.policy


def small_policy(request: dict[str, Any]) -> CompressionPolicy:
    """The request's policy with small windows, as far as its parts have them."""
    default = policy_of(request)
    fields = {name for part in default.parts for name in type(part).model_fields}
    if request["policy"] == "tova":
        return default
    return policy_of({name: value for name, value in SMALL.items() if name in fields} | request)


def entries_for(
    policy: CompressionPolicy, seed: int, num_heads: int, n: int, num_dead: int = 0, first: int = 0
) -> Entries:
    """Tokens from the position ``first``, with statistics as the policy's tracker would have left them."""
    entries = random_entries(seed, num_heads, n, num_dead=num_dead)
    if policy.tracker.mode in ("log_ema", "mean"):
        counts = torch.randint(1, 5, (num_heads, n), generator=torch.Generator().manual_seed(seed))
        entries.aux = torch.where(entries.is_live, counts.float(), entries.aux)
    entries.positions[entries.is_live] += first
    return entries


def context_for(
    policy: CompressionPolicy,
    entries: Entries,
    budget: int,
    num_tokens: int | None = None,
    at_prompt_end: bool = True,
    by_layer: bool = False,
    **fields: Any,
) -> CompressionContext:
    """With two query heads per KV head. by_layer: each row is the only head of a layer."""
    (num_heads, n, head_size), capacity = entries.keys.shape, policy.capacity(budget)
    num_tokens = n if num_tokens is None else num_tokens
    generator = torch.Generator().manual_seed(0)
    window = max(1, min(policy.query_window, n))
    known = {
        "capacity": n if capacity is None else min(capacity, n),
        "queries": newest_queries(torch.randn(num_heads, 2, window, head_size, generator=generator), num_tokens),
        "output_weights": torch.randn(num_heads, 2, 12, head_size, generator=generator),
        "rotation": rope(head_size),
        "head_budgets": HeadBudgets(
            fingerprint="", shares=torch.rand(num_heads, num_heads, generator=generator).add(0.01).tolist()
        ),
        "num_layers": num_heads,
    } | fields
    context = CompressionContext.of_layer(entries, budget, num_tokens, at_prompt_end, **known)
    if by_layer:
        layers = list(range(num_heads))
        context = replace(context, heads=Heads.of(layers, [0], num_heads, gather=lambda tensor: tensor))
    if policy.allocator.has_layer_statistic and context.layer_statistics is None:
        statistics = policy.layer_statistic(entries, context)
        context = replace(context, layer_statistics=statistics.expand(len(statistics), num_heads))
    return context
