"""Random entries with the queries of the newest tokens, and their attention output."""

import torch
from torch import Tensor

from tests.policies.sampling import newest_queries, random_entries
from vllm_kvmerge.policies import CompressionContext, Entries

WINDOW = 4


def problem(
    seed: int, num_heads: int = 2, num_groups: int = 2, n: int = 40, budget: int = 16, num_dead: int = 0, **options
) -> tuple[Entries, CompressionContext]:
    """Random entries with votes, and the queries of the newest tokens."""
    dtype = options.pop("dtype", torch.float32)
    entries = random_entries(seed, num_heads, n, num_dead=num_dead, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    votes = 0.3 * torch.randn(num_heads, n, generator=generator, dtype=dtype)
    entries.log_votes = torch.where(entries.is_live, votes, entries.log_votes)
    shape = num_heads, num_groups, options.pop("window", WINDOW), 8
    queries = options.pop("size", 1.0) * torch.randn(shape, generator=generator, dtype=dtype)
    context = CompressionContext.of_layer(
        entries,
        budget,
        n,
        at_prompt_end=True,
        scale=8**-0.5,
        queries=newest_queries(queries, n),
    )
    return entries, context


def output(entries: Entries, context: CompressionContext) -> Tensor:
    """``[H, r, d]`` float64: attention output of the queries over live entries up to their positions."""
    keys, values = (t.double().masked_fill(~entries.is_live.unsqueeze(-1), 0.0) for t in (entries.keys, entries.values))
    logits = torch.einsum("hgwd,hnd->hgwn", context.queries.vectors.double(), keys) * context.scale
    seen = entries.is_live[:, None] & (entries.positions[:, None] <= context.queries.positions[..., None])
    logits = torch.where(seen[:, None], logits + entries.log_votes[:, None, None].double(), -torch.inf)
    weights = torch.where(seen.any(-1)[:, None, :, None], logits.softmax(-1), 0.0)
    return torch.einsum("hgwn,hnd->hgwd", weights, values).flatten(1, 2)


def window_loss(full: Entries, compressed: Entries, context: CompressionContext) -> Tensor:
    """``[H]``: GRKV eq. 4."""
    return (output(full, context) - output(compressed, context)).square().sum((1, 2))
