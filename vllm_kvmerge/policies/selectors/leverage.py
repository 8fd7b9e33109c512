"""Selector that keeps the entries whose keys are outliers, or that queries nearby attend to."""

from functools import lru_cache
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import avg_pool1d

from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies.base import DEAD, MAX_QUERIES, CompressionContext, Entries, HeadShape
from vllm_kvmerge.policies.indexing import by_position
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.rotation import Rotation
from vllm_kvmerge.policies.selectors.ranked import NewestEntries, RankedSelector, SinkTokens
from vllm_kvmerge.policies.tiles import once

RIDGE = 1e-2
"""Added to the diagonal of the sketched keys' Gram matrix, as in kvpress."""

MIN_DEVIATION = 1e-6
"""Least standard deviation of scores that are normalised."""


@register
class Leverage(RankedSelector):
    """Leverage scores of keys before RoPE and non-causal attention in chunks, blended (Compactor).

        blending z(l) + z(a)        l_i = x_i' (X'X + ridge)^-1 x_i        a_i = ||v_i|| sum over q of softmax(q.k)_i

    X are the keys before RoPE, less their mean, times a Gaussian sketch. a is pooled over three neighbours. z is the
    distance from the mean in standard deviations. Sinks and the newest entries stay, and count nowhere else.

    Compactor and kvpress let each token's query attend to the tokens of its own chunk, later ones included. Most of a
    prompt's queries are gone when it is compressed, so here the newest ``attention_window`` attend in their place,
    turned to positions spread evenly over the chunk. As in the authors' code and kvpress, logits are not divided by the
    root of the head size there. Further differences: z is taken over a head's entries, not a layer's, so that no head
    depends on others; and one sketch, always the same, serves all heads, as in the authors' code, while kvpress draws
    one for each head and prompt.

    Where no query is known, leverage decides alone.
    """

    name = "compactor"
    source = "Compactor, Chari and Van Durme, arXiv:2507.08143"
    needs_scores = False
    needs_rotation = True
    has_mass = True

    num_sink_tokens: SinkTokens = 8
    recent_window: NewestEntries = 4
    attention_window: int = Field(
        128, ge=1, le=MAX_QUERIES, description="Newest queries used in place of each chunk's own."
    )
    attention_chunk: int = Field(
        256, ge=32, le=4096, description="Entries, by position, over which a query's attention is normalised."
    )
    sketch_size: int = Field(48, ge=1, le=256, description="Dimensions of the random projection of keys.")
    blending: Annotated[float, Field(ge=0.0, le=100.0)] | None = Field(
        None, description="Weight of leverage relative to attention; default: the share of evicted entries."
    )

    @property
    def query_window(self) -> int:
        return self.attention_window

    def mass(self, entries: Entries, context: CompressionContext) -> Tensor:
        """``[H, n]``: softmax of the ranking; what is protected counts as its head's best."""
        protected = self.protected(entries, context)
        scores = self.ranking(entries, entries.scores, protected, context).masked_fill(
            ~entries.is_live | protected, -torch.inf
        )
        shares = scores.softmax(dim=1).nan_to_num(nan=0.0)  # NaN: all are protected
        return torch.where(protected, shares.amax(1, keepdim=True), shares)

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        """``[H, n]``: blended scores; 0 for protected and dead entries."""
        rotation, queries = context.known_rotation(), context.queries
        if queries is not None:
            queries = queries.newest(self.query_window)
            vectors = rotation.turned_back(queries.vectors, queries.positions.unsqueeze(1))
        order, counted = in_order(entries, entries.is_live & ~protected)

        def of_chunks() -> tuple[Tensor, Tensor | None]:
            """Sketched keys, and the attention that entries receive."""
            rows, attention = [], []
            for index, mask in zip(
                order.split(self.attention_chunk, 1), counted.split(self.attention_chunk, 1), strict=True
            ):
                places, positions = index.masked_fill(~mask, DEAD), entries.positions.gather(1, index)
                keys = entries.keys_at(places)
                sketch = gaussian(keys.shape[2], self.sketch_size, keys.device)
                rows.append(rotation.turned_back(keys, positions) @ sketch)
                if queries is not None:
                    biases = entries.log_votes.gather(1, index).masked_fill(~mask, -torch.inf)
                    received = chunk_attention(vectors, keys, biases, positions, rotation)
                    attention.append(received * torch.linalg.vector_norm(entries.values_at(places), dim=-1))
            return torch.cat(rows, dim=1), torch.cat(attention, dim=1) if attention else None

        rows, attention = once(of_chunks)
        scores = normalised(leverage_scores(rows, counted), counted) * self._blending(entries, context)
        if attention is not None:
            pooled = avg_pool1d(attention, 3, stride=1, padding=1)
            scores += normalised(pooled, counted)
        return torch.empty_like(scores).scatter_(1, order, scores)

    def _blending(self, entries: Entries, context: CompressionContext) -> Tensor | float:
        """The weight of leverage; by default, as in kvpress, the share of its head's entries that leave, ``[H, 1]``."""
        if self.blending is not None:
            return self.blending
        counts = context.num_kept if context.budgets is None else context.counts  # None: budgets are to follow from it
        return (1.0 - counts * entries.num_live.clamp(min=1).reciprocal()).clamp(min=0.0).unsqueeze(1)

    def held(self, shape: HeadShape) -> int:
        # The sketched keys in float32 and, in four copies, in float64.
        return 9 * self.sketch_size * (shape.num_entries + self.sketch_size)


def in_order(entries: Entries, counted: Tensor) -> tuple[Tensor, Tensor]:
    """All entries by position, those not ``counted`` (``[H, n]`` bool) last; and which ones are, in this order."""
    last_first = by_position(entries.without(~counted))  # dead ones come first
    n, num_counted = len(entries), counted.sum(1, keepdim=True)
    places = torch.arange(n, device=counted.device).expand_as(last_first)
    return last_first.gather(1, (places - num_counted) % n), places < num_counted


@lru_cache(maxsize=8)
def gaussian(head_size: int, sketch_size: int, device: torch.device) -> Tensor:
    """``[d, k]`` float32: independent normal numbers of variance 1/k, always the same."""
    generator = torch.Generator("cpu").manual_seed(0)
    # In float64, which no processor's vector instructions round to other float32 numbers.
    numbers = torch.randn(head_size, sketch_size, dtype=torch.float64, device="cpu", generator=generator)
    return sent((numbers / sketch_size**0.5).float(), device)


def leverage_scores(rows: Tensor, counted: Tensor) -> Tensor:
    """``[H, n]`` in the dtype of ``rows``: x_i' (X'X + ridge)^-1 x_i of each row's distance x_i from the mean row.

    rows: ``[H, n, k]``; counted: ``[H, n]`` bool, the rows that X is made of; the others get 0.
    """
    mask = counted.unsqueeze(2)
    # In float64, because with fewer rows than columns, or equal ones, the ridge alone makes the matrix positive.
    exact = rows.double().masked_fill_(~mask, 0.0)
    centred = (exact - exact.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).masked_fill_(~mask, 0.0)
    gram = centred.mT @ centred
    gram.diagonal(dim1=1, dim2=2).add_(RIDGE)
    factor = torch.linalg.cholesky_ex(gram).L
    whitened = torch.linalg.solve_triangular(factor.mT, centred, upper=True, left=False)
    return whitened.square_().sum(2).to(rows.dtype)


def chunk_attention(vectors: Tensor, keys: Tensor, biases: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """``[H, m]``: attention that a chunk's entries get from ``vectors``, queries before RoPE, ``[H, G, w, d]``, turned
    to positions spread evenly over the chunk; the sum of as many queries as there are entries, as mean over G.

    keys: ``[H, m, d]``, after RoPE. biases: ``[H, m]``, added to logits, -inf for those that do not count, which come
    last. positions: ``[H, m]`` int64.
    """
    num_queries, num_counted = vectors.shape[2], biases.isfinite().sum(1, keepdim=True)
    spread = torch.arange(num_queries, device=positions.device) * num_counted // num_queries
    turned = rotation.turned(vectors, positions.gather(1, spread).unsqueeze(1))
    logits = turned.flatten(1, 2) @ keys.mT
    weights = logits.add_(biases.unsqueeze(1)).softmax(dim=2).mean(1) * num_counted
    return weights.masked_fill(biases == -torch.inf, 0.0)  # NaN where no entry counts


def normalised(scores: Tensor, counted: Tensor) -> Tensor:
    """``[H, n]``: distance from the mean in standard deviations, over the ``counted`` entries; 0 for the others."""
    num = counted.sum(1, keepdim=True)
    mean = scores.masked_fill(~counted, 0.0).sum(1, keepdim=True) / num.clamp(min=1)
    distance = (scores - mean).masked_fill(~counted, 0.0)
    deviation = (distance.square().sum(1, keepdim=True) / (num - 1).clamp(min=1)).sqrt()
    return distance / deviation.clamp(min=MIN_DEVIATION)
