"""Random entries, and what attention makes of them."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from threading import Barrier

import torch
from hypothesis import strategies as st
from torch import Tensor

from vllm_kvmerge.policies import DEAD, CacheUpdate, CompressionContext, Entries, Heads, Queries
from vllm_kvmerge.policies.rotation import Rotation

torch.set_num_threads(1)

SEEDS = st.integers(0, 2**32 - 1)


def random_entries(
    seed: int,
    num_heads: int = 2,
    n: int = 16,
    head_size: int = 8,
    num_dead: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Entries:
    """Ordinary tokens at shuffled positions, with random scores; ``num_dead`` entries of each head are dead.

    Dead entries hold NaN, so that whatever reads one shows it.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    shuffled = torch.stack([torch.randperm(n, generator=generator) for _ in range(num_heads)])
    entries = Entries(
        keys=randn(num_heads, n, head_size),
        values=randn(num_heads, n, head_size),
        log_votes=torch.zeros(num_heads, n, dtype=dtype),
        scores=randn(num_heads, n).abs(),
        aux=torch.zeros(num_heads, n, dtype=dtype),
        positions=shuffled,
    )
    dead = torch.rand(num_heads, n, generator=generator).argsort(dim=1) < num_dead
    entries.kill(dead)
    for tensor in (entries.keys, entries.values, entries.scores, entries.aux):
        tensor[dead] = torch.nan
    return entries


def live(entries: Entries, head: int) -> list[int]:
    """Indices of a head's live entries, in order of position."""
    positions = entries.positions[head].tolist()
    return sorted((i for i, p in enumerate(positions) if p != DEAD), key=lambda i: positions[i])


def nearest(entries: Entries, head: int, sources: Iterable[int], carriers: list[int]) -> dict[int, tuple[float, int]]:
    """Of each source the cosine similarity of the most similar carrier's key, and which it is."""
    keys = torch.nn.functional.normalize(entries.keys[head].double(), dim=-1)
    return {e: max((float(keys[e] @ keys[c]), c) for c in carriers) for e in sources}


def logits(entries: Entries, query: Tensor) -> Tensor:
    """``[H, n]``: scale * q.k for one query per head, ``[H, d]``; without the votes' bias."""
    return torch.einsum("hnd,hd->hn", entries.keys, query) / query.shape[-1] ** 0.5


def probabilities(entries: Entries, query: Tensor) -> Tensor:
    """``[H, n]``: attention with votes (KeepKV eq. 20, ZSMerge eq. 8); dead entries have none."""
    biased = torch.where(entries.is_live, logits(entries, query) + entries.log_votes, -torch.inf)
    return biased.softmax(dim=-1)


def attend(entries: Entries, query: Tensor) -> Tensor:
    """``[H, d]``: attention's output."""
    values = torch.where(entries.is_live.unsqueeze(-1), entries.values, 0.0)
    return torch.einsum("hn,hnd->hd", probabilities(entries, query), values)


def random_query(seed: int, entries: Entries, size: float = 1.0) -> Tensor:
    """``[H, d]``."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (entries.keys.shape[0], entries.keys.shape[2])
    return size * torch.randn(shape, generator=generator, dtype=entries.keys.dtype)


def concatenate(one: Entries, other: Entries) -> Entries:
    """One's entries, then the other's, per head."""
    return Entries(*(torch.cat([getattr(one, f.name), getattr(other, f.name)], dim=1) for f in fields(Entries)))


def stack_rows(parts: list[Entries]) -> Entries:
    """The rows of several, each with equally many entries."""
    return Entries(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Entries)))


def newest_queries(vectors: Tensor, num_tokens: int) -> Queries:
    """``vectors`` (``[H, G, w, d]``) as the queries of the newest of so many tokens."""
    positions = torch.arange(num_tokens - vectors.shape[2], num_tokens)
    return Queries(vectors, positions.expand(len(vectors), -1))


def rope(size: int, is_neox: bool = True, num_positions: int = 2048, factor: float = 1.0) -> Rotation:
    """RoPE of a head's first ``size`` numbers, theta 10,000, with this attention factor."""
    frequencies = 1e4 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * frequencies
    return Rotation(factor * torch.cat([angles.cos(), angles.sin()], dim=1).float(), is_neox)


def for_parts(context: CompressionContext) -> CompressionContext:
    """The context as selectors and mergers see it where every row has the same budget."""
    return replace(context, budgets=torch.full((len(context.heads.layers),), context.budget))


def as_worker(
    context: CompressionContext, rows: list[int], gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> CompressionContext:
    """The context of one layer on a tensor-parallel worker with the heads of these rows alone."""
    heads = Heads.of([context.heads.layers[0]], rows, context.heads.num_layers, gather)
    own = replace(context, heads=heads, queries=context.queries and context.queries.of_rows(rows))
    return own if own.output_weights is None else replace(own, output_weights=own.output_weights[rows])


def on_two_workers(
    compute: Callable[[Entries, CompressionContext], object], entries: Entries, context: CompressionContext, cut: int
) -> list[object]:
    """What ``compute`` gives for heads ``[0, cut)`` and for the others, as two tensor-parallel workers would run it."""
    sent: dict[int, Tensor] = {}
    barrier = Barrier(2, timeout=60)

    def compute_for(rows: list[int]) -> object:
        def gather(tensor: Tensor) -> Tensor:
            sent[rows[0]] = tensor
            barrier.wait()
            gathered = torch.cat([sent[0], sent[cut]])
            barrier.wait()
            return gathered

        return compute(entries.of_rows(rows), as_worker(context, rows, gather))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compute_for, [list(range(cut)), list(range(cut, len(entries.positions)))]))


def in_layer(context: CompressionContext, layer: int) -> CompressionContext:
    """The context in another layer."""
    return replace(context, heads=replace(context.heads, layers=[layer] * len(context.heads.layers)))


def assert_sound(entries: Entries, budget: int) -> None:
    """Exactly ``budget`` entries per head, dead ones marked, no NaN anywhere, no position twice."""
    assert entries.positions.shape[1] == len(entries) == budget
    dead = ~entries.is_live
    for name in ("keys", "values", "scores", "aux"):
        assert getattr(entries, name).isfinite().all(), name
    assert (entries.log_votes[dead] == -torch.inf).all()
    assert entries.log_votes[~dead].isfinite().all()
    for row in entries.positions.tolist():
        live = [position for position in row if position != DEAD]
        assert len(set(live)) == len(live)


def random_update(entries: Entries, num_places: int, num_changed: int, generator: torch.Generator) -> CacheUpdate:
    """Some entries in random places, some places empty, some with new rows."""
    heads, n, d = entries.keys.shape
    kept = torch.rand(heads, max(n, num_places), generator=generator).argsort(1)[:, :num_places]
    kept = kept.masked_fill(kept >= n, DEAD)
    update = CacheUpdate.of(entries, kept.clamp(min=0))
    empty = (kept < 0) | (torch.rand(heads, num_places, generator=generator) < 0.1)
    update.kept = kept.masked_fill(empty, DEAD)
    update.positions = update.positions.masked_fill(empty, DEAD)
    changed = torch.rand(heads, num_places, generator=generator).argsort(1)[:, :num_changed]
    update.changed = changed.masked_fill(torch.rand(changed.shape, generator=generator) < 0.3, DEAD)
    update.keys = torch.randn(heads, num_changed, d, generator=generator)
    update.values = torch.randn(heads, num_changed, d, generator=generator)
    update.scores = torch.rand(heads, num_places, generator=generator)
    return update


def assert_same(one: Entries, other: Entries) -> None:
    """Equal bit for bit, NaN included."""
    for name in ("keys", "values", "log_votes", "scores", "aux", "positions"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0, equal_nan=True)
